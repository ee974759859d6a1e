"""Whether a model would fit, decided before its weights are read.

Counted are the weights, what packing holds twice at its peak (one layer, and a tied head, whose embedding stays), and
the cache of one sequence of full length (twice for longrope, see models.runners.longrope).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from paceline.checkpoints import DTYPES, Checkpoint, Forms, quantized_sizes, weight_bytes
from paceline.errors import OutOfMemoryError
from paceline.models.layers.linear import can_pack
from paceline.models.passes.eligibility import unsupported
from paceline.models.spec import ModelSpec
from paceline.models.state.free_memory import available
from paceline.models.state.window_slots import windows_of

log = logging.getLogger("paceline")

HEADROOM = 0.9
"""Part of the available memory that may be used; the rest is for activations and what the allocator cannot use
again.
"""

MIN_CONTEXT = 2048
"""A default context is shortened down to this before a model is rejected."""

CHUNK, FIRST_SLOTS = 512, 2048
"""Tokens of a prompt that are fed at once, which layers with a window hold beside it; what every cache begins with."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes: of the weights, of second copies while packing, of the cache per token.

    Attributes:
        in_windows: the part of `per_token` that layers with a sliding window have, of `held` tokens at most.
    """

    weights: int
    packing: int
    per_token: int
    in_windows: int = 0
    held: int = 0

    def cache(self, context: int) -> int:
        return self.per_token * context - self.in_windows * max(0, context - self.held)

    def total(self, context: int) -> int:
        return self.weights + self.packing + self.cache(context)

    def fitting(self, budget: int) -> int:
        """The longest context that fits, from some that does on."""
        left = budget - self.weights - self.packing
        short, per_token = left // self.per_token, self.per_token - self.in_windows
        if short <= self.held or not per_token:
            return short
        return (left - self.in_windows * self.held) // per_token


def estimate(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, *, quantization: Forms | None = None
) -> MemoryNeed:
    """What a model needs; quantised weights are rounded one tensor at a time, so that one is held in `dtype` too."""
    dense = weight_bytes(spec, dtype)
    sizes = quantized_sizes(spec, dtype, quantization) if quantization else dense
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        if name.startswith("layers."):
            layer = name.split(".")[1]
            layers[layer] = layers.get(layer, 0) + size
    packs = can_pack(device, dtype) or unsupported(spec, dtype, device) is None
    twice = max(dense.values()) if quantization else sizes["embed.weight"] if spec.tied and packs else 0
    per_layer = 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    per_token = per_layer * sum(layer.keeps_keys for layer in spec.layers)
    copies = 2 if any(rope.kind == "longrope" for rope in spec.ropes.values()) else 1
    windows = [window for window in windows_of(spec, device) if window is not None]
    in_windows = copies * per_layer * len(windows)
    held = max(FIRST_SLOTS, 2 * (max(windows, default=0) + CHUNK))  # memory grows by doubling
    return MemoryNeed(sum(sizes.values()), twice + max(layers.values()), copies * per_token, in_windows, held)


def fit_context(
    spec: ModelSpec,
    *,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    max_context: int | None,
    budget: int | None = None,
    quantization: Forms | None = None,
) -> int:
    """The context to run with.

    The requested one, or the checkpoint's, shortened (and logged) where its cache would not fit.

    Args:
        max_context: what the user requested; None takes the checkpoint's.
        budget: bytes at hand; None measures.
        quantization: what the weights will be rounded to (checkpoints.quantization).
    Raises:
        OutOfMemoryError: the weights, or the cache of the requested context, would not fit.
    """
    need = estimate(spec, dtype, device, quantization=quantization)
    budget = int(HEADROOM * (available(device) if budget is None else budget))
    wanted = spec.max_context if max_context is None else max_context
    if need.total(wanted) <= budget:
        return wanted
    least = min(wanted, MIN_CONTEXT) if max_context is None else wanted
    if need.total(least) > budget:
        held = _held(quantization) or _short(dtype)
        raise OutOfMemoryError(
            f"{name} needs {_gib(need.total(least))} on {device} ({_gib(need.weights)} weights in {held}, "
            f"{_gib(need.packing)} while packing, {_gib(need.cache(least))} cache for {least} tokens), but "
            f"{_gib(budget)} can be used; use a smaller dtype, context (max_model_len) or model"
        )
    fitting = need.fitting(budget)
    log.warning(
        "%s: the cache of %d tokens would not fit into memory; the context is limited to %d", name, wanted, fitting
    )
    return fitting


def check_files(checkpoint: Checkpoint, *, name: str, dtype: torch.dtype | None, device: torch.device) -> None:
    """For models of unknown shape: whether the stored tensors alone would fit, in `dtype` or (None) as they are stored.

    Raises:
        OutOfMemoryError: they would not.
    """
    need = 0
    for entry in checkpoint.entries.values():
        stored = DTYPES.get(entry.dtype)
        need += entry.nbytes if dtype is None or stored is None else entry.nbytes // stored.itemsize * dtype.itemsize
    budget = int(HEADROOM * available(device))
    if need > budget:
        raise OutOfMemoryError(
            f"{name} needs {_gib(need)} for its weights on {device}, but {_gib(budget)} can be used; use a smaller "
            "dtype or model"
        )


def _held(forms: Forms | None) -> str | None:
    return forms if forms is None or isinstance(forms, str) else " and ".join(sorted(set(forms.values())))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
