"""GGUF's blocks in compiled passes: packing and products of every type, and whole models out of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from models.test_gguf import TEXT, random_blocks, values_of, write
from models.translated_once import translated_once
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import LLM, SamplingParams
from paceline.checkpoints import TYPES, BlockRows, block_values, head_share
from paceline.checkpoints.gguf_blocks import block_bytes
from paceline.errors import ConfigError, UnsupportedModelError
from paceline.models import load_runner
from paceline.models.cpu.block_packing import in_strips, pack_strips, strip_table
from paceline.models.cpu.block_products import PER_GROUP, block_sums, row_pitch, to_signed_bytes
from paceline.models.cpu.pages import Pages
from paceline.tree import EMPTY_TREE, TokenTree

INPUTS = 512
KINDS = pytest.mark.parametrize("kind", TYPES)
OWN = {"INT4_ZEROS": [0], "FP4_HALVES": [0, 2]}
"""Types that GGUF does not have, and the bytes of their blocks where a float16 begins."""


@translated_once
def _products(table, strips, groups, x, pitch, rows, sums, out):
    for strip in range(strips):
        block_sums(table[strip, 1], table[strip, 0], groups, x, pitch, rows, np.int64(sums.ctypes.data))
        for row in range(rows):
            for i in range(64):
                out[row, 64 * strip + i] = sums[row * 64 + i]


@translated_once
def _converted(source, size, target, dim, outer, inner, rest, order):
    to_signed_bytes(source, size, target, dim, outer, inner, rest, order)


def converted(
    x: np.ndarray, heads: tuple[int, int, int] = (0, 0, 0), *, twice: bool = False, columns: np.ndarray | None = None
) -> np.ndarray:
    """(rows, bytes) of rows of float32; (2 * rows, bytes) where what each one loses is a row of its own."""
    order = None if columns is None else 4 * columns.astype(np.int64)
    made = np.zeros((len(x), 1 + twice, row_pitch(x.shape[1])), np.uint8)
    for row, target in zip(x, made, strict=True):
        rest = target[1].ctypes.data if twice else 0
        _converted(np.ascontiguousarray(row).ctypes.data, len(row), target[0].ctypes.data, *heads, rest,
                   0 if order is None else order.ctypes.data)  # fmt: skip
    return made.reshape(-1, made.shape[2])


def meant(made: np.ndarray, inputs: int = INPUTS) -> np.ndarray:
    """(rows, inputs) float64 that converted rows stand for."""
    groups = inputs // 32
    numbers = made[:, :inputs].view(np.int8).astype(np.float64).reshape(len(made), groups, 32)
    beside = np.ascontiguousarray(made[:, inputs : inputs + PER_GROUP * groups])
    scales = beside.view(np.float32).reshape(len(made), groups, 3)[:, :, :1]
    return (numbers * scales).reshape(len(made), inputs)


def matrix(kind: str, outputs: int, seed: int = 0) -> tuple[BlockRows, torch.Tensor]:
    """Rows of random blocks in memory, and the weights that they stand for."""
    blocks = blocks_of(kind, outputs * INPUTS // TYPES[kind], seed)
    raw = np.concatenate([np.zeros(7, np.uint8), blocks.ravel()])
    size = blocks.size // outputs
    places = np.array([(0, 7 + row * size, list(TYPES).index(kind)) for row in range(outputs)])
    weights = block_values(torch.from_numpy(blocks.ravel().copy()), kind).view(outputs, INPUTS)
    return BlockRows((raw,), places, INPUTS), weights


def blocks_of(kind: str, count: int, seed: int) -> np.ndarray:
    """(count, bytes) of random blocks."""
    rng = np.random.default_rng(seed)
    if kind not in OWN:
        raw = random_blocks(rng, gguf.GGMLQuantizationType[kind], count)
        if kind == "MXFP4":  # which would leave float32
            raw[:, 0] = rng.integers(118, 125, count)
        return raw
    raw = rng.integers(0, 256, (count, block_bytes(kind)), np.uint8)
    for at in OWN[kind]:
        raw[:, at : at + 2] = (rng.standard_normal((count, 1)) / 100).astype(np.float16).view(np.uint8)
    return raw


def products(rows: BlockRows, made: np.ndarray, *, paired: bool = False) -> np.ndarray:
    """(rows, strips of 64) products with converted rows."""
    ordered = in_strips(rows, paired=paired)
    packed = pack_strips(ordered, Pages())
    table = strip_table(ordered, packed)
    sums, out = np.zeros((len(made), 64), np.float32).ravel(), np.zeros((len(made), 64 * len(table)), np.float32)
    _products(table.numpy(), len(table), rows.inputs // 32, made.ctypes.data, made.shape[1], len(made), sums, out)
    del packed
    return out


def inputs_of(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, INPUTS)).astype(np.float32)


@KINDS
def test_products_are_those_of_the_numbers(kind: str) -> None:
    """Up to the rounding of float32, for every number of rows, with the same bits."""
    rows, weights = matrix(kind, 130)
    made = converted(inputs_of(19))
    wanted = meant(made) @ weights.double().numpy().T
    found = products(rows, made)
    assert np.abs(found[:, :130] - wanted).max() < 3e-6 * np.abs(wanted).max()
    assert not found[:, 130:].any()
    for count in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17):
        assert np.array_equal(products(rows, made[:count]), found[:count])
    _, others = matrix(kind, 130, seed=2)
    assert np.abs(found[:, :130] - meant(made) @ others.double().numpy().T).max() > 0.1 * np.abs(wanted).max()


@KINDS
def test_rows_are_packed_in_any_order_gates_beside_ups(kind: str) -> None:
    rows, weights = matrix(kind, 64)
    made = converted(inputs_of(2))
    wanted = meant(made) @ weights.double().numpy().T
    order = np.random.default_rng(0).permutation(64)
    turned = products(rows.take(order), made)
    assert np.abs(turned - wanted[:, order]).max() < 3e-6 * np.abs(wanted).max()
    paired = products(rows.take(np.arange(20)), made, paired=True)
    assert np.abs(paired[:, :10] - wanted[:, :10]).max() < 3e-6 * np.abs(wanted).max()
    assert np.abs(paired[:, 32:42] - wanted[:, 10:20]).max() < 3e-6 * np.abs(wanted).max()
    assert torch.equal(rows.values([3, 60, 3]), weights[[3, 60, 3]])


def test_strips_may_have_types_of_their_own_but_no_strip_two() -> None:
    first, one = matrix("Q4_K", 64)
    second, two = matrix("Q6_K", 64, seed=3)
    places = np.concatenate([first.places, second.places + np.array([1, 0, 0])])
    both = BlockRows((*first.sources, *second.sources), places, INPUTS)
    made = converted(inputs_of(3))
    wanted = meant(made) @ torch.cat((one, two)).double().numpy().T
    assert np.abs(products(both, made) - wanted).max() < 3e-6 * np.abs(wanted).max()
    with pytest.raises(ValueError, match="several types"):
        pack_strips(in_strips(both.take(np.arange(32, 96)), paired=False), Pages())


def test_activations_lose_less_than_half_a_step_and_odd_numbers_are_not_hidden() -> None:
    x = inputs_of(3) * np.geomspace(1e-3, 1e3, 3).astype(np.float32)[:, None]
    groups = np.abs(x).reshape(3, -1, 32).max(-1)
    assert (np.abs(meant(converted(x)) - x).reshape(3, -1, 32).max(-1) <= groups / 127 * 0.5001).all()
    rows, _ = matrix("Q4_0", 64)
    for odd in (np.nan, np.inf):
        y = x.copy()
        y[1, 300] = odd
        found = products(rows, converted(y))
        assert [np.isfinite(row).all() for row in found] == [True, False, True]
    zeros = converted(np.zeros((1, INPUTS), np.float32))
    assert not products(rows, zeros).any()


def test_two_bytes_lose_a_256th_of_what_one_does() -> None:
    x = inputs_of(3) * np.geomspace(1e-3, 1e3, 3).astype(np.float32)[:, None]
    once, both = converted(x), converted(x, twice=True)
    assert np.array_equal(both[::2], once)
    groups = np.abs(x).reshape(3, -1, 32).max(-1)
    lost = np.abs(meant(both).reshape(3, 2, -1).sum(1) - x).reshape(3, -1, 32).max(-1)
    assert (lost <= groups / 127**2 * 0.2501).all()
    assert (np.abs(meant(once) - x).reshape(3, -1, 32).max(-1) > groups / 127 * 0.3).mean() > 0.9
    heads = converted(x, (64, 4, 2), twice=True)
    assert np.array_equal(heads[::2], converted(x, (64, 4, 2)))
    assert not np.array_equal(heads[1::2], both[1::2])


def test_heads_are_brought_into_the_order_of_the_file() -> None:
    """From (2 in a group, 4 groups) to (4 groups, 2)."""
    heads = inputs_of(1).reshape(2, 4, 64)
    made = converted(heads.reshape(1, -1), (64, 4, 2))
    assert np.array_equal(made, converted(heads.swapaxes(0, 1).reshape(1, -1)))
    assert not np.array_equal(made, converted(heads.reshape(1, -1)))


def test_inputs_are_brought_into_any_order() -> None:
    x, columns = inputs_of(2), np.random.default_rng(3).permutation(INPUTS)
    made, ordered = converted(x, columns=columns), np.ascontiguousarray(x[:, columns])
    assert np.array_equal(made, converted(ordered))
    assert not np.array_equal(made, converted(x))
    twice = converted(x, twice=True, columns=columns)
    assert np.array_equal(twice, converted(ordered, twice=True))


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2} | more
    config = LlamaConfig(vocab_size=128, num_hidden_layers=2, head_dim=64, initializer_range=0.1, **sizes)
    return LlamaForCausalLM(config).eval()


MIXED = {"blk.0.attn_v.weight": Kind.Q8_0, "blk.1.ffn_down.weight": Kind.Q5_1, "output.weight": Kind.Q5_0}
TREE = TokenTree.build([5, 6, 7, 8, 9, 5], [-1, -1, 0, 1, 2, 3])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, "mixed"])
def test_files_keep_their_numbers(tmp_path: Path, kind: Any, tied: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Logits are those of the file's own values, but for the rounding of activations, whatever is scored together."""
    kinds: Any = (lambda name: MIXED.get(name, Kind.Q4_1)) if kind == "mixed" else kind
    path = write(tmp_path / "m.gguf", "llama", llama(tie_word_embeddings=tied), kinds)
    runner: Any = load_runner(path, dtype="float32")
    assert runner.info.quantization == "blocks"
    assert "rounded" not in caplog.text
    exact = values_of(path)
    caches = [runner.open() for _ in range(3)]
    found = runner.extend(caches[:1], [TEXT], all_logits=True).logits
    assert (found - exact).norm() < 0.05 * exact.norm()
    assert (found - exact.roll(1, 0)).norm() > 0.5 * exact.norm()
    runner.extend(caches[1:], [TEXT, TEXT[:30]])
    scored = runner.score(caches, [3, 3, 4], [TREE, EMPTY_TREE, TokenTree.chain([1, 2])])
    assert torch.equal(scored.of(0)[0], scored.of(1)[0])
    assert scored.best == scored.logits.argmax(-1).tolist()


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0])
def test_activations_of_two_bytes_come_near_to_the_files_own_values(tmp_path: Path, kind: Kind) -> None:
    path = write(tmp_path / "m.gguf", "llama", llama(intermediate_size=1536), kind)
    exact = values_of(path)
    runner: Any = load_runner(path, dtype="float32", activation_bits=16)
    caches = [runner.open() for _ in range(3)]
    found = runner.extend(caches[:1], [TEXT], all_logits=True).logits
    assert (found - exact).norm() < 3e-4 * exact.norm()
    one: Any = load_runner(path, dtype="float32", activation_bits=8)
    assert (one.extend([one.open()], [TEXT], all_logits=True).logits - exact).norm() > 3e-3 * exact.norm()
    runner.extend(caches[1:], [TEXT, TEXT[:30]])
    scored = runner.score(caches, [3, 3, 4], [TREE, EMPTY_TREE, TokenTree.chain([1, 2])])
    assert torch.equal(scored.of(0)[0], scored.of(1)[0]), "a row's bits do not depend on its neighbours"
    default: Any = load_runner(path, dtype="float32")
    assert default.info.fingerprint == one.info.fingerprint != runner.info.fingerprint


def test_bits_of_activations_are_honoured_or_rejected(tmp_path: Path) -> None:
    path = str(write(tmp_path / "m.gguf", "llama", llama(), Kind.Q4_0))
    with pytest.raises(ConfigError, match="activation_bits must be 8 or 16, got 4"):
        LLM(path, activation_bits=4)
    with pytest.raises(UnsupportedModelError, match=r"activation_bits=8 .* multiplied with 16 bits; leave it out"):
        load_runner(path, quantization="int8", activation_bits=8)
    with pytest.raises(UnsupportedModelError, match=r"activation_bits=16 .* not rounded; leave it out"):
        load_runner(path, quantization="none", activation_bits=16)
    assert load_runner(path, quantization="int8", activation_bits=16).info.quantization == "int8"
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(path, activation_bits=16, speculative_config=None, threads=1) as plain:
        tokens = plain.generate([TEXT[:9]], greedy)[0].outputs[0].token_ids
        drafted = plain.with_speculative_config("ngram").generate([TEXT[:9]], greedy)
        assert drafted[0].outputs[0].token_ids == tokens


def test_types_that_share_a_strip_are_rounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Gates in one and ups in another."""

    def kind_of(name: str) -> Kind:
        return Kind.Q8_0 if name == "blk.0.ffn_up.weight" else Kind.Q4_0

    runner: Any = load_runner(write(tmp_path / "m.gguf", "llama", llama(), kind_of), dtype="float32")
    assert runner.info.quantization == "int4"
    assert "rounded" in caplog.text


def test_a_damaged_block_is_another_model(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", llama(), Kind.Q4_0)
    before: Any = load_runner(path, dtype="float32")
    logits = before.extend([before.open()], [TEXT]).logits
    raw = bytearray(path.read_bytes())
    raw[-5000] ^= 0x70
    path.write_bytes(raw)
    after: Any = load_runner(path, dtype="float32")
    assert not torch.equal(after.extend([after.open()], [TEXT]).logits, logits)


def test_a_cut_head_keeps_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", llama(), Kind.Q5_0)
    whole: Any = load_runner(path, dtype="float32")
    cut: Any = load_runner(path, dtype="float32", head_rows=[3, 90, 17])
    logits = [one.extend([one.open()], [TEXT]).logits for one in (whole, cut)]
    assert torch.equal(logits[0][:, [3, 17, 90]], logits[1][:, [3, 17, 90]])
    assert torch.isinf(logits[1]).sum() == 128 - 3
    assert cut.inner.info.quantization == whole.info.quantization, "its blocks are kept as well"
    assert type(cut.inner.passes) is type(whole.passes)


@pytest.mark.parametrize("tied", [False, True])
def test_the_share_of_a_head_is_that_of_its_bytes(tmp_path: Path, tied: bool) -> None:
    """As the package gguf reads the file: a head of 8 bits among matrices of 4 is more than its numbers tell."""
    wide = "token_embd.weight" if tied else "output.weight"
    kinds: Any = lambda name: Kind.Q8_0 if name == wide else Kind.Q4_0  # noqa: E731
    path = write(tmp_path / "m.gguf", "llama", llama(tie_word_embeddings=tied), kinds)
    read = {one.name: one for one in gguf.GGUFReader(path).tensors if len(one.shape) == 2}
    head, table = read.get("output.weight", read["token_embd.weight"]), read.pop("token_embd.weight")
    others = [one for one in read.values() if one.name != "output.weight"]
    size = int(head.n_bytes)
    assert head_share(path) == pytest.approx(size / (size + sum(int(one.n_bytes) for one in others)))
    numbers = int(table.n_elements) / (int(table.n_elements) + sum(int(one.n_elements) for one in others))
    assert head_share(path) > 1.5 * numbers


def test_drafts_change_no_token(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", llama(), Kind.Q4_0)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [TEXT[:9], TEXT]
    plain = LLM(str(path), speculative_config=None, threads=1)
    expected = [out.outputs[0].token_ids for out in plain.generate(prompts, greedy)]
    for method in ("ngram", "token_recycling", "quantized_copy"):
        drafted = plain.with_speculative_config(method).generate(prompts, greedy)
        assert [out.outputs[0].token_ids for out in drafted] == expected
    assert "strict" in str(plain.exactness)
