"""What a format of another engine is, and what several share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.models.heads.head_config import LAYER_KEYS, HeadConfig
from paceline.models.heads.head_tensors import MASK_HIDDEN
from paceline.utils import shortened

Shapes = Mapping[str, Sequence[int]]
Found = Mapping[str, Any]

HARMLESS: Final = frozenset({
    *LAYER_KEYS, "hidden_size", "vocab_size", "num_hidden_layers", "rope_parameters", "tie_word_embeddings",
    "attention_bias", "mlp_bias", "bias", "qkv_bias", "torch_dtype", "dtype", "use_cache", "initializer_range",
    "pretraining_tp", "attention_dropout", "dropout_rate", "bos_token_id", "eos_token_id", "pad_token_id",
    "unk_token_id", "model_type", "architectures", "auto_map", "_name_or_path", "base_model_name_or_path",
    "transformers_version", "version", "max_window_layers", "num_lookahead_tokens", "draft_vocab_size",
    "model_max_length", "target_model_type", "method", "id2label", "label2id", "return_dict", "problem_type",
    "_attn_implementation_autoset", "chunk_size_feed_forward",
})  # fmt: skip
"""Keys of any format that are read, that the tensors say too, or that change nothing of what a head drafts."""

NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "logit_scale": (1.0,),
    "partial_rotary_factor": (1.0,),
    "use_sliding_window": (False,),
    "skip_prenorm": (True,),
    "skip_output_norm": (True,),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "parallel_draft_step": (1,),
}
"""Keys that change what a head drafts, with the values under which they do not."""


SHAPE: Final = ("target_hidden_size", "layer_types", "sliding_window")
"""Keys of a decoder layer that are checked."""

NAMES: Final = {"lm_head.weight": "head.weight", "embed_tokens.weight": "embed.weight", "d2t": "draft_to_target"}
LATER_NORM: Final = re.compile(r"layers\.[1-9]\d*\.hidden_norm\.weight")
"""What vLLM keeps in every layer of P-EAGLE and uses in the first."""
DROPPED: Final = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""What formats with decoder layers call what a head shares with its target, and what says nothing that other tensors
do not say.
"""


class HeadTarget(NamedTuple):
    """The model that a head is written for.

    Attributes:
        name: or path. kind: the architecture in its config.json. num_layers: of it.
    """

    name: str
    kind: str
    num_layers: int = 0


class HeadFormat(ABC):
    """The files of one engine, as config.json and tensors.

    Attributes:
        name: for users, and in messages.
        methods: whose heads can be written.
        whole: tensors that other engines do not take from the target, and which are filled in before a head is written.
    """

    name: ClassVar[str]
    methods: ClassVar[tuple[str, ...]]
    whole: ClassVar[tuple[str, ...]] = ("head.weight",)

    @abstractmethod
    def matches(self, config: Found, shapes: Shapes) -> bool:
        """Whether a folder has this format, by its config.json and the shapes of its tensors."""

    @abstractmethod
    def config_of(self, config: Found, shapes: Shapes, num_layers: int) -> HeadConfig:
        """What a folder holds; `num_layers` are the target's.

        Raises:
            ConfigError, KeyError, TypeError: config.json does not describe a head, or one that is not supported.
        """

    @abstractmethod
    def canonical(self, name: str, config: HeadConfig) -> str | None:
        """The name of `tensors_of` for a tensor; None for one that says nothing that others do not say."""

    def finish(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors, by their canonical names, with our meaning of numbers where the format has another."""
        return weights

    @abstractmethod
    def written(
        self, config: HeadConfig, weights: Mapping[str, Tensor], target: HeadTarget
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json and tensors of a head that has all that `whole` names.

        Raises:
            ConfigError: something that the format has no place for.
        """

    def lacks(self, what: str) -> ConfigError:
        """The error for what cannot be written."""
        return ConfigError(f"the format {self.name!r} has no place for {what}; write 'paceline', or another format")


def refuse_unread(config: Found, read: Collection[str], *, where: str = "") -> None:
    """Refuse what a config.json switches on and nobody reads, for it may change what the head drafts.

    Args:
        read: keys of the format. where: before a key, for messages.
    Raises:
        ConfigError: naming the first of them.
    """
    for key, value in config.items():
        fine = NEUTRAL.get(key)
        known = key in read or key in HARMLESS
        if not known and (value not in (None, *fine) if fine else value not in (None, False, 0, "", [], {})):
            raise ConfigError(f"{where}{key}={shortened(value)} is not supported; train the head without it")


def layer_of(config: Found) -> dict[str, Any]:
    """The keys of a decoder layer; newer transformers keep the rotary base in an object.

    Raises:
        ConfigError: a layer with a sliding window.
    """
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise ConfigError("layers with a sliding window are not supported; train the head without it")
    rope = config.get("rope_parameters") or {}
    values = {"rope_theta": rope.get("rope_theta"), **config}
    if rope.keys() - {"rope_theta", "rope_type"} or rope.get("rope_type", "default") != "default":
        values["rope_scaling"] = dict(rope)
    return {key: values[key] for key in LAYER_KEYS if values.get(key) is not None}


def check_sizes(config: Found, layer: Found) -> None:
    """Reject states of another width than the layer's, and a layer that sees a window only.

    Raises:
        ConfigError: either of them.
    """
    if config.get("target_hidden_size") not in (None, layer["hidden_size"]):
        raise ConfigError(
            f"target_hidden_size must be hidden_size={layer['hidden_size']}, got {config['target_hidden_size']!r}"
        )
    if layer.get("sliding_window") and layer.get("use_sliding_window") is not False:
        raise ConfigError(f"sliding_window={layer['sliding_window']!r} is not supported; train the head without it")


def canonical_name(name: str) -> str | None:
    """The name of `tensors_of`, where layers are called `layers.N`; None for what is dropped."""
    while name.startswith("model."):
        name = name.removeprefix("model.")
    return None if name in DROPPED or LATER_NORM.fullmatch(name) else NAMES.get(name, name)


def our_numbers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with ids in the place of offsets, for `d2t` holds how much larger the target's id is, and with the
    axes of `tensors_of`.
    """
    if (offsets := weights.get("draft_to_target")) is not None:
        weights = {**weights, "draft_to_target": torch.arange(len(offsets)) + offsets}
    if (hidden := weights.get(MASK_HIDDEN)) is not None:
        weights = {**weights, MASK_HIDDEN: hidden.view(1, 1, -1)}
    return weights


def foreign_tensors(config: HeadConfig, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The inverse: tensors by their names there; `t2d` says which ids of the target there are."""
    stored = {canonical: name for name, canonical in NAMES.items()}
    for name, tensor in weights.items():
        yield stored.get(name, name), tensor - torch.arange(len(tensor)) if name == "draft_to_target" else tensor
        if name == "draft_to_target":
            there = torch.zeros(config.vocab_size, dtype=torch.bool)
            there[tensor] = True
            yield "t2d", there


def has_qk_norm(weights: Collection[str]) -> bool:
    """Whether the decoder layers have norms of queries and keys."""
    return "layers.0.self_attn.q_norm.weight" in weights


def layers_as_model(config: HeadConfig, weights: Collection[str]) -> dict[str, Any]:
    """config.json of a model of the decoder layers alone: a Llama, or with norms of queries and keys a Qwen3."""
    qwen3, given = has_qk_norm(weights), {key: value for key, value in config.layer.items() if value is not None}
    usual = {"num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "rms_norm_eps": 1e-6,
             "rope_theta": 10000.0}  # fmt: skip
    return {
        "architectures": ["Qwen3ForCausalLM" if qwen3 else "LlamaForCausalLM"],
        "model_type": "qwen3" if qwen3 else "llama",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "attention_bias": any(name.endswith("self_attn.k_proj.bias") for name in weights),
        "tie_word_embeddings": False,
        **(usual | given if qwen3 else given),
    }


def dtype_of(weights: Mapping[str, Tensor]) -> str:
    """The name of the weights' dtype, for a config.json."""
    return str(next(weight for weight in weights.values() if weight.is_floating_point()).dtype).removeprefix("torch.")


def heads_rows(config: HeadConfig, weights: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor]]:
    """The rows of every head: its own, or those of all.

    Raises:
        KeyError: there are neither.
    """
    for head in range(config.num_heads):
        key = f"heads.{head}.head.weight"
        yield head, weights[key if key in weights else "head.weight"]
