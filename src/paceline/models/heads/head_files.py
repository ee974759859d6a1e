"""Reading and writing heads: safetensors and JSON, checked against the target they are to draft for."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from paceline.checkpoints import SINGLE, Checkpoint, resolve
from paceline.errors import CheckpointError, ConfigError, UnsupportedModelError
from paceline.models.base import ModelInfo
from paceline.models.heads.formats.known import FORMATS, foreign_config, format_of
from paceline.models.heads.head_config import HeadConfig
from paceline.models.heads.head_tensors import check_tensors, drafted_rows

KEY: Final = "paceline_head"
MAX_CONFIG: Final = 10_000_000
"""Most bytes of a config.json."""

FLOATS: Final = ("F64", "F32", "F16", "BF16")


def read_head(
    head: str | Path, target: ModelInfo, *, tokenizer: Callable[[], str] = str, dtype: torch.dtype | None = None
) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """A head and its weights on the target's device.

    Args:
        head: folder or hub id; the files of other engines are read too (models.heads.formats).
        target: the model that it is to draft for.
        tokenizer: gives the fingerprint of that model's tokenizer, "" where it is not known; called only where the head
            names one.
        dtype: of the weights; None is the target's.
    Returns:
        Its config, and the tensors by the names of `tensors_of`; `draft_to_target` is int64. A reduced vocabulary is
        without ids that are no tokens of the target, and without their rows.
    Raises:
        CheckpointError: no such files, a file that is not whole, tensors of other shapes, a head for another model, or
            one that drafts no token of the target; UnsupportedModelError for pickled or quantised weights.
    """
    folder = resolve(head)
    folder_config = stored_config(folder)
    checkpoint = Checkpoint(folder)
    shapes = {name: entry.shape for name, entry in checkpoint.entries.items()}
    foreign = None if KEY in folder_config else format_of(folder_config, shapes, folder)
    if foreign is None:
        config, names = _own_config(folder_config[KEY], folder), {name: name for name in shapes}
    else:
        config = foreign_config(foreign, folder_config, shapes, target.num_layers, folder)
        named = {stored: foreign.canonical(stored, config) for stored in shapes}
        names = {stored: name for stored, name in named.items() if name is not None}
    _check_target(config, folder, target, tokenizer)
    check_tensors(config, {name: shapes[stored] for stored, name in names.items()}, folder)
    weights = stored_tensors(checkpoint, names, folder)
    if foreign is not None:
        weights = foreign.finish(weights)
    if (ids := weights.get("draft_to_target")) is not None:
        check_ids(ids, config.vocab_size, folder)
        config, weights = _known(config, weights, target, folder)
    dtype = dtype or target.dtype
    return config, {
        name: tensor.to(target.device, dtype if tensor.is_floating_point() else None)
        for name, tensor in weights.items()
    }


def head_methods(model: str | Path) -> tuple[str, ...]:
    """Methods that may draft with the trained head in a folder on this machine; none where it holds no head, or no
    weights that a head may have, such as a GGUF file.
    """
    try:
        folder = Path(model).expanduser()
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            return ()
    except (OSError, RuntimeError):  # of which `resolve` says more
        return ()
    config = stored_config(folder)
    if KEY in config:
        return (_own_config(config[KEY], folder).method,)
    shapes = {name: entry.shape for name, entry in Checkpoint(folder).entries.items()}
    return next((known.methods for known in FORMATS if known.matches(config, shapes)), ())


def stored_config(folder: Path) -> dict[str, Any]:
    """What config.json holds, where the weights beside it can be read."""
    pickled = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind))
    if pickled and not any(folder.glob("*.safetensors")):
        raise UnsupportedModelError(
            f"{folder} holds pickled weights only ({pickled[0]}), which may run code and are not supported; where you "
            "trust them, convert them elsewhere: "
            f"safetensors.torch.save_file(torch.load({pickled[0]!r}, weights_only=True), {SINGLE!r})"
        )
    path = folder / "config.json"
    try:
        if path.stat().st_size > MAX_CONFIG:
            raise CheckpointError(f"{path} has more than {MAX_CONFIG} bytes; give the folder of a head")
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} cannot be read ({error}); give the folder of a head") from error
    if not isinstance(stored, dict):
        raise CheckpointError(f"{path} holds no object; give the folder of a head")
    return stored


def _own_config(stored: object, folder: Path) -> HeadConfig:
    path = folder / "config.json"
    if not isinstance(stored, dict):
        raise CheckpointError(f"{path}: {KEY!r} must be an object; give the folder of a head")
    try:
        return HeadConfig.from_json(stored)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def write_head(folder: str | Path, config: HeadConfig, weights: Mapping[str, torch.Tensor]) -> Path:
    """Write a head; one that is there stays whole until the new one is, and its files are replaced one by one.

    Args:
        weights: by the names of `tensors_of`, on any device.
    Returns:
        The folder.
    Raises:
        CheckpointError: tensors that the config does not describe, or the files cannot be written.
    """
    folder = Path(folder)
    check_tensors(config, {name: tensor.shape for name, tensor in weights.items()}, folder)
    if (ids := weights.get("draft_to_target")) is not None:
        check_ids(ids.cpu(), config.vocab_size, folder)
    return write_folder(folder, {KEY: config.as_json()}, weights)


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write config.json and model.safetensors; those that are there stay whole until the new ones are.

    Raises:
        CheckpointError: they cannot be written.
    """
    from safetensors.torch import save_file

    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        part.mkdir(parents=True)
        copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(copies, part / SINGLE, metadata={"format": "pt"})
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (part / "config.json").write_text(text + "\n", encoding="utf-8")
        shutil.copymode(part / "config.json", part / SINGLE)  # safetensors lets the owner alone read it
        folder.mkdir(parents=True, exist_ok=True)
        for name in (SINGLE, "config.json"):
            os.replace(part / name, folder / name)
    except OSError as error:
        raise CheckpointError(f"the head {folder} cannot be written ({error})") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def stored_tensors(checkpoint: Checkpoint, names: Mapping[str, str], folder: Path) -> dict[str, torch.Tensor]:
    """Tensors by their canonical names, from those that they are stored by."""
    from safetensors import safe_open

    files: dict[Path, dict[str, str]] = {}
    for stored, name in names.items():
        entry, wanted = checkpoint.entries[stored], ("I64",) if name == "draft_to_target" else FLOATS
        if entry.dtype not in wanted:
            raise UnsupportedModelError(
                f"{folder}: {stored} is stored as {entry.dtype}, a head's are {' or '.join(wanted)}; write it again"
            )
        files.setdefault(entry.file, {})[stored] = name
    tensors: dict[str, torch.Tensor] = {}
    for path, stored_in in files.items():
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors |= {name: file.get_tensor(stored) for stored, name in stored_in.items()}
    return tensors


def check_ids(ids: torch.Tensor, vocab_size: int, folder: Path) -> None:
    """Draft ids must ascend, so that a row has one place, and lie in the target's vocabulary."""
    fine = ids.dtype == torch.int64 and len(ids) > 0 and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size
    if not fine or bool((ids[1:] <= ids[:-1]).any()):
        raise CheckpointError(
            f"{folder}: draft_to_target must hold ascending int64 token ids below {vocab_size}; write it again"
        )


def _known(
    config: HeadConfig, weights: dict[str, torch.Tensor], target: ModelInfo, folder: Path
) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """The head without draft ids that are no tokens of the target: rows of its files that are left out."""
    ids = weights["draft_to_target"]
    count = int((ids < target.vocab_size).sum())
    if not count:
        raise CheckpointError(
            f"the head {folder} drafts ids from {int(ids[0])}, and those of {target.name} lie in "
            f"0..{target.vocab_size - 1}; use one that was trained for this model"
        )
    cut = replace(config, draft_vocab_size=count)
    return cut, {name: weight[:count] if drafted_rows(name) else weight for name, weight in weights.items()}


def _check_target(config: HeadConfig, folder: Path, target: ModelInfo, tokenizer: Callable[[], str]) -> None:
    """Reject a head of another model."""
    pairs = [
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ]
    if config.vocab_size == target.stored_rows:  # made for the rows that are no tokens as well
        pairs.pop()
    deepest = max(config.taps, default=-1) + (config.method == "hidden_transfer")
    if deepest > target.num_layers:
        pairs.append(("num_layers", deepest, target.num_layers))
    check_trained_for(config.target, folder, target, tokenizer, sizes=pairs)


def check_trained_for(
    trained_for: Mapping[str, str],
    folder: Path,
    target: ModelInfo,
    tokenizer: Callable[[], str],
    *,
    sizes: Sequence[tuple[str, object, object]] = (),
) -> None:
    """Reject what was trained for another model.

    Args:
        trained_for: as `HeadConfig.target`. folder: of the files. tokenizer: as of `read_head`.
        sizes: name, value of the files, value of the target.
    Raises:
        CheckpointError: naming the first difference.
    """
    trained_shape, its = shape_of(trained_for.get("fingerprint", "")), shape_of(target.fingerprint)
    different = [(name, a, b) for name, a, b in sizes if a != b]
    words: tuple[str, object, object] | None = different[0] if different else None
    if (
        words is None
        and trained_shape
        and trained_shape.startswith("transformers-") == its.startswith("transformers-")
        and trained_shape != its
    ):
        words = ("shape", trained_shape, its)
    if words is None and (wanted := trained_for.get("tokenizer")) and (here := tokenizer()) and wanted != here:
        words = ("tokenizer", wanted, here)
    if words is not None:
        named = f" (trained for {trained_for['name']})" if "name" in trained_for else ""
        raise CheckpointError(
            f"the head {folder}{named} is for {words[0]} {words[1]}, but {target.name} has {words[2]}; use one "
            "that was trained for this model"
        )


def shape_of(fingerprint: str) -> str:
    """A fingerprint without dtype and rounding, which a head does not depend on."""
    return re.split(r"-(?:bfloat16|float16|float32|float64)\b", fingerprint)[0]
