"""Logits processors: what they are called with, and what becomes of those that fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract.worlds import PROMPT, VOCAB, engine, make, target, verifier
from engine.harness import run
from processors import unlike_the_last
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from paceline import SamplingParams
from paceline.sampling import Rules
from paceline.tree import EMPTY_TREE, TokenTree


def rules_of(*processors: Any, prompt: tuple[int, ...] = (1, 2), **more: Any) -> Rules:
    params = SamplingParams(temperature=0.0, logits_processors=processors, **more)
    return Rules(params, vocab_size=VOCAB, prompt=prompt)


def test_each_row_is_asked_with_the_text_along_its_path() -> None:
    asked: list[Any] = []

    def short(output: list[int], logits: torch.Tensor, /, scale: float = 1.0) -> torch.Tensor:
        asked.append((output, len(logits), scale))
        return logits

    def long(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        asked.append((prompt, output))
        prompt.clear()
        output.clear()
        return logits

    rules = rules_of(short, long)
    rules.advance([7])
    rules.apply(torch.zeros(3, VOCAB), TokenTree.chain([4, 5]))
    assert asked[::2] == [([7], VOCAB, 1.0), ([7, 4], VOCAB, 1.0), ([7, 4, 5], VOCAB, 1.0)]
    assert asked[1::2] == [([], [])] * 3, "each call has lists of its own, which it may change"
    assert rules_of(short).apply_paths(torch.zeros(1, VOCAB), [[3]]).shape == (1, VOCAB)


@pytest.mark.parametrize(
    "processor",
    [NoRepeatNGramLogitsProcessor(2), RepetitionPenaltyLogitsProcessor(1.5)],
    ids=lambda one: type(one).__name__,
)
def test_processors_of_transformers(processor: Any) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    found = rules_of(*LogitsProcessorList([processor]), prompt=(4, 5, 4)).apply(logits, TokenTree.chain([5, 4]))
    for row, output in enumerate(([], [5], [5, 4])):
        expected = processor(torch.tensor([[4, 5, 4, *output]]), logits[row : row + 1].clone())
        assert torch.equal(found[row : row + 1], expected)


def test_forbidden_tokens_stay_forbidden_whatever_a_processor_does() -> None:
    rules = rules_of(lambda output, logits: logits + 1e4, allowed_token_ids=[2, 3])
    assert rules.apply(torch.zeros(1, VOCAB), EMPTY_TREE)[0].isfinite().nonzero().flatten().tolist() == [2, 3]


def test_allowed_tokens_with_every_other_rule() -> None:
    params = SamplingParams(temperature=0.7, allowed_token_ids=[1, 3, 3, 9], top_k=2, logit_bias={0: 100.0, 9: 3.0})
    rules = Rules(params, vocab_size=VOCAB, prompt=())
    assert rules.apply(torch.arange(VOCAB)[None].float(), EMPTY_TREE)[0].isfinite().nonzero().flatten().tolist() == [
        3,
        9,
    ]


def outputs(processor: Any, drafter: str | None, params: dict[str, Any]) -> list[Any]:
    runner = target()
    drafters = [] if drafter is None else [make(drafter, OPTIONS[drafter], runner)]
    live = engine(drafters, verifier("rejection_sampler"), runner=runner)
    fine = SamplingParams(max_tokens=12, ignore_eos=True, **params)
    broken = SamplingParams(max_tokens=12, ignore_eos=True, logits_processors=[processor], **params)
    found = run(live, [PROMPT, PROMPT[1:]], [fine, broken])
    return [(o.token_ids, o.finish_reason, o.error) for request in found for o in request.outputs]


OPTIONS: dict[str, dict[str, Any]] = {"ngram": {}, "draft_model": {"model": "toy"}}
MODES = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}]


@pytest.mark.parametrize("params", MODES, ids=str)
@pytest.mark.parametrize("drafter", [None, "ngram", "draft_model"])
def test_one_that_fails_ends_its_request_where_plain_decoding_would_and_no_other(
    drafter: str | None, params: dict[str, Any]
) -> None:
    def breaks(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits if len(output) < 5 else logits[:3]

    (_, reason, _), (tokens, broken, error) = outputs(breaks, drafter, params)
    assert reason == "length"
    assert (len(tokens), broken) == (5, "error")
    assert "breaks failed (TypeError: it must return logits of shape (11,), got a tensor of shape (3,))" in error
    assert outputs(breaks, drafter, params) == outputs(breaks, None, params)


@pytest.mark.parametrize(
    ("drafter", "params"), [("ngram", MODES[0]), *(("draft_model", one) for one in MODES)], ids=str
)
def test_one_that_fails_on_rejected_drafts_alone_is_not_noticed(drafter: str, params: dict[str, Any]) -> None:
    expected = outputs(unlike_the_last, None, params)
    text = expected[1][0]
    drafts = []

    def only_this(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if output != text[: len(output)]:
            drafts.append(output)
            raise LookupError(f"{output} is not how it goes")
        return unlike_the_last(output, logits)

    assert outputs(only_this, drafter, params) == expected
    assert drafts, "none was asked about a rejected draft"
