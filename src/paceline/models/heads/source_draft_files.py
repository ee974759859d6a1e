"""Files of a draft that is made of an encoder-decoder model's own decoder layers: which layers they were, what they
became by training, and which tokens it drafts. All else is the target's, and is taken from there.

Tensors have canonical names (`checkpoints.targets`), numbered by place in the draft; `draft_to_target` (n,) int64,
ascending, is there where not all tokens are drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from paceline.checkpoints import Checkpoint, resolve
from paceline.errors import CheckpointError
from paceline.models.base import ModelInfo
from paceline.models.heads.head_files import (
    check_ids,
    check_trained_for,
    stored_config,
    stored_tensors,
    write_folder,
)

KEY: Final = "paceline_encdec_draft"
IDS: Final = "draft_to_target"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDraft:
    """Says what a draft was made of.

    Attributes:
        layers: of the target's decoder, one or more, ascending.
        target, provenance: as of `HeadConfig`.
    """

    layers: tuple[int, ...]
    target: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)


def write_source_draft(folder: Path, draft: SourceDraft, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write a draft; returns the folder.

    Args:
        tensors: by their names above.
    Raises:
        CheckpointError: the files cannot be written.
    """
    return write_folder(folder, {KEY: asdict(draft) | {"layers": list(draft.layers)}}, tensors)


def is_source_draft(model: str | Path) -> bool:
    """Whether a folder on this machine holds such a draft."""
    return (Path(model).expanduser() / "config.json").is_file() and KEY in stored_config(Path(model).expanduser())


def read_source_draft(
    draft: str | Path, target: ModelInfo, tokenizer: Callable[[], str]
) -> tuple[SourceDraft, dict[str, torch.Tensor]]:
    """A draft and its tensors, on the target's device in its dtype.

    Args:
        draft: folder or hub id. target: the model that it is to draft for. tokenizer: gives that model's fingerprint.
    Raises:
        CheckpointError: no such files, or a draft for another model.
    """
    folder = resolve(draft)
    stored = stored_config(folder).get(KEY)
    if not isinstance(stored, dict):
        raise CheckpointError(
            f"{folder} holds no draft of `paceline train encdec_draft` (its config.json lacks {KEY!r}); name the "
            "folder of one"
        )
    config = _parsed(stored, folder)
    check_trained_for(config.target, folder, target, tokenizer)
    if config.layers[-1] >= target.num_layers:
        raise CheckpointError(
            f"{folder} is made of layer {config.layers[-1]}, and {target.name} has {target.num_layers}; use a draft "
            "that was trained for this model"
        )
    checkpoint = Checkpoint(folder)
    tensors = stored_tensors(checkpoint, {name: name for name in checkpoint.entries}, folder)
    if IDS in tensors:
        check_ids(tensors[IDS], target.vocab_size, folder)
    return config, {
        name: tensor.to(target.device, target.dtype if tensor.is_floating_point() else None)
        for name, tensor in tensors.items()
    }


def _parsed(stored: Mapping[str, Any], folder: Path) -> SourceDraft:
    layers, target = stored.get("layers"), stored.get("target")
    numbers = layers if isinstance(layers, list) and all(type(layer) is int and layer >= 0 for layer in layers) else []
    if not numbers or numbers != sorted(set(numbers)) or not isinstance(target, dict):
        raise CheckpointError(
            f"{folder}/config.json: {KEY!r} must name layers, ascending, and the target; write it again"
        )
    return SourceDraft(layers=tuple(numbers), target=target, provenance=stored.get("provenance") or {})
