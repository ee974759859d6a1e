"""Options of controllers in speculative_config: whose a key is, and what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from toys import ToyRunner

from paceline import ConfigError, registry
from paceline.config import SpeculativeConfig
from paceline.engine.build import build_parts, check_methods
from paceline.engine.policy import GIVEN


def controller(given: dict[str, Any]) -> Any:
    config = SpeculativeConfig.parse(given)
    check_methods(config)
    _, parts = build_parts(ToyRunner(), config, load=lambda name: ToyRunner(), default_draft="toy")
    return parts.controller


def test_options_reach_the_controller_and_the_drafter() -> None:
    built = controller({"method": "ngram", "controller": "kangaroo", "threshold": 0.4, "steps": 3, "prompt_lookup_max": 2})
    assert (built.name, built.threshold, built.levels) == ("kangaroo", 0.4, 3)
    built = controller({"method": "ngram", "controller": "specdec_pp", "bound": [1, 9], "num_speculative_tokens": 7})
    assert (built.bound, built.num_speculative_tokens) == ((1, 9), 7)
    assert controller({"method": "auto", "controller": "swift", "stop_threshold": 0.5}).threshold == 0.5
    assert controller({"method": "ngram", "max_depth": 3}).max_depth == 3


def test_beside_a_list_of_methods_they_are_the_controllers() -> None:
    given = {"method": [{"method": "ngram", "prompt_lookup_max": 2}, "draft_model"], "controller": "diffuspec", "k_max": 25}
    assert controller(given).k_max == 25


def test_defaults_stay() -> None:
    assert controller({"method": "ngram"}).name == "auto"
    assert controller({"method": "ngram", "num_speculative_tokens": 3}).num_speculative_tokens == 3
    assert controller({"method": "ngram", "controller": "fixed"}).num_speculative_tokens == 0
    assert controller({"method": "ngram", "controller": "heuristic"}).num_speculative_tokens is None


KANGAROO = {"method": "ngram", "controller": "kangaroo"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (KANGAROO | {"treshold": 0.4}, "with controller 'kangaroo' does not know 'treshold'; did you mean threshold"),
        (KANGAROO | {"k_max": 4}, "does not know 'k_max'; known are prompt_lookup_max, prompt_lookup_min, steps, threshold"),
        (KANGAROO | {"method": ["ngram"], "treshold": 0.4}, "controller 'kangaroo' does not know 'treshold'; did you mean"),
        (KANGAROO | {"method": ["ngram"], "prompt_lookup_max": 2}, "'prompt_lookup_max' stands beside a list of methods"),
        ({"method": "ngram", "threshold": 0.4}, "'ngram' does not know 'threshold'"),
        (KANGAROO | {"method": [{"method": "ngram", "threshold": 0.4}]}, "'ngram' does not know 'threshold'"),
        (KANGAROO | {"threshold": "low"}, "threshold must be in 0..1, got 'low'"),
        (KANGAROO | {"controller": "kangroo", "threshold": 0.4}, "unknown controller 'kangroo'; did you mean kangaroo"),
        ({"method": "ngram", "max_nodes": "many"}, "controller 'auto': TypeError"),
    ],
)
def test_wrong_options_are_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        controller(given)


class Greedy(registry.load("controllers", "kangaroo")):  # type: ignore[misc]
    """Has an option that a drafter has too."""

    def __init__(self, *, prompt_lookup_max: int = 3, disable_by_batch_size: int | None = None) -> None:
        super().__init__(steps=prompt_lookup_max, disable_by_batch_size=disable_by_batch_size)


def test_an_option_that_both_have_must_say_whose_it_is() -> None:
    mine = f"{__name__}:Greedy"
    with pytest.raises(
        ConfigError, match=r"both method 'ngram' and controller .* have an option 'prompt_lookup_max'; for the drafter"
    ):
        controller({"method": "ngram", "controller": mine, "prompt_lookup_max": 4})
    beside = controller({"method": [{"method": "ngram", "prompt_lookup_max": 5}], "controller": mine, "prompt_lookup_max": 4})
    assert beside.levels == 4


def parameters(family: str, name: str, without: tuple[str, ...]) -> set[str]:
    return set(inspect.signature(registry.load(family, name)).parameters) - set(without)


def test_no_option_of_ours_is_both_a_drafters_and_a_controllers() -> None:
    drafters = {n: parameters("drafters", n, ("args", "num_speculative_tokens")) for n in registry.DRAFTERS}
    for name in registry.CONTROLLERS:
        own = parameters("controllers", name, GIVEN)
        assert not {other: own & theirs for other, theirs in drafters.items() if own & theirs}, name
