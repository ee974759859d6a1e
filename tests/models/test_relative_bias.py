"""Attention of T5 in compiled passes: what distances add to scores, in the encoder and the decoder, far beyond the
buckets of one distance each; a table that is off by one bucket is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_encoder_decoder as tiny
import torch

from paceline.models import Inputs, load_runner
from paceline.models.attention import relative_bias
from paceline.tree import TokenTree

SIZES = {
    "d_model": 64, "d_kv": 32, "num_heads": 2, "vocab_size": 103, "num_layers": 2,
    "relative_attention_num_buckets": 12, "relative_attention_max_distance": 40,
}  # fmt: skip
FAMILIES = pytest.mark.parametrize("name", ["t5", "umt5"])
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
}
NEAR = {"float32": 2e-5, "bfloat16": 0.06, "int8": 0.06}
LENGTHS = (90, 7, 64)
TEXT = torch.randint(3, 103, (60,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """The model of transformers, with biases of the size of scores, and its folder."""

    @cache
    def of(name: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp("relative")
        model = tiny.make(name, folder, **SIZES)
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if "relative_attention_bias" in key:
                    weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(key))))
        model.save_pretrained(folder)
        return model, folder

    return of


def sources() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 103, (length,), generator=generator).tolist() for length in LENGTHS]


def read(runner: Any) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [states.float() for states in runner.encoder.run([torch.tensor(source) for source in sources()])]


@torch.no_grad()
def padded(model: Any) -> list[torch.Tensor]:
    """What the encoder of transformers makes of the same sources, in one batch filled up with padding."""
    tensors = [torch.tensor(source) for source in sources()]
    ids = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in tensors], batch_first=True)
    states = model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
    return [rows[: len(one)] for rows, one in zip(states, tensors, strict=True)]


def error(ours: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, wanted, strict=True))


def decoded(runner: Any) -> list[torch.Tensor]:
    """Logits of a text with each source: in chunks side by side, then of a chain and of a tree."""
    caches = [runner.open(len(TEXT), Inputs(encoder_tokens=source)) for source in sources()]
    runner.encode(caches)
    first = runner.extend(caches, [TEXT[:40], TEXT[:5], TEXT[:23]], all_logits=True)
    found = [first.of(i) for i in range(3)]
    chain = runner.score(caches[:1], TEXT[40:41], [TokenTree.chain(TEXT[41:50])])
    runner.commit(caches[:1], [list(range(9))])
    tree = runner.score(caches[:1], TEXT[50:51], [TokenTree.build([*TEXT[51:54], 9, 8], [-1, 0, 1, 0, 3])])
    return [*found, chain.of(0), tree.of(0)]


@torch.no_grad()
def by_transformers(model: Any) -> list[torch.Tensor]:
    def logits(source: list[int], text: list[int]) -> torch.Tensor:
        given = torch.tensor([source]), torch.tensor([text])
        rows: torch.Tensor = model(input_ids=given[0], decoder_input_ids=given[1]).logits[0]
        return rows

    first, second, third = sources()
    whole, aside = logits(first, TEXT[:54]), logits(first, [*TEXT[:52], 9, 8])
    found = [whole[:40], logits(second, TEXT[:5]), logits(third, TEXT[:23])]
    return [*found, whole[40:50], torch.cat([whole[50:54], aside[52:54]])]


def shifted(bucket: Any) -> Any:
    return lambda spec, distances: (bucket(spec, distances) + 1) % spec.buckets


def none(bucket: Any) -> Any:
    return lambda spec, distances: torch.zeros_like(distances)


@FAMILIES
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_attention_is_that_of_transformers(
    name: str, kind: str, folder_of: Callable[[str], tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = folder_of(name)
    states, logits = padded(model), by_transformers(model)
    runner = load_runner(folder, **KINDS[kind])
    assert runner.info.passes == "compiled"
    if kind != "bfloat16":  # which needs a processor that is fast at it
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)  # of PyTorch: not called
    assert error(read(runner), states) < NEAR[kind]
    assert error([rows.float() for rows in decoded(runner)], logits) < NEAR[kind]


@FAMILIES
@pytest.mark.parametrize("wrong", [shifted, none])
def test_the_comparison_catches_another_bucket_and_no_distances(
    name: str, wrong: Any, folder_of: Callable[[str], tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = folder_of(name)
    states, logits = padded(model), by_transformers(model)
    monkeypatch.setattr(relative_bias, "bucket", wrong(relative_bias.bucket))
    runner = load_runner(folder, dtype="float32")
    assert error(read(runner), states) > 3 * max(NEAR.values())
    assert error(decoded(runner), logits) > 3 * max(NEAR.values())
