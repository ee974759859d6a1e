"""The canonical weights of mixers (d hidden, c channels of the convolution, t taps, h heads, n value dim):

    mixer.in (.., d), .out (d, ..)    the maps before and behind, without what follows
    mixer.gates (.., d)               rows of the map before that are small: decays, steps, betas
    mixer.conv.weight (t, c), .conv.bias (c,)
    mixer.decay (h,), .step_bias (h,), .skip (h,)    float32 or wider
    mixer.norm (n,), or (h * n,)

of Kimi's delta net, with r dimensions of a head, whose gates make decays, gates and betas, also

    mixer.query_conv, .key_conv, .value_conv (t, h * r)    in place of .conv
    mixer.decays (h * r, r), .gate (h * r, r)
    mixer.step_bias (h * r,)

of LightNet, whose gates are what a map of rank r makes more of, also

    mixer.gate (h * n, r)

of Mamba, with s numbers of a state and steps of rank r, also

    mixer.selection (r + 2s, c), .steps (c, r)    what makes steps, and keys and queries; steps of the former
    mixer.decay (c, s)
    mixer.step_norm (r,), .key_norm (s,), .query_norm (s,)

of gated memory units mixer.in (c, d) and .out (d, c) alone

Each `.weight` but for decay, step_bias and skip; `mixer.in.bias` and `mixer.out.bias` where they have one. Stored names
are those of transformers, `layers.N.mixer.` taking the place of the family's own (`ModelFamily.names`); those of Kimi's
mixers begin with `self_attn`, as those of its attention do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter

import torch

from paceline.checkpoints.canonical_tensors import Arrange, CanonicalTensor, Shape, StoredTensor, fused, same, with_bias
from paceline.models import (
    DeltaSpec,
    GatedMemorySpec,
    KimiDeltaSpec,
    LightNetSpec,
    Mamba2Spec,
    MambaSpec,
    MixerSpec,
    ShortConvSpec,
    SimpleUnitSpec,
)


def mixer_tensors(mixer: MixerSpec, hidden: int, layer: str) -> Iterator[CanonicalTensor]:
    """Those of a layer, whose names begin with `layer`."""
    at = f"{layer}mixer."
    if isinstance(mixer, ShortConvSpec):
        yield from _short_conv(mixer, hidden, at)
    elif isinstance(mixer, DeltaSpec):
        yield from _delta(mixer, hidden, at)
    elif isinstance(mixer, KimiDeltaSpec):
        yield from _kimi_delta(mixer, hidden, at, f"{layer}self_attn.")
    elif isinstance(mixer, LightNetSpec):
        yield from _light_net(mixer, hidden, at)
    elif isinstance(mixer, MambaSpec):
        yield from _mamba(mixer, hidden, at)
    elif isinstance(mixer, GatedMemorySpec):
        yield from _gated_memory(mixer, hidden, at)
    elif isinstance(mixer, SimpleUnitSpec):
        yield from _simple_unit(mixer, hidden, at)
    else:
        yield from _mamba2(mixer, hidden, at)


def _short_conv(mixer: ShortConvSpec, hidden: int, at: str) -> Iterator[CanonicalTensor]:
    yield from with_bias(f"{at}in", (3 * mixer.channels, hidden), f"{at}in_proj", bias=mixer.bias)
    yield from _convolution(mixer.taps, mixer.channels, at, "conv", bias=mixer.bias)
    yield from with_bias(f"{at}out", (hidden, mixer.channels), f"{at}out_proj", bias=mixer.bias)


def _simple_unit(mixer: SimpleUnitSpec, hidden: int, at: str) -> Iterator[CanonicalTensor]:
    """Inputs, which have no bias, and gates."""
    width = mixer.width
    yield fused(f"{at}in.weight", [(f"{at}{name}_proj.weight", width) for name in ("in", "gate")], (hidden,), "")
    gates = StoredTensor((f"{at}gate_proj.bias",), (width,), width)
    yield CanonicalTensor(f"{at}in.bias", (2 * width,), ((gates,),))


def _delta(mixer: DeltaSpec, hidden: int, at: str) -> Iterator[CanonicalTensor]:
    """Stored in parts (Qwen3.5), or key head by key head as one (Qwen3-Next)."""
    heads, groups = mixer.value_heads, mixer.key_heads
    keys, values = mixer.key_dim, mixer.value_dim * heads // groups
    rows = 2 * mixer.keys + 2 * mixer.values
    parts = [(f"{at}in_proj_qkv.weight", rows - mixer.values), (f"{at}in_proj_z.weight", mixer.values)]
    by_part = partial(_by_part, sizes=(keys, keys, values, values))
    yield _or_turned(fused(f"{at}in.weight", parts, (hidden,), ""), f"{at}in_proj_qkvz.weight", by_part)
    parts = [(f"{at}in_proj_{name}.weight", heads) for name in "ba"]
    by_part = partial(_by_part, sizes=(heads // groups, heads // groups))
    yield _or_turned(fused(f"{at}gates.weight", parts, (hidden,), ""), f"{at}in_proj_ba.weight", by_part)
    yield from _convolution(mixer.taps, mixer.state.channels, at, "conv1d", bias=False)
    yield _wide(f"{at}decay", (heads,), f"{at}A_log")
    yield _wide(f"{at}step_bias", (heads,), f"{at}dt_bias")
    yield same(f"{at}norm.weight", (mixer.value_dim,), f"{at}norm.weight")
    yield same(f"{at}out.weight", (hidden, mixer.values), f"{at}out_proj.weight")


def _kimi_delta(mixer: KimiDeltaSpec, hidden: int, at: str, stored: str) -> Iterator[CanonicalTensor]:
    heads, inner, rank = mixer.heads, mixer.inner, mixer.head_dim
    parts = [(f"{stored}{name}_proj.weight", inner) for name in "qkv"]
    yield fused(f"{at}in.weight", parts, (hidden,), "")
    for number, name in enumerate(("query", "key", "value")):
        piece = StoredTensor(
            (f"{stored}{name[0]}_conv1d.weight",), (inner, 1, mixer.taps), arrange=_taps_first, length=mixer.taps
        )
        third = partial(_third_taps_first, number=number)
        whole = StoredTensor((f"{stored}conv1d.weight",), (3 * inner, 1, mixer.taps), arrange=third, length=mixer.taps)
        yield CanonicalTensor(f"{at}{name}_conv.weight", (mixer.taps, inner), ((piece,), (whole,)))
    parts = [(f"{stored}{name}_proj.weight", rows) for name, rows in (("f_a", rank), ("g_a", rank), ("b", heads))]
    yield fused(f"{at}gates.weight", parts, (hidden,), "")
    yield same(f"{at}decays.weight", (inner, rank), f"{stored}f_b_proj.weight")
    yield same(f"{at}gate.weight", (inner, rank), f"{stored}g_b_proj.weight")
    rate = StoredTensor((f"{stored}A_log",), (1, 1, heads, 1), arrange=torch.flatten, length=heads)
    yield CanonicalTensor(f"{at}decay", (heads,), ((rate,),), wide=True)
    yield _wide(f"{at}step_bias", (inner,), f"{stored}dt_bias")
    yield same(f"{at}norm.weight", (rank,), f"{stored}o_norm.weight")
    yield same(f"{at}out.weight", (hidden, inner), f"{stored}o_proj.weight")


def _light_net(mixer: LightNetSpec, hidden: int, at: str) -> Iterator[CanonicalTensor]:
    rows = {"q": mixer.keys, "k": mixer.keys, "v": mixer.values}
    parts = [(f"{at}{name}_proj.weight", count) for name, count in rows.items()]
    yield fused(f"{at}in.weight", parts, (hidden,), "")
    yield same(f"{at}gates.weight", (mixer.rank, hidden), f"{at}g_proj.0.weight")
    yield same(f"{at}gate.weight", (mixer.values, mixer.rank), f"{at}g_proj.1.weight")
    yield same(f"{at}norm.weight", (mixer.values,), f"{at}g_norm.weight")
    yield same(f"{at}out.weight", (hidden, mixer.values), f"{at}o_proj.weight")


def _or_turned(target: CanonicalTensor, stored: str, arrange: Arrange) -> CanonicalTensor:
    """The same, or what is stored as one and put into another order."""
    turned = StoredTensor((stored,), target.shape, arrange=arrange)
    return replace(target, recipes=(*target.recipes, (turned,)))


def _by_part(rows: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Rows of groups, each of so many rows of every part, part by part."""
    parts = rows.unflatten(0, (-1, sum(sizes))).split(sizes, 1)
    return torch.cat([part.flatten(0, 1) for part in parts])


def _mamba2(mixer: Mamba2Spec, hidden: int, at: str) -> Iterator[CanonicalTensor]:
    """The steps' rows are the last ones of the map before."""
    inner = 2 * mixer.inner + 2 * mixer.shared
    for kind, rest in (("weight", (hidden,)), *((("bias", ()),) if mixer.bias else ())):
        whole = (inner + mixer.heads, *rest)
        for name, rows in (("in", slice(0, inner)), ("gates", slice(inner, None))):
            count = inner if name == "in" else mixer.heads
            piece = StoredTensor((f"{at}in_proj.{kind}",), whole, arrange=itemgetter(rows), length=count)
            yield CanonicalTensor(f"{at}{name}.{kind}", (count, *rest), ((piece,),))
    yield from _convolution(mixer.taps, mixer.state.channels, at, "conv1d", bias=mixer.conv_bias)
    for name, stored in (("decay", "A_log"), ("step_bias", "dt_bias"), ("skip", "D")):
        yield _wide(f"{at}{name}", (mixer.heads,), f"{at}{stored}")
    if mixer.norm is not None:
        yield same(f"{at}norm.weight", (mixer.inner,), f"{at}norm.weight")
    yield from with_bias(f"{at}out", (hidden, mixer.inner), f"{at}out_proj", bias=mixer.out_bias)


def _mamba(mixer: MambaSpec, hidden: int, at: str) -> Iterator[CanonicalTensor]:
    channels, state, rank = mixer.channels, mixer.state_dim, mixer.rank
    yield from with_bias(f"{at}in", (2 * channels, hidden), f"{at}in_proj", bias=mixer.bias)
    yield from _convolution(mixer.taps, channels, at, "conv1d", bias=mixer.conv_bias)
    yield same(f"{at}selection.weight", (rank + 2 * state, channels), f"{at}x_proj.weight")
    yield same(f"{at}steps.weight", (channels, rank), f"{at}dt_proj.weight")
    yield _wide(f"{at}step_bias", (channels,), f"{at}dt_proj.bias")
    yield _wide(f"{at}decay", (channels, state), f"{at}A_log")
    yield _wide(f"{at}skip", (channels,), f"{at}D")
    if mixer.norm == "weighed":
        for name, stored, size in (("step", "dt", rank), ("key", "b", state), ("query", "c", state)):
            yield same(f"{at}{name}_norm.weight", (size,), f"{at}{stored}_layernorm.weight")
    yield from with_bias(f"{at}out", (hidden, channels), f"{at}out_proj", bias=mixer.bias)


def _gated_memory(mixer: GatedMemorySpec, hidden: int, at: str) -> Iterator[CanonicalTensor]:
    yield from with_bias(f"{at}in", (mixer.channels, hidden), f"{at}in_proj", bias=mixer.bias)
    yield from with_bias(f"{at}out", (hidden, mixer.channels), f"{at}out_proj", bias=mixer.bias)


def _convolution(taps: int, channels: int, at: str, stored: str, *, bias: bool) -> Iterator[CanonicalTensor]:
    weight = StoredTensor((f"{at}{stored}.weight",), (channels, 1, taps), arrange=_taps_first, length=taps)
    yield CanonicalTensor(f"{at}conv.weight", (taps, channels), ((weight,),))
    if bias:
        yield same(f"{at}conv.bias", (channels,), f"{at}{stored}.bias")


def _taps_first(weight: torch.Tensor) -> torch.Tensor:
    return weight.squeeze(1).t()


def _third_taps_first(weight: torch.Tensor, number: int) -> torch.Tensor:
    """Those of the first, second or third of all channels."""
    return _taps_first(weight.chunk(3)[number])


def _wide(name: str, shape: Shape, stored: str) -> CanonicalTensor:
    return replace(same(name, shape, stored), wide=True)
