"""The options of growing trees are declared once, and every drafter that grows them has them as it has its own."""

from __future__ import annotations

import inspect
from typing import Any, Unpack

import pytest

from paceline import LLM, registry
from paceline.drafters import Drafter
from paceline.drafters.growth.options import GrowthOptions, growth_policy, with_growth_options
from paceline.errors import ConfigError
from paceline.utils import check_types

SHARED = list(GrowthOptions.__annotations__)


def test_every_drafter_that_grows_trees_has_all_of_them_behind_its_own() -> None:
    growing = {name for name in registry.DRAFTERS if "tree_policy" in parameters(registry.load("drafters", name))}
    assert {"draft_model", "tli", "quantized_copy", "easyspec", "eagle3", "p_eagle", "medusa", "hydra++"} <= growing
    assert "pearl" not in growing
    for name in growing:
        assert parameters(registry.load("drafters", name))[-len(SHARED) :] == SHARED


def parameters(drafter: type) -> list[str]:
    return list(inspect.signature(drafter).parameters)


@with_growth_options
class OwnDrafter(Drafter):
    """Grows trees.

    Args:
        reach: its own.
    Raises:
        ConfigError: a wrong one.
    """

    def __init__(self, args: Any, *, reach: int = 3, **growth: Unpack[GrowthOptions]) -> None:
        self.reach, self.policy = reach, growth_policy(growth)


def test_the_docstring_and_the_checks_of_types_know_them() -> None:
    text = inspect.getdoc(OwnDrafter) or ""
    assert text.index("reach: its own") < text.index("tree_width: of") < text.index("Raises:")
    check_types(OwnDrafter, {"reach": 2, "tree_width": [2, 1]})
    for options in ({"reach": "x"}, {"tree_width": "x"}, {"tree_threshold": "x"}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))} must be"):
            check_types(OwnDrafter, options)


def test_policies_are_named_and_unknown_options_rejected() -> None:
    assert growth_policy({}).name == growth_policy({"tree_policy": None}).name == "chain"
    assert growth_policy({}, "eagle2").name == "eagle2"
    assert growth_policy({"speculative_token_tree": [[0]]}, "eagle2").name == "static"
    with pytest.raises(ConfigError, match="draft_sample_method must be greedy or left out with tree_policy 'eagle2'"):
        growth_policy({"tree_policy": "eagle2", "draft_sample_method": "probabilistic"})
    with pytest.raises(ConfigError, match="tree_wdth"):
        LLM(speculative_config={"method": "quantized_copy", "tree_wdth": 2})
