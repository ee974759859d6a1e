"""Falcon heads in the names of their authors, whose files are pickled: convert them to safetensors first.

config.json is a Llama's with `k_mask`, the tokens of a pass. Beside what is read there is what reads the last output of
the LSTM's layers, which counts for nothing, since every input begins anew.
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
    canonical_name,
    check_sizes,
    dtype_of,
    foreign_tensors,
    has_qk_norm,
    layer_of,
    layers_as_model,
    refuse_unread,
)
from paceline.models.heads.head_config import HeadConfig

LAYERS: Final = 2
"""Of the LSTM."""

BIASES: Final = ("bias_ih", "bias_hh")
"""The two of a layer, which are added up."""


class FalconFormat(HeadFormat):
    """Of Falcon's authors."""

    name = "falcon"
    methods = ("falcon",)
    whole = ("embed.weight",)

    def matches(self, config: Found, shapes: Shapes) -> bool:
        return "lstm.weight_ih_l0" in shapes

    def config_of(self, config: Found, shapes: Shapes, num_layers: int) -> HeadConfig:
        refuse_unread(config, (*SHAPE, "k_mask"))
        check_sizes(config, config)
        return HeadConfig(
            method="falcon",
            hidden_size=config["hidden_size"],
            vocab_size=config["vocab_size"],
            draft_vocab_size=config["vocab_size"],
            num_layers=config.get("num_hidden_layers", 1),
            block_size=config["k_mask"],
            layer=layer_of(config),
        )

    def canonical(self, name: str, config: HeadConfig) -> str | None:
        return None if name.startswith("lstm.weight_hh") else canonical_name(name)

    def written(
        self, config: HeadConfig, weights: Mapping[str, Tensor], target: HeadTarget
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if not {"draft_to_target", "head.weight"}.isdisjoint(weights):
            raise self.lacks("a reduced vocabulary, or a head of its own")
        if has_qk_norm(weights):
            raise self.lacks("norms of queries and keys")
        if config.layer["num_attention_heads"] * config.head_dim != config.hidden_size:
            raise self.lacks("attention heads that are together wider or narrower than the states")
        biased = any(f"layers.0.self_attn.{part}_proj.bias" in weights for part in "qkv")
        return {
            **layers_as_model(config, weights),
            "k_mask": config.block_size,
            "qkv_bias": biased,
            "torch_dtype": dtype_of(weights),
        }, dict(_foreign(config, weights))


def _foreign(config: HeadConfig, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by their names there, with zeros for all of the LSTM that counts for nothing."""
    d = config.hidden_size
    yield from foreign_tensors(config, weights)
    for layer in range(LAYERS):
        zeros = weights[f"lstm.weight_ih_l{layer}"].new_zeros
        yield f"lstm.weight_hh_l{layer}", zeros(4 * d, d)
        for bias in BIASES:
            if (name := f"lstm.{bias}_l{layer}") not in weights:
                yield name, zeros(4 * d)
