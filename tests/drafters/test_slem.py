"""String-level exact match: points in the target's tokens of what the draft wrote, and what cannot be drafted from."""

from __future__ import annotations

from typing import Any

import pytest
from toy_models import LETTERS, OTHER, ToyModels
from toys import ToyRunner

from paceline.drafters import Context, DrafterArgs
from paceline.drafters.vocab import SlemDrafter
from paceline.errors import ConfigError, DrafterError
from paceline.tree import EMPTY_TREE, Budget


def drafter_of(**options: Any) -> tuple[SlemDrafter, ToyModels]:
    context = options.pop("max_context", 4096)
    models = ToyModels(ToyRunner(11), ToyRunner(11, order=None, max_context=context))
    return SlemDrafter(
        DrafterArgs(vocab_size=11, index=3, max_context=99, models=models), model="other", **options
    ), models


def text_of(tokens: Any) -> str:
    return "".join(LETTERS[token - 1] if token else "." for token in tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_offers_the_text_that_the_draft_writes(temperature: float) -> None:
    drafter, models = drafter_of()
    for first in range(1, 9):
        (state,) = drafter.begin([Context("r", [first, 3, 4], 3, temperature)])
        (tree,) = drafter.propose([state], [Budget(9, 9)], [EMPTY_TREE])
        wrote = models.other.greedy([OTHER.index(LETTERS[first - 1]), OTHER.index("cd")], 9)
        text = "".join(OTHER[token] if token else "." for token in wrote).split("z")[0]
        end = text.find(".") + 1 or len(text)
        assert text_of(tree.tokens) == text[: min(end, 9)]
        assert not tree.trials
        assert set(tree.sources.tolist()) <= {3}
        drafter.end([state])
    assert models.other.open_caches == 0


def test_limits() -> None:
    for options, nodes, most in (
        ({"num_speculative_tokens": 2}, 9, 2),
        ({}, 4, 4),
        ({"max_context": 4}, 9, 4),
        ({"max_context": 2}, 9, 0),
    ):
        drafter, _ = drafter_of(**options)
        (state,) = drafter.begin([Context("r", [1, 5, 7], 3)])
        (tree,) = drafter.propose([state], [Budget(nodes, nodes)], [EMPTY_TREE])
        assert len(tree) <= most
        assert most == 0 or len(tree) > 0


def test_what_cannot_be_is_refused() -> None:
    args = DrafterArgs(vocab_size=11, index=0, max_context=99, models=drafter_of()[1])
    with pytest.raises(DrafterError, match="'strangers' shares no token"):
        SlemDrafter(args, model="strangers")
    with pytest.raises(ConfigError, match="must be a folder or hub id for method 'slem'"):
        SlemDrafter(args)
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        SlemDrafter(args, model="other", num_speculative_tokens=-1)
