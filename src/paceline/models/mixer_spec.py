"""The shape of what a layer has beside or in place of attention: a mixer, which sees what is before a token through a
state of fixed size.

Every mixer reads the last few tokens through a convolution, or a recurrence over all of them, or both, and all are
instances of one: a head keeps a matrix S (key dim, value dim), which each token scales, corrects and reads,

    S = e^decay * S + k u^T,    u = v, or with the delta rule beta * (v - (e^decay * S)^T k),    output S^T q.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

KEY_EPS: Final = 1e-6
"""Of the lengths by which the delta rule's queries and keys are divided."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a layer's mixer keeps of a text.

    Attributes:
        channels, taps: of its convolution, which reads a token and the `taps` - 1 before it; 0 and 1 where there is
            none.
        heads, key_dim, value_dim: of its recurrence; 0 heads where there is none.
        by_channel: a head's decay is a number for each dimension of its keys, not one.
        wide: columns are kept in float32 or wider, whatever the model's dtype.
    """

    channels: int = 0
    taps: int = 1
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    by_channel: bool = False
    wide: bool = False

    @property
    def by_state(self) -> bool:
        """A state behind each input is less to keep than what all inputs have written: heads have one value."""
        return self.value_dim == 1

    @property
    def kept(self) -> bool:
        """Whether there is anything."""
        return self.channels > 0 or self.heads > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """A gated convolution: out(c * conv(b * x)), with b, c and x of one map.

    Attributes:
        channels: of each of them. taps: see `StateShape`. bias: the maps and the convolution have one.
    Source: LFM2 (arXiv:2511.23404).
    """

    channels: int
    taps: int
    bias: bool = False

    @property
    def state(self) -> StateShape:
        return StateShape(channels=self.channels, taps=self.taps)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """A gated delta net: queries, keys and values go through a convolution, queries and keys are normed.

    Attributes:
        key_heads, value_heads: each key head serves value_heads / key_heads value heads, which follow each other, or,
            `in_turn`, stand key_heads apart (value head i reads key head i mod key_heads).
        key_dim, value_dim: of a head. taps: see `StateShape`.
    Source: Gated Delta Networks (arXiv:2412.06464).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    in_turn: bool = False

    @property
    def keys(self) -> int:
        """Width of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.value_heads * self.value_dim

    @property
    def state(self) -> StateShape:
        return StateShape(
            channels=2 * self.keys + self.values, taps=self.taps, heads=self.value_heads, key_dim=self.key_dim,
            value_dim=self.value_dim,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaSpec:
    """A delta net whose decays are by channel: a number for each dimension of a head's keys.

    Attributes:
        heads, head_dim: of queries, keys and values; also the rank of the maps that make decays and gates. taps: see
            `StateShape`.
    Source: Kimi Linear (arXiv:2510.26692).
    """

    heads: int
    head_dim: int
    taps: int

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_dim

    @property
    def state(self) -> StateShape:
        return StateShape(
            channels=3 * self.inner, taps=self.taps, heads=self.heads, key_dim=self.head_dim, value_dim=self.head_dim,
            by_channel=True,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec:
    """A Mamba-2 mixer: what goes into its state and what is read from it goes through a convolution.

    Attributes:
        heads, head_dim: of the inputs. state_dim: numbers of a state for each of them (N).
        groups: heads / groups heads that follow each other share what is written by (B) and read by (C).
        taps: see `StateShape`. conv_bias, bias, out_bias: the convolution, the map before and that behind have one.
        norm: what is read is normed, behind the gate ("gated_before") or before it, in so many `norm_groups`; None is
            the gate alone.
        steps: least and largest step that a token takes.
    Source: Mamba-2 (arXiv:2405.21060).
    """

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    taps: int
    conv_bias: bool = True
    bias: bool = False
    out_bias: bool = False
    norm: Literal["gated_before", "gated_after"] | None = "gated_before"
    norm_groups: int = 1
    steps: tuple[float, float] = (0.0, float("inf"))

    @property
    def inner(self) -> int:
        """Width of the inputs of all heads."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Width of B, and of C."""
        return self.groups * self.state_dim

    @property
    def state(self) -> StateShape:
        return StateShape(
            channels=self.inner + 2 * self.shared, taps=self.taps, heads=self.heads, key_dim=self.state_dim,
            value_dim=self.head_dim,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """A Mamba mixer: each channel is a head of its own, with a decay for each number of its state.

    Attributes:
        channels: of the inputs. state_dim: numbers of a state for each of them (N).
        rank: of the map that makes steps.
        taps: see `StateShape`. conv_bias, bias: the convolution, the maps before and behind have one.
        norm: what steps are made of, what is written by (B) and what is read by (C) are normed, with weights (Jamba) or
            without (Falcon-Mamba). norm_eps: of these.
        publishes: what it reads of its state, before its gate, is what gated memory units of later layers take.
    Source: Mamba (arXiv:2312.00752).
    """

    channels: int
    state_dim: int
    rank: int
    taps: int
    conv_bias: bool = True
    bias: bool = False
    norm: Literal["weighed", "plain"] | None = None
    norm_eps: float = 1e-6
    publishes: bool = False

    @property
    def state(self) -> StateShape:
        return StateShape(
            channels=self.channels, taps=self.taps, heads=self.channels, key_dim=self.state_dim, value_dim=1,
            by_channel=True,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMemorySpec:
    """A gated memory unit: out(silu(in(x)) * m), where m is what the last mixer before it that publishes has read of
    its state at the same token.

    Attributes:
        channels: of m. bias: the maps have one.
    Source: SambaY (arXiv:2507.06607).
    """

    channels: int
    bias: bool = False

    @property
    def state(self) -> StateShape:
        return StateShape()


@dataclass(frozen=True, slots=True, kw_only=True)
class LightNetSpec:
    """Averages of all values so far, weighted by e^logit, one for each dimension of the keys.

    Attributes:
        heads, key_dim, value_dim: of queries and logits, and of values. rank: of the map that makes gates.
    Source: LightNet (arXiv:2405.21022).
    """

    heads: int
    key_dim: int
    value_dim: int
    rank: int

    @property
    def keys(self) -> int:
        """Width of all keys."""
        return self.heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.heads * self.value_dim

    @property
    def state(self) -> StateShape:
        """The column before a token is that of its sums (`RecurrentStep.log_sums`)."""
        return StateShape(
            channels=self.keys, taps=2, heads=self.heads, key_dim=self.key_dim, value_dim=self.value_dim,
            by_channel=True, wide=True,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleUnitSpec:
    """The simpler simple recurrent unit: relu(c), where c is a gate times the last c, and the rest of it times an
    input.

    Attributes:
        width: numbers of c, each a head of its own.
    Source: From Research to Production and Back (D19-5632).
    """

    width: int

    @property
    def state(self) -> StateShape:
        return StateShape(heads=self.width, key_dim=1, value_dim=1)


MixerSpec = (
    ShortConvSpec | DeltaSpec | KimiDeltaSpec | Mamba2Spec | MambaSpec | GatedMemorySpec | LightNetSpec | SimpleUnitSpec
)
