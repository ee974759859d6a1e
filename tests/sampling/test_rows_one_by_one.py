"""`Rules.by_row`: a row made by itself has the bits of the same row among all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.config import SamplingParams
from paceline.sampling import Rules
from paceline.sampling.rules import LazyRows
from paceline.tree import TokenTree

VOCAB = 300
TREE = TokenTree.build([5, 6, 7, 5, 9, 2], [-1, -1, 0, 0, 2, 4])
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {"temperature": 1.0},
    "temperature": {"temperature": 0.7},
    "nucleus": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "min_tokens": {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": [5, 9]},
    "bias": {"temperature": 1.0, "logit_bias": {5: 4.0}},
}


def rules_of(name: str) -> Rules:
    params = SamplingParams(**SETTINGS[name])
    rules = Rules(params, vocab_size=VOCAB, prompt=[5, 2], stop_ids=params.stop_token_ids, bad_word_ids=[(6, 8), (3,)])
    rules.advance([7])
    return rules


def logits(dtype: torch.dtype) -> torch.Tensor:
    return (3 * torch.randn(1 + len(TREE), VOCAB, generator=torch.Generator().manual_seed(1))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_row_alone_is_the_row_among_others(name: str, dtype: torch.dtype) -> None:
    given, rules = logits(dtype), rules_of(name)
    before, whole, lazy = given.clone(), rules.apply(given, TREE), rules.by_row(given, TREE)
    for row in range(1 + len(TREE)):
        assert torch.equal(lazy[row], whole[row])
    assert torch.equal(given, before)


@pytest.mark.parametrize("name", ["penalties", "min_tokens"])
def test_rows_without_their_paths_fail_that_check(name: str) -> None:
    class Rootless(LazyRows):
        def __getitem__(self, row: int) -> torch.Tensor:
            return self._rules.row(self._logits[row : row + 1], self._tree, 0)

    given, rules = logits(torch.float32), rules_of(name)
    whole, wrong = rules.apply(given, TREE), Rootless(rules, given, TREE)
    assert not all(torch.equal(wrong[row], whole[row]) for row in range(1 + len(TREE)))


def test_another_number_of_rows_is_rejected() -> None:
    with pytest.raises(ValueError, match="one row per path"):
        rules_of("nothing").by_row(logits(torch.float32)[1:], TREE)
