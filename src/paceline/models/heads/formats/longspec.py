"""LongSpec heads in the files of their authors: the layer's tensors by themselves, beside the target's config.json.

The layer has a bias on queries, keys and values, none on outputs, and the window that its authors gave it, which no key
of config.json names. Its cross-attention has projections of keys and values that nothing reads, since these are the
target's; its norms are called by what comes before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import Tensor

from paceline.models.heads.formats.base import (
    SHAPE,
    Found,
    HeadFormat,
    HeadTarget,
    Shapes,
    check_sizes,
    dtype_of,
    layer_of,
    layers_as_model,
    refuse_unread,
)
from paceline.models.heads.head_config import HeadConfig

WINDOW: Final = 512
"""Tokens before its own that a row's self-attention sees."""

NORMS: Final = {
    "post_self_attention_layernorm": "cross_layernorm",
    "post_cross_attention_layernorm": "post_attention_layernorm",
}
"""Their names -> ours."""

UNREAD: Final = ("cross_attn.k_proj.", "cross_attn.v_proj.")


class LongSpecFormat(HeadFormat):
    """Of LongSpec's authors."""

    name = "longspec"
    methods = ("longspec",)
    whole = ()

    def matches(self, config: Found, shapes: Shapes) -> bool:
        return "cross_attn.q_proj.weight" in shapes

    def config_of(self, config: Found, shapes: Shapes, num_layers: int) -> HeadConfig:
        refuse_unread(config, SHAPE)
        check_sizes(config, config)
        return HeadConfig(
            method="longspec",
            hidden_size=config["hidden_size"],
            vocab_size=config["vocab_size"],
            draft_vocab_size=config["vocab_size"],
            layer=layer_of(config),
            sliding_window=WINDOW,
        )

    def canonical(self, name: str, config: HeadConfig) -> str | None:
        if name.startswith(UNREAD):
            return None
        part, dot, rest = name.partition(".")
        return f"layers.0.{NORMS.get(part, part)}{dot}{rest}"

    def written(
        self, config: HeadConfig, weights: Mapping[str, Tensor], target: HeadTarget
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if not {"draft_to_target", "head.weight", "embed.weight"}.isdisjoint(weights):
            raise self.lacks("a reduced vocabulary, or an embedding or a head of its own")
        if config.sliding_window != WINDOW:
            raise self.lacks(f"a sliding window of {config.sliding_window} tokens, which has {WINDOW} here")
        if config.layer["num_attention_heads"] * config.head_dim != config.hidden_size:
            raise self.lacks("attention heads that are together wider or narrower than the states")
        if any(f"layers.0.{attention}_attn.o_proj.bias" in weights for attention in ("self", "cross")):
            raise self.lacks("a bias behind attention")
        return {
            **layers_as_model(config, weights),
            "architectures": ["LlamaGlideDecoderLayer"],
            "dtype": dtype_of(weights),
        }, dict(_foreign(weights))


def _foreign(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by their names there, with zeros where theirs have biases, or projections that nothing reads."""
    theirs = {ours: name for name, ours in NORMS.items()}
    own = {name.removeprefix("layers.0."): tensor for name, tensor in weights.items()}
    own |= {f"cross_attn.{part}_proj.weight": 0 * own[f"self_attn.{part}_proj.weight"] for part in "kv"}
    for name, tensor in own.items():
        part, dot, rest = name.partition(".")
        yield f"{theirs.get(part, part)}{dot}{rest}", tensor
        bias = name.replace(".weight", ".bias")
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) and bias not in own:
            yield bias, tensor.new_zeros(len(tensor))
