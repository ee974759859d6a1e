"""What compiled passes know of the sequences whose states they read and leave: tables of models.cpu.offsets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from paceline.models.attention.segments import Segment
from paceline.models.cpu import offsets as at
from paceline.models.cpu.mixers import compiled_mixers, compiled_settling
from paceline.models.cpu.pages import address
from paceline.models.passes.packing import ROWS, RecordTable
from paceline.models.spec import ModelSpec
from paceline.models.state.recurrence import Written
from paceline.models.state.recurrent import LayerState
from paceline.models.state.window_slots import Ints


class MixerTables:
    """The sequences of a pass, and what each layer keeps of them.

    Args:
        layers, frame: the tables of a pass, which get the addresses of these.
    """

    def __init__(self, spec: ModelSpec, layers: RecordTable, frame: RecordTable) -> None:
        self._frame, self._sequences = frame, RecordTable(at.SEQUENCE_FIELDS, ROWS)
        self._shapes, each = spec.states, len(layers.fields) // spec.num_layers
        self._states = {layer: RecordTable(at.STATE_FIELDS, ROWS) for layer in spec.states}
        for layer, table in self._states.items():
            layers.put({at.STATES: table.address}, each * layer)
        frame.put({at.MIXERS: compiled_mixers().address, at.SEQUENCE_ROWS: self._sequences.address})
        shapes = spec.states.values()
        self._summed = [number for number, shape in enumerate(shapes) if shape.heads and not shape.by_state]
        self._by_state = [number for number, shape in enumerate(shapes) if shape.by_state]
        self._mixers = [int(layers.fields[each * layer, at.MIXER // at.FIELD]) for layer in spec.states]
        self._settled, self._settling = RecordTable(at.SETTLED_FIELDS, len(spec.states)), compiled_settling()
        frame.put({at.SETTLED: self._settled.address, at.SETTLED_COUNT: len(self._summed)})

    def place(self, segments: Sequence[Segment]) -> list[Any]:
        """Point at the states of the segments, with room for what their rows leave.

        Returns what must live until the pass is over.
        """
        kept: list[Any] = []
        row = 0
        self._frame.put({at.SEQUENCES: len(segments)})
        for number, segment in enumerate(segments):
            part = segment.recurrent
            assert part is not None, "a sequence without the states of its mixers"
            parents = np.arange(-1, segment.slots - 1) if segment.tree is None else parents_of(segment.tree.sees)
            kept.append(parents)
            done = 0 if segment.known else segment.done
            fields = {
                at.SEQUENCE_FIRST: row, at.SEQUENCE_COUNT: segment.rows, at.SEQUENCE_DONE: done,
                at.SEQUENCE_KNOWN: int(segment.known), at.SEQUENCE_PARENTS: address(parents),
                at.SEQUENCE_BEGINS: int(part.length == 0 and (not segment.known or segment.done == 0)),
            }  # fmt: skip
            self._sequences.put(fields, number)
            for layer, table in self._states.items():
                state = part.layers[layer]
                if segment.known:
                    found = _known(state, segment, kept)
                else:
                    found = _scored(state, segment, by_state=self._shapes[layer].by_state)
                table.fields[number, : len(found)] = found
            row += segment.rows
        return kept

    def settle(
        self, states: Sequence[LayerState], nodes: Sequence[int], alone: bool, run: Callable[[Any], None]
    ) -> Sequence[torch.Tensor]:
        """See `models.state.recurrent.Settle`; `run` runs compiled code on the frame."""
        found = [state.matrices for state in states]
        for number in self._by_state:
            state = states[number]
            assert state.node_matrices is not None, "states behind nodes that were scored"
            found[number] = state.node_matrices[nodes[-1]].clone()
        for row, number in enumerate(self._summed):
            state = states[number]
            if not alone:
                found[number] = torch.empty_like(state.matrices)
            self._settled.fields[row] = [
                self._mixers[number], state.matrices.data_ptr(), *(rows.data_ptr() for rows in state.written),
                found[number].data_ptr(),
            ]  # fmt: skip
        if self._summed:
            path = np.array(nodes, np.int64)
            self._frame.put({at.PATH: address(path), at.PATH_COUNT: len(path)})
            run(self._settling)
        return found


def parents_of(sees: Any) -> Ints:
    """(inputs,) the last ancestor of each input, -1 for the first."""
    return np.array([-1, *(np.flatnonzero(row[:node])[-1] for node, row in enumerate(sees) if node)], np.int64)


def _known(state: LayerState, segment: Segment, kept: list[Any]) -> list[int]:
    """The fields of a state (models.cpu.offsets) that known tokens carry on."""
    columns, matrices = state.next if segment.done else (state.columns, state.matrices)
    kept.append((columns, matrices))
    state.next = torch.empty_like(columns), matrices if segment.done else torch.empty_like(matrices)
    after = [tensor.data_ptr() for tensor in state.next]
    return [columns.data_ptr(), matrices.data_ptr(), 0, 0, 0, 0, *after]


def _scored(state: LayerState, segment: Segment, *, by_state: bool) -> list[int]:
    """The fields of a state that scored inputs read, with room for what they leave."""
    done, slots = segment.done, segment.slots
    state.node_columns = _grown(state.node_columns, done, slots)
    addresses = [state.columns.data_ptr(), state.matrices.data_ptr(), state.node_columns.data_ptr()]
    if by_state:
        before = state.matrices[None] if state.node_matrices is None else state.node_matrices
        state.node_matrices = _grown(before, done, slots)
        return [*addresses, state.node_matrices.data_ptr()]
    if not len(state.matrices):
        return addresses
    state.written = Written(*(_grown(rows, done, slots) for rows in state.written))
    return [*addresses, *(rows.data_ptr() for rows in state.written)]


def _grown(rows: torch.Tensor, done: int, slots: int) -> torch.Tensor:
    """Room for so many rows, the first of which are kept."""
    grown = rows.new_empty(slots, *rows.shape[1:])
    if done:
        grown[:done] = rows[:done]
    return grown
