"""The tensors of a diffusion checkpoint under the canonical names of `models.loading.weights` and
`models.denoiser.layers`.

In: a Checkpoint, its DenoiserSpec, how its layout names tensors. Out: name -> tensor. Not here: what files there are
(`models.loading.checkpoint`), what a configuration means (`models.denoiser.layouts`).
"""

from __future__ import annotations

import re

import torch

from paceline.errors import CheckpointError
from paceline.models.denoiser.layouts import Rename
from paceline.models.denoiser.spec import DenoiserSpec
from paceline.models.loading.checkpoint import Checkpoint
from paceline.models.loading.weights import load_weights

EXTRA = re.compile(r"^model\.layers\.(\d+)\.mlp\.(gate\.expert_bias|shared_experts\.(?:gate|up|down)_proj\.weight)$")
"""Tensors of grouped routing, which no decoder family has."""


class RenamedCheckpoint(Checkpoint):
    """A checkpoint whose tensors go by other names; some may be left out."""

    def __init__(self, stored: Checkpoint, names: dict[str, str]) -> None:
        self.folder, self._stored, self._names = stored.folder, stored, names
        self.entries = {new: stored.entries[old] for new, old in names.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """See `Checkpoint.tensor`."""
        return self._stored.tensor(self._names[name])


def load_denoiser_weights(
    checkpoint: Checkpoint, spec: DenoiserSpec, names: Rename, *, device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The canonical weights of `spec` on `device` in `dtype`.

    Raises:
        CheckpointError: missing, surplus or wrongly shaped tensors. UnsupportedModelError: quantised ones, or an
        adapter.
    """
    renamed = {_renamed(name, names): name for name in checkpoint.entries}
    extra = {name for name in renamed if spec.routing is not None and EXTRA.match(name)}
    main = RenamedCheckpoint(checkpoint, {new: old for new, old in renamed.items() if new not in extra})
    weights = load_weights(main, spec.model, device=device, dtype=dtype)
    rest = RenamedCheckpoint(checkpoint, {name: renamed[name] for name in extra})
    for index, layer in enumerate(spec.model.layers):
        if layer.moe and spec.routing is not None:
            weights.update(_routing(rest, spec, index, device, dtype))
    return weights


def _renamed(name: str, names: Rename) -> str:
    for pattern, new in names:
        name = pattern.sub(new, name)
    return name


def _routing(
    rest: RenamedCheckpoint, spec: DenoiserSpec, index: int, device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The expert bias and the shared MLP of one layer."""
    assert spec.routing is not None
    assert spec.model.moe is not None
    at, to = f"model.layers.{index}.mlp.", f"layers.{index}."
    width, shared = spec.model.hidden_size, spec.routing.shared
    found = {}
    if f"{at}gate.expert_bias" in rest.entries:  # without it all experts are equally preferred
        found[f"{to}router.bias"] = _read(rest, f"{at}gate.expert_bias", (spec.model.moe.experts,))
    if shared:
        halves = [_read(rest, f"{at}shared_experts.{name}_proj.weight", (shared, width)) for name in ("gate", "up")]
        found[f"{to}shared.gate_up.weight"] = torch.cat(halves)
        found[f"{to}shared.down.weight"] = _read(rest, f"{at}shared_experts.down_proj.weight", (width, shared))
    kept = {name: torch.float32 if name.endswith("bias") and dtype is not torch.float64 else dtype for name in found}
    return {name: tensor.to(device, kept[name]) for name, tensor in found.items()}


def _read(rest: RenamedCheckpoint, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if name not in rest.entries:
        raise CheckpointError(f"{rest.folder} lacks {name}; the checkpoint is incomplete or of another architecture")
    if rest.entries[name].shape != shape:
        raise CheckpointError(
            f"{rest.folder}: {name} has shape {rest.entries[name].shape}, but config.json asks for {shape}; download "
            f"both again"
        )
    return rest.tensor(name)
