"""models.cpu.quantized: what int4 weights have beside int8 ones (`test_quantized_kernels`): pairs, scales of groups."""

from __future__ import annotations

import pytest
import torch
from models.test_quantized_kernels import DTYPES, case, exact, product

from paceline.models.cpu import Pages, pack, self_test
from paceline.models.cpu import quantized as int4
from paceline.models.loading import unpacked


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (70, 96), (1, 1024), (130, 2816), (8, 80)])
def test_packing_keeps_every_weight_and_scale_once(outputs, inputs):
    pairs, scale, _ = case("int4", outputs, inputs, 1)
    blocks = pack(pairs, Pages(), scale=scale).strips
    body = blocks[:, :, int4.SCALES :].view(len(blocks), -1, 4, 64, 1, 4)
    whole = (
        torch.cat((body & 15, body >> 4), -2).permute(0, 3, 1, 2, 4, 5).reshape(64 * len(blocks), -1).to(torch.int8) - 8
    )
    assert torch.equal(whole[:outputs, :inputs], unpacked(pairs))
    assert not whole[:outputs, inputs:].any()
    scales = blocks[:, :, : int4.SCALES].contiguous().view(torch.bfloat16).transpose(1, 2).reshape(64 * len(blocks), -1)
    assert torch.equal(scales[:outputs], scale)
    assert not scales[outputs:].any()


@pytest.mark.parametrize("inputs", [8, 24, 40, 48, 88])
def test_what_lies_behind_a_row_counts_for_nothing(inputs):
    pairs, scale, x = case("int4", 64, inputs, 1)
    packed = pack(pairs, Pages(), scale=scale)
    if inputs % 16 == 0:
        assert torch.equal(product(packed, x, filling=77), product(packed, x))
    assert torch.allclose(product(packed, torch.cat((x, x))[:1]).double(), exact(pairs, scale, x), atol=1e-3)


@DTYPES
def test_the_self_test_catches_scales_of_other_groups(dtype, monkeypatch):
    right = int4.pack_nibbles
    monkeypatch.setattr(
        "paceline.models.cpu.matrix.pack_nibbles", lambda pairs, scale, pages: right(pairs, scale.roll(1, 1), pages)
    )
    assert not self_test.agrees(dtype, quantization="int4")
