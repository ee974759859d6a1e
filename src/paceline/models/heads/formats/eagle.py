"""EAGLE heads in the files of EAGLE's authors, which vLLM and SGLang read, and of the `speculators` package.

eagle         a Llama's config.json; EAGLE-1 has `fc.weight` and `layers.0.*`, EAGLE-3 `midlayer.*`. An older layout of
              vLLM has the Llama's keys under "model", and "model." before the names.
              P-EAGLE is EAGLE-3 with `mask_hidden`, `layers.*` of any number and `ptd_token_id`.
speculators   config.json with `speculators_model_type` "eagle3" or "peagle" and a `transformer_layer_config`; vLLM
              reads it too. P-EAGLE's has `mask_token_id`.

`d2t` holds for each draft id how much larger the target's is, `t2d` which ids of the target there are. A layer id of
EAGLE-3, where none are given 2, n // 2 and n - 3 of n layers, means what that layer reads, which is what the one before
it gives. NVIDIA and SGLang keep the ids in an object `eagle_config`, where some count what layers read and others what
they give; they are read where that makes no doubt.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from paceline.checkpoints import MASK_KEYS, mask_token
from paceline.errors import ConfigError
from paceline.models.heads.formats.base import Found, HeadFormat, HeadTarget, Shapes, dtype_of, layer_of, refuse_unread
from paceline.models.heads.head_config import TAPPED, HeadConfig, HeadMethod
from paceline.models.heads.head_tensors import MASK_HIDDEN
from paceline.utils import shortened

DROPPED: Final = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""What says nothing that other tensors do not say."""

NAMES: Final = {"lm_head.weight": "head.weight", "embed_tokens.weight": "embed.weight", "d2t": "draft_to_target"}

LATER_NORM: Final = re.compile(r"layers\.[1-9]\d*\.hidden_norm\.weight")
"""What vLLM keeps in every layer of P-EAGLE and uses in the first."""

LAYERS: Final = "eagle_aux_hidden_state_layer_ids"

SHAPE: Final = ("target_hidden_size", "layer_types", "sliding_window")
"""Keys of any EAGLE that are checked."""

THIRD: Final = (LAYERS, "norm_before_residual")
"""Keys of EAGLE-3."""

NORMS: Final = ("norm_before_fc", "fc_norm")
"""Keys of the `speculators` package that say which norms stand before fc; `norm_output` norms what EAGLE-3 goes on
from, which P-EAGLE does not do."""

TYPES: Final = {"eagle3": "eagle3", "peagle": "p_eagle"}
"""`speculators_model_type` -> our method."""

SPECULATORS: Final = ("speculators_model_type", "speculators_version", "speculators_config", "embed_requires_grad",
                      "transformer_layer_config")  # fmt: skip

UNUSED: Final = ("next_layer_regular", "parallel_draft_heads_num_layers", "has_lm_head")
"""Keys of `eagle_config` that the tensors say too, or that count only with a `parallel_draft_step` above 1."""

Q_NORM: Final = "layers.0.self_attn.q_norm.weight"
QWEN3: Final = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
"""A layer with norms of queries and keys."""


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
        _check_sizes(config, config)
        more: dict[str, Any] = {}
        if third:
            inner = _inner(config)
            taps = _taps(config.get(LAYERS), inner.get(LAYERS), num_layers)
            more = {"taps": taps, "norm_before_residual": _residual({**inner, **config})}
        method: HeadMethod = "eagle3" if third else "eagle"
        if third and parallel:
            method, more = "p_eagle", more | _parallel(config, config)
        return HeadConfig(
            method=method,
            hidden_size=config["hidden_size"],
            vocab_size=config["vocab_size"],
            draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
            layer=layer_of(config),
            **more,
        )

    def canonical(self, name: str, config: HeadConfig) -> str | None:
        while name.startswith("model."):
            name = name.removeprefix("model.")
        if name in DROPPED or LATER_NORM.fullmatch(name):
            return None
        return NAMES.get(name, name.replace("midlayer.", "layers.0.", 1))

    def finish(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        if (offsets := weights.get("draft_to_target")) is not None:
            weights = {**weights, "draft_to_target": torch.arange(len(offsets)) + offsets}
        if (hidden := weights.get(MASK_HIDDEN)) is not None:
            weights = {**weights, MASK_HIDDEN: hidden.view(1, 1, -1)}
        return weights

    def written(
        self, config: HeadConfig, weights: Mapping[str, Tensor], target: HeadTarget
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        third, parallel = config.method in TAPPED, config.method == "p_eagle"
        if Q_NORM in weights:
            raise self.lacks("norms of queries and keys")
        if _norms(weights):
            raise self.lacks("norms before fc")
        more = {LAYERS: _ids(config), "norm_before_residual": config.norm_before_residual} if third else {}
        if parallel:
            more["ptd_token_id"] = config.mask_token_id
        return {
            **_llama(config),
            "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"],
            "draft_vocab_size": config.draft_vocab_size,
            "torch_dtype": dtype_of(weights),
            **more,
        }, dict(_foreign(config, weights, layer="midlayer." if third and not parallel else "layers.0."))


class SpeculatorsFormat(EagleFormat):
    """Of the `speculators` package, version 0.9."""

    name = "speculators"
    methods = ("eagle3", "p_eagle")

    def matches(self, config: Found, shapes: Shapes) -> bool:
        return "speculators_model_type" in config

    def config_of(self, config: Found, shapes: Shapes, num_layers: int) -> HeadConfig:
        kind = config["speculators_model_type"]
        if kind not in TYPES:
            raise ConfigError(f"heads of type {kind!r} are not supported; {' and '.join(TYPES)} are")
        parallel = kind == "peagle"
        own_keys = ("mask_token_id", "norm_output") if parallel else ()
        refuse_unread(config, (*SHAPE, *THIRD, *SPECULATORS, *NORMS, *own_keys))
        layer = config["transformer_layer_config"]
        refuse_unread(layer, SHAPE, where="transformer_layer_config: ")
        _check_sizes(config, layer)
        _check_norms(config, shapes)
        if parallel and config.get("embed_requires_grad", True) and "embed_tokens.weight" not in shapes:
            raise ConfigError("embed_requires_grad=True, and there is no embed_tokens.weight that was trained")
        more = _parallel(config, layer) if parallel else {}
        return HeadConfig(
            method="p_eagle" if parallel else "eagle3",
            hidden_size=layer["hidden_size"],
            vocab_size=layer["vocab_size"],
            draft_vocab_size=config["draft_vocab_size"],
            taps=_taps(config.get(LAYERS), None, num_layers),
            layer=layer_of(layer),
            norm_before_residual=_residual(config),
            **more,
        )

    def written(
        self, config: HeadConfig, weights: Mapping[str, Tensor], target: HeadTarget
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        parallel, norms = config.method == "p_eagle", _norms(weights)
        kind = "peagle" if parallel else "eagle3"
        way = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        more: dict[str, Any] = dict.fromkeys(norms, True)
        if parallel:
            more |= {"mask_token_id": config.mask_token_id, "embed_requires_grad": True}
        return {
            "architectures": ["PEagleSpeculator" if parallel else "Eagle3Speculator"],
            "speculators_model_type": kind,
            "speculators_version": "0.9.0",
            "draft_vocab_size": config.draft_vocab_size,
            "norm_before_residual": config.norm_before_residual,
            LAYERS: _ids(config),
            "transformer_layer_config": _llama(config) | (QWEN3 if Q_NORM in weights else {}),
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [way],
                "verifier": {"name_or_path": target.name, "architectures": [target.kind]},
            },
            "dtype": dtype_of(weights),
            **more,
        }, dict(_foreign(config, weights, layer="layers.0."))


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


def _parallel(config: Found, layer: Found) -> dict[str, Any]:
    """What P-EAGLE has beside EAGLE-3."""
    mask = mask_token(config, "the head")
    if mask is None:
        raise ConfigError(f"config.json names no mask token ({', '.join(MASK_KEYS)})")
    return {"mask_token_id": mask, "num_layers": layer.get("num_hidden_layers") or 1}


def _norms(weights: Container[str]) -> list[str]:
    """The keys of the norms before fc that there are."""
    there = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}
    return [key for key, name in there.items() if name in weights]


def _check_norms(config: Found, shapes: Shapes) -> None:
    """Reject norms before fc that are switched on and not there, or there and not switched on."""
    there = _norms(shapes)
    for key in NORMS:
        if bool(config.get(key)) != (key in there):
            raise ConfigError(f"{key}={shortened(config.get(key))} does not fit the norms that there are before fc")


def _residual(config: Found) -> bool:
    return config.get("norm_before_residual") or False


def _check_sizes(config: Found, layer: Found) -> None:
    """Reject states of another width than the layer's, and a layer that sees a window only."""
    if config.get("target_hidden_size") not in (None, layer["hidden_size"]):
        raise ConfigError(
            f"target_hidden_size must be hidden_size={layer['hidden_size']}, got {config['target_hidden_size']!r}"
        )
    if layer.get("sliding_window") and layer.get("use_sliding_window") is not False:
        raise ConfigError(f"sliding_window={layer['sliding_window']!r} is not supported; train the head without it")


def _taps(ids: Sequence[int] | None, nested: Sequence[int] | None, count: int) -> tuple[int, ...]:
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


def _ids(config: HeadConfig) -> list[int]:
    return [tap + 1 for tap in config.taps]


def _llama(config: HeadConfig) -> dict[str, Any]:
    """The layer as a model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "attention_bias": False,
        "tie_word_embeddings": False,
        **config.layer,
    }


def _foreign(config: HeadConfig, weights: Mapping[str, Tensor], *, layer: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors by their names there; `layer` stands before those of the decoder layer."""
    stored = {canonical: name for name, canonical in NAMES.items()}
    for name, tensor in weights.items():
        if name == "draft_to_target":
            yield "d2t", tensor - torch.arange(len(tensor))
            there = torch.zeros(config.vocab_size, dtype=torch.bool)
            there[tensor] = True
            yield "t2d", there
        elif name.startswith("layers.0."):
            yield f"{layer}{name.removeprefix('layers.0.')}", tensor
        else:
            yield stored.get(name, name), tensor
