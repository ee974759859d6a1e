"""EAGLE heads in the files of EAGLE's authors, which vLLM and SGLang read.

config.json is a Llama's; EAGLE-1 has `fc.weight` and `layers.0.*`, EAGLE-3 `midlayer.*`. An older layout of vLLM has
the Llama's keys under "model", and "model." before the names. P-EAGLE is EAGLE-3 with `mask_hidden`, `layers.*` of any
number and `ptd_token_id`.

`d2t` holds for each draft id how much larger the target's is, `t2d` which ids of the target there are. A layer id of
EAGLE-3, where none are given 2, n // 2 and n - 3 of n layers, means what that layer reads, which is what the one before
it gives. NVIDIA and SGLang keep the ids in an object `eagle_config`, where some count what layers read and others what
they give; they are read where that makes no doubt.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

from torch import Tensor

from paceline.checkpoints import MASK_KEYS, mask_token
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
    has_qk_norm,
    layer_of,
    layers_as_model,
    our_numbers,
    refuse_unread,
)
from paceline.models.heads.head_config import TAPPED, HeadConfig, HeadMethod
from paceline.models.heads.head_tensors import MASK_HIDDEN
from paceline.utils import shortened

LAYERS: Final = "eagle_aux_hidden_state_layer_ids"

THIRD: Final = (LAYERS, "norm_before_residual")
"""Keys of EAGLE-3."""

NORMS: Final = ("norm_before_fc", "fc_norm")
"""Keys of the `speculators` package that say which norms stand before fc; `norm_output` norms what EAGLE-3 goes on
from, which P-EAGLE does not do."""

UNUSED: Final = ("next_layer_regular", "parallel_draft_heads_num_layers", "has_lm_head")
"""Keys of `eagle_config` that the tensors say too, or that count only with a `parallel_draft_step` above 1."""


class EagleFormat(HeadFormat):
    """Of EAGLE's authors."""

    name = "eagle"
    methods: ClassVar[tuple[str, ...]] = ("eagle", "eagle3", "p_eagle")
    whole = ("head.weight", "embed.weight")

    def matches(self, config: Found, shapes: Shapes) -> bool:
        return "fc.weight" in shapes

    def config_of(self, config: Found, shapes: Shapes, num_layers: int) -> HeadConfig:
        if isinstance(config.get("model"), dict):
            config = {**config["model"], **{key: value for key, value in config.items() if key != "model"}}
        if "token_map" in shapes or config.get("truncated_vocab_size") not in (None, config["vocab_size"]):
            raise ConfigError(
                "token_map is not supported; leave it out, with truncated_vocab_size and the rows it cuts"
            )
        third = any(name.startswith("midlayer.") or ".hidden_norm." in name for name in shapes)
        parallel = any(name.endswith(MASK_HIDDEN) for name in shapes)
        extra_keys = (*THIRD, "eagle_config", *MASK_KEYS) if third else ()
        refuse_unread(config, (*SHAPE, "truncated_vocab_size", "eagle_fc_bias", *extra_keys))
        check_sizes(config, config)
        more: dict[str, Any] = {}
        if third:
            inner = _inner(config)
            taps = taps_of(config.get(LAYERS), inner.get(LAYERS), num_layers)
            more = {"taps": taps, "norm_before_residual": residual_of({**inner, **config})}
        method: HeadMethod = "eagle3" if third else "eagle"
        if third and parallel:
            method, more = "p_eagle", more | parallel_of(config, config)
        return HeadConfig(
            method=method,
            hidden_size=config["hidden_size"],
            vocab_size=config["vocab_size"],
            draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
            layer=layer_of(config),
            **more,
        )

    def canonical(self, name: str, config: HeadConfig) -> str | None:
        known = canonical_name(name)
        return known and known.replace("midlayer.", "layers.0.", 1)

    def finish(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return our_numbers(weights)

    def written(
        self, config: HeadConfig, weights: Mapping[str, Tensor], target: HeadTarget
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        third, parallel = config.method in TAPPED, config.method == "p_eagle"
        if has_qk_norm(weights):
            raise self.lacks("norms of queries and keys")
        if norms_of(weights):
            raise self.lacks("norms before fc")
        more = {LAYERS: ids_of(config), "norm_before_residual": config.norm_before_residual} if third else {}
        if parallel:
            more["ptd_token_id"] = config.mask_token_id
        return {
            **layers_as_model(config, weights),
            "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"],
            "draft_vocab_size": config.draft_vocab_size,
            "torch_dtype": dtype_of(weights),
            **more,
        }, dict(_foreign(config, weights, layer="midlayer." if third and not parallel else "layers.0."))


def _inner(config: Found) -> Found:
    """`eagle_config`, in which NVIDIA keeps what others have at the top.

    Raises:
        ConfigError: a switch that makes another head.
    """
    inner = config.get("eagle_config") or {}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"eagle_config must be an object, got {shortened(inner)}")
    refuse_unread(inner, (*THIRD, *UNUSED), where="eagle_config: ")
    return inner


def parallel_of(config: Found, layer: Found) -> dict[str, Any]:
    """What P-EAGLE has beside EAGLE-3."""
    mask = mask_token(config, "the head")
    if mask is None:
        raise ConfigError(f"config.json names no mask token ({', '.join(MASK_KEYS)})")
    return {"mask_token_id": mask, "num_layers": layer.get("num_hidden_layers") or 1}


def norms_of(weights: Container[str]) -> list[str]:
    """The keys of the norms before fc that there are."""
    there = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}
    return [key for key, name in there.items() if name in weights]


def check_norms(config: Found, shapes: Shapes) -> None:
    """Reject norms before fc that are switched on and not there, or there and not switched on."""
    there = norms_of(shapes)
    for key in NORMS:
        if bool(config.get(key)) != (key in there):
            raise ConfigError(f"{key}={shortened(config.get(key))} does not fit the norms that there are before fc")


def residual_of(config: Found) -> bool:
    """`HeadConfig.norm_before_residual`."""
    return config.get("norm_before_residual") or False


def taps_of(ids: Sequence[int] | None, nested: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """The layers whose outputs are read.

    Args:
        ids: of layers by what they read. nested: those of `eagle_config`, which count where there are no others.
    Raises:
        ConfigError: nested ids that may count either what layers read or what they give.
    """
    usual = (2, count // 2, count - 3)
    if not ids and nested:
        ids = _read_by(tuple(nested), usual, count)
    return tuple(layer - 1 for layer in ids or usual)


def _read_by(nested: tuple[int, ...], usual: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Ids of `eagle_config` by what layers read: the usual ones of either kind, and those that no layer gives."""
    if nested == usual or max(nested) >= count:
        return nested
    if tuple(layer + 1 for layer in nested) == usual:
        return usual
    raise ConfigError(
        f"eagle_config: {LAYERS}={list(nested)} counts what layers give in some engines and what they read in others; "
        f"write {LAYERS} at the top of config.json, counted by what they read"
    )


def ids_of(config: HeadConfig) -> list[int]:
    """The layers by what they read."""
    return [tap + 1 for tap in config.taps]


def _foreign(config: HeadConfig, weights: Mapping[str, Tensor], *, layer: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors by their names there; `layer` stands before those of the first decoder layer."""
    for name, tensor in foreign_tensors(config, weights):
        yield name.replace("layers.0.", layer, 1), tensor
