"""The shape of a model, a decoder or a denoiser, in one vocabulary for all families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from paceline.models.mixer_spec import GatedMemorySpec, MixerSpec, StateShape

LATENT_EPS: Final = 1e-6
"""Of the norms of latent vectors, whatever those of layers have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """One rotary table.

    Attributes:
        theta: base.
        dims: rotated dimensions of each head (even); the others pass unchanged (partial rotary).
        kind: default, linear, dynamic, yarn, longrope or llama3, as in transformers.
        scaling: that kind's parameters under transformers 5's names (factor, original_max_position_embeddings, ...).
        max_position: max_position_embeddings of the checkpoint.
        interleaved: the checkpoint pairs dimensions 2i and 2i + 1; its rows are reordered as they are read
            (checkpoints.weights), so that everything else sees pairs (i, i + dims / 2).
        growth: queries at position p are multiplied by 1 + growth[0] * log(1 + floor(p / growth[1])); None is by 1.
            Source: Scalable-Softmax (arXiv:2501.19399), as Llama 4 and Ministral 3 have it.
        width: of the tables, where that is more than `dims`: pairs (i, i + width / 2) are rotated for i < dims / 2, and
            the others pass unchanged (models.passes.padding).
    """

    theta: float
    dims: int
    kind: str = "default"
    scaling: Mapping[str, object] = field(default_factory=dict)
    max_position: int = 2048
    interleaved: bool = False
    growth: tuple[float, int] | None = None
    width: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A sparse mixture of experts in place of the MLP.

    Attributes:
        experts, top_k: number of experts, and of those that each token uses.
        intermediate: inner width of one expert.
        norm_top_k: renormalise the chosen experts' probabilities to sum to 1.
        bias: router and experts have biases.
        shared: inner width of an MLP that every token goes through beside its experts, or 0.
        shared_gate: what that MLP gives is multiplied by the sigmoid of a linear map of its input.
        scaling: factor on the chosen experts' probabilities.
        groups: experts lie in the first number of groups, of which only the second number of best ones are used.
        sigmoid: scores are sigmoids, not a softmax over all experts. A bias of each expert, if there is one, is added
            for choosing, not for weighing, and the best groups are those with the highest sums of two best scores.
            Source: Ling 2.0 and LLaDA2.0 (arXiv:2512.15745).
        biased_choice: scores of a softmax have such a bias, too (ERNIE 4.5).
    """

    experts: int
    top_k: int
    intermediate: int
    norm_top_k: bool
    bias: bool = False
    shared: int = 0
    shared_gate: bool = False
    scaling: float = 1.0
    groups: tuple[int, int] | None = None
    sigmoid: bool = False
    biased_choice: bool = False

    @property
    def ranks(self) -> bool:
        """Whether experts are chosen by other numbers than those that weigh them."""
        return self.sigmoid or self.biased_choice


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Keys and values of all heads made of one latent vector, see models.layers.latent.

    Attributes:
        rank: size of that vector.
        nope, rope: dimensions of a head's queries and keys without and with a rotary embedding.
        value: dimensions of a head's values.
        query_rank: size of the latent vector that queries are made of, or None.
    """

    rank: int
    nope: int
    rope: int
    value: int
    query_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What differs from layer to layer.

    Attributes:
        rope: key into `ModelSpec.ropes`, or None for no positional encoding (NoPE).
        window: sliding window in tokens (a query sees itself and window - 1 before it), or None for full attention.
        moe: this layer's MLP is the mixture of experts.
        attention: there is attention in it. mixer: there is a mixer, beside attention or instead; what both give is
            added. mlp: there is an MLP behind them, or the mixture.
        kv_of: the earlier layer whose keys and values its attention reads, by that layer's window; None where it has
            its own.
    """

    rope: str | None = "default"
    window: int | None = None
    moe: bool = False
    attention: bool = True
    mixer: MixerSpec | None = None
    mlp: bool = True
    kv_of: int | None = None

    @property
    def keeps_keys(self) -> bool:
        """Whether it keeps keys and values of a text."""
        return self.attention and self.kv_of is None

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything of a text."""
        return self.keeps_keys or (self.mixer is not None and self.mixer.state.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionSpec:
    """A vector for each position, added to the embeddings.

    Attributes:
        kind: "learned" (in the checkpoint); or sines in the first half of the dimensions and cosines in the second,
            with wavelengths of 10000^(2i / dims) ("sinusoidal") or 10000^(i / (dims / 2 - 1)) ("fairseq").
        rows: positions that there are.
        offset: rows of the table before position 0.
    Sources: Attention Is All You Need (arXiv:1706.03762), fairseq (arXiv:1904.01038).
    """

    kind: Literal["learned", "sinusoidal", "fairseq"]
    rows: int
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeBiasSpec:
    """A number for each head and each bucket of distances, added to the scores of self-attention.

    Attributes:
        buckets: half of them are single distances, the rest grow like the logarithm up to `max_distance`, and the last
            one takes all beyond.
        two_sided: half of the buckets are for what stands behind a position.
        per_layer: each layer has a table of its own; else all use that of the first.
    Source: T5 (arXiv:1910.10683).
    """

    buckets: int
    max_distance: int
    two_sided: bool = False
    per_layer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionSpec:
    """A convolution over time in front of an encoder's layers.

    Attributes:
        inputs, outputs: channels.
        kernel, stride, padding: in steps of time.
        norm: what it gives is normed over all channels and all of the time (a group norm of one group).
    """

    inputs: int
    outputs: int
    kernel: int
    stride: int
    padding: int = 0
    bias: bool = True
    activation: Literal["gelu", "tanh"] = "gelu"
    norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """What reads the source: a transformer whose positions all see each other.

    Attributes:
        model: its layers; `model.max_context` is the longest source, in rows of its layers.
        reads: the attribute of a request's inputs that is its source: "encoder_tokens", or the name of one of its
            `features`: (channels, steps), or (steps,) of one channel.
        convolutions: in front of its layers, for features.
        shared_embedding: it embeds tokens by the decoder's table.
    """

    model: ModelSpec
    reads: str = "encoder_tokens"
    convolutions: tuple[ConvolutionSpec, ...] = ()
    shared_embedding: bool = True

    def rows(self, steps: int) -> int:
        """Rows of the layers that a source of so many tokens or steps becomes; 0 or less where it is too short."""
        for conv in self.convolutions:
            steps = (steps + 2 * conv.padding - conv.kernel) // conv.stride + 1
        return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer, or the decoder of an encoder-decoder model.

    Attributes:
        norm: "rms", or "layer" (mean and variance), whose weights have a bias beside them if `norm_bias`.
        norm_placement: "pre" (Llama), "post" (OLMo-2: each sub-layer's output is normed before it is added), "sandwich"
            (Gemma: before and after), "residual" (BART: the sum is normed).
        parallel: attention and MLP read the same normed state, and both outputs are added to it (Cohere).
        norm_offset: weights are stored as w - 1 (Gemma), used as 1 + w.
        qk_norm: None, "head" (over each head: Qwen3, Gemma 3) or "full" (over all heads: OLMo-2), before the rotary
            embedding, or behind it if `qk_norm_rotated` (Hunyuan); `qk_norm_eps` where its epsilon is another than
            `norm_eps`.
        attention_scale: factor on q.k.
        attention_softcap, logit_softcap: cap * tanh(x / cap), or None.
        embedding_multiplier, residual_multiplier, logit_multiplier: factors on embeddings, on each sub-layer's output
            before it is added, and on the final logits (Granite's logits_scaling is its reciprocal).
        latent: multi-head latent attention: one kv head, whose dimensions are `latent.rope` and then `latent.rank`.
        attention_sinks: each head has a logit of its own in the softmax, which belongs to no position (gpt-oss).
        differential: from what a query head reads, what the next one reads is subtracted (models.layers.differential).
            A key-value head is a pair of these, of `head_dim` dimensions together; query heads have half as many, no
            norm and no rotary embedding.
        gated: the MLP multiplies act(gate) * up; without, it is act(up).
        activation: "silu", "gelu", "gelu_tanh", "relu" or its square "relu2" on the gate; or "clamped_swiglu", in full
            gate * sigmoid(swiglu_alpha * gate) * (up + 1), with the gate at most swiglu_limit and up within it
            (gpt-oss); or "xielu", p * x^2 + b * x above 0 and n * (exp(x) - 1 - x) + b * x below, with three numbers
            of each layer (xIELU, arXiv:2411.13010).
        positions, relative_bias: positions that are added to the embeddings, or weighed in attention; beside or instead
            of rotary ones.
        empty_start: the embedding at position 0 is zeros, whatever token stands there (Marian, which feeds none).
        embed_norm: embeddings are normed, positions included. final_norm: so are the states behind the last layer.
        head_bias: logits have a bias.
        encoder: of an encoder-decoder model, each layer of which also attends to what its encoder made of the source.
        attention_gate: what attention gives is multiplied by the sigmoid of another map of its input.
        factors: what rows of weights are multiplied by as they are read, by the weight's name in its layer: runs of
            (rows, factor).
        wide_sums: states between layers, to which sub-layers' outputs are added, are in float32 or wider, whatever the
            model's dtype.
        max_context: longest sequence that the checkpoint declares.
        dtype: the checkpoint's ("float32", "bfloat16", "float16").
        stored_rows: of embedding and head in the files, where those from `vocab_size` on, which are no tokens, are left
            out; else None.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    ropes: Mapping[str, RopeSpec]
    max_context: int
    dtype: str = "float32"
    norm_eps: float = 1e-6
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_placement: Literal["pre", "post", "sandwich", "residual"] = "pre"
    norm_offset: bool = False
    parallel: bool = False
    qk_norm: Literal["head", "full"] | None = None
    qk_norm_rotated: bool = False
    qk_norm_eps: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu", "xielu"] = "silu"
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    attention_sinks: bool = False
    differential: bool = False
    latent: LatentSpec | None = None
    logit_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    tied: bool = False
    moe: MoeSpec | None = None
    stored_rows: int | None = None
    positions: PositionSpec | None = None
    relative_bias: RelativeBiasSpec | None = None
    empty_start: bool = False
    embed_norm: bool = False
    final_norm: bool = True
    head_bias: bool = False
    encoder: EncoderSpec | None = None
    attention_gate: bool = False
    factors: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    wide_sums: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def states(self) -> Mapping[int, StateShape]:
        """What the mixers of layers keep, by layer."""
        mixers = {index: layer.mixer for index, layer in enumerate(self.layers) if layer.mixer is not None}
        return {index: mixer.state for index, mixer in mixers.items() if mixer.state.kept}

    @property
    def shares_across_layers(self) -> bool:
        """Whether layers read what others have made in the same pass, so that none of these can be left out."""
        return any(layer.kv_of is not None or isinstance(layer.mixer, GatedMemorySpec) for layer in self.layers)

    @property
    def tail(self) -> int:
        """The first of the last layers that keep nothing of a text; the number of layers where there are none."""
        return 1 + max((index for index, layer in enumerate(self.layers) if layer.keeps), default=-1)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        """Inner widths of the MLP, of experts and of the MLP beside them."""
        return (self.intermediate_size, *((self.moe.intermediate, self.moe.shared) if self.moe else ()))

    @property
    def query_size(self) -> int:
        """Outputs of the projection before attention that are queries."""
        return self.num_heads * self.head_dim // (2 if self.differential else 1)

    @property
    def attended_size(self) -> int:
        """Inputs of the projection behind attention."""
        return self.query_size if self.latent is None else self.num_heads * self.latent.value


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What all layers share, and the window of each: `windows` lists the kinds, `kind_of[layer]` indexes it."""

    groups: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    windows: tuple[int | None, ...]
    kind_of: tuple[int, ...]

    @property
    def heads(self) -> int:
        return self.groups * self.kv_heads


def attention_shape(spec: ModelSpec) -> AttentionShape:
    """The spec's attention, layers sorted into window kinds."""
    windows = tuple(dict.fromkeys(layer.window for layer in spec.layers))
    return AttentionShape(
        groups=spec.num_heads // spec.num_kv_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        softcap=spec.attention_softcap,
        windows=windows,
        kind_of=tuple(windows.index(layer.window) for layer in spec.layers),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoiserSpec:
    """A bidirectional or block-causal transformer over slots.

    Attributes:
        model: the transformer: pre-norm, without windows and soft-caps.
        mask_token_id: what stands at a masked slot.
        eos_token_ids: tokens that end a text.
        block_length: slots of a block where attention is block-causal; None where every slot sees every other.
        shifted: the logits of a slot come from the pass at the slot left of it.
    """

    model: ModelSpec
    mask_token_id: int
    eos_token_ids: tuple[int, ...] = ()
    block_length: int | None = None
    shifted: bool = False

    @property
    def attention(self) -> Literal["full", "block"]:
        return "full" if self.block_length is None else "block"
