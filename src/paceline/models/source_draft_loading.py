"""From the files of a draft on a target's sources (models.heads) and those of the target to a runner."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from paceline.checkpoints import Checkpoint, Form, load_weights, quantize, targets
from paceline.errors import CapabilityError, CheckpointError
from paceline.models.base import Runner
from paceline.models.heads import read_source_draft
from paceline.models.heads.source_draft_files import IDS
from paceline.models.layers.own_weights import Weights
from paceline.models.runners.encoder_decoder import EncoderDecoderRunner
from paceline.models.runners.remapped_tokens import HeadRows
from paceline.models.runners.source_draft import SourceDraftRunner
from paceline.models.spec import ModelSpec

LAYER: Final = re.compile(r"layers\.(\d+)\.(.+)")
FIXED: Final = ("cross_kv.", "relative_bias.")
"""Of a layer's tensors, those that a draft takes from the target as they are, or does not have."""


def source_draft_target(runner: Runner | None, method: str) -> EncoderDecoderRunner:
    """The target of such a draft.

    Raises:
        CapabilityError: a model without an encoder, or one that does not run natively.
    """
    if isinstance(runner, EncoderDecoderRunner):
        return runner
    name = "this model" if runner is None else runner.info.name
    lacks = "does not run natively" if runner is not None and runner.info.source else "has no encoder"
    raise CapabilityError(
        f"method {method!r} drafts on what the encoder of an encoder-decoder model has read, and {name} {lacks}; "
        "choose another method"
    )


def load_source_draft(
    draft: str | Path,
    target: EncoderDecoderRunner,
    folder: Path,
    *,
    tokenizer: Callable[[], str],
    quantization: Form | None = None,
) -> SourceDraftRunner:
    """A draft for a target.

    Args:
        draft: folder or hub id. folder: of the target's checkpoint. tokenizer: gives the fingerprint of its tokenizer.
        quantization: how the draft's matrices are rounded; None leaves them as they are.
    Raises:
        CheckpointError: no such files, a draft for another model, or tensors of other shapes.
    """
    config, tensors = read_source_draft(draft, target.info, tokenizer)
    ids = tensors.pop(IDS, None)
    spec = shortened_spec(target.spec, config.layers)
    _check_shapes(tensors, spec, str(draft))
    weights = around_layers(target, folder, config.layers, dtype=target.info.dtype) | tensors
    weights["embed.weight"] = target.embedding
    rows = None if ids is None else HeadRows(ids.cpu().numpy(), spec.vocab_size)
    if rows is not None and ids is not None:
        spec, weights["head.weight"] = rows.spec(spec), weights.get("head.weight", target.embedding)[ids]
        if spec.head_bias:
            weights["head.bias"] = weights["head.bias"][ids]
    if quantization is not None:
        weights = quantize(weights, spec, quantization)
    return SourceDraftRunner(spec, weights, target, config.layers, rows, name=str(draft))


def shortened_spec(spec: ModelSpec, layers: Sequence[int]) -> ModelSpec:
    """The shape of a model with these layers of its decoder alone."""
    return replace(spec, layers=tuple(spec.layers[layer] for layer in layers), stored_rows=None)


def trained_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a draft's own tensors, by its shortened spec."""
    return {
        tensor.name: tuple(tensor.shape)
        for tensor in targets(spec)
        if (part := LAYER.fullmatch(tensor.name)) and not part[2].startswith(FIXED)
    }


def _check_shapes(tensors: Weights, spec: ModelSpec, name: str) -> None:
    wanted = trained_shapes(spec)
    for tensor in sorted({*wanted, *tensors}):
        has = tuple(tensors[tensor].shape) if tensor in tensors else "none"
        if has != wanted.get(tensor, "none"):
            raise CheckpointError(
                f"{name}: {tensor} must have shape {wanted.get(tensor, 'none')}, got {has}; use a draft that was "
                "trained for this model"
            )


def around_layers(
    target: EncoderDecoderRunner, folder: Path, layers: Sequence[int], *, dtype: torch.dtype, with_layers: bool = False
) -> Weights:
    """What a draft of these layers has of its target, but for the embedding, by canonical names with the draft's
    numbers; on the target's device.

    Args:
        folder: of the target's checkpoint. with_layers: the layers' own weights too.
    Raises:
        CheckpointError: files that have changed since the target was loaded.
    """
    spec = target.spec
    stored = replace(spec, vocab_size=spec.stored_rows or spec.vocab_size, stored_rows=None)
    place = {layer: number for number, layer in enumerate(layers)}
    shared_bias = spec.relative_bias is not None and not spec.relative_bias.per_layer

    def name_in_draft(name: str) -> str | None:
        part = LAYER.fullmatch(name)
        if part is None:
            return None if name.startswith(("encoder.", "embed.")) else name
        if part[2].startswith("relative_bias.") and shared_bias:
            return name
        wanted = int(part[1]) in place and not part[2].startswith("cross_kv.")
        wanted = wanted and (with_layers or part[2].startswith("relative_bias."))
        return f"layers.{place[int(part[1])]}.{part[2]}" if wanted else None

    names = {tensor.name: name_in_draft(tensor.name) for tensor in targets(stored)}
    elsewhere = [name for name, renamed in names.items() if renamed is None]
    read = load_weights(Checkpoint(folder), stored, device=target.info.device, dtype=dtype, elsewhere=elsewhere)
    weights = {names[name] or name: weight for name, weight in read.items()}
    for name in ("head.weight", "head.bias"):
        if name in weights:
            weights[name] = weights[name][: spec.vocab_size]
    return weights
