"""DFlash and DSpark networks in the files of their authors.

dflash     z-lab's: a Qwen3's config.json with `block_size`, `num_target_layers` and `dflash_config`, in which
           `target_layer_ids` mean what layers give; no embedding and no head, which are the target's.
deepspec   DeepSeek's DSpark: the same with flat keys, `markov_rank` and more, and with embedding and head. vLLM's
           spelling of some keys has "dspark_" before them. `dspark_bonus_anchor` says that a row predicts the token at
           its own place.

Rows of a block see each other both ways, unless `is_causal`, or `causal` of `dflash_config`, says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from paceline.errors import ConfigError
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
    layer_of,
    layers_as_model,
    refuse_unread,
)
from paceline.models.heads.head_config import HeadConfig, block_taps
from paceline.utils import shortened

INNER: Final = ("target_layer_ids", "mask_token_id", "causal", "block_size", "swa_window_size")
"""Keys of `dflash_config`."""

FLAT: Final = ("block_size", "mask_token_id", "target_layer_ids", "num_anchors", "num_target_layers", "markov_rank",
               "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")  # fmt: skip
"""Keys of DSpark."""

SPELLINGS: Final = {
    "dspark_block_size": "block_size",
    "dspark_noise_token_id": "mask_token_id",
    "dspark_target_layer_ids": "target_layer_ids",
}
"""vLLM's keys -> DSpark's."""

BONUS: Final = "dspark_bonus_anchor"


class DFlashFormat(HeadFormat):
    """Of DFlash's authors."""

    name = "dflash"
    methods = ("dflash",)
    whole = ()

    def matches(self, config: Found, shapes: Shapes) -> bool:
        return "dflash_config" in config

    def config_of(self, config: Found, shapes: Shapes, num_layers: int) -> HeadConfig:
        inner = config["dflash_config"]
        if not isinstance(inner, Mapping):
            raise ConfigError(f"dflash_config must be an object, got {shortened(inner)}")
        refuse_unread(inner, INNER, where="dflash_config: ")
        refuse_unread(config, (*SHAPE, "block_size", "num_target_layers", "dflash_config", "is_causal"))
        _check(config, num_layers)
        layers = config["num_hidden_layers"]
        return HeadConfig(
            method="dflash",
            hidden_size=config["hidden_size"],
            vocab_size=config["vocab_size"],
            draft_vocab_size=config["vocab_size"],
            num_layers=layers,
            taps=tuple(inner.get("target_layer_ids") or block_taps(num_layers, layers)),
            layer=layer_of(config),
            block_size=config.get("block_size") or inner["block_size"],
            mask_token_id=inner["mask_token_id"],
            causal=config.get("is_causal", inner.get("causal")) or False,
        )

    def canonical(self, name: str, config: HeadConfig) -> str | None:
        return canonical_name(name)

    def written(
        self, config: HeadConfig, weights: Mapping[str, Tensor], target: HeadTarget
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if not {"draft_to_target", "head.weight", "embed.weight"}.isdisjoint(weights):
            raise self.lacks("a reduced vocabulary, or an embedding or a head of its own")
        if config.sample_from_anchor:
            raise self.lacks("drafts from the block's first row")
        return {
            **layers_as_model(config, weights),
            "architectures": ["DFlashDraftModel"],
            "block_size": config.block_size,
            "num_target_layers": target.num_layers,
            "layer_types": ["full_attention"] * config.num_layers,
            "dflash_config": {
                "target_layer_ids": list(config.taps),
                "mask_token_id": config.mask_token_id,
                **({"causal": True} if config.causal else {}),
            },
            "dtype": dtype_of(weights),
        }, dict(weights)


class DeepSpecFormat(HeadFormat):
    """Of DSpark's authors."""

    name = "deepspec"
    methods = ("dspark",)
    whole = ("head.weight", "embed.weight")

    def matches(self, config: Found, shapes: Shapes) -> bool:
        architectures = config.get("architectures") or []
        return any(name in config for name in SPELLINGS) or any("DSpark" in str(name) for name in architectures)

    def config_of(self, config: Found, shapes: Shapes, num_layers: int) -> HeadConfig:
        config = {SPELLINGS.get(key, key): value for key, value in config.items()}
        refuse_unread(config, (*SHAPE, *FLAT, BONUS, "is_causal"))
        _check(config, num_layers)
        return HeadConfig(
            method="dspark",
            hidden_size=config["hidden_size"],
            vocab_size=config["vocab_size"],
            draft_vocab_size=config["vocab_size"],
            num_layers=config["num_hidden_layers"],
            taps=tuple(config["target_layer_ids"]),
            layer=layer_of(config),
            block_size=config["block_size"],
            mask_token_id=config["mask_token_id"],
            causal=config.get("is_causal") or False,
            sample_from_anchor=not config.get(BONUS),
            markov_rank=config.get("markov_rank") or 0,
            markov_head_type=config.get("markov_head_type") or "vanilla",
            enable_confidence_head=config.get("enable_confidence_head") or False,
            confidence_head_with_markov=config.get("confidence_head_with_markov") or False,
        )

    def canonical(self, name: str, config: HeadConfig) -> str | None:
        return canonical_name(name)

    def written(
        self, config: HeadConfig, weights: Mapping[str, Tensor], target: HeadTarget
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if "draft_to_target" in weights:
            raise self.lacks("a reduced vocabulary")
        own = {key: getattr(config, key) for key in FLAT if hasattr(config, key)}
        return {
            **layers_as_model(config, weights),
            "architectures": ["Qwen3DSparkModel"],
            **own,
            "num_target_layers": target.num_layers,
            "target_layer_ids": list(config.taps),
            "layer_types": ["full_attention"] * config.num_layers,
            **({} if config.sample_from_anchor else {BONUS: True}),
            **({"is_causal": True} if config.causal else {}),
            "dtype": dtype_of(weights),
        }, dict(foreign_tensors(config, weights))


def _check(config: Found, num_layers: int) -> None:
    """Reject what was made for a target of another depth, and layers that see a window only."""
    check_sizes(config, config)
    made_for = config.get("num_target_layers")
    if made_for not in (None, num_layers):
        raise ConfigError(f"num_target_layers={made_for!r}, and the model has {num_layers} layers")
