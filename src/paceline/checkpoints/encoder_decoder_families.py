"""Which encoder-decoder families run natively, and what each makes of its `config.json`.

Sources: T5 (arXiv:1910.10683), mT5 (arXiv:2010.11934), UMT5 (arXiv:2304.09151), BART (arXiv:1910.13461), mBART
(arXiv:2001.08210), PEGASUS (arXiv:1912.08777), Marian (arXiv:1804.00344), M2M-100 (arXiv:2010.11125), NLLB
(arXiv:2207.04672), Whisper (arXiv:2212.04356), Moonshine (arXiv:2410.15608).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from paceline.checkpoints.config_keys import ConfigKeys, rope_spec
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models import (
    ConvolutionSpec,
    EncoderSpec,
    LayerSpec,
    ModelSpec,
    PositionSpec,
    RelativeBiasSpec,
    SimpleUnitSpec,
)

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
LAYER_NORM_EPS: Final = 1e-5
MARIAN_NORM_EPS: Final = 1e-6
UNBOUNDED: Final = 8192
"""Longest source and text of models whose positions are distances, which no configuration limits."""

Rename = tuple[tuple[re.Pattern[str], str], ...]


def _patterns(*pairs: tuple[str, str]) -> Rename:
    return tuple((re.compile(old), new) for old, new in pairs)


_FAIRSEQ_NAMES = _patterns(
    (r"^model\.", ""),
    (r"^proj_out\.", "lm_head."),
    (r"^final_logits_bias$", "lm_head.bias"),
    (r"^decoder\.layers\.", "layers."),
    (r"^decoder\.", ""),
    (r"\bembed_positions\.", "embed_positions."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"_attn\.out_proj\.", "_attn.o_proj."),
    (r"\.self_attn_layer_norm\.", ".input_layernorm."),
    (r"\.encoder_attn_layer_norm\.", ".cross_attn_layernorm."),
    (r"(layers\.\d+)\.final_layer_norm\.", r"\1.post_attention_layernorm."),
    (r"(\.mlp)?\.fc1\.", ".mlp.up_proj."),
    (r"(\.mlp)?\.fc2\.", ".mlp.down_proj."),
    (r"^(encoder\.)?layer_norm\.", r"\1norm."),
    (r"^(encoder\.)conv(\d)\.", r"\1convolutions.\2."),
)
_MOONSHINE_NAMES = _patterns(
    (r"^(?:model\.)?decoder\.(.*layers\.\d+)\.mlp\.fc1\.", r"\1.mlp.up_gate_proj."),
    (r"^(?:model\.)?decoder\.(.*layers\.\d+)\.post_attention_layernorm\.", r"\1.cross_attn_layernorm."),
    (r"(layers\.\d+)\.final_layernorm\.", r"\1.post_attention_layernorm."),
    (r"^(model\.)?encoder\.groupnorm\.", "encoder.convolutions.1.norm."),
    *((pattern.pattern, new) for pattern, new in _FAIRSEQ_NAMES),
)
_T5_NAMES = _patterns(
    (r"\.layer\.\d\.EncDecAttention\.relative_attention_bias\.", ".rotary_emb.inv_freq."),
    (r"^encoder\.block\.", "encoder.layers."),
    (r"^decoder\.block\.", "layers."),
    (r"\.layer\.0\.SelfAttention\.relative_attention_bias\.", ".relative_bias."),
    (r"\.layer\.0\.SelfAttention\.([qkvo])\.", r".self_attn.\1_proj."),
    (r"\.layer\.1\.EncDecAttention\.([qkvo])\.", r".cross_attn.\1_proj."),
    (r"\.layer\.0\.layer_norm\.", ".input_layernorm."),
    (r"^(layers\.\d+)\.layer\.1\.layer_norm\.", r"\1.cross_attn_layernorm."),
    (r"\.layer\.[12]\.layer_norm\.", ".post_attention_layernorm."),
    (r"\.layer\.[12]\.DenseReluDense\.wi_0\.", ".mlp.gate_proj."),
    (r"\.layer\.[12]\.DenseReluDense\.wi(_1)?\.", ".mlp.up_proj."),
    (r"\.layer\.[12]\.DenseReluDense\.wo\.", ".mlp.down_proj."),
    (r"^decoder\.final_layer_norm\.", "norm."),
    (r"^encoder\.final_layer_norm\.", "encoder.norm."),
    (r"^decoder\.", ""),
)


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderFamily:
    """What is fixed for a family; the rest is in its `config.json`.

    Attributes:
        names: patterns of tensors' names, and what takes their place, so that `checkpoints.weights` knows them.
        defaults: of keys that its files may leave out.
        spec: makes the model's shape of them.
    """

    names: Rename
    defaults: Mapping[str, Any] = field(default_factory=dict)
    spec: Callable[[ConfigKeys, EncoderDecoderFamily], ModelSpec]
    placement: Literal["pre", "residual"] = "pre"
    positions: Literal["learned", "sinusoidal", "fairseq"] = "learned"
    offset: int = 0
    embed_norm: bool = False
    final_norm: bool = True
    head_bias: bool = True


def _activation(keys: ConfigKeys, name: object) -> Activation:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{keys.family}: activation {name!r} is not implemented; known are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _head_dim(keys: ConfigKeys, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise CheckpointError(f"config.json: {hidden} dimensions do not fall into {heads} heads evenly; repair it")
    return hidden // heads


def _stack(keys: ConfigKeys, side: Literal["encoder", "decoder"], **extra: Any) -> dict[str, Any]:
    """The fields that encoder and decoder of the families after BART have in common."""
    hidden, heads = keys.size("d_model"), keys.size(f"{side}_attention_heads")
    return {
        "family": keys.family,
        "vocab_size": keys.size("vocab_size"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": _head_dim(keys, hidden, heads),
        "intermediate_size": keys.size(f"{side}_ffn_dim"),
        "layers": (LayerSpec(rope=None),) * keys.size(f"{side}_layers"),
        "ropes": {},
        "norm": "layer",
        "norm_bias": True,
        "norm_eps": LAYER_NORM_EPS,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "gated": False,
        "activation": _activation(keys, keys.get("activation_function")),
        "embedding_multiplier": float(hidden) ** 0.5 if keys.flag("scale_embedding") else 1.0,
    } | extra


def _fairseq(keys: ConfigKeys, family: EncoderDecoderFamily) -> ModelSpec:
    """BART and those after it: absolute positions, layer norms, biases everywhere."""
    longest = keys.size("max_position_embeddings")
    common = {
        "norm_placement": family.placement,
        "positions": PositionSpec(kind=family.positions, rows=longest, offset=family.offset),
        "embed_norm": family.embed_norm,
        "final_norm": family.final_norm,
        "max_context": longest,
    }
    shared = keys.flag("share_encoder_decoder_embeddings")
    if not shared and keys.optional_size("decoder_vocab_size") is None:
        raise CheckpointError("config.json lacks 'decoder_vocab_size' beside embeddings that are not shared; repair it")
    encoder = ModelSpec(**_stack(keys, "encoder", **common))
    decoder = _stack(keys, "decoder", **common)
    decoder["vocab_size"] = keys.optional_size("decoder_vocab_size") or decoder["vocab_size"]
    return ModelSpec(
        **decoder,
        tied=keys.flag("tie_word_embeddings"),
        head_bias=family.head_bias,
        encoder=EncoderSpec(model=encoder, shared_embedding=shared),
    )


def _marian_file(keys: ConfigKeys, family: EncoderDecoderFamily) -> ModelSpec:
    """As the encoder-decoder models after BART, but for what texts begin with, and decoders that do not attend to
    themselves.
    """
    spec = _fairseq(keys, family)
    assert spec.encoder is not None
    encoder = replace(spec.encoder, model=replace(spec.encoder.model, norm_eps=MARIAN_NORM_EPS))
    if keys.flag("recurrent_decoder"):
        layer = LayerSpec(rope=None, attention=False, mixer=SimpleUnitSpec(width=spec.hidden_size))
        spec = replace(spec, layers=(layer,) * spec.num_layers)
    return replace(spec, norm_eps=MARIAN_NORM_EPS, empty_start=True, encoder=encoder)


def _whisper(keys: ConfigKeys, family: EncoderDecoderFamily) -> ModelSpec:
    def positions(key: str) -> dict[str, Any]:
        rows = keys.size(key)
        return {"positions": PositionSpec(kind="learned", rows=rows), "max_context": rows}

    hidden, bins = keys.size("d_model"), keys.size("num_mel_bins")
    encoder = _stack(keys, "encoder", **positions("max_source_positions"), embedding_multiplier=1.0)
    return ModelSpec(
        **_stack(keys, "decoder", **positions("max_target_positions")),
        tied=True,
        encoder=EncoderSpec(
            model=ModelSpec(**encoder),
            reads="input_features",
            convolutions=(
                ConvolutionSpec(inputs=bins, outputs=hidden, kernel=3, stride=1, padding=1),
                ConvolutionSpec(inputs=hidden, outputs=hidden, kernel=3, stride=2, padding=1),
            ),
        ),
    )


def _moonshine(keys: ConfigKeys, family: EncoderDecoderFamily) -> ModelSpec:
    hidden, longest = keys.size("hidden_size"), keys.size("max_position_embeddings")

    def stack(side: Literal["encoder", "decoder"]) -> dict[str, Any]:
        heads = keys.size(f"{side}_num_attention_heads")
        kv_heads = keys.optional_size(f"{side}_num_key_value_heads") or heads
        head_dim = keys.optional_size("head_dim") or _head_dim(keys, hidden, heads)
        rope = replace(rope_spec(keys, head_dim), interleaved=True)
        return {
            "family": keys.family,
            "vocab_size": keys.size("vocab_size"),
            "hidden_size": hidden,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": keys.size("intermediate_size"),
            "layers": (LayerSpec(),) * keys.size(f"{side}_num_hidden_layers"),
            "ropes": {"default": rope},
            "norm": "layer",
            "norm_eps": LAYER_NORM_EPS,
            "qkv_bias": keys.flag("attention_bias"),
            "mlp_bias": True,
            "gated": side == "decoder",
            "activation": _activation(keys, keys.get(f"{side}_hidden_act")),
            "max_context": longest,
        }

    return ModelSpec(
        **stack("decoder"),
        tied=keys.flag("tie_word_embeddings"),
        encoder=EncoderSpec(
            model=ModelSpec(**stack("encoder")),
            reads="input_values",
            convolutions=(
                ConvolutionSpec(
                    inputs=1, outputs=hidden, kernel=127, stride=64, bias=False, activation="tanh", norm=True
                ),
                ConvolutionSpec(inputs=hidden, outputs=2 * hidden, kernel=7, stride=3),
                ConvolutionSpec(inputs=2 * hidden, outputs=hidden, kernel=3, stride=2),
            ),
        ),
    )


def _t5(keys: ConfigKeys, family: EncoderDecoderFamily) -> ModelSpec:
    hidden, gated, activation = keys.size("d_model"), *_t5_mlp(keys)
    heads, head_dim = keys.size("num_heads"), keys.size("d_kv")

    def stack(layers: int, *, two_sided: bool) -> dict[str, Any]:
        return {
            "family": keys.family,
            "vocab_size": keys.size("vocab_size"),
            "hidden_size": hidden,
            "num_heads": heads,
            "num_kv_heads": heads,
            "head_dim": head_dim,
            "intermediate_size": keys.size("d_ff"),
            "layers": (LayerSpec(rope=None),) * layers,
            "ropes": {},
            "norm_eps": keys.share("layer_norm_epsilon"),
            "attention_scale": 1.0,
            "gated": gated,
            "activation": activation,
            "relative_bias": RelativeBiasSpec(
                buckets=keys.size("relative_attention_num_buckets"),
                max_distance=keys.size("relative_attention_max_distance"),
                two_sided=two_sided,
                per_layer=keys.family == "umt5",
            ),
            "max_context": UNBOUNDED,
        }

    tied = keys.flag("tie_word_embeddings")
    scaled = keys.flag("scale_decoder_outputs") if keys.given("scale_decoder_outputs") else tied
    scaled = scaled and keys.family != "mt5"
    return ModelSpec(
        **stack(keys.optional_size("num_decoder_layers") or keys.size("num_layers"), two_sided=False),
        tied=tied,
        logit_multiplier=float(hidden) ** -0.5 if scaled else 1.0,
        encoder=EncoderSpec(model=ModelSpec(**stack(keys.size("num_layers"), two_sided=True))),
    )


def _t5_mlp(keys: ConfigKeys) -> tuple[bool, Activation]:
    """Whether there is a gate, and the activation: `feed_forward_proj` is "relu" or "gated-gelu", which is gelu_new."""
    text = keys.get("feed_forward_proj")
    gate, _, name = text.rpartition("-") if isinstance(text, str) else ("?", "", "")
    if gate not in {"", "gated"}:
        raise UnsupportedModelError(f"{keys.family}: feed_forward_proj={text!r} is not implemented")
    return bool(gate), _activation(keys, "gelu_new" if text == "gated-gelu" else name)


_FAIRSEQ: Mapping[str, Any] = {
    "vocab_size": 50265,
    "max_position_embeddings": 1024,
    "encoder_layers": 12,
    "encoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_layers": 12,
    "decoder_ffn_dim": 4096,
    "decoder_attention_heads": 16,
    "activation_function": "gelu",
    "d_model": 1024,
    "scale_embedding": False,
    "tie_word_embeddings": True,
    "share_encoder_decoder_embeddings": True,
}
_T5: Mapping[str, Any] = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "tie_word_embeddings": True,
}
_MT5 = {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"}
_WHISPER = {
    "vocab_size": 51865,
    "num_mel_bins": 80,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "decoder_layers": 4,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 1536,
    "encoder_ffn_dim": 1536,
    "d_model": 384,
    "max_source_positions": 1500,
    "max_target_positions": 448,
}
_MOONSHINE = {
    "vocab_size": 32768,
    "hidden_size": 288,
    "intermediate_size": 1152,
    "encoder_num_hidden_layers": 6,
    "decoder_num_hidden_layers": 6,
    "encoder_num_attention_heads": 8,
    "decoder_num_attention_heads": 8,
    "encoder_hidden_act": "gelu",
    "decoder_hidden_act": "silu",
    "max_position_embeddings": 512,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "partial_rotary_factor": 0.9,
    "rope_theta": 10000.0,
}
_MARIAN_FILE = {"max_position_embeddings": UNBOUNDED, "activation_function": "relu", "scale_embedding": True}
_M2M = {"vocab_size": 128112, "activation_function": "relu", "scale_embedding": True}

ENCODER_DECODER_FAMILIES: Mapping[str, EncoderDecoderFamily] = {
    "t5": EncoderDecoderFamily(names=_T5_NAMES, defaults=_T5, spec=_t5),
    "mt5": EncoderDecoderFamily(names=_T5_NAMES, defaults={**_T5, **_MT5}, spec=_t5),
    "umt5": EncoderDecoderFamily(names=_T5_NAMES, defaults={**_T5, **_MT5}, spec=_t5),
    "bart": EncoderDecoderFamily(
        names=_FAIRSEQ_NAMES,
        defaults=_FAIRSEQ,
        spec=_fairseq,
        placement="residual",
        offset=2,
        embed_norm=True,
        final_norm=False,
    ),
    "mbart": EncoderDecoderFamily(names=_FAIRSEQ_NAMES, defaults=_FAIRSEQ, spec=_fairseq, offset=2, embed_norm=True),
    "pegasus": EncoderDecoderFamily(names=_FAIRSEQ_NAMES, defaults=_FAIRSEQ, spec=_fairseq, positions="sinusoidal"),
    "marian": EncoderDecoderFamily(
        names=_FAIRSEQ_NAMES,
        defaults={**_FAIRSEQ, "vocab_size": 58101},
        spec=_fairseq,
        placement="residual",
        positions="sinusoidal",
        final_norm=False,
    ),
    "marian_file": EncoderDecoderFamily(
        names=(),
        defaults={**_FAIRSEQ, **_MARIAN_FILE},
        spec=_marian_file,
        placement="residual",
        positions="fairseq",
        final_norm=False,
    ),
    "m2m_100": EncoderDecoderFamily(
        names=_FAIRSEQ_NAMES,
        defaults={**_FAIRSEQ, **_M2M},
        spec=_fairseq,
        positions="fairseq",
        offset=2,
        head_bias=False,
    ),
    "whisper": EncoderDecoderFamily(names=_FAIRSEQ_NAMES, defaults={**_FAIRSEQ, **_WHISPER}, spec=_whisper),
    "moonshine": EncoderDecoderFamily(names=_MOONSHINE_NAMES, defaults=_MOONSHINE, spec=_moonshine),
}
"""NLLB's dense models are of the family m2m_100; marian_file is a model in Marian's own file
(checkpoints.marian_checkpoint).
"""


def is_encoder_decoder(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` describes a model with an encoder and a decoder, native or not."""
    return str(config.get("model_type")) in ENCODER_DECODER_FAMILIES or config.get("is_encoder_decoder") is True


def writes_times(config: Mapping[str, Any]) -> bool:
    """Whether the model has tokens of time, which its tokenizer may not list (Whisper)."""
    return config.get("model_type") == "whisper"


def encoder_decoder_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The shape of the encoder-decoder model that a `config.json` describes.

    Raises:
        UnsupportedModelError: a family, or a feature of one, that is not implemented natively.
        CheckpointError: a key that is missing, of the wrong kind, or contradicts another.
    """
    name = str(config.get("model_type"))
    if name not in ENCODER_DECODER_FAMILIES:
        known = ", ".join(ENCODER_DECODER_FAMILIES)
        raise UnsupportedModelError(f"architecture {name!r} with an encoder is not native; native are {known}")
    family = ENCODER_DECODER_FAMILIES[name]
    keys = ConfigKeys(config, family.defaults, name)
    keys.check()
    return family.spec(keys, family)
