"""Options that would have no effect, or no end, are refused by name; the same options are taken where something reads
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError
from tests.diffusion.decoding import fill
from tests.diffusion.toys import Independent
from tests.tiny_diffusion import MASK, write

IDLE: list[tuple[dict[str, Any], str]] = [
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


@pytest.mark.parametrize(("config", "message"), IDLE, ids=str)
def test_what_nothing_reads_is_refused(config: dict[str, Any], message: str) -> None:
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
    with pytest.raises(ConfigError, match=r"hold no mask token \(leave it out; .*Canvas\.infill"):
        llm.generate({"prompt_token_ids": [5, MASK]}, SamplingParams(**few))
    assert llm.diffusion is not None
    most = llm.diffusion.max_context
    with pytest.raises(
        ConfigError, match=f"a block of {most + 1} slots is longer than the context, .* smaller block_length"
    ):
        LLM(folder, diffusion_config={"block_length": most + 1}).generate("a1: ", SamplingParams(**few))
