"""A rule of a method that raises ends its canvas alone; ids that are no tokens are never written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.diffusion import Canvas, ConfiguredMethod, decode
from paceline.errors import ConfigError
from paceline.models import load_denoiser
from tests.diffusion.toys import t4
from tests.tiny_checkpoint import edit_weights
from tests.tiny_diffusion import CHARACTERS, SPECIAL, write

ABSENT = "klmnop"
IDS = [len(SPECIAL) + CHARACTERS.index(letter) for letter in ABSENT]


class Raising:
    """A commit rule that raises once so many slots are written."""

    def __init__(self, inner: Any, since: int) -> None:
        self.inner, self.since = inner, since

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def choose(self, *given: Any, **more: Any) -> Any:
        self.since -= 1
        if self.since < 0:
            raise LookupError("a mistake of a user's")
        return self.inner.choose(*given, **more)


@pytest.mark.parametrize("since", [0, 3])
def test_a_rule_that_raises_ends_its_canvas_alone(since: int) -> None:
    toy = t4()
    canvases = [Canvas.of([1, 2, 3][: n + 1], 6, mask_token_id=toy.mask_token_id) for n in range(3)]

    def parts(failing: bool) -> list[Any]:
        made = [ConfiguredMethod("static").parts(toy, canvas) for canvas in canvases]
        if failing:
            made[1].transition.commit = Raising(made[1].transition.commit, since)
        return made

    whole, found = (decode(canvases, toy, parts(failing)) for failing in (False, True))
    assert [one.error for one in whole] == [None] * 3
    for i in (0, 2):
        assert np.array_equal(found[i].canvas.tokens, whole[i].canvas.tokens)
        assert found[i].error is None
    assert str(found[1].error) == "a rule of the diffusion method failed (LookupError: a mistake of a user's)"
    assert found[1].canvas.masked().size == 6 - since


def padded(folder: Path) -> Path:
    """A checkpoint whose tokenizer lacks some letters; the model has the largest logits for them."""
    write(folder)
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    for letter in ABSENT:
        del found["model"]["vocab"][letter]
    path.write_text(json.dumps(found))

    def larger(weights: dict[str, torch.Tensor]) -> None:
        (head,) = (weight for name, weight in weights.items() if name.endswith("transformer.ff_out.weight"))
        half = 4.0 * torch.randn(len(IDS) // 2, head.shape[1])
        head[IDS] = torch.cat((half, -half)).to(head.dtype)

    edit_weights(folder, larger)
    return folder


@pytest.mark.parametrize("config", ["static", "threshold", {"method": "static", "score": "random"}], ids=str)
def test_ids_that_are_no_tokens_are_never_written(config: Any, tmp_path: Path) -> None:
    folder = padded(tmp_path)
    llm = LLM(folder, diffusion_config=config, dtype="float32", seed=0)
    for more in ({"temperature": 0.0}, {"temperature": 1.0, "n": 3}):
        (found,) = llm.generate("a1: ", SamplingParams(max_tokens=16, ignore_eos=True, **more))
        for one in found.outputs:
            assert len(one.token_ids) == 16
            assert set(IDS).isdisjoint(one.token_ids)
    with pytest.raises(ConfigError, match=f"logit_bias must hold ids of the tokenizer's tokens, got {IDS[0]}"):
        llm.generate("a", SamplingParams(logit_bias={IDS[0]: 1.0}))
    denoiser = load_denoiser(folder, dtype="float32")
    canvas = Canvas.of(llm.tokenizer.encode("a1: "), 16, mask_token_id=denoiser.mask_token_id)
    (outcome,) = decode([canvas], denoiser, [ConfiguredMethod(config).parts(denoiser, canvas)])
    assert not set(IDS).isdisjoint(outcome.canvas.output), "the model by itself writes them"
