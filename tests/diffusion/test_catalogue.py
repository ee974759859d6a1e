"""Every method of the catalogue completes every kind of text, under every cache policy it allows."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from paceline.diffusion import METHODS, PARTS, Canvas, ConfiguredMethod, Outcome, decode, options_of, part
from paceline.diffusion.commit import block_confidences
from paceline.errors import ConfigError
from paceline.models.denoiser import Call
from tests.diffusion.decoding import complete, same
from tests.diffusion.toys_t4 import t4

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
REFUSED = re.compile("has no option|of the whole text|constraint must be one of")
"""Options of the method's own cache policy; blocks for a method without; a constraint that is not given here."""


def config_of(method: str, **more: Any) -> dict[str, Any]:
    blocks = {} if method in WITHOUT_BLOCKS or METHODS[method].schedule == "sliding" else {"block_length": 4}
    return {"method": method, **blocks, **OPTIONS.get(method, {}), **more}


def completed(toy: Any, canvas: Canvas, config: dict[str, Any]) -> Outcome:
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


def bit_for_bit(ours: Outcome, theirs: Outcome) -> bool:
    """Canvas, order, probabilities and calls."""
    sure = np.array_equal(ours.canvas.confidence, theirs.canvas.confidence, equal_nan=True)
    return same(ours, theirs) and sure and ours.trajectory.calls == theirs.trajectory.calls


def together_and_alone(toy: Any, config: dict[str, Any]) -> list[tuple[Outcome, Outcome]]:
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
