"""Heads in the formats of other engines, made whole with what they share with their target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from paceline.errors import ConfigError
from paceline.models.heads import WRITTEN, Target, read_head, target_rows, write_folder, write_head, writer
from paceline.models.loading import read_config
from paceline.utils import choice, need

if TYPE_CHECKING:
    from paceline.llm import LLM

FORMATS = ("paceline", *WRITTEN)


def convert(llm: LLM, head: str | Path, to: str, output: str | Path) -> Path:
    """Write a head in another format.

    Other engines want in the file what the head takes from its target: rows of its head, and for EAGLE its embedding.

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
    form = writer(to, config.method)
    if "head.weight" in form.whole and not all(f"heads.{k}.head.weight" in weights for k in range(config.num_heads)):
        ids = weights.get("draft_to_target", torch.arange(config.vocab_size))
        weights.setdefault("head.weight", target_rows(cast(Any, llm.runner), llm.runner.info, ids))
    if "embed.weight" in form.whole and "embed.weight" not in weights:
        weights["embed.weight"] = llm.runner.embed(range(config.vocab_size))  # type: ignore[attr-defined]
    kind = read_config(llm.folder).get("architectures", ["LlamaForCausalLM"])[0]
    made, tensors = form.written(config, weights, Target(str(llm.runner.info.name), kind))
    return write_folder(output, made, tensors)
