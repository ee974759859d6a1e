"""The self-test of compiled passes: a small random model against plain PyTorch arithmetic in float64.

It imports numba, which models.cpu.eligibility does only where a model could use it.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from paceline.models.cpu.compiled_decoder import CompiledDecoder
from paceline.models.decoder.arena import Arena
from paceline.models.decoder.cache import NativeCache
from paceline.models.decoder.segments import chunk
from paceline.models.loading.quantization import Form, dequantized, quantize
from paceline.models.model_spec import LayerSpec, ModelSpec, RopeSpec

SIZE, HEAD, INNER, VOCABULARY, LENGTH = 64, 32, 80, 80, 9
SPEC = ModelSpec(
    family="self-test", vocab_size=VOCABULARY, hidden_size=SIZE, num_heads=4, num_kv_heads=2, head_dim=HEAD,
    intermediate_size=INNER, layers=(LayerSpec(),), ropes={"default": RopeSpec(theta=10000.0, dims=HEAD)},
    max_context=64,
    tied=True,
)  # fmt: skip

Weights = dict[str, torch.Tensor]


def random_weights(dtype: torch.dtype) -> Weights:
    """Weights of the one layer of `SPEC`."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embed": (VOCABULARY, SIZE), "layers.0.qkv": (8 * HEAD, SIZE), "layers.0.o": (SIZE, 4 * HEAD),
        "layers.0.gate_up": (2 * INNER, SIZE), "layers.0.down": (SIZE, INNER),
    }  # fmt: skip
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) / shape[1] ** 0.5 for name, shape in shapes.items()
    }
    for name in ("layers.0.attn_norm", "layers.0.mlp_norm", "final_norm"):
        weights[f"{name}.weight"] = 1 + 0.1 * torch.randn(SIZE, generator=generator)
    return {name: weight.to(dtype) for name, weight in weights.items()}


def expected(weights: Weights, tokens: list[int]) -> torch.Tensor:
    """(n, v) logits of `SPEC` in float64."""
    w = {name.removeprefix("layers.0."): weight.double() for name, weight in weights.items()}
    x, n = w["embed.weight"][tokens], len(tokens)

    def norm(name: str) -> torch.Tensor:
        return F.rms_norm(x, (SIZE,), w[name], SPEC.norm_eps)

    angles = torch.outer(torch.arange(n).double(), 10000.0 ** -(torch.arange(0, HEAD, 2).double() / HEAD)).repeat(1, 2)
    heads = (norm("attn_norm.weight") @ w["qkv.weight"].T).view(n, 8, HEAD).transpose(0, 1)
    turned = torch.cat((-heads[..., HEAD // 2 :], heads[..., : HEAD // 2]), -1)
    rotated = heads * angles.cos() + turned * angles.sin()
    keys, values = (part.repeat_interleave(2, 0) for part in (rotated[4:6], heads[6:]))
    mixed = F.scaled_dot_product_attention(rotated[None, :4], keys[None], values[None], is_causal=True)[0]
    x = x + mixed.transpose(0, 1).reshape(n, -1) @ w["o.weight"].T
    gate, up = (norm("mlp_norm.weight") @ w["gate_up.weight"].T).chunk(2, -1)
    x = x + (F.silu(gate) * up) @ w["down.weight"].T
    return norm("final_norm.weight") @ w.get("head.weight", w["embed.weight"]).T


@torch.inference_mode()
def agrees(dtype: torch.dtype, kind: int | None = None, *, quantization: Form | None = None) -> bool:
    """Whether a compiled pass gives the logits of plain arithmetic, within the rounding of its dtype."""
    weights, tokens = random_weights(dtype), [(7 * i) % VOCABULARY for i in range(LENGTH)]
    weights = quantize(weights, SPEC, quantization) if quantization else weights
    wanted = expected(dequantized(weights), tokens)
    arena = Arena(1, SPEC.num_kv_heads, HEAD, dtype=dtype, device=torch.device("cpu"), slots=64)
    passes = CompiledDecoder(SPEC, dict(weights), arena, kind=kind)
    found = passes.run([chunk(NativeCache(arena), LENGTH)], tokens, ())
    error = float((found.logits.double() - wanted).abs().max())
    return error < (
        0.1 if dtype is torch.bfloat16 else 4e-3 if quantization else 1e-4
    )  # activations of 16 bits lie between
