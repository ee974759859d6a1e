"""IBM's accelerators, which vLLM and text-generation-inference read: config.json of `model_type` "mlp_speculator", with
`n_predict` heads of width `inner_dim` (0: that of the target's states), and `emb.K`, `proj.K`, `ln.K`, `head.K`, with
"speculator." before them. Of heads that are tied, the first ones count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from paceline.models.heads.formats.base import Found, HeadFormat, HeadTarget, Shapes, dtype_of, refuse_unread
from paceline.models.heads.head_config import HeadConfig

READ: Final = (
    "emb_dim",
    "n_predict",
    "inner_dim",
    "tie_weights",
    "scale_input",
    "n_candidates",
    "top_k_tokens_per_head",
)
PARTS: Final = {"emb": "embed", "proj": "proj", "ln": "norm", "head": "head"}


class MLPSpeculatorFormat(HeadFormat):
    """Of IBM's fms-extras."""

    name = "mlp_speculator"
    methods = ("mlp_speculator",)
    whole = ()

    def matches(self, config: Found, shapes: Shapes) -> bool:
        return config.get("model_type") == "mlp_speculator" or "n_predict" in config

    def config_of(self, config: Found, shapes: Shapes, num_layers: int) -> HeadConfig:
        refuse_unread(config, READ)
        hidden = config["emb_dim"] if "emb_dim" in config else config["hidden_size"]
        return HeadConfig(
            method="mlp_speculator",
            hidden_size=hidden,
            vocab_size=config["vocab_size"],
            draft_vocab_size=config["vocab_size"],
            num_heads=config["n_predict"],
            inner_size=config.get("inner_dim") or hidden,
            tie_weights=config.get("tie_weights", False),
            scale_input=config.get("scale_input", False),
        )

    def canonical(self, name: str, config: HeadConfig) -> str | None:
        parts = re.fullmatch(r"(?:speculator\.)?(emb|proj|ln|head)\.(\d+)\.(weight|bias)", name)
        if parts is None:
            return name
        part, head, kind = parts.groups()
        if config.tie_weights and int(head) > (part == "proj"):
            return None
        return f"heads.{head}.{PARTS[part]}.{kind}"

    def written(
        self, config: HeadConfig, weights: Mapping[str, Tensor], target: HeadTarget
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if "draft_to_target" in weights:
            raise self.lacks("a reduced vocabulary")
        stored = {ours: theirs for theirs, ours in PARTS.items()}
        tensors = {}
        for name, weight in weights.items():
            _, head, part, kind = name.split(".")
            tensors[f"speculator.{stored[part]}.{head}.{kind}"] = weight
            if part == "norm" and f"heads.{head}.norm.bias" not in weights:
                tensors[f"speculator.ln.{head}.bias"] = torch.zeros_like(weight)
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "emb_dim": config.hidden_size,
            "inner_dim": config.inner_size,
            "vocab_size": config.vocab_size,
            "n_predict": config.num_heads,
            "tie_weights": config.tie_weights,
            "scale_input": config.scale_input,
            "top_k_tokens_per_head": [1] * config.num_heads,
            "n_candidates": 1,
            "torch_dtype": dtype_of(weights),
        }, tensors
