"""The token tree: candidate continuations of one sequence, the one type that drafters, verifiers and runners exchange.

Columns that follow from a chain's length alone are made once and shared by all chains of that length. They lie over
`bytes`, which nobody can make writable. So a tree that holds one of these very objects is right in that column, whoever
built it, and need not be looked through: that makes a chain's checks take a few microseconds.

Rows of drawn proposals stay on their device and are shared, never copied.

Axes in this file: n = tree nodes, v = vocabulary. Node indices count from 0; the parent of a first-level node is -1,
the root, which is the last committed token of the sequence and is not stored in the tree. Source: SpecInfer
(arXiv:2305.09781).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.errors import DrafterError

if TYPE_CHECKING:
    import torch

Ints = npt.NDArray[np.int32]
INT: Final = np.dtype(np.int32)


class ChainColumns(NamedTuple):
    """(n,) int32 each: node i continues node i - 1, and is a candidate."""

    parents: Ints
    depths: Ints
    kinds: Ints


@lru_cache(maxsize=256)
def chain_columns(length: int) -> ChainColumns:
    """The columns of every chain of `length` nodes."""
    parents, depths = np.arange(-1, length - 1, dtype=np.int32), np.arange(1, length + 1, dtype=np.int32)
    return ChainColumns(_fixed(parents), _fixed(depths), _fixed(np.zeros(length, np.int32)))


@lru_cache(maxsize=1024)
def chain_sources(length: int, source: int) -> Ints:
    """(n,) int32: every node proposed by drafter number `source`."""
    return _fixed(np.full(length, source, np.int32))


@lru_cache(maxsize=256)
def first_nodes(count: int) -> tuple[int, ...]:
    """0, 1, ... count - 1: the path of an accepted chain."""
    return tuple(range(count))


def _fixed(column: Ints) -> Ints:
    return np.frombuffer(column.tobytes(), np.int32)


def lone_source(tree: TokenTree) -> int:
    """The drafter of a chain of shared columns with points alone, all by one drafter.

    -1 says nothing about the tree.
    """
    n = len(tree.tokens)
    if not n or tree.trials or tree.also:
        return -1
    columns, source = chain_columns(n), tree.sources.item(0)
    shared = tree.parents is columns.parents and tree.depths is columns.depths and tree.kinds is columns.kinds
    return source if shared and tree.sources is chain_sources(n, source) else -1


def is_sound_chain(tree: TokenTree, vocab_size: int, source: int | None = None) -> bool:
    """Whether a tree is a chain of shared columns with nothing wrong in the others; False says nothing about the tree.

    Args:
        source: proposed by this drafter, as the shared column says it; None for any.
    """
    tokens, sources, confidence = tree.tokens, tree.sources, tree.confidence
    parents, depths, kinds = chain_columns(n := len(tokens))
    if tree.parents is not parents or tree.depths is not depths or tree.kinds is not kinds:
        return False
    if tree.trials or not n or tokens.dtype != INT or not tokens.shape == confidence.shape == (n,):
        return False
    if source is None:
        if sources.dtype != INT or sources.shape != (n,):
            return False
    elif sources is not chain_sources(n, source):
        return False
    for token, chance in zip(tokens.tolist(), confidence.tolist(), strict=True):
        if not (0 <= token < vocab_size and 0.0 <= chance <= 1.0):  # a NaN is not in 0..1 either
            break
    else:
        return True
    return False


IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

ROOT: Final = -1
CANDIDATE: Final = 0
PROBE: Final = 1
COLUMNS: Final = ("tokens", "parents", "depths", "sources", "confidence", "kinds")


@dataclass(frozen=True, slots=True)
class Trial:
    """One attempt to accept a child of a parent, in the order in which attempts are made.

    A *point* trial (`row is None`) was chosen by a rule: q(x) = 1. A *drawn* trial was sampled from
    `norm(row with the tokens in removed set to 0)`.

    Attributes:
        node: index of the child node that this trial proposes.
        row: (v,) float32 probabilities on the drafter's device, or None for a point trial.
        removed: tokens taken out of `row` before this draw (sampling without replacement); empty with replacement.
        order: when this draw was made, for drafters that do not draw level by level; equal orders mean level by level,
            parents in node order. Cutting a tree follows it (`tree.select_nodes`).
    """

    node: int
    row: torch.Tensor | None = None
    removed: tuple[int, ...] = ()
    order: int = 0

    @property
    def drawn(self) -> bool:
        return self.row is not None


def _ints(values: Sequence[int] | IntArray) -> IntArray:
    given = np.asarray(values)
    found: IntArray = given.astype(np.int32, copy=False)
    if given.size and (given.dtype.kind not in "iu" or (given is not found and (given != found).any())):
        raise DrafterError(f"tree columns must hold 32-bit integers, got {given.dtype} {given.ravel()[:5].tolist()}")
    return found


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """Candidate continuations of one sequence, parents before children, unique by (parent, token).

    Build it with `TokenTree.build` or `TokenTree.chain`, which fill in and check everything.

    Attributes:
        tokens: (n,) int32 token ids.
        parents: (n,) int32 index of the parent node, -1 for the root.
        depths: (n,) int32, 1 for children of the root.
        sources: (n,) int32 index of the drafter that proposed the node.
        confidence: (n,) float32 chance that the target takes this child at its parent; siblings sum to at most 1.
        kinds: (n,) int32, CANDIDATE, or PROBE for an extra input position that selection keeps and verifiers skip.
        trials: parent -> ordered trials, for parents with at least one drawn trial. Every other parent has one point
            trial per candidate child in node order (`trials_of` gives both alike).
        also: node -> the drafters besides `sources[node]` that proposed it too, for credit; filled in by `merge`.
    """

    tokens: IntArray
    parents: IntArray
    depths: IntArray
    sources: IntArray
    confidence: FloatArray
    kinds: IntArray
    trials: Mapping[int, tuple[Trial, ...]] = field(default_factory=lambda: MappingProxyType({}))
    also: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def build(
        cls,
        tokens: Sequence[int] | IntArray,
        parents: Sequence[int] | IntArray,
        *,
        confidence: Sequence[float] | FloatArray | None = None,
        sources: Sequence[int] | IntArray | int = 0,
        kinds: Sequence[int] | IntArray | None = None,
        trials: Mapping[int, Sequence[Trial]] | None = None,
    ) -> TokenTree:
        """Make a tree; depths are derived, missing columns get their defaults (confidence 0.5 shared by siblings).

        Raises:
            DrafterError: columns of different length, a parent that does not come first, duplicates, bad confidence.
        """
        tokens_n, parents_n = _ints(tokens), _ints(parents)
        n = len(tokens_n)
        if parents_n.shape != (n,):
            raise DrafterError(f"a tree needs one parent per token, got {n} tokens and {parents_n.size} parents")
        tree = cls(
            tokens=tokens_n,
            parents=parents_n,
            depths=_depths(parents_n),
            sources=np.full(n, sources, np.int32) if isinstance(sources, int) else _ints(sources),
            confidence=_default_confidence(parents_n) if confidence is None else np.asarray(confidence, np.float32),
            kinds=np.zeros(n, np.int32) if kinds is None else _ints(kinds),
            trials=MappingProxyType({p: tuple(ts) for p, ts in (trials or {}).items()}),
        )
        tree.check_structure()
        return tree

    @classmethod
    def chain(cls, tokens: Sequence[int], *, confidence: Sequence[float] | None = None, source: int = 0) -> TokenTree:
        """A tree without branches: token i+1 continues token i. Raises DrafterError as `build` does."""
        n = len(tokens)
        if not n:
            return EMPTY_TREE
        parents, depths, kinds = chain_columns(n)
        chances = np.full(n, 0.5, np.float32) if confidence is None else np.asarray(confidence, np.float32)
        tree = cls(_ints(tokens), parents, depths, chain_sources(n, source), chances, kinds)
        tree.check_columns()
        return tree

    def children(self, parent: int) -> list[int]:
        """Candidate children of a node (or of ROOT) in node order; probes are left out."""
        return [int(i) for i in np.flatnonzero((self.parents == parent) & (self.kinds == CANDIDATE))]

    def trials_of(self, parent: int) -> tuple[Trial, ...]:
        """The ordered trials at a parent, point trials made up for parents that have no drawn ones."""
        explicit = self.trials.get(parent)
        return explicit if explicit is not None else tuple(Trial(node) for node in self.children(parent))

    def path(self, node: int) -> tuple[int, ...]:
        """Node indices from the first level down to `node`, inclusive; empty for ROOT."""
        path = []
        while node != ROOT:
            path.append(node)
            node = int(self.parents[node])
        return tuple(reversed(path))

    def leaves(self) -> list[int]:
        """Nodes without children, in node order."""
        return [int(i) for i in np.setdiff1d(np.arange(len(self)), self.parents)]

    @property
    def is_chain(self) -> bool:
        parents = chain_columns(len(self.tokens)).parents
        return self.parents is parents or bool(np.array_equal(self.parents, parents))

    @property
    def max_depth(self) -> int:
        n = len(self)
        return n if self.depths is chain_columns(n).depths else int(self.depths.max(initial=0))

    def ancestor_mask(self) -> BoolArray:
        """(n, n) bool: [i, j] is true when j is i or an ancestor of i. The root and the prefix are not included."""
        if self.is_chain:
            return np.tri(len(self), dtype=np.bool_)
        mask_nn = np.eye(len(self), dtype=np.bool_)
        for i, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                mask_nn[i] |= mask_nn[parent]
        return mask_nn

    def reach(self) -> FloatArray:
        """(n,) float32: estimated chance that a node is accepted, the product of confidences along its path."""
        if self.is_chain:
            return np.multiply.accumulate(self.confidence)
        reach_n = self.confidence.copy()
        for i, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                reach_n[i] *= reach_n[parent]
        return reach_n

    def check_columns(self) -> None:
        """Raise DrafterError unless all columns have one length and confidences are sane."""
        n = len(self)
        for name in COLUMNS:
            if (got := getattr(self, name).shape) != (n,):
                raise DrafterError(f"tree column {name!r} has shape {got}, need ({n},)")
        sure = self.confidence.tolist()
        if n and not (min(sure) >= 0.0 and max(sure) <= 1.0 and sum(sure) >= 0.0):  # only a sum tells a NaN
            raise DrafterError("tree confidences must lie between 0 and 1 (and not be NaN)")

    def check_structure(self) -> None:
        """Raise DrafterError unless columns fit together, nodes are unique and trials name their parent's children."""
        self.check_columns()
        n, parents, depths = len(self), self.parents.tolist(), self.depths.tolist()
        for node, (parent, depth) in enumerate(zip(parents, depths, strict=True)):
            if not ROOT <= parent < node:
                raise DrafterError("parents must come before their children and start at -1")
            if depth != (1 if parent < 0 else depths[parent] + 1):
                raise DrafterError(f"tree depths {depths} do not follow from the parents; use TokenTree.build")
        if (unique := len(set(zip(parents, self.tokens.tolist(), strict=True)))) < n:
            raise DrafterError(
                f"a tree's nodes must be unique by (parent, token), got {n - unique} duplicates; merge them"
            )
        for parent, trials in self.trials.items():
            _check_trials(self, parent, trials)

    def check(self, vocab_size: int, max_nodes: int) -> None:
        """The boundary check before a proposed tree meets the model.

        Raises:
            DrafterError: token ids or rows that do not fit the vocabulary, more nodes than the budget, or a broken
                structure.
        """
        if len(self) > max_nodes:
            raise DrafterError(f"a tree of {len(self)} nodes exceeds the budget of {max_nodes}")
        if is_sound_chain(self, vocab_size):
            return
        if any(
            getattr(self, name).dtype.kind not in "iu" for name in ("tokens", "parents", "depths", "sources", "kinds")
        ):
            raise DrafterError("tree columns must hold integers; use TokenTree.build or TokenTree.chain")
        if len(self) and (int(self.tokens.min()) < 0 or int(self.tokens.max()) >= vocab_size):
            raise DrafterError(
                f"tree tokens must lie in 0..{vocab_size - 1}, got {self.tokens.min()}..{self.tokens.max()}"
            )
        self.check_structure()
        for parent, trials in self.trials.items():
            for trial in trials:
                if trial.row is not None and tuple(trial.row.shape) != (vocab_size,):
                    raise DrafterError(
                        f"a drawn trial at node {parent} has a row of {tuple(trial.row.shape)}, need ({vocab_size},)"
                    )

    def read_only(self) -> TokenTree:
        """The same tree, through arrays that cannot be written to."""
        columns = {name: getattr(self, name).view() for name in COLUMNS}
        for column in columns.values():
            column.flags.writeable = False
        return self.replace(**columns)

    def replace(self, **columns: Any) -> TokenTree:
        """A copy with some columns replaced (and not checked again)."""
        return TokenTree(**{name: columns.get(name, getattr(self, name)) for name in (*COLUMNS, "trials", "also")})


def _depths(parents_n: IntArray) -> IntArray:
    depths: list[int] = []
    for i, parent in enumerate(parents_n.tolist()):
        if not -1 <= parent < i:
            raise DrafterError(f"node {i} has parent {parent}, but parents must come first and start at -1")
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return _ints(depths)


def _default_confidence(parents_n: IntArray) -> FloatArray:
    counts = np.bincount(parents_n + 1, minlength=1) if len(parents_n) else np.ones(1)
    return (0.5 / counts[parents_n + 1]).astype(np.float32)


def _check_trials(tree: TokenTree, parent: int, trials: Sequence[Trial]) -> None:
    tried = {trial.node for trial in trials}
    if tried != set(tree.children(parent)):
        raise DrafterError(
            f"the trials at node {parent} name nodes {sorted(tried)}, but its children are {tree.children(parent)}"
        )


EMPTY_TREE: Final = TokenTree.build([], [])


@dataclass(frozen=True, slots=True)
class GroupTrial(Trial):
    """One of several draws with replacement from one row at one position, for rules that need their number.

    They share the row object.

    A cut leaves fewer draws than planned, and how many may depend on the tokens that came up. A rule that reads the
    number of draws off a tree would let the chance of the first draw depend on its own token, which breaks the output
    distribution; the planned number does not.

    Attributes:
        group: planned number of these draws, decided before the first.
    """

    group: int = 1
