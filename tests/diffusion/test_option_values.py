"""Every option of every part, given values that mean nothing: one clear line, or a method that decodes."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from paceline.diffusion import METHODS, Canvas, ConfiguredMethod, options_of, part
from paceline.diffusion.base import Step
from paceline.errors import ConfigError, PacelineError
from tests.diffusion.decoding import complete
from tests.diffusion.toys import Independent

NEGATIVE = {"entropy_threshold", "gap_thresholds"}
"""A bar below all entropies, or gaps: the best slot alone is written, or everything."""
UNBOUNDED = {"gap_thresholds"}
TEXTS = {"regex", "grammar", "grammar_start", "filter", "json_schema"}
SWITCHES = {"adaptive", "eager_end", "merge_writes", "json_schema"}


def quite_unsure(step: Step) -> Any:
    return np.zeros(len(step.block))


def base_of(method: str) -> dict[str, Any]:
    more = {"cfg_dllm": {"regex": "[ab]*"}, "learn2pd": {"filter": quite_unsure}}
    return {"method": method, **more.get(method.removesuffix("_eotp"), {})}


def options() -> list[tuple[str, str]]:
    """Each option with the first method that has it."""
    found: dict[tuple[Any, str], str] = {}
    for method in METHODS:
        made = ConfiguredMethod(base_of(method))
        for factory in [part(kind, name) for kind, name in made.names.items()] + [
            part("modifier", name) for name in made.modifiers
        ]:
            for option in options_of(factory):
                found.setdefault((factory, option), method)
    return sorted({(method, option) for (_, option), method in found.items()})


OPTIONS = options()


def tried(method: str, option: str, value: Any) -> None:
    toy = Independent([0.9, 0.4, 0.8, 0.6], vocab_size=8)
    toy.eos_token_ids = (5,)
    canvas = Canvas.of((), 4, mask_token_id=toy.mask_token_id, eos_token_ids=toy.eos_token_ids)
    config = ConfiguredMethod({**base_of(method), option: value})
    config.parts(toy, canvas, token_text=lambda token: "ab"[token % 2])
    if method != "cfg_dllm":
        complete(toy, canvas, {**base_of(method), option: value})


@pytest.mark.parametrize(("method", "option"), OPTIONS)
def test_wrong_types_and_numbers_that_are_none_get_one_line(method: str, option: str) -> None:
    wrong: list[Any] = [math.nan, [math.nan], [True], {1: 2}]
    wrong += [] if option in TEXTS else ["x"]
    wrong += [] if option in SWITCHES else [True]
    wrong += [] if option in NEGATIVE else [-1, -0.5]
    wrong += [] if option in UNBOUNDED else [math.inf, -math.inf, 1e300, 10**30]
    if option == "entropy_threshold":
        wrong += [-2.0]
    for value in wrong:
        with pytest.raises(PacelineError) as caught:
            tried(method, option, value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400
        assert option in str(caught.value) or option in TEXTS, str(caught.value)


@pytest.mark.parametrize(("method", "option"), OPTIONS)
def test_zero_and_huge_counts_decode_or_get_one_line(method: str, option: str) -> None:
    for value in (0, 0.0, 2**62):
        with suppress(ConfigError):
            tried(method, option, value)


def test_values_that_mean_something_are_taken() -> None:
    fine = {"confidence_threshold": 0.95, "denoising_steps": 2, "drafts": 2, "refresh_period": 2, "alg_temp": 0.5}
    for method, option in OPTIONS:
        if option in fine and METHODS[method].cache == "none":
            tried(method, option, fine[option])
