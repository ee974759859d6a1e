"""The self-test of compiled passes: a small random model against plain PyTorch arithmetic in float64.

It imports numba, which models.passes.eligibility does only where a model could use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional as F

from paceline.checkpoints import BLOCKS, NAMES, TYPES, BlockRows, Form, block_values, dequantized, quantize, row_bytes
from paceline.models.attention.segments import chunk
from paceline.models.passes.compiled_decoder import CompiledDecoder
from paceline.models.spec import LayerSpec, ModelSpec, RopeSpec
from paceline.models.state.arena import Arena
from paceline.models.state.cache import NativeCache

SIZE, HEAD, INNER, VOCABULARY, LENGTH = 64, 32, 80, 80, 9
SPEC = ModelSpec(
    family="self-test", vocab_size=VOCABULARY, hidden_size=SIZE, num_heads=4, num_kv_heads=2, head_dim=HEAD,
    intermediate_size=INNER, layers=(LayerSpec(),), ropes={"default": RopeSpec(theta=10000.0, dims=HEAD)},
    max_context=64,
    tied=True,
)  # fmt: skip

WIDE = replace(SPEC, hidden_size=256, num_heads=8, num_kv_heads=4, intermediate_size=256)
"""For blocks of 256 inputs."""

SCALES: Mapping[str, tuple[tuple[int, float], ...]] = {
    "Q4_0": ((0, 0.0136),),
    "Q4_1": ((0, 0.0136), (2, -0.1)),
    "Q5_0": ((0, 0.0068),),
    "Q5_1": ((0, 0.0068), (2, -0.105)),
    "Q8_0": ((0, 8.5e-4),),
    "Q4_K": ((0, 4.2e-4), (2, 3.2e-3)),
    "Q5_K": ((0, 2.1e-4), (2, 3.2e-3)),
    "Q6_K": ((208, 4.7e-5),),
    "INT4_ZEROS": ((0, 0.0136),),
    "MXFP4": (),
    "FP4_HALVES": ((0, 0.0195), (2, 0.0195)),
}
"""Of each type of blocks the float16 numbers, by their place, with which random bytes are weights of a usual size."""

ZERO_BYTES: Mapping[str, tuple[int, int]] = {"INT4_ZEROS": (2, 7), "MXFP4": (0, 121)}
"""Likewise a byte and its value."""

Weights = dict[str, torch.Tensor]


def random_weights(dtype: torch.dtype, spec: ModelSpec = SPEC) -> Weights:
    """Weights of the one layer of a model such as `SPEC`."""
    generator = torch.Generator().manual_seed(0)
    size, inner, heads = spec.hidden_size, spec.intermediate_size, spec.num_heads
    shapes = {
        "embed": (VOCABULARY, size), "layers.0.qkv": (2 * heads * HEAD, size), "layers.0.o": (size, heads * HEAD),
        "layers.0.gate_up": (2 * inner, size), "layers.0.down": (size, inner),
    }  # fmt: skip
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) / shape[1] ** 0.5 for name, shape in shapes.items()
    }
    for name in ("layers.0.attn_norm", "layers.0.mlp_norm", "final_norm"):
        weights[f"{name}.weight"] = 1 + 0.1 * torch.randn(size, generator=generator)
    return {name: weight.to(dtype) for name, weight in weights.items()}


def expected(weights: Weights, tokens: list[int]) -> torch.Tensor:
    """(n, v) logits of a model such as `SPEC` in float64."""
    w = {name.removeprefix("layers.0."): weight.double() for name, weight in weights.items()}
    x, n = w["embed.weight"][tokens], len(tokens)

    def norm(name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[1:], w[name], SPEC.norm_eps)

    angles = torch.outer(torch.arange(n).double(), 10000.0 ** -(torch.arange(0, HEAD, 2).double() / HEAD)).repeat(1, 2)
    heads = (norm("attn_norm.weight") @ w["qkv.weight"].T).view(n, -1, HEAD).transpose(0, 1)
    count = len(heads) // 2
    turned = torch.cat((-heads[..., HEAD // 2 :], heads[..., : HEAD // 2]), -1)
    rotated = heads * angles.cos() + turned * angles.sin()
    keys, values = (part.repeat_interleave(2, 0) for part in (rotated[count : -count // 2], heads[-count // 2 :]))
    mixed = F.scaled_dot_product_attention(rotated[None, :count], keys[None], values[None], is_causal=True)[0]
    x = x + mixed.transpose(0, 1).reshape(n, -1) @ w["o.weight"].T
    gate, up = (norm("mlp_norm.weight") @ w["gate_up.weight"].T).chunk(2, -1)
    x = x + (F.silu(gate) * up) @ w["down.weight"].T
    return norm("final_norm.weight") @ w.get("head.weight", w["embed.weight"]).T


@torch.inference_mode()
def agrees(dtype: torch.dtype, kind: int | None = None, *, quantization: Form | None = None) -> bool:
    """Whether a compiled pass gives the logits of plain arithmetic, within the rounding of its dtype; for blocks,
    whether their products are those of the numbers that they stand for.
    """
    if quantization == BLOCKS:
        return all(blocks_agree(kind) for kind in TYPES)
    weights, tokens = random_weights(dtype), [(7 * i) % VOCABULARY for i in range(LENGTH)]
    weights = quantize(weights, SPEC, quantization) if quantization else weights
    wanted = expected(dequantized(weights), tokens)
    arena = Arena(1, SPEC.num_kv_heads, HEAD, dtype=dtype, device=torch.device("cpu"), slots=64)
    passes = CompiledDecoder(SPEC, dict(weights), arena, kind=kind)
    result = passes.run([chunk(NativeCache(arena), LENGTH)], tokens, ())
    error = float((result.logits.double() - wanted).abs().max())
    return error < (
        0.1 if dtype is torch.bfloat16 else 4e-3 if quantization else 1e-4
    )  # activations of 16 bits lie between


@torch.inference_mode()
def blocks_agree(kind: str) -> bool:
    """Whether a compiled pass over blocks of a type, of random bytes, gives the logits of the weights that they are."""
    weights, tokens = random_weights(torch.float32, WIDE), [(7 * i) % VOCABULARY for i in range(LENGTH)]
    generator, blocks = torch.Generator().manual_seed(1), dict[str, BlockRows]()
    for name in [name for name in (*weights, "head.weight") if not name.endswith("norm.weight")]:
        outputs, inputs = weights["embed.weight" if name == "head.weight" else name].shape
        raw = torch.randint(256, (outputs, row_bytes(kind, inputs)), generator=generator, dtype=torch.uint8)
        for place, value in SCALES[kind]:
            raw.view(-1, row_bytes(kind, TYPES[kind]))[:, place : place + 2] = (
                torch.tensor([value]).half().view(torch.uint8)
            )
        if kind in ZERO_BYTES:
            place, value = ZERO_BYTES[kind]
            raw.view(-1, row_bytes(kind, TYPES[kind]))[:, place] = value
        weights[name] = block_values(raw.flatten(), kind).view(outputs, inputs)
        if name != "embed.weight":
            places = np.array([(0, row * raw.shape[1], NAMES.index(kind)) for row in range(outputs)])
            blocks[name] = BlockRows((raw.numpy(),), places, inputs)
    arena = Arena(1, WIDE.num_kv_heads, HEAD, dtype=torch.float32, device=torch.device("cpu"), slots=64)
    passes = CompiledDecoder(
        WIDE, {name: weight for name, weight in weights.items() if name not in blocks}, arena, blocks=blocks
    )
    logits = passes.run([chunk(NativeCache(arena), LENGTH)], tokens, ()).logits.double()
    wanted = expected(weights, tokens)
    return float((logits - wanted).norm()) < 0.03 * float(wanted.norm())
