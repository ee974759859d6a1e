"""Settings that reduce each method to the static baseline: the same canvas, slot for slot, in the same order.

To add a method, add a line: its name, the setting, and the baseline where that is not `static`.
"""

from typing import Any

import numpy as np
import pytest

from paceline.diffusion import Outcome
from tests.diffusion.decoding import fill, same
from tests.diffusion.toys import Independent, Joint, Toy, permutation
from tests.diffusion.toys_t4 import t4

INFINITE = float("inf")
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "threshold above 1": ({"method": "threshold", "confidence_threshold": 1.1}, {}),
    "dParallel, no entropy low enough": ({"method": "dparallel", "entropy_threshold": -1.0}, {"method": "entropy"}),
    "factor 0": ({"method": "factor", "factor": 0.0}, {}),
    "quota of a slot a round": ({"method": "static", "denoising_steps": 4}, {}),
    "LocalLeap, anchors above 1": ({"method": "local_leap", "confidence_threshold": 1.1, "relaxed_threshold": 1.1}, {}),
    "LocalLeap, no anchor to relax": (
        {"method": "local_leap", "confidence_threshold": 1.1, "relaxed_threshold": 0.1},
        {},
    ),
    "ETE, no exploring, no look-ahead": (
        {"method": "ete", "confidence_threshold": 1.1, "explore_blocks": 0, "look_ahead": 0},
        {},
    ),
    "ETE, one token tried": (
        {"method": "ete_tokens", "explore_tokens": 1, "confidence_threshold": 0.5},
        {"method": "ete", "confidence_threshold": 0.5},
    ),
    "CCD, one context": ({"method": "ccd", "history_length": 1}, {"method": "entropy"}),
    "CCD agreement, warm-up only": ({"method": "ccd_agreement", "warmup_rounds": 99}, {"method": "entropy"}),
    "CCD-DS, a slot remembered": ({"method": "ccd_ds", "history_slots": 1}, {"method": "entropy"}),
    "EOSER, factor 1": ({"method": "eoser", "eos_factor_min": 1.0, "eos_factor_max": 1.0}, {}),
    "EOSER on the ascending schedule, factor 1": (
        {"method": "eoser_ass", "eos_factor_min": 1.0, "eos_factor_max": 1.0, "block_length": None},
        {"method": "ass", "block_length": None},
    ),
    "ascending schedule, one block": (
        {"method": "ass_blocks", "schedule": "ascending", "ascending_blocks": 1},
        {"method": "ass", "block_length": None},
    ),
    "Dream, a round for each slot": ({"method": "dream"}, {"method": "entropy"}),
    "Dream origin, one round": (
        {"method": "dream_origin", "denoising_steps": 1, "block_length": None},
        {"denoising_steps": 1, "block_length": None},
    ),
    "BACD, both bounds above 1": ({"method": "bacd", "confidence_low": 1.1, "confidence_high": 1.1}, {}),
    "progressive, one length": ({"method": "static", "schedule": "progressive", "block_lengths": (4,)}, {}),
    "progressive BACD, one length": (
        {"method": "bacd_progressive", "schedule": "progressive", "block_lengths": (4,)},
        {"method": "bacd"},
    ),
    "CAD, one token, no bar": ({"method": "cad", "max_tokens_per_round": 1, "eos_bar": 0.0}, {}),
    "CAD, threshold above 1, no bar": ({"method": "cad", "confidence_threshold": 1.1, "eos_bar": 0.0}, {}),
    "Learn2PD, threshold 1": (
        {"method": "learn2pd", "filter_threshold": 1.0, "filter": lambda step: np.full(4, 50.0)},
        {},
    ),
    "EoTP, no end of text": ({"method": "eotp", "end_token_ids": (9,)}, {}),
    "Prophet, infinite bars": ({"method": "prophet", "gap_thresholds": (INFINITE,) * 3}, {}),
    "Learn2PD with EoTP, threshold 1, no end of text": (
        {
            "method": "learn2pd_eotp",
            "filter_threshold": 1.0,
            "filter": lambda step: np.full(4, 50.0),
            "end_token_ids": (9,),
        },
        {},
    ),
    "LLaDA2.1, thresholds above 1": ({"method": "llada2.1_s", "confidence_threshold": 1.1, "edit_threshold": 1.0}, {}),
    "repetition guard, no penalty": ({"method": "static", "correction": "repetition_guard", "penalty_lambda": 0.0}, {}),
    "FreeDave": ({"method": "freedave"}, {}),
    "FreeDave, many drafts": ({"method": "freedave", "drafts": 99}, {}),
    "FreeDave across blocks": ({"method": "freedave", "blocks_ahead": 1}, {}),
    "FreeDave++, threshold above 1": ({"method": "freedave++", "confidence_threshold": 1.1}, {}),
    "prefix cache, refreshed every round": (
        {"method": "fast_dllm_prefix", "confidence_threshold": 1.1, "refresh_period": 1},
        {},
    ),
    "dual cache, refreshed every round": (
        {"method": "fast_dllm_dual", "confidence_threshold": 1.1, "refresh_period": 1},
        {},
    ),
    "ReMDM, one round": (
        {"method": "remdm", "denoising_steps": 1, "block_length": None},
        {"denoising_steps": 1, "block_length": None},
    ),
    "Mask-Predict, one round": (
        {"method": "mask_predict", "denoising_steps": 1, "block_length": None},
        {"denoising_steps": 1, "block_length": None},
    ),
    "ReCAP, no local steps": ({"method": "recap", "refresh_period": 1}, {}),
    "Window-Diffusion, everything open and refreshed every round": (
        {
            "method": "window_diffusion",
            "schedule": "sliding",
            "active_slots": None,
            "window_slots": None,
            "refresh_period": 1,
        },
        {"block_length": None},
    ),
}
TOYS: dict[str, Toy] = {
    "T1": Independent(np.random.default_rng(0).uniform(0.2, 0.95, 8)),
    "T2": Joint(np.random.default_rng(1).dirichlet(np.full(3**8, 0.05)).reshape((3,) * 8)),
    "T3": permutation(4),
    "T4": t4(),
}
for toy in TOYS.values():
    toy.eos_token_ids = (1,)  # rules about ends have something to act on


def decoded(name: str, config: dict[str, Any]) -> Outcome:
    length, prompt = 4 if name == "T3" else 8, (3, 4, 5) if name == "T4" else ()
    return fill(TOYS[name], config, length, prompt)


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_canvas_as_the_baseline(name: str, toy: str) -> None:
    config, baseline = SETTINGS[name]
    ours = decoded(toy, config if "schedule" in config else {"block_length": 4, **config})
    theirs = decoded(toy, {"method": "static", "block_length": 4, **baseline})
    assert same(ours, theirs)
    assert ours.trajectory.calls <= theirs.trajectory.calls


@pytest.mark.parametrize(
    "config",
    [
        {"method": "threshold", "confidence_threshold": 0.3},
        {"method": "local_leap", "confidence_threshold": 0.4, "relaxed_threshold": 0.2},
        {"method": "ete", "confidence_threshold": 0.3},
        {"method": "bacd", "confidence_low": 0.2, "confidence_high": 0.3},
        {"method": "cad", "confidence_threshold": 0.3, "eos_bar": 0.0},
        {"method": "cad", "confidence_threshold": 1.1, "eos_bar": 0.9},
        {"method": "eoser"},
        {"method": "eotp"},
        {"method": "prophet", "gap_thresholds": (0.1, 0.1, 0.1)},
        {"method": "llada2.1_s", "confidence_threshold": 0.3},
        {"method": "entropy"},
        {"method": "dparallel", "entropy_threshold": 1.0},
    ],
    ids=lambda config: config["method"],
)
def test_other_settings_are_told_apart(config: dict[str, Any]) -> None:
    config = {"block_length": 4, **config}
    static = {"method": "static", "block_length": 4}
    assert not all(same(decoded(name, config), decoded(name, static)) for name in TOYS)
