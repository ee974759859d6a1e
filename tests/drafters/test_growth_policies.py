"""Options of tree policies: what is refused, and with which words; what all policies share."""

from __future__ import annotations

from typing import Any

import pytest
from controllers.test_lengths import p_value
from drafters.test_draft_model import VOCAB, begin, drafter_of, propose
from tools.gtest import ERROR
from toys import ToyRunner

from paceline.controllers.policies import FixedController
from paceline.drafters.growth.policies import POLICIES
from paceline.errors import CapabilityError, ConfigError, DrafterError

OPTIONS: dict[str, dict[str, Any]] = {
    "levels": {"tree_width": 3},
    "static": {"speculative_token_tree": "[(0,), (1,), (0, 0)]"},
}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tree_policy": "best"}, "static, ppd, rsd_c, rsd_s, spectr, greedy_draft, got 'best'"),
        ({"tree_policy": ["dyspec"]}, "tree_policy must be one of"),
        ({"tree_policy": "dyspec", "tree_width": 2}, "tree_width must be left out with tree_policy 'dyspec'"),
        ({"tree_policy": "dyspec", "tree_threshold": 0.1}, "tree_threshold must be left out with tree_policy 'dyspec'"),
        ({"tree_policy": "eagle2", "speculative_token_tree": "[(0,)]"}, "speculative_token_tree must be given with"),
        (
            {"tree_policy": "static"},
            'speculative_token_tree must be given with tree_policy "static", and with no other, got None',
        ),
        ({"speculative_token_tree": "[(0,), (64,)]"}, "ranks in 0..63"),
        (
            {"tree_policy": "rsd_c", "tree_width": []},
            r"tree_width must be a list of 1..64 integers in 1..64, one per level, got \[\]",
        ),
        ({"tree_policy": "rsd_c", "tree_width": [3, 0]}, r"one per level, got \[3, 0\]"),
        ({"tree_policy": "rsd_c", "tree_width": (2, 65)}, r"one per level, got \(2, 65\)"),
        ({"tree_policy": "rsd_c", "tree_width": [2, True]}, r"one per level, got \[2, True\]"),
        ({"tree_policy": "rsd_c", "tree_width": [1] * 65}, "one per level, got"),
        (
            {"tree_policy": "rsd_c", "tree_width": "3,2"},
            r"integer in 1..64 \(with tree_policy 'rsd_c' also a list .*got '3,2'",
        ),
        ({"tree_policy": "rsd_s", "tree_width": [3, 2]}, r"\(with tree_policy 'rsd_c' also a list .*got \[3, 2\]"),
        ({"tree_width": [3, 2]}, r"\(with tree_policy 'rsd_c' also a list of them, one per level\), got \[3, 2\]"),
        ({"tree_width": 65}, "tree_width must be an integer in 1..64, got 65"),
    ],
)
def test_wrong_options_are_rejected(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        drafter_of(ToyRunner(VOCAB), **options)


@pytest.mark.parametrize("policy", POLICIES)
def test_trees_need_a_draft_model_that_scores_them(policy: str) -> None:
    with pytest.raises(CapabilityError, match=f"tree_policy '{policy}' needs a draft model that scores trees"):
        drafter_of(ToyRunner(VOCAB, trees=False), tree_policy=policy, **OPTIONS.get(policy, {}))


@pytest.mark.parametrize("policy", POLICIES)
def test_nan_from_the_draft_model_is_an_error(policy: str) -> None:
    for temperature in (0.0, 1.0):
        drafter = drafter_of(ToyRunner(VOCAB, nan_from=3), tree_policy=policy, **OPTIONS.get(policy, {}))
        with pytest.raises(DrafterError, match="NaN"):
            propose(drafter, begin(drafter, temperature=temperature), 4)


@pytest.mark.parametrize("policy", POLICIES)
def test_outputs_follow_the_target(policy: str) -> None:
    """Through the engine; what this check catches: `controllers.test_lengths`, and exactly: `test_growth_dyspec`."""
    assert p_value(FixedController(6), tree_policy=policy, **OPTIONS.get(policy, {})) > ERROR


def test_levels_of_width_1_are_chains() -> None:
    drafter = drafter_of(ToyRunner(VOCAB, trees=False), tree_policy="levels", tree_width=1)
    assert propose(drafter, begin(drafter), 4).is_chain
