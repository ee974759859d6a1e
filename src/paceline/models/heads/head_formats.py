"""Heads in the files of other engines: what their config.json says, and what their tensors are called.

speculators   config.json with `speculators_model_type` "eagle3" and a `transformer_layer_config`; vLLM reads it too.
              `d2t` holds for each draft id how much larger the target's is, `t2d` which ids of the target there are.
eagle         the layout of EAGLE's authors, which vLLM and SGLang read: a Llama's config.json; EAGLE-1 has `fc.weight`
              and `layers.0.*`, EAGLE-3 `midlayer.*`, with d2t and t2d as above.
medusa        config.json with `medusa_num_heads`; `K.J.linear` is block J of head K, behind them its own matrix.

A layer id of speculators, and of EAGLE-3 where none are given (2, n // 2 and n - 3 of n layers), means what that layer
reads, which is what the one before it gives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from paceline.errors import CheckpointError, ConfigError
from paceline.models.heads.head_config import LAYER_KEYS, HeadConfig

WRITTEN: Final = ("speculators", "eagle")
"""Formats that a head can be written in."""

Shapes = Mapping[str, Sequence[int]]

DROPPED: Final = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""What says nothing that other tensors do not say."""

NAMES: Final = {"lm_head.weight": "head.weight", "embed_tokens.weight": "embed.weight", "d2t": "draft_to_target"}


def foreign_config(found: Mapping[str, Any], shapes: Shapes, num_layers: int, where: object) -> HeadConfig:
    """The config of a head of another engine.

    Args:
        found: its config.json. shapes: of its tensors. num_layers: of the target. where: folder, for messages.
    Raises:
        CheckpointError: none of the formats, or one of their options that is not supported.
    """
    try:
        if "speculators_model_type" in found:
            return _speculators(found, num_layers, where)
        if "medusa_num_heads" in found:
            return _medusa(found, shapes)
        if "fc.weight" in shapes:
            return _eagle(found, shapes, num_layers)
    except (KeyError, TypeError, AttributeError, ConfigError) as error:
        why = f"no key {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{where}: config.json does not describe a head ({why}); write it again") from None
    raise CheckpointError(
        f"{where} is no head: its config.json has neither 'paceline_head' nor what speculators, EAGLE or Medusa write; "
        "give the folder of a head"
    )


def canonical_names(config: HeadConfig, names: Sequence[str]) -> dict[str, str]:
    """Stored name -> name of `tensors_of`, for the tensors of another engine's head; some are left out."""
    found = {}
    for name in names:
        if name in DROPPED:
            continue
        if config.method == "medusa" and (parts := re.fullmatch(r"(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)", name)):
            head, block, kind = parts.groups()
            own = int(block) >= config.num_layers
            found[name] = f"heads.{head}.head.{kind}" if own else f"heads.{head}.blocks.{block}.{kind}"
        else:
            found[name] = NAMES.get(name, name.replace("midlayer.", "layers.0.", 1))
    return found


def target_ids(offsets: Tensor) -> Tensor:
    """(v,) `draft_to_target` of `d2t`."""
    return torch.arange(len(offsets)) + offsets.to(torch.int64)


def _speculators(found: Mapping[str, Any], num_layers: int, where: object) -> HeadConfig:
    method = found["speculators_model_type"]
    if method != "eagle3":
        raise CheckpointError(f"{where}: heads of speculators of type {method!r} are not supported; eagle3 is")
    for option in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if found.get(option):
            raise CheckpointError(f"{where}: {option} is not supported; train the head without it")
    layer = found["transformer_layer_config"]
    return HeadConfig(
        method="eagle3",
        hidden_size=layer["hidden_size"],
        vocab_size=layer["vocab_size"],
        draft_vocab_size=found["draft_vocab_size"],
        taps=_taps(found.get("eagle_aux_hidden_state_layer_ids"), num_layers),
        layer=_layer(layer),
    )


def _eagle(found: Mapping[str, Any], shapes: Shapes, num_layers: int) -> HeadConfig:
    third = any(name.startswith("midlayer.") for name in shapes)
    more: dict[str, Any] = {"taps": _taps(None, num_layers)} if third else {}
    return HeadConfig(
        method="eagle3" if third else "eagle",
        hidden_size=found["hidden_size"],
        vocab_size=found["vocab_size"],
        draft_vocab_size=found.get("draft_vocab_size") or found["vocab_size"],
        layer=_layer(found),
        **more,
    )


def _medusa(found: Mapping[str, Any], shapes: Shapes) -> HeadConfig:
    layers = found.get("medusa_num_layers", 1)
    rows, hidden = shapes[f"0.{layers}.weight"]
    return HeadConfig(
        method="medusa", hidden_size=hidden, vocab_size=rows, draft_vocab_size=rows,
        num_heads=found["medusa_num_heads"], num_layers=layers,
    )  # fmt: skip


def _taps(layers: Sequence[int] | None, count: int) -> tuple[int, ...]:
    return tuple(layer - 1 for layer in layers or (2, count // 2, count - 3))


def _layer(found: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a layer; those of newer transformers keep the rotary base in an object."""
    rope = found.get("rope_parameters") or {}
    given = {"rope_theta": rope.get("rope_theta"), **found}
    if rope.get("rope_type", "default") != "default":
        given["rope_scaling"] = dict(rope)
    return {key: given[key] for key in LAYER_KEYS if given.get(key) is not None}


# ------------------------------------------------------------------------------------------------ writing


def exported(
    config: HeadConfig, weights: Mapping[str, Tensor], to: str, *, name: str, kind: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of a head for other engines.

    Args:
        weights: with `head.weight` and `embed.weight`. to: one of WRITTEN. name, kind: of the target: its name or path,
            and the architecture in its config.json.
    Raises:
        ConfigError: a method that the format does not have, or layers that it cannot name.
    """
    if config.method not in ("eagle", "eagle3") or (to == "speculators" and config.method == "eagle"):
        raise ConfigError(f"a head of method {config.method!r} has no form in the format {to!r}; eagle3 has")
    layer: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": 1,
        "attention_bias": False,
        "tie_word_embeddings": False,
        **config.layer,
    }
    tensors = dict(_foreign(config, weights, midlayer=to == "eagle"))
    if to == "eagle":
        third = config.method == "eagle3"
        return layer | {
            "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"],
            "draft_vocab_size": config.draft_vocab_size,
            "torch_dtype": str(weights["fc.weight"].dtype).removeprefix("torch."),
        }, tensors
    way = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [way],
            "verifier": {"name_or_path": name, "architectures": [kind]},
        },
        "dtype": str(weights["fc.weight"].dtype).removeprefix("torch."),
    }, tensors


def _foreign(config: HeadConfig, weights: Mapping[str, Tensor], *, midlayer: bool) -> Iterator[tuple[str, Tensor]]:
    stored = {canonical: name for name, canonical in NAMES.items()}
    for name, tensor in weights.items():
        if name == "draft_to_target":
            yield "d2t", tensor - torch.arange(len(tensor))
            there = torch.zeros(config.vocab_size, dtype=torch.bool)
            there[tensor] = True
            yield "t2d", there
        elif midlayer and config.method == "eagle3" and name.startswith("layers.0."):
            yield f"midlayer.{name.removeprefix('layers.0.')}", tensor
        else:
            yield stored.get(name, name), tensor
