"""What compiled passes know of the sequences whose states they read and leave: tables of models.cpu.offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline.models.attention.segments import Segment
from paceline.models.cpu import offsets as at
from paceline.models.cpu.mixers import compiled_mixers
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
        self._states = {layer: RecordTable(at.STATE_FIELDS, ROWS) for layer in spec.states}
        for layer, table in self._states.items():
            layers.put({at.STATES: table.address}, layer)
        frame.put({at.MIXERS: compiled_mixers().address, at.SEQUENCE_ROWS: self._sequences.address})

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
            }  # fmt: skip
            self._sequences.put(fields, number)
            for layer, table in self._states.items():
                state = part.layers[layer]
                table.put(_known(state, segment, kept) if segment.known else _scored(state, segment), number)
            row += segment.rows
        return kept


def parents_of(sees: Any) -> Ints:
    """(inputs,) the last ancestor of each input, -1 for the first."""
    return np.array([-1, *(np.flatnonzero(row[:node])[-1] for node, row in enumerate(sees) if node)], np.int64)


def _known(state: LayerState, segment: Segment, kept: list[Any]) -> dict[int, int]:
    columns, matrices = state.next if segment.done else (state.columns, state.matrices)
    kept.append((columns, matrices))
    state.next = torch.empty_like(columns), matrices if segment.done else torch.empty_like(matrices)
    return {
        at.COLUMNS: columns.data_ptr(), at.MATRICES: matrices.data_ptr(),
        at.NEXT_COLUMNS: state.next[0].data_ptr(), at.NEXT_MATRICES: state.next[1].data_ptr(),
    }  # fmt: skip


def _scored(state: LayerState, segment: Segment) -> dict[int, int]:
    written, done, slots = state.written, segment.done, segment.slots
    state.node_columns = _grown(state.node_columns, done, slots)
    state.written = Written(*(_grown(rows, done, slots) for rows in written))
    return {
        at.COLUMNS: state.columns.data_ptr(), at.MATRICES: state.matrices.data_ptr(),
        at.NODE_COLUMNS: state.node_columns.data_ptr(), at.NODE_KEYS: state.written.keys.data_ptr(),
        at.NODE_UPDATES: state.written.updates.data_ptr(), at.NODE_SUMS: state.written.sums.data_ptr(),
    }  # fmt: skip


def _grown(rows: torch.Tensor, done: int, slots: int) -> torch.Tensor:
    """Room for so many rows, the first of which are kept."""
    grown = rows.new_empty(slots, *rows.shape[1:])
    if done:
        grown[:done] = rows[:done]
    return grown
