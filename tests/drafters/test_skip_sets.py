"""Sets of sub-layers: sizes, plans, and the published lists of Unified Layer Skipping."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.drafters.self.skip_sets import (
    choices,
    count_of,
    first_set,
    plan_of,
    random_set,
    unified_layers,
    unified_plan,
)
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    ("speedup", "kept"),
    [
        (2, [*range(0, 27, 2), 29]),
        (3, [*range(0, 25, 3), 29]),
        (5, [0, 6, 12, 18, 24, 29]),
        (10, [0, 15, 29]),
        (15, [0, 29]),
        (1, list(range(30))),
    ],
)
def test_the_lists_of_the_paper_for_thirty_layers(speedup: float, kept: list[int]) -> None:
    assert unified_layers(30, speedup) == kept


def test_a_unified_plan_leaves_out_whole_layers() -> None:
    plan = unified_plan(6, 2)
    assert plan.skip_attention == plan.skip_mlp == {1, 2, 4}
    assert (plan.first, plan.stop) == (0, None)


@pytest.mark.parametrize("speedup", [0.5, 3.5, 100.0])
def test_too_little_or_too_much_is_rejected(speedup: float) -> None:
    with pytest.raises(ConfigError, match=r"target_speedup must be in 1\.\.3 for 6 layers, got"):
        unified_layers(6, speedup)


@pytest.mark.parametrize(
    ("layers", "ratio", "count"), [(32, 0.45, 27), (6, 0.45, 3), (40, 0.45, 34), (52, 0.29, 29), (4, 1.0, 4)]
)
def test_the_size_is_the_share_of_what_may_be_left_out(layers: int, ratio: float, count: int) -> None:
    assert count_of(layers, ratio) == count
    rng = np.random.default_rng(0)
    for one in (first_set(layers, count), random_set(layers, count, rng), random_set(layers, count, rng)):
        assert len(one) == count
        assert one <= set(choices(layers))
        plan = plan_of(one)
        assert not {0, layers - 1} & (set(plan.skip_attention) | set(plan.skip_mlp))
        assert len(plan.skip_attention) + len(plan.skip_mlp) == count


def test_the_first_set_is_every_second_layer() -> None:
    plan = plan_of(first_set(8, 6))
    assert plan.skip_attention == plan.skip_mlp == {1, 3, 5}
    plan = plan_of(first_set(8, 7))
    assert plan.skip_attention == {1, 3, 5, 2}
    assert plan.skip_mlp == {1, 3, 5}
