"""Side branches around a chain, as SWIFT verifies them."""

from __future__ import annotations

from typing import Any

import pytest
from toys import ToyRunner

from paceline import LLM, SamplingParams
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.self import SwiftDrafter, branched
from paceline.errors import CapabilityError
from paceline.tree import EMPTY_TREE, Budget

PROMPTS = ["What is 2 + 3?", "def area(width, height):", "Name the first three months of the year, please."]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(speculative_config=None, dtype="float32", seed=1)


def fast(plain: LLM, **options: Any) -> tuple[LLM, SwiftDrafter]:
    llm = plain.with_speculative_config({"method": "swift", **options})
    (drafter,) = llm.engine.parts.drafter_set.drafters
    assert isinstance(drafter, SwiftDrafter)
    return llm, drafter


def decoded(llm: LLM, prompts: list[Any]) -> list[Any]:
    found = llm.generate(prompts, GREEDY)
    assert not any(out.metrics.dropped_drafters for out in found), found[0].metrics.dropped_drafters
    return [[one.token_ids for one in out.outputs] for out in found]


def test_the_likeliest_branches_get_the_room_that_is_left() -> None:
    levels = [([3, 4, 5], [0.5, 0.3, 0.0]), ([6, 7, 8], [0.8, 0.1, 0.05])]
    tree = branched(levels, 4, source=2)
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([3, 6, 4, 7], [-1, 0, -1, 0])
    assert tree.sources.tolist() == [2] * 4
    assert len(branched(levels, 2, source=0)) == 2
    assert len(branched(levels, 9, source=0)) == 5, "a token without any chance is no candidate"


def test_side_branches_hang_off_the_chain_and_help(plain: LLM) -> None:
    """Fewer steps than the chain alone takes, for the same text; only the chain goes on."""
    options = {"draft_stop_threshold": 0.0, "max_search_steps": 0, "controller": "swift"}
    steps = {}
    for width in (1, 10):
        llm, _ = fast(plain, tree_width=width, draft_max_length=3, **options)
        assert decoded(llm, PROMPTS) == decoded(plain, PROMPTS)
        steps[width] = sum(out.metrics.num_steps for out in llm.generate(PROMPTS, GREEDY))
    assert steps[10] < steps[1]
    _, drafter = fast(plain, tree_width=4, **options)
    text, runner = [4, 5, 6], plain.runner
    cache = runner.open()
    runner.extend([cache], [text[:-1]])
    (state,) = drafter.begin([Context("r", text, 3, cache=lambda: cache)])
    (tree,) = drafter.propose([state], [Budget(12, 3)], [EMPTY_TREE])
    assert tree.parents.tolist()[:3] == [-1, 0, 1]
    assert len(tree) == 12
    assert set(tree.parents.tolist()) <= {-1, 0, 1}
    (short,) = drafter.propose([state], [Budget(3, 3)], [EMPTY_TREE])
    assert short.parents.tolist() == [-1] * 3, "one level where there is room for no more"
    assert short.tokens[0] == tree.tokens[0]
    for node in range(3, 12):
        assert tree.confidence[node] <= tree.confidence[tree.parents[node] + 1]
    runner.release(cache)


def test_a_runner_of_chains_refuses_side_branches() -> None:
    with pytest.raises(
        CapabilityError, match=r"tree_width must be 1, since the runner of toy scores chains only, got 3"
    ):
        SwiftDrafter(
            DrafterArgs(vocab_size=11, index=0, max_context=64, target=ToyRunner(11, trees=False)), tree_width=3
        )
