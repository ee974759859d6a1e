"""`paceline tune --steering svdecode`: how far a fine-tuned model is to be carried, from prompts with answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.cli import outputs
from paceline.cli.options import open_llm
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.training import Strength

LONGEST = 1024
"""Tokens of an example that count."""


def run(
    flag_values: dict[str, Any], steering: str, prompts: Path | None, output: Path | None, *, as_json: bool
) -> None:
    """Find the mu of svdecode, print it and keep it.

    Args:
        flag_values: flags of the model, among them the adapter. steering: a name, or JSON that names the base besides.
        prompts: a file of texts, or of conversations that end with an answer. output: of the steering, as JSON.
    Raises:
        ConfigError: another method, no prompts, a model without base, or flags that do not go together.
        PromptError: a file that cannot be read.
    """
    from paceline.config import SamplingParams
    from paceline.training import documents_of, svdecode_strength, texts_of

    wanted = dict(SamplingParams(steering=cast(Any, steering)).steering or {})
    if wanted["method"] != "svdecode" or wanted.keys() - {"method", "model", "alpha"}:
        raise ConfigError(f"tune --steering finds mu of svdecode, got {steering}; give svdecode, and its model at most")
    if prompts is None:
        raise ConfigError("tune --steering needs examples; add --prompts FILE, of texts or conversations with answers")
    if flag_values.pop("speculative_config", None) is not None:
        raise ConfigError("tune --steering drafts nothing; leave --speculative-config out")
    if output is not None:
        outputs.must_be_own("--output", output, mark='{"method": "svdecode"', what="a steering that tune found")
    llm = open_llm(flag_values | {"speculative_config": "null"})
    base = llm.models.open(wanted["model"]) if "model" in wanted else llm.models.base_of_target()
    longest = min(LONGEST, llm.runner.info.max_context)
    strength = svdecode_strength(llm.runner, base, documents_of(texts_of(llm, [prompts], most=None), longest))
    kept = wanted | {"mu": strength.mu}
    if output is not None:
        with outputs.writing("--output", output):
            output.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    if as_json:
        facts = {
            "candidates": dict(strength.candidates),
            "losses": {str(mu): loss for mu, loss in strength.losses.items()},
        }
        print(json.dumps(kept | facts | {"tokens": list(strength.tokens)}))
    else:
        print(words(strength, kept))


def words(strength: Strength, kept: dict[str, Any]) -> str:
    """Say the findings in sentences."""
    fitted, judged = strength.tokens
    lines = [f"mu, of {fitted} tokens of answers, judged by {judged} others (cross-entropy in nats):"]
    named = {"no steering": 0.0, **strength.candidates}
    lines += [f"  {name:<14} {mu:>10.4g}  {strength.losses[mu]:.4f}" for name, mu in named.items()]
    if strength.mu == 0.0:
        lines.append("Steering makes nothing better here: the base says nothing that the model has not learned.")
    return "\n".join([*lines, f"Use it: --steering '{json.dumps(kept)}'"])
