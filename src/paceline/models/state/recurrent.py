"""What mixers keep of a text: for each layer the last columns of its convolution and the state of its recurrence.

Both are those behind the committed tokens. A pass leaves what it has read beside them: of known tokens the columns and
the state behind them, which take their place when the pass is done (`advance`); of a root and its tree what each node
would write, of which `commit` takes what the accepted path has written. So nothing is copied to be taken back, and a
tensor is never changed once it is there: forks share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from paceline.errors import ConfigError
from paceline.models.base import PartAbilities, Rollback
from paceline.models.mixer_spec import StateShape
from paceline.models.state.recurrence import Written, nothing_written, state_after


@dataclass(slots=True)
class LayerState:
    """What the mixer of one layer keeps.

    Attributes:
        columns: (taps - 1, channels) inputs of the convolution, the newest last, in the model's dtype.
        matrices: (heads, key dim, value dim), float32 or float64.
        node_columns: (nodes, channels) of the root and nodes that were scored last. written: by these.
        next: columns and matrices behind a chunk of known tokens.
    """

    columns: torch.Tensor
    matrices: torch.Tensor
    node_columns: torch.Tensor
    written: Written
    next: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def empty(cls, shape: StateShape, dtype: torch.dtype, device: torch.device) -> LayerState:
        """That before the first token."""
        columns = torch.zeros(shape.taps - 1, shape.channels, dtype=dtype, device=device)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        matrices = torch.zeros(shape.heads, shape.key_dim, shape.value_dim, dtype=wide, device=device)
        return cls._behind(columns, matrices, nothing_written(matrices, by_channel=shape.by_channel))

    @classmethod
    def _behind(cls, columns: torch.Tensor, matrices: torch.Tensor, nothing: Written) -> LayerState:
        return cls(columns, matrices, columns[:0], nothing, (columns, matrices))

    def after(self, columns: torch.Tensor, matrices: torch.Tensor) -> LayerState:
        """The state with these committed and nothing scored."""
        return self._behind(columns, matrices, self.written.first(0))

    def advanced(self) -> LayerState:
        """That behind the chunk that was read last."""
        return self.after(*self.next)

    def committed(self, nodes: torch.Tensor) -> LayerState:
        """That behind a path of scored nodes, its root first."""
        columns, matrices = self.columns, self.matrices
        if taps := len(columns):
            columns = torch.cat([columns, self.node_columns[nodes]])[-taps:]
        if len(matrices):
            matrices = state_after(matrices, self.written.path(nodes))
        return self.after(columns, matrices)


class RecurrentPart:
    """The states of all mixers of a sequence (`models.state.parts.StatePart`).

    Args:
        layers: by number of the layer.
        length: committed tokens.
    """

    abilities: ClassVar = PartAbilities(rollback=Rollback.NONE, shared=False)
    __slots__ = ("layers", "length", "scored")

    def __init__(self, layers: Mapping[int, LayerState], length: int = 0) -> None:
        self.layers, self.length, self.scored = dict(layers), length, 0

    @classmethod
    def opened(cls, shapes: Mapping[int, StateShape], dtype: torch.dtype, device: torch.device) -> Self:
        """That of an empty sequence, by layer."""
        return cls({layer: LayerState.empty(shape, dtype, device) for layer, shape in shapes.items()})

    def advance(self, tokens: int) -> None:
        """Known tokens were read: they are committed."""
        self.layers = {layer: state.advanced() for layer, state in self.layers.items()}
        self.length, self.scored = self.length + tokens, 0

    def commit(self, path: Sequence[int]) -> None:
        """See `StatePart.commit`.

        Raises:
            ConfigError: nothing is scored, or a node was not part of the tree last scored.
        """
        if any(not 0 <= node < self.scored - 1 for node in path) or not self.scored:
            raise ConfigError(
                f"commit: path {list(path)} does not lie in the {self.scored} inputs last scored; score first"
            )
        nodes = torch.tensor([0, *(node + 1 for node in path)])
        self.layers = {layer: state.committed(nodes) for layer, state in self.layers.items()}
        self.length, self.scored = self.length + len(nodes), 0

    def check_truncate(self, length: int) -> None:
        """See `StatePart.check_truncate`.

        Raises:
            ConfigError: it is not the present length.
        """
        if length != self.length:
            raise ConfigError(
                f"truncate: a recurrent state cannot go back from {self.length} to {length} tokens; open a new sequence"
            )

    def truncate(self, length: int) -> None:
        """See `StatePart.truncate`; only what was scored last is forgotten."""
        self.check_truncate(length)
        self.scored = 0

    def fork(self) -> Self:
        """See `StatePart.fork`."""
        layers = {layer: state.after(state.columns, state.matrices) for layer, state in self.layers.items()}
        return type(self)(layers, self.length)

    def release(self) -> None:
        """See `StatePart.release`."""
        self.layers, self.scored = {}, 0
