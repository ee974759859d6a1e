"""T4: a tiny random transformer in float64, for equivalences of caches, masks and batches."""

from __future__ import annotations

from typing import Literal

import torch

from paceline.models import LayerSpec, ModelSpec, RopeSpec
from paceline.models.denoiser import DenoiserSpec, NativeDenoiser
from paceline.models.loading import targets

WIDTH, HEADS, HEAD_DIM, INNER, LAYERS = 32, 4, 8, 48, 2


def t4(
    kind: Literal["full", "shifted", "block", "shifted block"] = "full",
    block_length: int = 4,
    vocab_size: int = 24,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float64,
    eos_token_ids: tuple[int, ...] = (),
) -> NativeDenoiser:
    """Two layers, 32 wide; the mask token is the last of the vocabulary. Logits spread by about 2, so that arguments of
    the maximum are clear and depend on the canvas.
    """
    spec = DenoiserSpec(
        model=ModelSpec(
            family="t4",
            vocab_size=vocab_size,
            hidden_size=WIDTH,
            num_heads=HEADS,
            num_kv_heads=HEADS,
            head_dim=HEAD_DIM,
            intermediate_size=INNER,
            layers=(LayerSpec(),) * LAYERS,
            ropes={"default": RopeSpec(theta=10000.0, dims=HEAD_DIM)},
            max_context=512,
            qk_norm="head" if kind == "block" else None,
            qkv_bias="shifted" in kind,
        ),
        mask_token_id=vocab_size - 1,
        eos_token_ids=eos_token_ids,
        block_length=block_length if "block" in kind else None,
        shifted="shifted" in kind,
    )
    return NativeDenoiser(spec, random_weights(spec, seed, dtype))


def random_weights(spec: DenoiserSpec, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Canonical weights of a dense model, the same values in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for target in targets(spec.model):
        drawn = torch.randn(target.shape, generator=generator, dtype=torch.float64)
        if target.name.endswith("norm.weight"):
            weights[target.name] = (1 + 0.2 * drawn).to(dtype)
        elif target.name == "embed.weight":
            weights[target.name] = (0.2 * drawn).to(dtype)
        elif target.name.endswith("bias"):
            weights[target.name] = (0.3 * drawn).to(dtype)
        else:
            weights[target.name] = (drawn * (4.0 / target.shape[-1]) ** 0.5).to(dtype)
    return weights
