"""LUD: a model commits what it was sure of as the paper has it, and is itself where it verifies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import write

from benchmarks.stand_ins import written_head
from paceline import LLM, SamplingParams
from paceline.errors import CheckpointError, ConfigError
from paceline.models.heads import HeadConfig

LEVELS, COUNT = 3, 40
PROMPTS = [[(7 * i + 5 * j) % 300 + 4 for i in range(6 + 5 * j)] for j in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
SURE = 0.2
"""Of what so small a model guesses, about as much is above it as below."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write(tmp_path_factory.mktemp("target"), vocab_size=320, initializer_range=0.4)
    return LLM(folder, speculative_config=None, dtype="float32", threads=1, profile=False)


@pytest.fixture(scope="module")
def head(llm: LLM) -> str:
    info = llm.runner.info
    sizes = {"hidden_size": info.hidden_size, "vocab_size": info.vocab_size, "draft_vocab_size": info.vocab_size}
    own = HeadConfig(method="lud", num_heads=LEVELS, mask_token_id=7, **sizes)  # type: ignore[arg-type]
    return written_head(own, {"placeholder": llm.runner.embed([7])[0]})  # type: ignore[attr-defined]


def texts(llm: LLM, head: str, **options: Any) -> tuple[list[list[int]], int, int]:
    """Tokens of the prompts' outputs, tokens drafted, and departures."""
    given = {"method": "lud", "model": head, "num_speculative_tokens": LEVELS, **options}
    found = llm.with_speculative_config(given).generate([{"prompt_token_ids": one} for one in PROMPTS], GREEDY)
    assert not any(out.metrics.dropped_drafters for out in found)
    counts = [(out.metrics.num_draft_tokens, out.metrics.num_departures) for out in found]
    drafted, departures = (sum(each) for each in zip(*counts, strict=True))
    return [out.outputs[0].token_ids for out in found], drafted, departures


def papers(llm: LLM, prompt: Sequence[int], beta: float) -> list[int]:
    """Tokens of the paper's loop, each step in passes of its own over text and placeholders."""
    runner: Any = llm.runner
    text, guesses, placeholder = list(prompt), list[tuple[int, float]](), runner.embed([7])
    while len(text) < len(prompt) + COUNT:
        fed = [*text, *(token for token, _ in guesses)]
        said = runner.extend([runner.open()], [fed], all_logits=True).logits[len(text) - 1 :].argmax(-1).tolist()
        kept = 0
        for (token, sure), own in zip(guesses, said, strict=False):
            if token != own and sure < beta:
                break
            kept += 1
        text += [*(token for token, _ in guesses[:kept]), said[kept]]
        rows = torch.cat((runner.embed(text[:-1]), placeholder.expand(LEVELS, -1)))
        guessed = runner.extend_embeddings([runner.open()], [rows], all_logits=True).logits[-LEVELS:].softmax(-1)
        guesses = list(zip(guessed.argmax(-1).tolist(), guessed.amax(-1).tolist(), strict=True))
    return text[len(prompt) :]


def test_units_stand_as_in_the_papers_loop(llm: LLM, head: str) -> None:
    """Nothing of a placeholder is kept, and what was guessed is read as real tokens. Negative control: another beta."""
    given = {"acceptance_method": "lexical_units", "unit_threshold": SURE}
    found, _, departures = texts(llm, head, **given)
    end = COUNT - LEVELS - 1  # where a step is cut by the end of the text, fewer drafts stand
    assert [one[:end] for one in found] == [papers(llm, prompt, SURE)[:end] for prompt in PROMPTS]
    assert departures > 5
    assert [one[:end] for one in found] != [papers(llm, prompt, 2.0)[:end] for prompt in PROMPTS]


def test_verified_or_never_sure_it_is_the_model_itself(llm: LLM, head: str) -> None:
    plain = [out.outputs[0].token_ids for out in llm.generate([{"prompt_token_ids": one} for one in PROMPTS], GREEDY)]
    for options in ({}, {"acceptance_method": "lexical_units", "unit_threshold": 1.5}):
        found, drafted, departures = texts(llm, head, **options)
        assert found == plain
        assert drafted > 0 == departures
    found, drafted, _ = texts(llm, head, placeholder_rows=0, acceptance_method="lexical_units", unit_threshold=0.0)
    assert (found, drafted) == (plain, 0), "units of one token"
    relaxed, _, departures = texts(llm, head, acceptance_method="lexical_units", unit_threshold=0.0)
    assert relaxed != plain
    assert departures > 0


def test_placeholders_are_all_one_token(llm: LLM, head: str) -> None:
    drafter = llm.with_speculative_config({"method": "lud", "model": head}).engine.parts.drafter_set.drafters[0]
    expected = llm.runner.embed([7] * LEVELS)  # type: ignore[attr-defined]
    assert torch.equal(drafter.prompts[:, 0], expected)  # type: ignore[attr-defined]


def test_the_rule_is_refused_where_it_does_not_belong(llm: LLM, head: str) -> None:
    rule = {"acceptance_method": "lexical_units"}
    own = {"method": "lud", "model": head}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"method": "ngram"}, r"method must be 'lud' with acceptance_method 'lexical_units'.*got \['ngram'\]"),
        ({"method": "auto"}, "method must be 'lud'"),
        ({"method": [own, "ngram"]}, "method must be 'lud'"),
        (own | {"tree_width": 3}, "judges chains, but method 'lud' drafts trees by its tree_policy 'levels'"),
        (own | {"unit_threshold": -0.1}, "unit_threshold must be 0 or more"),
    ]
    for given, message in wrong:
        with pytest.raises(ConfigError, match=message):
            llm.with_speculative_config(given | rule)
    with pytest.raises(ConfigError, match='unit_threshold must be given together with "acceptance_method": "lexical'):
        llm.with_speculative_config(own | {"unit_threshold": 0.5})
    with pytest.raises(ConfigError, match="acceptance_method must be an exact rule with exactness='strict'"):
        LLM(speculative_config=own | rule, exactness="strict")
    for method, parts in (("lud", own), ("auto", {"method": "auto"})):
        assert llm.with_speculative_config(parts).engine.parts.sampled.name == "rejection_sampler", method


def test_what_is_no_placeholder_is_named(llm: LLM, head: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="placeholder_rows must be"):
        llm.with_speculative_config({"method": "lud", "model": head, "placeholder_rows": -1})
    with pytest.raises(CheckpointError, match="is of method 'lud', not 'ppd'; name that one"):
        llm.with_speculative_config({"method": "ppd", "model": head})
    size = {"hidden_size": 8, "vocab_size": 16, "draft_vocab_size": 16}
    for wrong in (None, 16):
        with pytest.raises(ConfigError, match="mask_token_id must be"):
            HeadConfig(method="lud", mask_token_id=wrong, **size)  # type: ignore[arg-type]
