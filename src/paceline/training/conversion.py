"""Heads in the formats of other engines, made whole with what they share with their target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from paceline.checkpoints import read_config
from paceline.errors import ConfigError
from paceline.models.heads import (
    WRITTEN,
    HeadConfig,
    HeadTarget,
    drafted_rows,
    read_head,
    target_rows,
    token_rows,
    write_folder,
    write_head,
    writer,
)
from paceline.utils import choice, need

if TYPE_CHECKING:
    from paceline.llm import LLM

FORMATS = ("paceline", *WRITTEN)


def convert(llm: LLM, head: str | Path, to: str, output: str | Path) -> Path:
    """Write a head in another format.

    Other engines want in the file what the head takes from its target: rows of its head, and for EAGLE its embedding.
    They count as tokens all rows of the target's files, so that a head has as many; those that are no tokens repeat the
    first row, and so are never better than it.

    Args:
        llm: the target. head: folder or hub id, in any format that can be read. to: one of FORMATS.
    Returns:
        The folder.
    Raises:
        CheckpointError: no such head, or one for another model. ConfigError: a method that the format does not have, or
            a folder that holds a model or a head.
    """
    choice("to", to, FORMATS)
    output = Path(output)
    need(output.is_dir() or not output.exists(), "output", "be a folder", str(output))
    if taken := [path.name for path in (output / "config.json", *output.glob("*.safetensors")) if path.exists()]:
        raise ConfigError(f"{str(output)!r} holds {taken[0]}; name another output, or remove it")
    config, weights = read_head(head, llm.runner.info, tokenizer=llm.tokenizer.fingerprint)
    if to == "paceline":
        return write_head(output, config, weights)
    form, info = writer(to, config.method), llm.runner.info
    if "head.weight" in form.whole and not all(f"heads.{k}.head.weight" in weights for k in range(config.num_heads)):
        ids = weights.get("draft_to_target", torch.arange(info.vocab_size))
        weights.setdefault("head.weight", target_rows(cast(Any, llm.runner), info, ids))
    if "embed.weight" in form.whole and "embed.weight" not in weights:
        weights["embed.weight"] = llm.runner.embed(range(info.vocab_size))  # type: ignore[attr-defined]
    config, weights = _padded(config, weights, info.stored_rows or info.vocab_size)
    kind = read_config(llm.folder).get("architectures", ["LlamaForCausalLM"])[0]
    written_config, tensors = form.written(config, weights, HeadTarget(str(info.name), kind, info.num_layers))
    return write_folder(output, written_config, tensors)


def _padded(
    config: HeadConfig, weights: dict[str, torch.Tensor], rows: int
) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """The head for a vocabulary of so many rows."""
    reduced = "draft_to_target" in weights
    padded_config = replace(config, vocab_size=rows, draft_vocab_size=config.draft_vocab_size if reduced else rows)

    def fits(name: str, tensor: torch.Tensor) -> torch.Tensor:
        drafted = drafted_rows(name) and not reduced
        missing = rows - len(tensor) if drafted or token_rows(name) else 0
        return torch.cat((tensor, tensor[:1].expand(missing, *tensor.shape[1:]))) if missing else tensor

    return padded_config, {name: fits(name, tensor) for name, tensor in weights.items()}
