"""What follows from the shapes of mixers: fields of records (models.cpu.offsets), and the room that their rows take."""

from __future__ import annotations

from paceline.models.cpu import offsets as at
from paceline.models.cpu.mixers import (
    CONV,
    DELTA,
    GATE_AFTER,
    GATE_BEFORE,
    KIMI,
    LIGHT,
    MAMBA,
    MAMBA2,
    SIMPLE,
)
from paceline.models.cpu.tiles import STRIP
from paceline.models.cpu.vectors import LANES
from paceline.models.mixer_spec import (
    DeltaSpec,
    KimiDeltaSpec,
    LightNetSpec,
    Mamba2Spec,
    MambaSpec,
    MixerSpec,
    ShortConvSpec,
    SimpleUnitSpec,
)
from paceline.models.spec import ModelSpec


def mixer_constants(mixer: MixerSpec) -> dict[int, int | float]:
    """The fields of a mixer's record that follow from its shape."""
    shape = mixer.state
    fields: dict[int, int | float] = {
        at.MIX_CHANNELS: shape.channels, at.MIX_TAPS: shape.taps, at.MIX_HEADS: shape.heads,
        at.MIX_KEY_DIM: shape.key_dim, at.MIX_VALUE_DIM: shape.value_dim, at.MIX_BY_CHANNEL: int(shape.by_channel),
    }  # fmt: skip
    return fields | _constants_of_kind(mixer)


def _constants_of_kind(mixer: MixerSpec) -> dict[int, int | float]:
    fields: dict[int, int | float]
    match mixer:
        case ShortConvSpec():
            fields = {at.MIX_KIND: CONV, at.MIX_IN_SIZE: 3 * mixer.channels, at.MIX_OUT_SIZE: mixer.channels}
        case DeltaSpec():
            fields = {
                at.MIX_KIND: DELTA, at.MIX_DELTA: 1, at.MIX_IN_SIZE: 2 * (mixer.keys + mixer.values),
                at.MIX_GATES_SIZE: 2 * mixer.value_heads, at.MIX_OUT_SIZE: mixer.values,
                at.MIX_GROUPS: mixer.key_heads, at.MIX_IN_TURN: int(mixer.in_turn),
            }  # fmt: skip
        case KimiDeltaSpec():
            fields = {
                at.MIX_KIND: KIMI, at.MIX_DELTA: 1, at.MIX_IN_SIZE: 3 * mixer.inner, at.MIX_OUT_SIZE: mixer.inner,
                at.MIX_GATES_SIZE: 2 * mixer.head_dim + mixer.heads, at.MIX_RANK: mixer.head_dim,
                at.MIX_FURTHER_SIZE: mixer.inner, at.MIX_MADE_SIZE: 2 * mixer.inner, at.MIX_NORM_SIZE: mixer.head_dim,
            }  # fmt: skip
        case LightNetSpec():
            fields = {
                at.MIX_KIND: LIGHT, at.MIX_FIRST: mixer.keys, at.MIX_IN_SIZE: 2 * mixer.keys + mixer.values,
                at.MIX_OUT_SIZE: mixer.values, at.MIX_GATES_SIZE: mixer.rank, at.MIX_RANK: mixer.rank,
                at.MIX_FURTHER_SIZE: mixer.values, at.MIX_MADE_SIZE: mixer.values + mixer.keys,
                at.MIX_NORM_SIZE: mixer.values,
            }  # fmt: skip
        case MambaSpec():
            fields = {
                at.MIX_KIND: MAMBA, at.MIX_IN_SIZE: 2 * mixer.channels, at.MIX_OUT_SIZE: mixer.channels,
                at.MIX_GATES_SIZE: mixer.rank + 2 * mixer.state_dim, at.MIX_RANK: mixer.rank,
                at.MIX_FURTHER_SIZE: mixer.channels, at.MIX_MADE_SIZE: mixer.channels,
                at.MIX_PART_EPSILON: float(mixer.norm_eps),
            }  # fmt: skip
        case SimpleUnitSpec():
            # There is no map behind it; what is read is as wide as the residual stream.
            fields = {at.MIX_KIND: SIMPLE, at.MIX_IN_SIZE: 2 * mixer.width, at.MIX_OUT_SIZE: mixer.width}
        case Mamba2Spec():
            order = {"gated_before": GATE_BEFORE, "gated_after": GATE_AFTER, None: 0}[mixer.norm]
            fields = {
                at.MIX_KIND: MAMBA2, at.MIX_IN_SIZE: 2 * (mixer.inner + mixer.shared), at.MIX_GATES_SIZE: mixer.heads,
                at.MIX_OUT_SIZE: mixer.inner, at.MIX_GROUPS: mixer.groups, at.MIX_FIRST: mixer.inner,
                at.MIX_LEAST: float(mixer.steps[0]), at.MIX_MOST: float(mixer.steps[1]), at.MIX_NORM_ORDER: order,
                at.MIX_NORM_SIZE: mixer.inner // mixer.norm_groups,
            }  # fmt: skip
    return fields


def row_of_head(spec: ModelSpec) -> int:
    """Bytes that a thread needs for a row of one head of a mixer, or for what LANES nodes have written to it.

    Of a row these are its key, its query, what decays leave and a key so decayed, its value and what corrects it.
    """
    sizes = [
        4 * max(4 * shape.key_dim + 2 * shape.value_dim, (1 + LANES) * shape.key_dim) for shape in spec.states.values()
    ]
    return 64 * -(-max(sizes, default=0) // 64)


def mixer_widths(spec: ModelSpec) -> dict[int, int]:
    """Bytes of a row of each buffer that mixers work in, whose pitch stands behind it; nothing where there are none."""
    if not spec.states:
        return {}
    mixers = [layer.mixer for layer in spec.layers if layer.mixer is not None]
    fields = [mixer_constants(mixer) for mixer in mixers]
    return {
        field: 4 * max((-(-int(one.get(size, 0)) // STRIP) * STRIP for one in fields), default=0)
        for field, size in (
            (at.MIX, at.MIX_IN_SIZE), (at.CONVOLVED, at.MIX_CHANNELS), (at.GATES, at.MIX_GATES_SIZE),
            (at.MADE, at.MIX_MADE_SIZE), (at.READ, at.MIX_OUT_SIZE),
        )
    }  # fmt: skip
