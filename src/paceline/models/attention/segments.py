"""One sequence's part of a forward pass, and who sees what in it: the one description of which inputs are fed, at which
positions, and what they see of the committed text and of each other.

Every kind of pass makes its own form of it: masks (tree_attention), chunks (strict_attention), buffers that a captured
graph reads (fixed_shape_attention), lists of slots for compiled code (slot_lists).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import ConfigError
from paceline.models.state.cache import NativeCache
from paceline.models.state.cross_memory import CrossMemory
from paceline.models.state.parts import State, keys_of, memory_of_source, states_of
from paceline.models.state.recurrent import RecurrentPart
from paceline.models.state.window_slots import Ints
from paceline.tree import EMPTY_TREE, TokenTree

Bools = npt.NDArray[np.bool_]
Position = TypeVar("Position", int, Ints, torch.Tensor)


def first_in_window(position: Position, window: int) -> Position:
    """The first position in the window of a row at `position`; below 0 where the window begins before the text."""
    return position + (1 - window)


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Where the inputs of a tree stand and what they see, root included.

    Attributes:
        depths: (slots,) position of each input behind the committed length.
        sees: (slots, slots), which inputs an input attends to, itself included.
    """

    depths: Ints
    sees: Bools


class Visible(NamedTuple):
    """What the fed rows of a segment see in layers of one window kind: committed positions from `first` on, and inputs.

    Attributes:
        first: (rows,) first position in each row's window, which may lie behind the committed text.
        inputs: (rows, slots), which inputs each row sees.
    """

    first: Ints
    inputs: Bools


@dataclass(slots=True)
class Segment:
    """One sequence's part of a pass.

    Attributes:
        cache: committed tokens, `length` of them, with room for `slots` more.
        slots: how many the pending root and nodes take, or the chunk; input i lives in that of position length + i.
        done: the first `done` inputs are in their slots already; rows are fed for the rest.
        tree: of inputs that branch; None for a chain, of which a row sees all positions of its window up to its own.
        memory: what the rows see of their source; None where there is none.
        recurrent: the states of the sequence's mixers; None where the model has none.
        known: a chunk of known tokens, all of which will be committed.
        unit: rows see those behind them in units of so many, counted from the last input; one pass feeds all of a unit.
    """

    cache: NativeCache
    slots: int
    done: int = 0
    tree: TreeShape | None = None
    memory: CrossMemory | None = None
    recurrent: RecurrentPart | None = None
    known: bool = False
    unit: int = 1

    @property
    def rows(self) -> int:
        return self.slots - self.done

    @property
    def depths(self) -> Ints:
        """See `TreeShape`; of a chain too, as is `sees`."""
        return np.arange(self.slots) if self.tree is None else self.tree.depths

    @property
    def sees(self) -> Bools:
        return np.tri(self.slots, dtype=np.bool_) if self.tree is None else self.tree.sees

    def positions(self) -> range | list[int]:
        """Positions of the fed rows."""
        length = self.cache.length
        if self.tree is None:
            return range(length + self.done, length + self.slots)
        return (self.tree.depths[self.done :] + length).tolist()  # type: ignore[no-any-return]  # numpy types tolist as Any

    def visible(self, window: int | None) -> Visible:
        """What the fed rows see in layers with this window, or with none."""
        inputs = self.sees[self.done :]
        if window is None:
            return Visible(np.zeros(self.rows, np.int64), inputs)
        positions = self.depths + self.cache.length
        first = np.maximum(first_in_window(positions[self.done :], window), 0)
        return Visible(first, inputs & (positions >= first[:, None]))

    def part(self, first: int, stop: int) -> Segment:
        """Inputs first .. stop - 1 as the rows of a pass of their own, those before them being in their slots."""
        if first == self.done and stop == self.slots:
            return self
        tree = None if self.tree is None else TreeShape(self.depths[:stop], self.sees[:stop, :stop])
        return replace(self, slots=stop, done=first, tree=tree)


def chunk(state: State, rows: int) -> Segment:
    """A chunk of known tokens, with room made for it.

    Raises:
        ConfigError: no rows, or a released cache.
    """
    if rows == 0:
        raise ConfigError("extend needs at least one token for each sequence, got none; leave that sequence out")
    cache = keys_of(state)
    cache.reserve(rows)
    cache.scratch = 0
    return Segment(cache, rows, memory=memory_of_source(state), recurrent=states_of(state), known=True)


def seeing_each_other(segment: Segment, unit: int) -> Segment:
    """The same inputs in units of so many, counted from the last one, of which each sees its whole unit as well.

    Each input of a unit stands behind the one before it; of a first unit that is not whole nothing else is asked.
    """
    units = np.arange(segment.slots - 1, -1, -1) // unit
    shape = TreeShape(segment.depths, segment.sees | (units[:, None] == units))
    return replace(segment, tree=shape, unit=unit)


def tree_segment(state: State, tree: TokenTree, done: int) -> Segment:
    """A root with its tree, `done` of whose inputs are in scratch already."""
    cache, memory, recurrent = keys_of(state), memory_of_source(state), states_of(state)
    if tree is EMPTY_TREE:
        return Segment(cache, 1, memory=memory, recurrent=recurrent)
    slots = 1 + len(tree)
    if tree.is_chain:
        return Segment(cache, slots, done, memory=memory, recurrent=recurrent)
    sees = np.zeros((slots, slots), np.bool_)
    sees[:, 0] = True
    sees[1:, 1:] = tree.ancestor_mask()
    shape = TreeShape(np.concatenate([[0], tree.depths]).astype(np.int64), sees)
    return Segment(cache, slots, done, shape, memory, recurrent)


def fed_tokens(roots: Sequence[int], trees: Sequence[TokenTree], segments: Sequence[Segment]) -> Sequence[int]:
    """The tokens that are fed, sequence by sequence."""
    if len(roots) == 1 and segments[0].slots == 1:
        return roots
    tokens: list[int] = []
    for root, tree, segment in zip(roots, trees, segments, strict=True):
        tokens.extend([root, *tree.tokens.tolist()][segment.done :])
    return tokens


def offsets(segments: Sequence[Segment]) -> tuple[int, ...]:
    """Row offsets, as in `Scores.rows`."""
    starts = [0]
    for segment in segments:
        starts.append(starts[-1] + segment.rows)
    return tuple(starts)


def run_lengths(segments: Sequence[Segment], chunked: bool) -> list[tuple[int, int]]:
    """Runs of (rows, sequence length): a row of the prompt counts all of it, a later one the text up to itself.

    Where no prompt was announced, a chunk is one with all that is before it.
    """
    runs_of_all = []
    for segment in segments:
        cache = segment.cache
        prompt = cache.prompt_length or (cache.length + segment.slots if chunked else 0)
        runs = groupby(max(prompt, position + 1) for position in segment.positions())
        runs_of_all += [(len(list(rows)), length) for length, rows in runs]
    return runs_of_all


def parts_with(segments: Sequence[Segment], wanted: Sequence[int]) -> tuple[list[Segment], list[int], list[int]]:
    """The parts of segments from the first row of each that is wanted to the last.

    Args:
        wanted: rows among those of all segments, in ascending order.
    Returns:
        The parts, which rows of all segments they hold, and which of these are the wanted ones.
    """
    parts: list[Segment] = []
    rows: list[int] = []
    picked: list[int] = []
    for segment, start in zip(segments, offsets(segments), strict=False):
        own = [row - start for row in wanted if start <= row < start + segment.rows]
        if own:
            first, stop = own[0], own[-1] + 1
            picked += [len(rows) + row - first for row in own]
            rows += range(start + first, start + stop)
            parts.append(segment.part(segment.done + first, segment.done + stop))
    return parts, rows, picked


def split_into_passes(segments: Sequence[Segment], most: int) -> list[list[Segment]]:
    """Passes of at most `most` rows that feed all segments in order, cut where they do not fit, but for units."""
    passes: list[list[Segment]] = [[]]
    room = most
    for segment in segments:
        at = segment.done
        while at < segment.slots:
            stop = min(segment.slots, at + room)
            stop -= (stop - segment.slots) % segment.unit
            if stop <= at:
                passes.append([])
                room = most
                continue
            passes[-1].append(segment.part(at, stop))
            room -= stop - at
            at = stop
    return passes
