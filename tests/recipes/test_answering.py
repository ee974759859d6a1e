"""Canvases filled by a net in training, all in one pass: what the package's loop writes to each alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.checkpoints import Tokenizer
from paceline.diffusion import Canvas, ConfiguredMethod, decode
from paceline.errors import CapabilityError, ConfigError
from paceline.models import Call, load_denoiser
from recipes.bundled_diffusion import answering, model
from recipes.common.options import BUNDLED

PROMPTS = [[700, 800, 900], [50, 60, 70, 80, 90], [1000]]


def test_all_texts_in_one_pass_are_those_of_one_by_one() -> None:
    net = model.read_net(BUNDLED / "diffusion")
    denoiser = load_denoiser(BUNDLED / "diffusion", dtype="float32", device="cpu")
    filled = answering.fill(answering.Batched(net), PROMPTS, {"method": "static", "block_length": 4}, length=8)
    ours = [outcome.canvas.output for outcome in filled]
    for block_length in (4, 8):
        canvases = [Canvas.of(prompt, 8, mask_token_id=denoiser.mask_token_id) for prompt in PROMPTS]
        method = ConfiguredMethod({"method": "static", "block_length": block_length})
        outcomes = decode(canvases, denoiser, [method.parts(denoiser, canvas) for canvas in canvases])
        assert (ours == [outcome.canvas.output for outcome in outcomes]) is (block_length == 4)


def test_a_folder_is_read_as_what_it_runs() -> None:
    net = model.read_net(BUNDLED / "diffusion")
    denoiser = load_denoiser(BUNDLED / "diffusion", dtype="float32", device="cpu")
    call = Call(np.arange(20) + 5, np.arange(20))
    assert torch.allclose(net.denoiser().forward([call])[0], denoiser.forward([call])[0])


def test_the_package_and_the_recipe_have_one_tokenizer() -> None:
    """Texts are encoded by the target's; the model's own has one token more."""
    ours, theirs = Tokenizer.load(BUNDLED / "target"), Tokenizer.load(BUNDLED / "diffusion")
    text = "<|user|>\nsort: Ada Ben Cleo <|assistant|>\n 12.5 <|end|>"
    assert ours.encode(text) == theirs.encode(text)
    assert theirs.encode("<|mask|>") == [model.MASK] != ours.encode("<|mask|>")


@pytest.mark.parametrize("output", [[7, 8, 3, 9], [3], [7, 8]])
def test_a_text_ends_before_its_end_token(output: list[int]) -> None:
    canvas = SimpleNamespace(output=output, eos_token_ids=(3,))
    assert answering.before_end(canvas) == output[: output.index(3) if 3 in output else None]


def test_an_error_of_a_canvas_is_raised() -> None:
    net = model.read_net(BUNDLED / "diffusion")
    with pytest.raises(ConfigError, match="slots"):
        answering.fill(answering.Batched(net), PROMPTS, {"method": "static"}, length=10_000)


def test_caches_are_rejected_in_training() -> None:
    net = model.read_net(BUNDLED / "diffusion")
    with pytest.raises(CapabilityError, match="not for models in training"):
        answering.fill(answering.Batched(net), PROMPTS[:1], {"method": "static", "cache": "dual"}, length=8)
