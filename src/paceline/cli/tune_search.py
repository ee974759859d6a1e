"""`paceline tune --search adadec`: from which entropy on a model is to look ahead, from texts that are right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.cli import outputs
from paceline.cli.options import open_llm
from paceline.cli.terminal import counted
from paceline.errors import ConfigError

LONGEST = 1024
"""Tokens of a text that count."""


def run(flag_values: dict[str, Any], search: str, prompts: Path | None, output: Path | None, *, as_json: bool) -> None:
    """Find the threshold of adadec, print it and keep it.

    Args:
        flag_values: flags of the model. search: a name, or JSON with other options besides.
        prompts: a file of texts, or of conversations that end with an answer. output: of the search, as JSON.
    Raises:
        ConfigError: another method, no prompts, too few places, or flags that do not go together.
        PromptError: a file that cannot be read.
    """
    from paceline.search import SearchConfig, entropies_of, learned_threshold
    from paceline.training import documents_of, texts_of

    config = SearchConfig.parse(search)
    if config.method != "adadec" or "threshold" in config.options:
        raise ConfigError(f"tune --search finds the threshold of adadec, got {search}; give adadec, without threshold")
    if prompts is None:
        raise ConfigError("tune --search needs texts that are right; add --prompts FILE, of texts or conversations")
    if flag_values.pop("speculative_config", None) is not None:
        raise ConfigError("tune --search drafts nothing; leave --speculative-config out")
    if output is not None:
        outputs.must_be_own("--output", output, mark='{"method": "adadec"', what="a search that tune found")
    llm = open_llm(flag_values | {"speculative_config": "null"})
    documents = documents_of(texts_of(llm, [prompts], most=None), min(LONGEST, llm.runner.info.max_context))
    entropies, right = entropies_of(llm.runner, [(document.tokens, document.first) for document in documents])
    threshold = learned_threshold(entropies, right)
    wanted = json.loads(search) if search.lstrip().startswith("{") else {}
    kept = {"method": "adadec"} | wanted | {"threshold": round(threshold, 4)}
    if output is not None:
        with outputs.writing("--output", output):
            output.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(kept | facts(entropies, right, kept["threshold"])))
    else:
        print(words(facts(entropies, right, kept["threshold"]), kept))


def facts(entropies: Sequence[float], right: Sequence[bool], threshold: float) -> dict[str, Any]:
    """What the threshold means on the texts: the share of places from it on, and how often the likeliest token is the
    text's there and below (None where there are none).
    """
    unsure, sure = ([hit for entropy, hit in zip(entropies, right, strict=True) if (entropy >= threshold) == side]
                    for side in (True, False))  # fmt: skip
    mean = {name: round(fmean(some), 4) if some else None for name, some in (("from", unsure), ("below", sure))}
    return {
        "places": len(right),
        "share_from": round(len(unsure) / len(right), 4),
        "right_from": mean["from"],
        "right_below": mean["below"],
    }


def words(facts: dict[str, Any], kept: dict[str, Any]) -> str:
    """Say the findings in sentences."""
    shares = [("none" if share is None else f"{share:.0%}") for share in (facts["right_from"], facts["right_below"])]
    return "\n".join(
        [
            f"threshold {kept['threshold']:.4g} nats, of {counted(facts['places'], 'token')} of texts:",
            f"  from it on {facts['share_from']:>5.0%} of the places; the likeliest token is right in {shares[0]}",
            f"  below it   {1 - facts['share_from']:>5.0%} of the places; the likeliest token is right in {shares[1]}",
            f"Use it: --search '{json.dumps(kept)}'",
        ]
    )
