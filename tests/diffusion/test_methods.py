"""Every method of the catalogue completes every kind of text under every cache policy it allows; settings that reduce
it to the static baseline; options that nothing reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.diffusion import METHODS, Canvas, ConfiguredMethod, FinishedCanvas, decode, options_of, part
from paceline.diffusion.catalogue import PARTS
from paceline.diffusion.commit.learned import block_confidences
from paceline.errors import ConfigError
from paceline.models import Call
from tests.diffusion.decoding import complete, fill, same
from tests.diffusion.toys import Independent, Joint, Toy, permutation, t4
from tests.tiny_diffusion import MASK, write

END = 5

OPTIONS: dict[str, dict[str, Any]] = {
    "learn2pd": {"filter": lambda step: 9 * block_confidences(step) - 4, "filter_threshold": 0.5},
    "ass_blocks": {"ascending_blocks": 2},
    "bacd_progressive": {"block_lengths": (2, 2, 4)},
    "window_diffusion": {"active_slots": 4, "window_slots": 8, "refresh_period": 3},
}

OPTIONS["learn2pd_eotp"] = OPTIONS["learn2pd"]

WITHOUT_BLOCKS = {
    "ass",
    "eoser_ass",
    "ass_blocks",
    "bacd_progressive",
    "remdm",
    "remdm_conf",
    "mask_predict",
    "dream_origin",
}

REFUSED = re.compile("has no option|of the whole text|fit one block|constraint must be one of")
"""Options of the method's own cache policy; blocks for a method without; a constraint that is not given here."""


def config_of(method: str, **more: Any) -> dict[str, Any]:
    blocks = {} if method in WITHOUT_BLOCKS or METHODS[method].schedule == "sliding" else {"block_length": 4}
    return {"method": method, **blocks, **OPTIONS.get(method, {}), **more}


def completed(toy: Any, canvas: Canvas, config: dict[str, Any]) -> FinishedCanvas:
    try:
        return complete(toy, canvas, config)
    except ConfigError as error:
        if not REFUSED.search(str(error)):
            raise
        pytest.skip(f"refused: {error}")


def texts(toy: Any) -> list[Canvas]:
    ids = {"mask_token_id": toy.mask_token_id, "eos_token_ids": toy.eos_token_ids}
    return [Canvas.of((3, 4, 6, 7), 12, **ids), Canvas.of((3, 4, 6, 7), 8, priors={2: 1, 7: 2}, **ids)]


@pytest.mark.parametrize("cache", ["own", "none", "prefix", "dual"])
@pytest.mark.parametrize("method", METHODS)
def test_a_model_with_full_attention(method: str, cache: str) -> None:
    toy = t4(eos_token_ids=(END,), seed=2)
    config = config_of(method) if cache == "own" else config_of(method, cache=cache)
    for canvas in texts(toy):
        given = np.flatnonzero(canvas.tokens != canvas.mask_token_id)
        outcome = completed(toy, canvas, config)
        assert not outcome.canvas.masked().size
        kept = given[given < outcome.canvas.length]
        assert (outcome.canvas.tokens[kept] == canvas.tokens[kept]).all()
        assert outcome.trajectory.calls <= 3 * (4 + 16) + 20


@pytest.mark.parametrize("cache", ["none", "block"])
@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.needs != "full attention"])
def test_a_block_causal_model(method: str, cache: str) -> None:
    toy = t4("block", block_length=4, eos_token_ids=(END,), seed=2)
    for canvas in texts(toy):
        outcome = completed(toy, canvas, config_of(method, cache=cache))
        assert not outcome.canvas.masked().size
        assert outcome.trajectory.calls <= 3 * (4 + 16) + 20


class Crowded:
    """A denoiser whose logits depend on how many calls come together."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        return [(1 + 0.01 * len(calls)) * logits for logits in self.inner.forward(calls)]


def bit_for_bit(ours: FinishedCanvas, theirs: FinishedCanvas) -> bool:
    """Canvas, order, probabilities and calls."""
    sure = np.array_equal(ours.canvas.confidence, theirs.canvas.confidence, equal_nan=True)
    return same(ours, theirs) and sure and ours.trajectory.calls == theirs.trajectory.calls


def together_and_alone(toy: Any, config: dict[str, Any]) -> list[tuple[FinishedCanvas, FinishedCanvas]]:
    """Texts of two lengths, sampled: each decoded beside the other, and alone."""
    ids = {"mask_token_id": toy.mask_token_id, "eos_token_ids": (END,)}
    canvases, method = [Canvas.of((3, 4, 6, 7), 8, **ids), Canvas.of((9,) * 8, 4, **ids)], ConfiguredMethod(config)
    both = decode(canvases, toy, [method.parts(toy, canvas, seed=i) for i, canvas in enumerate(canvases)])
    assert not any(outcome.error for outcome in both)
    alone = [decode([canvas], toy, [method.parts(toy, canvas, seed=i)])[0] for i, canvas in enumerate(canvases)]
    return list(zip(both, alone, strict=True))


@pytest.mark.parametrize("method", [name for name in METHODS if name != "cfg_dllm"])
def test_company_changes_nothing_in_single_precision(method: str) -> None:
    """To the bit; a constraint is tested with its check."""
    toy = t4(eos_token_ids=(END,), seed=2, dtype=torch.float32)
    more = {"max_post_edit_steps": 2} if METHODS[method].edit == "token_editing" else {}
    config = config_of(method, temperature=0.7, **more)
    assert all(bit_for_bit(*pair) for pair in together_and_alone(toy, config))


@pytest.mark.parametrize("method", ["static", "factor", "freedave", "ccd"])
def test_company_changes_nothing_under_the_exact_cache(method: str) -> None:
    toy = t4("block", seed=2, dtype=torch.float32)
    assert all(bit_for_bit(*pair) for pair in together_and_alone(toy, {"method": method, "cache": "block"}))


@pytest.mark.parametrize("method", ["static", "random", "freedave"])
def test_company_that_shows_is_noticed(method: str) -> None:
    toy = Crowded(t4(dtype=torch.float32))
    assert not all(bit_for_bit(*pair) for pair in together_and_alone(toy, {"method": method, "block_length": 4}))


def test_what_is_named_can_be_made() -> None:
    """Every part of the tables is imported and has the options its methods give it."""
    for kind, table in PARTS.items():
        for name in table:
            assert options_of(part(kind, name)) is not None
    for name in METHODS:
        assert ConfiguredMethod(name).method is METHODS[name]


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


def decoded(name: str, config: dict[str, Any]) -> FinishedCanvas:
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


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"blocks_ahead": 5}, "blocks_ahead must be left out: this model has no blocks of its own, .* got 5"),
    ({"method": "ete_tokens", "blocks_ahead": 1}, "blocks_ahead must be left out"),
    (
        {"method": "eoser_ass", "denoising_steps": 3},
        "denoising_steps must be left out with eos_ramp 'exponential'.* got 3",
    ),
    (
        {"method": "prophet", "answer_start": 3},
        "answer_start must be left out with monitor 'masked'; it is read with 'span', got 3",
    ),
    ({"method": "prophet", "answer_template": [1]}, "answer_template must be left out with monitor 'masked'"),
    ({"method": "prophet", "answer_length": 2}, "answer_length must be left out with monitor 'masked'"),
    ({"method": "prophet", "monitor": "last", "answer_start": 3}, "answer_start must be left out with monitor 'last'"),
    ({"method": "prophet", "denoising_steps": -1, "commit": "threshold"}, "denoising_steps must be at least 1, got -1"),
    ({"block_length": 0}, "block_length must be at least 1 .* got 0"),
    ({"block_length": -4}, "block_length must be at least 1 .* got -4"),
    ({"method": "ete", "block_length": 0}, "block_length must be at least 1"),
    ({"method": "dparallel", "entropy_threshold": -2}, r"entropy_threshold must be a number in -1\.\."),
    ({"method": "dparallel", "confidence_threshold": 0.5}, "no option 'confidence_threshold'"),
    ({"method": "bacd", "confidence_low": 0.95}, "confidence_low must be at most confidence_high"),
    ({"method": "local_leap", "relaxed_threshold": 0.95}, "relaxed_threshold must be at most confidence_threshold"),
    ({"method": "threshold", "verification": "explore_tokens"}, "commit must be 'explore'"),
    ({"method": "ass_blocks", "ascending_blocks": 4}, r"ascending_blocks must lie in 1\.\.3"),
    ({"method": "ass", "block_length": 4}, "block_length must be that of the whole text for the ascending schedule"),
    ({"method": "remdm", "block_length": 4}, "block_length must be that of the whole text"),
    ({"method": "mask_predict", "block_length": 4}, "block_length must be that of the whole text"),
    ({"method": "dream_origin", "block_length": 4}, "block_length must be that of the whole text"),
    ({"method": "ccd", "history_slots": 1, "commit_slots": 2}, "history_slots must be at least commit_slots"),
    ({"method": "eoser", "eos_factor_min": 0.0}, "eos_factor_min must be positive"),
    ({"method": "cad", "eos_bar": 2.0}, r"eos_bar must lie in 0\.\.1"),
    ({"method": "prophet", "gap_thresholds": (1.0, 2.0)}, "gap_thresholds must be one more than gap_progress"),
    ({"method": "prophet", "monitor": "last", "answer_length": 9}, "answer_start must lie in the 8 slots of the text"),
    ({"method": "prophet", "monitor": "all"}, "monitor must be"),
    ({"method": "remdm", "remask_eta": 2.0}, "remask_eta must"),
    ({"method": "remdm", "remask_rate": "all"}, "remask_rate must"),
    ({"method": "remdm", "remask_from": -1.0}, "remask_from must"),
    ({"method": "remdm", "remask_by": "age"}, "remask_by must"),
    ({"method": "threshold", "edit": "token_editing"}, "schedule must be 'held_blocks'"),
    ({"method": "llada2.1_s", "edit_scope": "all"}, "edit_scope must be"),
    ({"method": "llada2.1_s", "check": "grammar"}, "edit must be left out where a constraint is checked"),
    ({"method": "freedave", "drafts": 0}, "drafts must be at least 1"),
    ({"method": "freedave", "layout": "ring"}, "layout must be batch or tree"),
    ({"method": "freedave", "cache": "dual", "blocks_ahead": 1}, "blocks_ahead must be 0 with this cache policy"),
    ({"method": "freedave", "blocks_ahead": -1}, "blocks_ahead must be"),
]

READ: list[dict[str, Any]] = [
    {"method": "freedave", "blocks_ahead": 1, "block_length": 4},
    {"blocks_ahead": 0},
    {"method": "eoser", "denoising_steps": 3},
    {"method": "eoser", "denoising_steps": 3, "eos_ramp": "exponential"},  # of the commit rule
    {"method": "eoser_ass", "denoising_steps": 3, "eos_ramp": "linear"},
    {"method": "eoser_ass", "denoising_steps": None},
    {"method": "prophet", "monitor": "span", "answer_start": 3},
    {"method": "prophet", "monitor": "last", "answer_length": 2},
    {"block_length": None},
]


@pytest.mark.parametrize(("config", "message"), WRONG, ids=str)
def test_wrong_options_and_those_that_nothing_reads_are_rejected(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fill(Independent([0.5] * 8), config, 8, ())


@pytest.mark.parametrize("config", READ, ids=str)
def test_what_is_read_is_taken(config: dict[str, Any]) -> None:
    assert not fill(Independent([0.5] * 8), config, 8, ()).canvas.masked().size


@pytest.mark.parametrize("method", ["mask_predict", "remdm", "dream_origin"])
def test_rounds_are_at_most_sixteen_for_each_slot(method: str) -> None:
    toy = Independent([0.5] * 4)
    assert not fill(toy, {"method": method, "denoising_steps": 64}, 4, ()).canvas.masked().size
    for steps in (0, 65, 10**12):
        with pytest.raises(
            ConfigError, match=rf"denoising_steps must lie in 1\.\.64, at most 16 rounds for each .* got {steps}"
        ):
            fill(toy, {"method": method, "denoising_steps": steps}, 4, ())


def test_what_a_request_cannot_have(tmp_path: Path) -> None:
    folder = write(tmp_path / "llada")
    llm = LLM(folder, diffusion_config="static")
    few: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}
    with pytest.raises(
        ConfigError, match=f"logit_bias must leave out the mask token, which is never written, got {MASK}"
    ):
        llm.generate("a1: ", SamplingParams(**few, logit_bias={MASK: 5.0}))
    llm.generate("a1: ", SamplingParams(**few, logit_bias={MASK - 1: 5.0}))
    with pytest.raises(ConfigError, match=r"hold no mask token \(leave it out; slots to fill are numbers"):
        llm.generate({"prompt_token_ids": [5, MASK]}, SamplingParams(**few))
    assert llm.diffusion is not None
    most = llm.diffusion.max_context
    with pytest.raises(
        ConfigError, match=f"a block of {most + 1} slots is longer than the context, .* smaller block_length"
    ):
        LLM(folder, diffusion_config={"block_length": most + 1}).generate("a1: ", SamplingParams(**few))
