"""One sequence's part of a forward pass: which inputs are fed, at which positions, what they see of each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from paceline.errors import ConfigError
from paceline.models.state.cache import NativeCache
from paceline.models.state.cross_memory import CrossMemory
from paceline.models.state.parts import State, keys_of, memory_of_source
from paceline.models.state.window_slots import BLOCK
from paceline.tree import EMPTY_TREE, TokenTree


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Where the inputs of a tree stand and what they see, root included.

    Attributes:
        depths: (slots,) position of each input behind the committed length.
        sees: (slots, slots) bool, which inputs an input attends to, itself included.
    """

    depths: np.ndarray[tuple[int], np.dtype[np.int64]]
    sees: np.ndarray[tuple[int, int], np.dtype[np.bool_]]

    def until(self, stop: int) -> TreeShape:
        """Of the first `stop` inputs."""
        return TreeShape(self.depths[:stop], self.sees[:stop, :stop])


@dataclass(slots=True)
class Segment:
    """One sequence's part of a pass.

    Attributes:
        cache: committed tokens, `length` of them, with room for `slots` more.
        slots: how many the pending root and nodes take, or the chunk; input i lives in that of position length + i.
        done: the first `done` inputs are in their slots already; rows are fed for the rest.
        tree: of inputs that branch; None for a chain.
        memory: what the rows see of their source; None where there is none.
    """

    cache: NativeCache
    slots: int
    done: int = 0
    tree: TreeShape | None = None
    memory: CrossMemory | None = None

    @property
    def rows(self) -> int:
        return self.slots - self.done

    def positions(self) -> range | list[int]:
        """Positions of the fed rows."""
        length = self.cache.length
        if self.tree is None:
            return range(length + self.done, length + self.slots)
        return (self.tree.depths[self.done :] + length).tolist()  # type: ignore[no-any-return]  # numpy types tolist as Any


def reach(segment: Segment) -> int:
    """Number of positions from 0 to the deepest fed row."""
    depth = segment.slots - 1 if segment.tree is None else int(segment.tree.depths.max())
    return segment.cache.length + depth + 1


def span(segment: Segment, window: int | None) -> tuple[int, int]:
    """Positions [start, stop) that the fed rows may see, on block borders."""
    stop = -(-(segment.cache.length + segment.slots) // BLOCK) * BLOCK
    if window is None:
        return 0, stop
    first = segment.cache.length + (segment.done if segment.tree is None else 0)
    start = max(0, first - window + 1) // BLOCK * BLOCK
    return min(start, segment.cache.length // BLOCK * BLOCK), stop


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
    return Segment(cache, rows, memory=memory_of_source(state))


def tree_segment(state: State, tree: TokenTree, done: int) -> Segment:
    """A root with its tree, `done` of whose inputs are in scratch already."""
    cache, memory = keys_of(state), memory_of_source(state)
    if tree is EMPTY_TREE:
        return Segment(cache, 1, memory=memory)
    slots = 1 + len(tree)
    if tree.is_chain:
        return Segment(cache, slots, done, memory=memory)
    sees = np.zeros((slots, slots), np.bool_)
    sees[:, 0] = True
    sees[1:, 1:] = tree.ancestor_mask()
    return Segment(cache, slots, done, TreeShape(np.concatenate([[0], tree.depths]).astype(np.int64), sees), memory)


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


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """Rows first .. stop - 1 of a segment's inputs, fed in one pass."""

    segment: Segment
    first: int
    stop: int


def split_into_passes(segments: Sequence[Segment], most: int) -> list[list[SegmentPart]]:
    """Passes of at most `most` rows that feed all segments in order."""
    passes: list[list[SegmentPart]] = [[]]
    room = most
    for segment in segments:
        at = segment.done
        while at < segment.slots:
            if room == 0:
                passes.append([])
                room = most
            stop = min(segment.slots, at + room)
            passes[-1].append(SegmentPart(segment, at, stop))
            room -= stop - at
            at = stop
    return passes
