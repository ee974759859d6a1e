"""Hydra's heads in the names of its authors, whose files are pickled: convert them to safetensors first.

config.json has `hydra_num_heads`, `hydra_num_layers` and `hydra_head_arch`: "mlp" for Hydra, "prefix-mlp" for Hydra++.
The blocks of head K are `hydra_mlp.K.J`, every second J where there is dropout (in Hydra++), with `linear`, and in the
first one `res_connection`; its matrix is `hydra_lm_head.K` or `.K.1`, with a bias. The prefix layer of Hydra++ is a
Llama of one layer, `prefix_embeding_layer`; its sizes are those of the target, which config.json does not have: add the
keys num_attention_heads, intermediate_size and so on of the target's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.models.heads.formats.base import (
    Found,
    HeadFormat,
    HeadTarget,
    Shapes,
    dtype_of,
    heads_rows,
    layer_of,
    refuse_unread,
)
from paceline.models.heads.head_config import HeadConfig

READ: Final = ("hydra_num_heads", "hydra_num_layers", "hydra_head_arch", "grounded_heads", "hidden_state_offset")
ARCHITECTURES: Final = {"mlp": "hydra", "prefix-mlp": "hydra++"}
PREFIX: Final = "prefix_embeding_layer"
NAMES: Final = {f"{PREFIX}.norm.weight": "prefix.norm.weight", f"{PREFIX}.embed_tokens.weight": None}


class HydraFormat(HeadFormat):
    """Of its authors."""

    name = "hydra"
    methods = ("hydra", "hydra++")

    def matches(self, config: Found, shapes: Shapes) -> bool:
        return "hydra_num_heads" in config

    def config_of(self, config: Found, shapes: Shapes, num_layers: int) -> HeadConfig:
        refuse_unread(config, READ)
        arch = config.get("hydra_head_arch", "mlp")
        if arch not in ARCHITECTURES or not config.get("grounded_heads", True) or config.get("hidden_state_offset"):
            raise ConfigError(
                f"hydra_head_arch must be {' or '.join(ARCHITECTURES)}, got {arch!r}, with grounded_heads and no "
                "hidden_state_offset"
            )
        plus = arch == "prefix-mlp"
        rows, hidden = shapes[f"hydra_lm_head.0{'.1' * plus}.weight"]
        return HeadConfig(
            method="hydra++" if plus else "hydra",
            hidden_size=hidden,
            vocab_size=rows,
            draft_vocab_size=rows,
            num_heads=config["hydra_num_heads"],
            num_layers=config.get("hydra_num_layers", 1),
            layer=layer_of(config) if plus else {},
        )

    def canonical(self, name: str, config: HeadConfig) -> str | None:
        if parts := re.fullmatch(r"hydra_lm_head\.(\d+)(?:\.1)?\.(weight|bias)", name):
            return "heads.{}.head.{}".format(*parts.groups())
        if parts := re.fullmatch(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)", name):
            head, place, part, kind = parts.groups()
            block = int(place) // 2 if config.method == "hydra++" else int(place)
            return f"heads.{head}.reduce.{kind}" if part != "linear" else f"heads.{head}.blocks.{block}.{kind}"
        return NAMES[name] if name in NAMES else name.replace(f"{PREFIX}.layers.0.", "prefix.", 1)

    def written(
        self, config: HeadConfig, weights: Mapping[str, Tensor], target: HeadTarget
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        plus = config.method == "hydra++"
        for name, what in (("draft_to_target", "a reduced vocabulary"), ("embed.weight", "an embedding of the head's")):
            if name in weights:
                raise self.lacks(what)
        if "prefix.self_attn.q_norm.weight" in weights:
            raise self.lacks("norms of queries and keys")
        if plus and "prefix.norm.weight" not in weights:
            raise self.lacks("a prefix layer without a norm behind it")
        tensors = {}
        for head, rows in heads_rows(config, weights):
            name = f"hydra_lm_head.{head}{'.1' * plus}"
            tensors[f"{name}.weight"], bias = rows, weights.get(f"heads.{head}.head.bias")
            tensors[f"{name}.bias"] = torch.zeros(len(rows), dtype=rows.dtype) if bias is None else bias
            for block in range(config.num_layers):
                here = f"hydra_mlp.{head}.{2 * block + 1 if plus else block}"
                tensors |= _both(weights, f"heads.{head}.blocks.{block}", f"{here}.linear")
            tensors |= _both(weights, f"heads.{head}.reduce", f"hydra_mlp.{head}.{int(plus)}.res_connection")
        stored = {canonical: name for name, canonical in NAMES.items() if canonical}
        for name, weight in weights.items():
            if name.startswith("prefix."):
                tensors[stored.get(name, f"{PREFIX}.layers.0.{name.removeprefix('prefix.')}")] = weight
        return {
            "hydra_num_heads": config.num_heads,
            "hydra_num_layers": config.num_layers,
            "hydra_head_arch": "prefix-mlp" if plus else "mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
            "base_model_name_or_path": target.name,
            "torch_dtype": dtype_of(weights),
            **config.layer,
        }, tensors


def _both(weights: Mapping[str, Tensor], name: str, stored: str) -> dict[str, Tensor]:
    """A matrix and its bias, which is there in these files."""
    matrix, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    zeros = torch.zeros(len(matrix), dtype=matrix.dtype)
    return {f"{stored}.weight": matrix, f"{stored}.bias": zeros if bias is None else bias}
