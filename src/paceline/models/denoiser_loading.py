"""From a folder or hub id to a running denoiser: its tensors under canonical names, its special tokens.

Weights are safetensors; no code of a checkpoint is ever run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoints import (
    DENOISER_FAMILIES,
    Checkpoint,
    Rename,
    denoiser_spec,
    family_name,
    load_weights,
    open_checkpoint,
    read_config,
    read_json,
    renamed,
    resolve,
)
from paceline.config import DTYPES
from paceline.errors import ConfigError
from paceline.models.devices import resolve_device, resolve_dtype
from paceline.models.memory import fit_context
from paceline.models.runners.denoiser import NativeDenoiser
from paceline.models.spec import DenoiserSpec


class RenamedCheckpoint(Checkpoint):
    """A checkpoint whose tensors go by other names."""

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
        CheckpointError: missing, surplus or wrongly shaped tensors.
        UnsupportedModelError: quantised ones, or an adapter.
    """
    renaming = RenamedCheckpoint(checkpoint, {renamed(name, names): name for name in checkpoint.entries})
    layers = range(spec.model.num_layers)
    unbiased = [i for i in layers if f"model.layers.{i}.mlp.gate.expert_bias" not in renaming.entries]
    lacking = [f"layers.{i}.router.bias" for i in unbiased]  # all experts are equally preferred
    return load_weights(renaming, spec.model, device=device, dtype=dtype, lacking=lacking)


MASK_NAMES = ("<|mask|>", "<|MASK|>", "[MASK]", "<|mdm_mask|>", "<mask>")
"""What mask tokens are called in tokenizers of published checkpoints, where no file names theirs."""


def load_denoiser(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    name: str | None = None,
    revision: str | None = None,
) -> NativeDenoiser:
    """Load a masked diffusion language model.

    Args:
        model: a checkpoint folder or a hub id.
        dtype: "auto" (the checkpoint's), "float32", "bfloat16", "float16" or "float64".
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".
        name: for messages, where `model` is the folder that a name was resolved to.
        revision: branch, tag or commit on the hub.
    Raises:
        CheckpointError: missing, incomplete or inconsistent files.
        UnsupportedModelError: not supported, or without a mask token.
        OutOfMemoryError: it would not fit.
        ConfigError: a wrong argument.
    """
    if dtype not in (*DTYPES, "auto", "float64"):
        raise ConfigError(f"dtype must be auto, float64 or one of {', '.join(DTYPES)}, got {dtype!r}")
    folder, target = resolve(model, revision=revision), resolve_device(device)
    config = read_config(folder)
    spec = denoiser_spec(config, mask_token_id=mask_token_id(folder, config), eos_token_ids=end_tokens(folder, config))
    wanted = resolve_dtype(dtype, spec.model.dtype, target)
    most = fit_context(spec.model, name=name or str(model), dtype=wanted, device=target, max_context=None)
    spec = replace(spec, model=replace(spec.model, max_context=most))
    family = DENOISER_FAMILIES[str(family_name(config))]
    return NativeDenoiser(
        spec, load_denoiser_weights(open_checkpoint(folder, config), spec, family.names, device=target, dtype=wanted)
    )


def mask_token_id(folder: Path, config: Mapping[str, Any]) -> int | None:
    """The mask token of a checkpoint: as its configuration, generation defaults or tokenizer say.

    None where none does.
    """
    for source in (config, read_json(folder / "generation_config.json")):
        mask = source.get("mask_token_id")
        if isinstance(mask, int) and not isinstance(mask, bool):
            return mask
    added = _added_tokens(folder)
    named = read_json(folder / "tokenizer_config.json").get("mask_token")
    text = named.get("content") if isinstance(named, Mapping) else named
    return next((added[name] for name in (text, *MASK_NAMES) if isinstance(name, str) and name in added), None)


def end_tokens(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """All end tokens that configuration and generation defaults name; for LLaDA also the end of a turn."""
    ids: list[int] = []
    for source in (config, read_json(folder / "generation_config.json")):
        value = source.get("eos_token_id")
        ids += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]
    turn = _added_tokens(folder).get("<|eot_id|>") if family_name(config) == "llada" else None
    return tuple(dict.fromkeys(ids if turn is None else [*ids, turn]))


def _added_tokens(folder: Path) -> dict[str, int]:
    """Tokens that are kept apart from the vocabulary, by text."""
    listed = read_json(folder / "tokenizer.json").get("added_tokens")
    decoder = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder")
    ids_by_text = {
        str(token.get("content")): int(token["id"])
        for token in listed or []
        if isinstance(token, Mapping) and "id" in token
    }
    for index, token in (decoder if isinstance(decoder, Mapping) else {}).items():
        if isinstance(token, Mapping) and str(index).isdecimal():
            ids_by_text.setdefault(str(token.get("content")), int(index))
    return ids_by_text
