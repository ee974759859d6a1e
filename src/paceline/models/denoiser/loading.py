"""From a folder or hub id to a running denoiser.

In: what the user calls the model, dtype, device. Out: a NativeDenoiser. Not here: the layouts
(`models.denoiser.layouts`), tensors (`models.denoiser.weights`). Weights are safetensors; no code of a checkpoint is
ever run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config import DTYPES
from paceline.errors import ConfigError
from paceline.models.denoiser.layouts import LAYOUTS, denoiser_spec, layout_name
from paceline.models.denoiser.native import NativeDenoiser
from paceline.models.denoiser.weights import load_denoiser_weights
from paceline.models.load import resolve_device, resolve_dtype
from paceline.models.loading.checkpoint import Checkpoint
from paceline.models.loading.hub import read_config, resolve
from paceline.models.loading.tokenizer import read_json
from paceline.models.memory import fit_context

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
        CheckpointError: missing, incomplete or inconsistent files. UnsupportedModelError: refused by name, or without a
        mask token.
        OutOfMemoryError: it would not fit. ConfigError: a wrong argument.
    """
    if dtype not in (*DTYPES, "auto", "float64"):
        raise ConfigError(f"dtype must be auto, float64 or one of {', '.join(DTYPES)}, got {dtype!r}")
    folder, target = resolve(model, revision=revision), resolve_device(device)
    config = read_config(folder)
    spec = denoiser_spec(config, mask_token_id=mask_token_id(folder, config), eos_token_ids=end_tokens(folder, config))
    wanted = resolve_dtype(dtype, spec.model.dtype, target)
    most = fit_context(spec.model, name=name or str(model), dtype=wanted, device=target, max_context=None)
    spec = replace(spec, model=replace(spec.model, max_context=most))
    layout = LAYOUTS[str(layout_name(config))]
    return NativeDenoiser(
        spec, load_denoiser_weights(Checkpoint(folder), spec, layout.names, device=target, dtype=wanted)
    )


def mask_token_id(folder: Path, config: Mapping[str, Any]) -> int | None:
    """The mask token of a checkpoint: as its configuration, generation defaults or tokenizer say; None where none
    does.
    """
    for source in (config, read_json(folder / "generation_config.json")):
        found = source.get("mask_token_id")
        if isinstance(found, int) and not isinstance(found, bool):
            return found
    added = _added_tokens(folder)
    named = read_json(folder / "tokenizer_config.json").get("mask_token")
    text = named.get("content") if isinstance(named, Mapping) else named
    return next((added[name] for name in (text, *MASK_NAMES) if isinstance(name, str) and name in added), None)


def end_tokens(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """All end tokens that configuration and generation defaults name; for LLaDA also the end of a turn."""
    found: list[int] = []
    for source in (config, read_json(folder / "generation_config.json")):
        value = source.get("eos_token_id")
        found += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]
    turn = _added_tokens(folder).get("<|eot_id|>") if layout_name(config) == "llada" else None
    return tuple(dict.fromkeys(found if turn is None else [*found, turn]))


def _added_tokens(folder: Path) -> dict[str, int]:
    """Tokens that stand apart from the vocabulary, by text."""
    listed = read_json(folder / "tokenizer.json").get("added_tokens")
    decoder = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder")
    found = {
        str(token.get("content")): int(token["id"])
        for token in listed or []
        if isinstance(token, Mapping) and "id" in token
    }
    for index, token in (decoder if isinstance(decoder, Mapping) else {}).items():
        if isinstance(token, Mapping) and str(index).isdecimal():
            found.setdefault(str(token.get("content")), int(index))
    return found
