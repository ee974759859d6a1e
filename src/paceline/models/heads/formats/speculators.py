"""Heads of the `speculators` package, version 0.9, which vLLM reads too: config.json with `speculators_model_type`, and
the decoder layers' own config.json in `transformer_layer_config`.

Layer ids mean what a layer reads, which is what the one before it gives. `d2t` holds for each draft id how much larger
the target's is, `t2d` which ids of the target there are. What is not in `transformer_layer_config` is a Qwen3's default
for DFlash and DSpark.
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
    our_numbers,
    refuse_unread,
)
from paceline.models.heads.formats.eagle import (
    LAYERS,
    NORMS,
    THIRD,
    check_norms,
    ids_of,
    norms_of,
    parallel_of,
    residual_of,
    taps_of,
)
from paceline.models.heads.head_config import BLOCKS, HeadConfig

READ: Final = ("speculators_model_type", "speculators_version", "speculators_config", "embed_requires_grad",
               "transformer_layer_config")  # fmt: skip

TYPES: Final = {"eagle3": "eagle3", "peagle": "p_eagle"}
"""`speculators_model_type` -> our method, of those whose layers begin as EAGLE-3's."""

BLOCK: Final = ("aux_hidden_state_layer_ids", "block_size", "mask_token_id", "sample_from_anchor",
                "sliding_window_non_causal")  # fmt: skip
MARKOV: Final = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
"""Keys of DFlash, and those that DSpark has beside them."""

QWEN3: Final = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
"""What transformers leaves out of a Qwen3's config.json where it writes differences alone."""

DSPARK: Final = {
    "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
"""What DSpark has where nothing is said."""


class SpeculatorsFormat(HeadFormat):
    """Of the `speculators` package."""

    name = "speculators"
    methods = (*TYPES.values(), *BLOCKS)
    whole = ("head.weight", "embed.weight")

    def matches(self, config: Found, shapes: Shapes) -> bool:
        return "speculators_model_type" in config

    def config_of(self, config: Found, shapes: Shapes, num_layers: int) -> HeadConfig:
        kind = config["speculators_model_type"]
        if kind not in (*TYPES, *BLOCKS):
            raise ConfigError(f"heads of type {kind!r} are not supported; {', '.join((*TYPES, *BLOCKS))} are")
        return _block_config(config) if kind in BLOCKS else _eagle3_config(config, shapes, num_layers)

    def canonical(self, name: str, config: HeadConfig) -> str | None:
        return canonical_name(name)

    def finish(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return our_numbers(weights)

    def written(
        self, config: HeadConfig, weights: Mapping[str, Tensor], target: HeadTarget
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        block = config.method in BLOCKS
        if config.causal:
            raise self.lacks("blocks whose rows do not see those behind them")
        tokens = config.drafts_of_block if block else 3
        way = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        kind = {method: name for name, method in TYPES.items()}.get(config.method, config.method)
        return {
            "architectures": [ARCHITECTURES[kind]],
            "speculators_model_type": kind,
            "speculators_version": "0.9.0",
            "draft_vocab_size": config.draft_vocab_size,
            BLOCK[0] if block else LAYERS: ids_of(config),
            **(_block_keys(config) if block else _eagle3_keys(config, weights)),
            "transformer_layer_config": layers_as_model(config, weights),
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [way],
                "verifier": {"name_or_path": target.name, "architectures": [target.kind]},
            },
            "dtype": dtype_of(weights),
        }, dict(foreign_tensors(config, weights))


ARCHITECTURES: Final = {
    "eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator", "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
}  # fmt: skip


def _eagle3_config(config: Found, shapes: Shapes, num_layers: int) -> HeadConfig:
    """Of EAGLE-3 and P-EAGLE."""
    parallel = config["speculators_model_type"] == "peagle"
    refuse_unread(config, (*SHAPE, *THIRD, *READ, *NORMS, *(("mask_token_id", "norm_output") if parallel else ())))
    layer = _layer(config, {})
    check_norms(config, shapes)
    if parallel and config.get("embed_requires_grad", True) and "embed_tokens.weight" not in shapes:
        raise ConfigError("embed_requires_grad=True, and there is no embed_tokens.weight that was trained")
    return HeadConfig(
        method="p_eagle" if parallel else "eagle3",
        hidden_size=layer["hidden_size"],
        vocab_size=layer["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        taps=taps_of(config.get(LAYERS), None, num_layers),
        layer=layer_of(layer),
        norm_before_residual=residual_of(config),
        **(parallel_of(config, layer) if parallel else {}),
    )


def _eagle3_keys(config: HeadConfig, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    own: dict[str, Any] = {
        "norm_before_residual": config.norm_before_residual,
        **dict.fromkeys(norms_of(weights), True),
    }
    if config.method == "p_eagle":
        own |= {"mask_token_id": config.mask_token_id, "embed_requires_grad": True}
    return own


def _block_config(config: Found) -> HeadConfig:
    dspark = config["speculators_model_type"] == "dspark"
    refuse_unread(config, (*SHAPE, *BLOCK, *(MARKOV if dspark else ()), *READ))
    layer = _layer(config, QWEN3)
    more = {key: config.get(key, usual) for key, usual in DSPARK.items()} if dspark else {}
    return HeadConfig(
        method=config["speculators_model_type"],
        hidden_size=layer["hidden_size"],
        vocab_size=layer["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        num_layers=layer["num_hidden_layers"],
        taps=tuple(read - 1 for read in config["aux_hidden_state_layer_ids"]),
        layer=layer_of(layer),
        block_size=config.get("block_size", 8),
        mask_token_id=config["mask_token_id"],
        sample_from_anchor=config.get("sample_from_anchor", dspark),
        **more,
    )


def _layer(config: Found, usual: Found) -> dict[str, Any]:
    """`transformer_layer_config`, checked."""
    layer = {**usual, **config["transformer_layer_config"]}
    refuse_unread(layer, SHAPE, where="transformer_layer_config: ")
    check_sizes(config, layer)
    return layer


def _block_keys(config: HeadConfig) -> dict[str, Any]:
    keys = (*BLOCK[1:4], *(MARKOV if config.method == "dspark" else ()))
    return {key: getattr(config, key) for key in keys}
