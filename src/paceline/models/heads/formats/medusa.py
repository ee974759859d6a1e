"""Medusa's heads, in the files of its authors (which text-generation-inference reads too) and in those of vLLM.

authors   config.json with `medusa_num_heads`; `K.J.linear` is block J of head K, behind them its own matrix.
vLLM      config.json of `model_type` "medusa"; `blocks.K.layers.J` and `lm_heads.K`, one for all heads where
          `original_lm_head` is set; `token_map` holds the ids of a reduced vocabulary, in any order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from paceline.models.heads.formats.base import (
    Found,
    HeadFormat,
    HeadTarget,
    Shapes,
    dtype_of,
    heads_rows,
    refuse_unread,
)
from paceline.models.heads.head_config import HeadConfig


class MedusaFormat(HeadFormat):
    """Of its authors."""

    name = "medusa"
    methods = ("medusa",)

    def matches(self, config: Found, shapes: Shapes) -> bool:
        return "medusa_num_heads" in config

    def config_of(self, config: Found, shapes: Shapes, num_layers: int) -> HeadConfig:
        refuse_unread(config, ("medusa_num_heads", "medusa_num_layers", "medusa_choices"))
        layers = config.get("medusa_num_layers", 1)
        rows, hidden = shapes[f"0.{layers}.weight"]
        return HeadConfig(
            method="medusa", hidden_size=hidden, vocab_size=rows, draft_vocab_size=rows,
            num_heads=config["medusa_num_heads"], num_layers=layers,
        )  # fmt: skip

    def canonical(self, name: str, config: HeadConfig) -> str | None:
        parts = re.fullmatch(r"(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)", name)
        if parts is None:
            return name
        head, block, kind = parts.groups()
        last = int(block) >= config.num_layers
        return f"heads.{head}.head.{kind}" if last else f"heads.{head}.blocks.{block}.{kind}"

    def written(
        self, config: HeadConfig, weights: Mapping[str, Tensor], target: HeadTarget
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if "draft_to_target" in weights:
            raise self.lacks("a reduced vocabulary, medusa_vllm has")
        tensors = {f"{head}.{config.num_layers}.weight": rows for head, rows in heads_rows(config, weights)}
        for name, weight in weights.items():
            if parts := re.fullmatch(r"heads\.(\d+)\.blocks\.(\d+)\.(weight|bias)", name):
                tensors["{}.{}.linear.{}".format(*parts.groups())] = weight
        return {
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_layers,
            "base_model_name_or_path": target.name,
            "torch_dtype": dtype_of(weights),
        }, tensors


VLLM: Final = ("truncated_vocab_size", "num_heads", "medusa_num_heads", "medusa_num_layers", "original_lm_head",
               "medusa_fc_bias", "topk", "max_paths", "max_seq_len")  # fmt: skip
"""Keys of vLLM's Medusa that are read, that the tensors say too, or that speak of drafting alone."""


class VllmMedusaFormat(HeadFormat):
    """Of vLLM."""

    name = "medusa_vllm"
    methods = ("medusa",)

    def matches(self, config: Found, shapes: Shapes) -> bool:
        return any(name.removeprefix("medusa_heads.").startswith("blocks.0.layers.") for name in shapes)

    def config_of(self, config: Found, shapes: Shapes, num_layers: int) -> HeadConfig:
        refuse_unread(config, VLLM)
        return HeadConfig(
            method="medusa",
            hidden_size=config["hidden_size"],
            vocab_size=config["vocab_size"],
            draft_vocab_size=config.get("truncated_vocab_size") or config["vocab_size"],
            num_heads=config.get("num_heads") or config["medusa_num_heads"],
            num_layers=config.get("num_hidden_layers") or config.get("medusa_num_layers", 1),
        )

    def canonical(self, name: str, config: HeadConfig) -> str | None:
        name = name.removeprefix("medusa_heads.")
        if parts := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name):
            return "heads.{}.blocks.{}.{}".format(*parts.groups())
        if parts := re.fullmatch(r"lm_heads\.(\d+)\.weight", name):
            return f"heads.{parts[1]}.head.weight"
        return {"token_map": "draft_to_target", "lm_head.weight": "head.weight"}.get(name, name)

    def finish(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        if "heads.1.head.weight" not in weights and "heads.0.head.weight" in weights:
            weights = {
                "head.weight" if name == "heads.0.head.weight" else name: weight for name, weight in weights.items()
            }
        ids = weights.get("draft_to_target")
        if ids is None:
            return weights
        order = ids.argsort()
        rows = {name: weight[order].contiguous() for name, weight in weights.items() if name.endswith("head.weight")}
        return {**weights, **rows, "draft_to_target": ids[order]}

    def written(
        self, config: HeadConfig, weights: Mapping[str, Tensor], target: HeadTarget
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        rows = dict(heads_rows(config, weights))
        shared = not any(f"heads.{head}.head.weight" in weights for head in rows)
        tensors = {f"lm_heads.{head}.weight": rows[head] for head in rows if not (shared and head)}
        bias = any(name.endswith(".bias") for name in weights)
        for head in range(config.num_heads):
            for block in range(config.num_layers):
                name, here = f"heads.{head}.blocks.{block}", f"blocks.{head}.layers.{block}"
                tensors[f"{here}.weight"] = weights[f"{name}.weight"]
                if bias:  # all of them have one, or none has
                    empty = torch.zeros(config.hidden_size, dtype=weights[f"{name}.weight"].dtype)
                    tensors[f"{here}.bias"] = weights.get(f"{name}.bias", empty)
        if "draft_to_target" in weights:
            tensors["token_map"] = weights["draft_to_target"]
        return {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "truncated_vocab_size": config.draft_vocab_size,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "original_lm_head": shared,
            "medusa_fc_bias": bias,
            "torch_dtype": dtype_of(weights),
        }, tensors
