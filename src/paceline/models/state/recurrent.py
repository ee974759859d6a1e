"""What mixers keep of a text: for each layer the last columns of its convolution and the state of its recurrence.

Both are those behind the committed tokens. A pass leaves what it has read beside them: of known tokens the columns and
the state behind them, which take their place when the pass is done (`advance`); of a root and its tree what each node
would write, of which `commit` takes what the accepted path has written, or the state behind each, of which it takes the
last one. So nothing is copied to be taken back, and what others hold too is never changed (`alone`): forks share it.

A state cannot be computed backwards, nor taken from the middle of a text. So copies are kept of some (`kept`, chosen by
the engine's prefix cache) and, where asked for, the state behind the last whole block of the text (`border`): a
sequence can go back to these, and others can begin there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from paceline.errors import ConfigError
from paceline.models.base import PartAbilities, Rollback
from paceline.models.mixer_spec import StateShape
from paceline.models.state.kept_states import KeptState
from paceline.models.state.recurrence import Written, nothing_written, state_after
from paceline.models.state.window_slots import BLOCK

Pair = tuple[torch.Tensor, torch.Tensor]
"""Columns and matrices of a layer."""


@dataclass(slots=True)
class LayerState:
    """What the mixer of one layer keeps.

    Attributes:
        columns: (taps - 1, channels) inputs of the convolution, the newest last, in the model's dtype unless they
            are wide.
        matrices: (heads, key dim, value dim), float32 or float64.
        node_columns: (nodes, channels) of the root and nodes that were scored last. written: by these.
        node_matrices: (nodes, heads, key dim, value dim) behind these, where compiled passes keep them in place of what
            was written (StateShape.by_state); else None.
        next: columns and matrices behind a chunk of known tokens.
        nothing: what no nodes write.
    """

    columns: torch.Tensor
    matrices: torch.Tensor
    node_columns: torch.Tensor
    node_matrices: torch.Tensor | None
    written: Written
    next: Pair
    nothing: Written

    @classmethod
    def empty(cls, shape: StateShape, dtype: torch.dtype, device: torch.device) -> LayerState:
        """That before the first token."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        kept = wide if shape.wide else dtype
        columns = torch.zeros(shape.taps - 1, shape.channels, dtype=kept, device=device)
        matrices = torch.zeros(shape.heads, shape.key_dim, shape.value_dim, dtype=wide, device=device)
        return cls._behind(columns, matrices, nothing_written(matrices, by_channel=shape.by_channel))

    @classmethod
    def _behind(cls, columns: torch.Tensor, matrices: torch.Tensor, nothing: Written) -> LayerState:
        return cls(columns, matrices, columns[:0], None, nothing, (columns, matrices), nothing)

    def after(self, columns: torch.Tensor, matrices: torch.Tensor) -> LayerState:
        """The state with these committed and nothing scored."""
        return self._behind(columns, matrices, self.nothing)

    def advanced(self) -> LayerState:
        """That behind the chunk that was read last."""
        return self.after(*self.next)

    def committed(self, nodes: Sequence[int], matrices: torch.Tensor) -> LayerState:
        """That behind a path of scored nodes, its root first, where the recurrence has left these matrices."""
        count, columns = len(nodes), self.columns
        if before := len(columns):
            last = self.node_columns[rows_of(nodes)][-before:]
            columns = last.clone() if count >= before else torch.cat([columns[count:], last])
        return self.after(columns, matrices)


def rows_of(nodes: Sequence[int]) -> torch.Tensor | slice:
    """An index of nodes in ascending order; those of a chain from its root on are a view."""
    return slice(len(nodes)) if nodes[-1] == len(nodes) - 1 else torch.tensor(nodes)


Settle = Callable[[Sequence[LayerState], Sequence[int], bool], Sequence[torch.Tensor]]
"""The matrices of layers behind a path of scored nodes, by the layers' states, the nodes, and whether they may take the
place of those before, which nobody else holds then.
"""


def settle_by_operators(states: Sequence[LayerState], nodes: Sequence[int], alone: bool) -> Sequence[torch.Tensor]:
    """See `Settle`; by PyTorch's operators, in tensors of their own."""
    path = rows_of(nodes)
    return [
        state_after(state.matrices, state.written.path(path)) if len(state.matrices) else state.matrices
        for state in states
    ]


class RecurrentPart:
    """The states of all mixers of a sequence (`models.state.parts.StatePart`).

    Args:
        layers: by number of the layer.
        settle: makes the matrices behind committed nodes.
        length: committed tokens.

    Attributes:
        alone: nobody else holds the tensors of its layers.
        kept: copies of earlier states, by the tokens that they stand behind.
        follows_borders: `border` is to be set.
        border: the tokens of the last whole block that `commit` has reached, with columns and matrices behind them.
    """

    abilities: ClassVar = PartAbilities(rollback=Rollback.CHECKPOINTS, shared=False)
    __slots__ = ("alone", "border", "follows_borders", "kept", "layers", "length", "scored", "settle")

    def __init__(self, layers: Mapping[int, LayerState], settle: Settle = settle_by_operators, length: int = 0) -> None:
        self.layers, self.settle, self.length, self.scored = dict(layers), settle, length, 0
        self.alone = False
        self.kept: dict[int, KeptState] = {}
        self.follows_borders = False
        self.border: tuple[int, dict[int, Pair]] | None = None

    @classmethod
    def opened(
        cls,
        shapes: Mapping[int, StateShape],
        dtype: torch.dtype,
        device: torch.device,
        settle: Settle = settle_by_operators,
    ) -> Self:
        """That of an empty sequence, by layer."""
        return cls({layer: LayerState.empty(shape, dtype, device) for layer, shape in shapes.items()}, settle)

    @property
    def nbytes(self) -> int:
        """Bytes of the states behind any number of tokens."""
        return sum(tensor.nbytes for pair in self._pairs().values() for tensor in pair)

    def _pairs(self) -> dict[int, Pair]:
        return _pairs_of(self.layers)

    def packed(self) -> torch.Tensor:
        """(nbytes,) uint8: the states behind all committed tokens."""
        return _packed(self._pairs())

    def packed_border(self) -> tuple[int, torch.Tensor] | None:
        """Those of `border`, with its tokens."""
        return None if self.border is None else (self.border[0], _packed(self.border[1]))

    def begin_with(self, length: int, state: KeptState) -> None:
        """Stand behind the first `length` tokens of a text, as `state` says, and forget what was here."""
        self._become(length, _unpacked(state.read(), self._pairs()))
        self.kept[length] = state

    def advance(self, tokens: int) -> None:
        """Known tokens were read: they are committed."""
        self.layers = {layer: state.advanced() for layer, state in self.layers.items()}
        self.length, self.scored, self.alone = self.length + tokens, 0, True

    def commit(self, path: Sequence[int]) -> None:
        """See `StatePart.commit`.

        Raises:
            ConfigError: nothing is scored, or a node was not part of the tree last scored.
        """
        if any(not 0 <= node < self.scored - 1 for node in path) or not self.scored:
            raise ConfigError(
                f"commit: path {list(path)} does not lie in the {self.scored} inputs last scored; score first"
            )
        nodes = [0, *(node + 1 for node in path)]
        length = self.length + len(nodes)
        beyond = length % BLOCK
        passes_border = self.follows_borders and beyond < len(nodes)
        if passes_border and beyond:
            self.border = (length - beyond, _pairs_of(self._behind(nodes[:-beyond], alone=False)))
        self.layers = self._behind(nodes, alone=self.alone)
        self.length, self.scored, self.alone = length, 0, True
        if passes_border and not beyond:
            self.border, self.alone = (length, self._pairs()), False

    def _behind(self, nodes: Sequence[int], *, alone: bool) -> dict[int, LayerState]:
        """All layers behind scored nodes."""
        matrices = self.settle([*self.layers.values()], nodes, alone)
        pairs = zip(self.layers.items(), matrices, strict=True)
        return {layer: state.committed(nodes, new) for (layer, state), new in pairs}

    def check_truncate(self, length: int) -> None:
        """See `StatePart.check_truncate`.

        Raises:
            ConfigError: no state is kept for this length.
        """
        known = {0, self.length, *(at for at, state in self.kept.items() if state.present)}
        if self.border is not None:
            known.add(self.border[0])
        if length not in known:
            lengths = ", ".join(map(str, sorted(known)))
            raise ConfigError(
                f"truncate: the recurrent state of {self.length} tokens can go back to {lengths} tokens only, got "
                f"{length}; open a new sequence"
            )

    def truncate(self, length: int) -> None:
        """See `StatePart.truncate`; behind the present length nothing but what was scored last is forgotten."""
        self.check_truncate(length)
        if length == self.length:
            self.scored = 0
        elif self.border is not None and self.border[0] == length:
            self._become(*self.border)
        elif length:
            self.begin_with(length, self.kept[length])
        else:
            self._become(
                0,
                {
                    layer: (torch.zeros_like(pair[0]), torch.zeros_like(pair[1]))
                    for layer, pair in self._pairs().items()
                },
            )

    def _become(self, length: int, pairs: Mapping[int, Pair]) -> None:
        self.layers = {layer: state.after(*pairs[layer]) for layer, state in self.layers.items()}
        self.length, self.scored, self.alone = length, 0, False
        self.kept = {at: state for at, state in self.kept.items() if at <= length}
        if self.border is not None and self.border[0] > length:
            self.border = None

    def fork(self) -> Self:
        """See `StatePart.fork`."""
        layers = {layer: state.after(state.columns, state.matrices) for layer, state in self.layers.items()}
        other = type(self)(layers, self.settle, self.length)
        self.alone = False
        other.kept, other.follows_borders, other.border = dict(self.kept), self.follows_borders, self.border
        return other

    def release(self) -> None:
        """See `StatePart.release`."""
        self.layers, self.kept, self.border, self.scored = {}, {}, None, 0


def _pairs_of(layers: Mapping[int, LayerState]) -> dict[int, Pair]:
    return {layer: (state.columns, state.matrices) for layer, state in layers.items()}


def _packed(pairs: Mapping[int, Pair]) -> torch.Tensor:
    """All tensors one behind the other, as bytes."""
    parts = [tensor.reshape(-1).view(torch.uint8) for pair in pairs.values() for tensor in pair]
    return torch.cat(parts)


def _unpacked(data: torch.Tensor, like: Mapping[int, Pair]) -> dict[int, Pair]:
    """What `_packed` made of tensors of these shapes."""
    rest, pairs = data, {}
    for layer, pair in like.items():
        found = []
        for tensor in pair:
            found.append(torch.empty_like(tensor, memory_format=torch.contiguous_format))
            found[-1].view(-1).view(torch.uint8).copy_(rest[: tensor.nbytes])
            rest = rest[tensor.nbytes :]
        pairs[layer] = (found[0], found[1])
    return pairs
