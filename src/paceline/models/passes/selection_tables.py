"""What compiled passes know of a selection of keys and values: tables of models.cpu.offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.models.attention.double_sparsity import DoubleSparsity
from paceline.models.attention.segments import Segment
from paceline.models.cpu import offsets as at
from paceline.models.cpu.pages import address
from paceline.models.cpu.selected_attention import LEAST_ROOM, SELECTED_ROW, compiled_selection
from paceline.models.passes.packing import ROWS, RecordTable


class SelectionTables:
    """Which layers choose by which channels, and where the labels of each row's text are.

    Args:
        method: ready for the model.
        layers, frame: the tables of a pass, which get the addresses of these.

    Attributes:
        room: positions for which a thread's scores must have room.
    """

    room = LEAST_ROOM

    def __init__(self, method: DoubleSparsity, layers: RecordTable, frame: RecordTable) -> None:
        self._method, self._frame, self._entry = method, frame, compiled_selection().address
        self._channels = [one.contiguous().numpy() for one in method.channels.values()]
        for number, (layer, channels) in enumerate(zip(method.channels, self._channels, strict=True)):
            layers.put({at.CHANNELS: address(channels), at.LABEL_LAYER: number}, layer)
        self._rows = np.zeros((ROWS, SELECTED_ROW // at.FIELD), np.int64)
        frame.put({at.SELECTED: address(self._rows), at.SELECTED_MOST: method.tokens})
        frame.put({at.SELECTED_SINKS: method.sinks, at.SELECTED_RECENT: method.recent})
        frame.put({at.LABEL_CHANNELS: self._channels[0].shape[1] if self._channels else 0})

    def place(self, segments: Sequence[Segment]) -> list[Any]:
        """Point at the labels of the segments; where none has more than is chosen, all are attended to whole.

        Returns what must live until the pass is over.
        """
        for segment in segments:
            self._method.forget(segment)
        chooses = any(self._method.chooses(segment) for segment in segments)
        self._frame.put({at.SELECTION: self._entry if chooses else 0})
        kept: list[Any] = []
        row = 0
        for segment in segments if chooses else ():
            labels = self._method.labels_of(segment)
            labels.follow(segment)
            tensor = labels.kept
            kept.append(tensor)
            strides = tensor.stride(1), tensor.stride(0)
            self._rows[row : row + segment.rows] = tensor.data_ptr(), *(one * tensor.itemsize for one in strides)
            row += segment.rows
        return kept
