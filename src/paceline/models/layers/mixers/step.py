"""One forward pass through the mixers of a model: each sequence's rows behind its own state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from paceline.models.attention.segments import Segment, TreeShape
from paceline.models.state.recurrence import (
    Recurrence,
    Written,
    apply,
    nothing_written,
    rows_at_once,
    state_after,
)
from paceline.models.state.recurrent import LayerState, Pair, RecurrentPart

AT_ONCE = 64
"""Rows whose states are held at a time."""


class RecurrentStep:
    """What the rows of a pass read and leave in the states of their sequences.

    Args:
        segments: of sequences that have states.

    Attributes:
        published: (rows, channels) what a mixer of this pass has read, for gated memory units of later layers; float32
            or float64.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self._rows: list[_Rows] = []
        start = 0
        for segment in segments:
            assert segment.recurrent is not None, "a sequence without the states of its mixers"
            sees = torch.from_numpy(segment.sees[segment.done :]).to(device)
            self._rows.append(_Rows(segment, segment.recurrent, start, sees))
            start += segment.rows
        self.published = torch.empty(start, 0, device=device)

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Later layers, none of which has a state, run these rows alone."""
        self.published = self.published[rows]

    def convolve(self, layer: int, columns: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        """(rows, channels): each row's column and those of the last tokens before it, weighed and summed.

        Args:
            columns: (rows, channels). taps: (taps, channels), that of the row itself last.
        """
        return torch.cat([rows.convolve(layer, columns, taps) for rows in self._rows])

    def log_sums(self, layer: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logarithms of the sums of e^logit over all tokens up to each row, and up to the one before it.

        The layer keeps them in place of a convolution's columns, for two taps.

        Args:
            logits: (rows, channels), float32 or float64.
        Returns:
            Two tensors of that shape; the second is -inf at the first token of a text.
        """
        sums, before = zip(*(rows.log_sums(layer, logits) for rows in self._rows), strict=True)
        return torch.cat(sums), torch.cat(before)

    def recur(self, layer: int, new: Recurrence) -> torch.Tensor:
        """(rows, heads, value dim): what each row reads of its state."""
        return torch.cat([rows.recur(layer, new.part(rows.start, rows.stop)) for rows in self._rows])


class _Rows(NamedTuple):
    """The rows of one sequence, from `start` on; `sees` (rows, slots) as of `Segment.sees`."""

    segment: Segment
    part: RecurrentPart
    start: int
    sees: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + self.segment.rows

    @property
    def done(self) -> int:
        """Rows before these that are not committed, and can be gone on from."""
        return 0 if self.segment.known else self.segment.done

    def before(self, state: LayerState) -> Pair:
        """Columns and matrices behind which the rows stand; of known tokens in pieces, those of the last piece."""
        carried = self.segment.known and self.segment.done
        return state.next if carried else (state.columns, state.matrices)

    def convolve(self, layer: int, columns: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        state, new = self.part.layers[layer], columns[self.start : self.stop]
        nodes = torch.cat([state.node_columns[: self.done], new])
        line = torch.cat([self.before(state)[0], nodes])
        if self.segment.known:
            state.next = (line[len(line) - len(state.columns) :], state.next[1])
        else:
            state.node_columns = nodes
        places, count = self._places(len(taps)), len(taps) - 1
        found = line[places[count]] * taps[count]
        for tap in reversed(range(count)):
            found.addcmul_(line[places[tap]], taps[tap])
        return found

    def log_sums(self, layer: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state, new, done = self.part.layers[layer], logits[self.start : self.stop], self.done
        behind = self.part.length or self.segment.done > done
        first = self.before(state)[0] if behind else torch.full_like(new[:1], -torch.inf)
        line = torch.cat([first, state.node_columns[:done]])
        if self.segment.tree is None:
            line = torch.cat([line[:done], torch.cat([line[done:], new]).logcumsumexp(0)])
            before = line[done:-1]
        else:
            parents = self._tree_places(self.segment.tree, 2)[0]
            for parent, row in zip(parents.tolist(), new, strict=True):
                line = torch.cat([line, torch.logaddexp(line[parent], row)[None]])
            before = line[parents]
        if self.segment.known:
            state.next = (line[-1:], state.next[1])
        else:
            state.node_columns = line[1:]
        return line[done + 1 :], before

    def _places(self, taps: int) -> list[slice | torch.Tensor]:
        """For each tap, where the rows' columns stand in a line of the committed ones and the nodes'."""
        done, rows, tree = self.done, self.segment.rows, self.segment.tree
        if tree is None:
            return [slice(tap + done, tap + done + rows) for tap in range(taps)]
        return list(self._tree_places(tree, taps))

    def _tree_places(self, tree: TreeShape, taps: int) -> torch.Tensor:
        """(taps, rows): the same for the rows of a tree."""
        segment, depths, sees = self.segment, tree.depths, tree.sees
        places = np.empty((taps, segment.rows), np.int64)
        for row, node in enumerate(range(segment.done, segment.slots)):
            line = [*range(taps - 1), *(np.flatnonzero(sees[node]) + taps - 1)]
            assert len(line) == taps + depths[node]
            places[:, row] = line[-taps:]
        return torch.from_numpy(places).to(self.sees.device)

    def recur(self, layer: int, new: Recurrence) -> torch.Tensor:
        state = self.part.layers[layer]
        if new.betas is None and new.values.shape[-1] == 1:
            return self._recur_known_one_by_one(state, new) if self.segment.known else self._recur_by_node(state, new)
        if self.segment.known:
            return self._recur_known(state, new)
        done, outputs = self.segment.done, []
        written = state.written.first(done)
        at_once = rows_at_once(new, self.segment.slots)
        for at in range(0, self.segment.rows, at_once):
            stop = min(at + at_once, self.segment.rows)
            read, more = apply(state.matrices, written, new.part(at, stop), self.sees[at:stop, : done + stop])
            written = written.and_then(more)
            outputs.append(read)
        state.written = written
        return torch.cat(outputs)

    def _recur_known(self, state: LayerState, new: Recurrence) -> torch.Tensor:
        """Known tokens: piece by piece, each behind the state that the one before has left."""
        matrices, outputs, at_once = self.before(state)[1], [], rows_at_once(new, 0)
        nothing = nothing_written(matrices, by_channel=new.decays.shape[-1] > 1)
        below = torch.ones(at_once, at_once, dtype=torch.bool, device=self.sees.device).tril()
        for at in range(0, self.segment.rows, at_once):
            stop = min(at + at_once, self.segment.rows)
            read, more = apply(matrices, nothing, new.part(at, stop), below[: stop - at, : stop - at])
            matrices = state_after(matrices, more)
            outputs.append(read)
        state.next = (state.next[0], matrices)
        return torch.cat(outputs)

    def _recur_known_one_by_one(self, state: LayerState, new: Recurrence) -> torch.Tensor:
        matrices, outputs = self.before(state)[1], []
        for at in range(0, self.segment.rows, AT_ONCE):
            part = new.part(at, min(at + AT_ONCE, self.segment.rows))
            states = states_one_by_one({0: matrices}, part, range(len(part.keys)))
            matrices = states[-1]
            outputs.append(torch.einsum("rhk,rhkv->rhv", part.queries, torch.stack(states)))
        state.next = (state.next[0], matrices)
        return torch.cat(outputs)

    def _recur_by_node(self, state: LayerState, new: Recurrence) -> torch.Tensor:
        done, tree = self.segment.done, self.segment.tree
        written = state.written.first(done)
        parents = range(done, self.segment.slots) if tree is None else self._tree_places(tree, 2)[0].tolist()
        behind = {0: state.matrices}
        for place in {place for place in parents if 0 < place <= done}:
            path = torch.arange(place) if tree is None else torch.from_numpy(np.flatnonzero(tree.sees[place - 1]))
            behind[place] = state_after(state.matrices, written.path(path))
        states = torch.stack(states_one_by_one(behind, new, parents, done))
        sums = [torch.zeros_like(new.decays[0]), *written.sums]
        for parent, decays in zip(parents, new.decays, strict=True):
            sums.append(sums[parent] + decays)
        state.written = written.and_then(Written(new.keys, new.values, torch.stack(sums[done + 1 :])))
        return torch.einsum("rhk,rhkv->rhv", new.queries, states)


def states_one_by_one(
    behind: Mapping[int, torch.Tensor], new: Recurrence, parents: Sequence[int], done: int = 0
) -> list[torch.Tensor]:
    """The state behind each row, made of that behind another: cheaper than tables of pairs where a head has one value,
    and each number of its state a decay of its own.

    Args:
        behind: states by place: 0 for the committed one, i + 1 for row i of those that were read before.
        parents: places that the rows stand behind; `done` rows were read before.
    """
    left, written = new.decays.exp().unsqueeze(-1), new.keys.unsqueeze(-1) * new.values.unsqueeze(-2)
    states: list[torch.Tensor] = []
    for row, parent in enumerate(parents):
        before = behind[parent] if parent <= done else states[parent - done - 1]
        states.append(torch.addcmul(written[row], left[row], before))
    return states
