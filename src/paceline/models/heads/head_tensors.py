"""The tensors of a head: names, shapes, and which may be left out.

    all             draft_to_target (draft vocabulary,) int64, ascending; absent where the vocabulary is not reduced
                    head.weight (draft vocabulary, hidden), embed.weight (vocabulary, hidden); absent: the target's
    medusa          heads.K.blocks.J, heads.K.head where it is not shared
    hydra           the same, and heads.K.reduce; block 0 and reduce read the state and K + 1 embeddings
    hydra++         and prefix.*, a decoder layer, and prefix.norm, behind it where there is one
    clover          as medusa, and prefix.* as hydra++; decoder.norm, .q_proj, .k_proj, .v_proj (hidden, hidden) for all
                    heads; embed holds rows by which tokens are read, in the place of the target's head's
    chimera         as medusa, and heads.K.reduce (hidden, 2 hidden) on [the target's state; the encoder's], before its
                    blocks; trigram.block (3 hidden, 3 hidden) and trigram.reduce (hidden, 3 hidden) on three
                    embeddings; encoder.*, a decoder layer
    eagle           fc (hidden, 2 hidden) on [embedding; state]; layers.0.*; norm, the target's, where it reads states
                    before that one
    fspad           the same; before fc sampler.gate and .up (inner size, hidden), .down (hidden, inner size); behind
                    the layer feature_proj (hidden, hidden)
    falcon          lstm.weight_ih_l0 (4 hidden, 2 hidden) on [embedding; state], lstm.weight_ih_l1 (4 hidden, hidden),
                    lstm.bias_ih_lN and .bias_hh_lN, as PyTorch has them, of gates of which the second one counts for
                    nothing (layers.gates); the rest as eagle
    mtp             fc (hidden, 2 hidden) on [embed_norm(embedding); state_norm(state)]; layers.0.*; norm
    eagle3          fc (hidden, taps * hidden); layers.0.*, whose q, k and v read [norm(embedding); norm(state)], the
                    first by input_layernorm, the second by hidden_norm; norm; what fc reads may be normed, whole by
                    input_norm (taps * hidden,) or each tap's states by fc_norm.K (hidden,)
    dovetail        fusion.state (hidden, hidden) on the state, fusion.token (hidden, hidden) on fusion.norm(embedding),
                    fusion.gate (hidden, 2 hidden) on both of what these make; layers.N.*
    p_eagle         as eagle3, with any number of layers, of which the first one is eagle3's, and mask_hidden (1, 1,
                    taps * hidden), what fc reads in the place of states that are not known
    longspec        layers.0.*, whose cross_attn.q_proj and .o_proj, with cross_layernorm before them, attend between
                    self-attention and MLP to the keys and values of the target's last layer
    dflash          fc (hidden, taps * hidden); hidden_norm, behind it; layers.N.*, with norms of queries and keys; norm
    dspark          and markov_head.markov_w1 (vocabulary, rank), .markov_w2 (draft vocabulary, rank), .gate_proj (rank,
                    hidden + rank) or .joint_proj (3 rank, hidden + 2 rank); confidence_head.proj (1, hidden [+ rank])
    ppd             prompts (heads, virtual tokens, hidden), embeddings of prompt tokens; nothing else, and all tokens
    hidden_transfer transfers.K (hidden, hidden), of the states behind its layer; nothing else, and all tokens
    lud             placeholder (hidden,), the embedding of its mask token; nothing else, and all tokens
    mlp_speculator  heads.K.embed, .proj, .norm, .head; head 0 alone where they are tied, and head 1's proj

Matrices are (out, in). Decoder layers have the names of a Llama of Hugging Face, and may have a Qwen3's norms of
queries and keys, both of them. Embeddings of the target are meant as
its layers get them, with the family's multiplier.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from paceline.errors import CheckpointError
from paceline.models.heads.head_config import BLOCKS, ROWS, TAPPED, HeadConfig

MASK_HIDDEN: Final = "mask_hidden"
"""The one vector that some write with other axes of length 1."""


@dataclass(frozen=True, slots=True)
class HeadTensor:
    """One tensor: its name and shape, and whether a head may lack it."""

    name: str
    shape: tuple[int, ...]
    optional: bool = False


def tensors_of(config: HeadConfig) -> Iterator[HeadTensor]:
    """All tensors that a head may have."""
    d, v = config.hidden_size, config.draft_vocab_size
    if config.method in ROWS:
        yield from _rows_of_passes(config)
        return
    yield HeadTensor("draft_to_target", (v,), optional=v == config.vocab_size)
    if config.method == "mlp_speculator":
        yield from _mlp_speculator(config)
        return
    yield HeadTensor("head.weight", (v, d), optional=True)
    yield HeadTensor("embed.weight", (config.vocab_size, d), optional=True)
    if config.method in OF_METHOD:
        yield from OF_METHOD[config.method](config)
    elif config.method in BLOCKS:
        yield from _block(config)
    elif config.method in TAPPED:
        yield from _tapped(config)
    else:
        yield from _residual_heads(config)
        yield from _before_heads(config)


def _eagle(config: HeadConfig) -> Iterator[HeadTensor]:
    d = config.hidden_size
    yield from _gates(d) if config.method == "falcon" else _linear("fc", d, 2 * d)
    yield from _layer(config, "layers.0.", d, normed=False)
    yield from _final_norm(config)
    if config.method == "fspad" and config.inner_size:
        for name in ("gate", "up"):
            yield from _linear(f"sampler.{name}", config.inner_size, d)
        yield from _linear("sampler.down", d, config.inner_size)
        yield from _linear("feature_proj", d, d)


def _rows_of_passes(config: HeadConfig) -> Iterator[HeadTensor]:
    d = config.hidden_size
    if config.method == "ppd":
        yield HeadTensor("prompts", (config.num_heads, config.virtual_tokens, d))
        return
    if config.method == "lud":
        yield HeadTensor("placeholder", (d,))
        return
    for head in range(config.num_heads):
        yield from _linear(f"transfers.{head}", d, d)


def _gates(d: int) -> Iterator[HeadTensor]:
    for layer in range(2):
        yield HeadTensor(f"lstm.weight_ih_l{layer}", (4 * d, d if layer else 2 * d))
        for kind in ("ih", "hh"):
            yield HeadTensor(f"lstm.bias_{kind}_l{layer}", (4 * d,), optional=True)


def _tapped(config: HeadConfig) -> Iterator[HeadTensor]:
    d, width = config.hidden_size, len(config.taps) * config.hidden_size
    yield from _linear("fc", d, width)
    yield HeadTensor("input_norm.weight", (width,), optional=True)
    for tap in range(len(config.taps)):
        yield HeadTensor(f"fc_norm.{tap}.weight", (d,), optional=True)
    for layer in range(config.num_layers):
        yield from _layer(config, f"layers.{layer}.", d if layer else 2 * d, normed=True)
    yield HeadTensor("layers.0.hidden_norm.weight", (d,))
    yield HeadTensor("norm.weight", (d,))
    if config.method == "p_eagle":
        yield HeadTensor(MASK_HIDDEN, (1, 1, width))


def _mtp(config: HeadConfig) -> Iterator[HeadTensor]:
    d = config.hidden_size
    yield from _linear("fc", d, 2 * d)
    yield from _layer(config, "layers.0.", d, normed=True)
    for name in ("embed_norm", "state_norm", "norm"):
        yield HeadTensor(f"{name}.weight", (d,))


def _final_norm(config: HeadConfig) -> Iterator[HeadTensor]:
    """The target's, of a head that makes states before it."""
    if not config.normed:
        yield HeadTensor("norm.weight", (config.hidden_size,), optional=True)


def _dovetail(config: HeadConfig) -> Iterator[HeadTensor]:
    d = config.hidden_size
    yield HeadTensor("fusion.norm.weight", (d,))
    for name, width in (("state", d), ("token", d), ("gate", 2 * d)):
        yield HeadTensor(f"fusion.{name}.weight", (d, width))
    for layer in range(config.num_layers):
        yield from _layer(config, f"layers.{layer}.", d, normed=True)
    yield from _final_norm(config)


def _longspec(config: HeadConfig) -> Iterator[HeadTensor]:
    d, q = config.hidden_size, config.layer["num_attention_heads"] * config.head_dim
    yield from (one for one in _layer(config, "layers.0.", d, normed=True) if "_norm." not in one.name)
    yield HeadTensor("layers.0.cross_layernorm.weight", (d,))
    yield from _linear("layers.0.cross_attn.q_proj", q, d)
    yield from _linear("layers.0.cross_attn.o_proj", d, q)


OF_METHOD: Final[Mapping[str, Callable[[HeadConfig], Iterator[HeadTensor]]]] = {
    "eagle": _eagle,
    "fspad": _eagle,
    "falcon": _eagle,
    "mtp": _mtp,
    "dovetail": _dovetail,
    "longspec": _longspec,
}
"""What single heads have beside vocabulary and rows, by method."""


def drafted_rows(name: str) -> bool:
    """Whether a tensor has a row for each token that can be drafted."""
    return name == "draft_to_target" or not {"head", "markov_w2"}.isdisjoint(name.split("."))


def token_rows(name: str) -> bool:
    """Whether a tensor has a row for each token of the target that can be read."""
    return not {"embed", "markov_w1"}.isdisjoint(name.split("."))


def _linear(name: str, outputs: int, inputs: int) -> Iterator[HeadTensor]:
    yield HeadTensor(f"{name}.weight", (outputs, inputs))
    yield HeadTensor(f"{name}.bias", (outputs,), optional=True)


def _residual_heads(config: HeadConfig) -> Iterator[HeadTensor]:
    d, on_state = config.hidden_size, config.method in ("medusa", "clover", "chimera")
    for head in range(config.num_heads):
        first = d if on_state else (head + 2) * d
        for block in range(config.num_layers):
            yield from _linear(f"heads.{head}.blocks.{block}", d, d if block else first)
        if config.method == "chimera":
            yield from _linear(f"heads.{head}.reduce", d, 2 * d)
        elif not on_state:
            yield from _linear(f"heads.{head}.reduce", d, first)
            yield HeadTensor(f"heads.{head}.head.bias", (config.draft_vocab_size,), optional=True)
        yield HeadTensor(f"heads.{head}.head.weight", (config.draft_vocab_size, d), optional=True)


def _before_heads(config: HeadConfig) -> Iterator[HeadTensor]:
    """What residual heads have in common, and which makes the states that they read."""
    d = config.hidden_size
    if config.method == "clover":
        yield HeadTensor("decoder.norm.weight", (d,))
        for name in "qkv":
            yield from _linear(f"decoder.{name}_proj", d, d)
    if config.method == "chimera":
        yield from _linear("trigram.block", 3 * d, 3 * d)
        yield from _linear("trigram.reduce", d, 3 * d)
        yield from _layer(config, "encoder.", d, normed=True)
    if config.method in ("hydra++", "clover"):
        yield from _layer(config, "prefix.", d, normed=True)
        yield HeadTensor("prefix.norm.weight", (d,), optional=True)


def _block(config: HeadConfig) -> Iterator[HeadTensor]:
    d, v, rank = config.hidden_size, config.draft_vocab_size, config.markov_rank
    yield from _linear("fc", d, len(config.taps) * d)
    for layer in range(config.num_layers):
        yield from _layer(config, f"layers.{layer}.", d, normed=True, qk_norm=True)
    for name in ("hidden_norm", "norm"):
        yield HeadTensor(f"{name}.weight", (d,))
    if rank:
        yield HeadTensor("markov_head.markov_w1.weight", (config.vocab_size, rank))
        yield HeadTensor("markov_head.markov_w2.weight", (v, rank))
    if rank and config.markov_head_type == "gated":
        yield from _linear("markov_head.gate_proj", rank, d + rank)
    elif rank and config.markov_head_type == "rnn":
        yield from _linear("markov_head.joint_proj", 3 * rank, 2 * rank + d)
    if config.enable_confidence_head:
        yield from _linear("confidence_head.proj", 1, d + rank * config.confidence_head_with_markov)


def _layer(
    config: HeadConfig, prefix: str, inputs: int, *, normed: bool, qk_norm: bool = False
) -> Iterator[HeadTensor]:
    """A decoder layer whose attention reads `inputs` numbers; `qk_norm`: with norms of queries and keys."""
    d, inner = config.hidden_size, config.layer["intermediate_size"]
    q, k = config.layer["num_attention_heads"] * config.head_dim, config.kv_heads * config.head_dim
    for name, width in (("q", q), ("k", k), ("v", k)):
        yield from _linear(f"{prefix}self_attn.{name}_proj", width, inputs)
    for name in "qk":
        yield HeadTensor(f"{prefix}self_attn.{name}_norm.weight", (config.head_dim,), optional=not qk_norm)
    yield from _linear(f"{prefix}self_attn.o_proj", d, q)
    yield HeadTensor(f"{prefix}input_layernorm.weight", (d,), optional=not normed)
    yield HeadTensor(f"{prefix}post_attention_layernorm.weight", (d,))
    for name, outputs, width in (("gate", inner, d), ("up", inner, d), ("down", d, inner)):
        yield from _linear(f"{prefix}mlp.{name}_proj", outputs, width)


def _mlp_speculator(config: HeadConfig) -> Iterator[HeadTensor]:
    inner, tied = config.inner_size or config.hidden_size, config.tie_weights
    for head in range(config.num_heads):
        has_own_head = not (tied and head)
        if has_own_head or head == 1:
            yield HeadTensor(f"heads.{head}.proj.weight", (inner, inner if head else config.hidden_size))
        if has_own_head:
            yield HeadTensor(f"heads.{head}.embed.weight", (config.vocab_size, inner))
            yield HeadTensor(f"heads.{head}.norm.weight", (inner,))
            yield HeadTensor(f"heads.{head}.norm.bias", (inner,), optional=True)
            yield HeadTensor(f"heads.{head}.head.weight", (config.draft_vocab_size, inner))


def check_tensors(config: HeadConfig, shapes: Mapping[str, Sequence[int]], where: object) -> None:
    """Reject tensors that are missing, of another shape, or that no head of this kind has.

    Args:
        shapes: of the tensors that are there. where: folder, for messages.
    Raises:
        CheckpointError: naming the first of them.
    """
    known = {tensor.name: tensor for tensor in tensors_of(config)}
    for name, shape in shapes.items():
        if name not in known:
            raise CheckpointError(f"{where}: a head of method {config.method!r} has no tensor {name!r}; leave it out")
        if tuple(shape) != known[name].shape and not (name == MASK_HIDDEN and prod(shape) == prod(known[name].shape)):
            raise CheckpointError(
                f"{where}: {name} must have shape {known[name].shape} by its config.json, got {tuple(shape)}"
            )
    _check_norms(config, shapes, where)
    absent = [tensor.name for tensor in known.values() if not tensor.optional and tensor.name not in shapes]
    if absent:
        raise CheckpointError(
            f"{where} lacks {absent[0]}{f' and {len(absent) - 1} more tensors' * (len(absent) > 1)}; write it again"
        )


def _check_norms(config: HeadConfig, shapes: Collection[str], where: object) -> None:
    """Reject states that are normed twice before fc, and those of some taps alone."""
    each = sum(f"fc_norm.{tap}.weight" in shapes for tap in range(len(config.taps)))
    if each and ("input_norm.weight" in shapes or each < len(config.taps)):
        raise CheckpointError(
            f"{where} must have input_norm or an fc_norm for each of its {len(config.taps)} taps, not both nor some; "
            "write it again"
        )
