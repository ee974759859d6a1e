"""Token Recycling: what did the model think might follow this token, the last time?

A table keeps the 8 best candidates of every token, as the last row computed from it had them, across requests of one
tenant. A static tree of 80 nodes and 6 levels, the template of the paper's code (version 2.2.2), is filled by looking
tokens up. Under a smaller budget those nodes stay that are most likely to be reached, by how often the target took the
candidate of that rank; where nothing is known of a token, what would follow it is left out and the next likely nodes
take the place. A controller that shapes trees (`ppd`) has its own template filled instead. (The reference fills an
empty table with token 0 and verifies that; here an empty table says nothing.) Rows of tokens that come twice in a step
are written in order: the last one stays. A step without any drafts teaches only what nothing is known of, so that it
costs next to nothing. On a GPU the candidates are found there, and 8 ids a row are copied.

The best tokens of scored rows are found in compiled code. Floats of one sign are ordered as their bits are, so a row is
looked through as integers, whatever its type: 64 logits at a time for their largest, and token by token only where that
is among the best so far, which soon becomes rare; the token's former candidates say at once how good that is at least.
A row of 6,144 logits takes less than a microsecond.

A table takes 32 bytes per token of the vocabulary: 4 MB for 128,000.

Source: Turning Trash into Treasure: Accelerating Inference of LLMs with Token Recycling (arXiv:2408.08696).

Axes in this file: r = scored rows, v = vocabulary, k = candidates of a token (CANDIDATES), n = nodes of the template.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.bases import SingleDrafter
from paceline.drafters.common.chains import tree_of
from paceline.drafters.common.tables import MAX_TENANTS, Arrays, TenantTables
from paceline.tree import Budget, Scores, TokenTree, Verdict
from paceline.utils import compiled, part_of_compiled

if TYPE_CHECKING:
    import torch

CANDIDATES: Final = 8
NOBODY: Final = -1
BLOCK: Final = 64
LOWEST: Final = -(2**40)

Ints = npt.NDArray[np.int32]
Bits = npt.NDArray[np.signedinteger[Any]]


@part_of_compiled
def _rank_of(bits: int, flip: int) -> int:
    """A number that is larger for a larger float; `flip` has all bits of the type but the sign."""
    return bits if bits >= 0 else bits ^ flip


@part_of_compiled
def _floor(known_k: Ints, bits: Bits, span: tuple[int, int], flip: int) -> int:
    """Least rank among the logits of CANDIDATES tokens: the row's best are no worse. LOWEST where fewer are known."""
    least = -LOWEST
    for token in known_k:
        if not 0 <= token < span[1] - span[0]:
            return LOWEST
        least = min(least, _rank_of(bits[span[0] + token], flip))
    return least


@part_of_compiled
def _extreme(bits: Bits, begin: int, flip: int) -> int:
    """The largest rank of BLOCK logits. Unsigned places and selections without branches: so this loop becomes vector
    code.
    """
    first = np.uint64(begin)
    high = low = bits[first]
    for step in range(np.uint64(BLOCK)):
        bit = bits[first + step]
        high = bit if bit > high else high
        low = bit if bit < low else low
    return _rank_of(high if high >= 0 else low, flip)


@part_of_compiled
def _best_of(bits: Bits, span: tuple[int, int], floor: int, flip: int, ids_k: Ints) -> None:
    """Fill `ids_k` with the tokens of the largest logits; `floor` as `_floor` gives it."""
    ranks_k, last = np.full(CANDIDATES, floor - 1, np.int64), CANDIDATES - 1
    ids_k[:] = NOBODY
    for begin in range(span[0], span[1], BLOCK):
        end = min(begin + BLOCK, span[1])
        if end - begin == BLOCK and _extreme(bits, begin, flip) <= ranks_k[last]:
            continue
        for at in range(begin, end):
            rank, position = _rank_of(bits[at], flip), last
            if rank > ranks_k[last]:
                while position > 0 and rank > ranks_k[position - 1]:
                    ranks_k[position], ids_k[position] = ranks_k[position - 1], ids_k[position - 1]
                    position -= 1
                ranks_k[position], ids_k[position] = rank, at - span[0]


@compiled
def learn_rows(table_vk: Ints, tokens_r: Ints, bits: Bits, pitch: int, width: int) -> None:
    """Write the best tokens of row i to `table_vk[tokens_r[i]]`, best first, lower ids first among equals.

    The last row wins.

    Args:
        table_vk: (v, k) int32.
        tokens_r: (r,) int32, the token that each row was computed from.
        bits: (..,) the rows' logits as signed integers of their size; row i begins at i * pitch.
        width: how many logits of a row count.
    """
    flip, ids_k = 32767 if bits.itemsize == 2 else 2147483647, np.empty(CANDIDATES, np.int32)
    for row in range(len(tokens_r)):
        known_k, base = table_vk[tokens_r[row]], row * pitch
        _best_of(bits, (base, base + width), _floor(known_k, bits, (base, base + width), flip), flip, ids_k)
        for k in range(CANDIDATES):
            known_k[k] = ids_k[k]


@compiled
def grow_tree(table_vk: Ints, root: int, shape_cn: Ints, most: tuple[int, int], columns_cn: Ints) -> int:
    """Fill a template with the table's candidates; returns how many nodes there are.

    Args:
        root: the last committed token.
        shape_cn: (3, n) parent in the template, rank, depth; in the order in which nodes are worth taking, parents
            first.
        most: nodes to use, levels to use.
        columns_cn: (4, n) out: tokens, parents, depths, ranks.
    """
    count = 0
    where_n = np.empty(shape_cn.shape[1], np.int32)
    for node in range(shape_cn.shape[1]):
        where_n[node] = NOBODY
        if count >= most[0]:
            break
        parent, rank = shape_cn[0, node], shape_cn[1, node]
        if shape_cn[2, node] > most[1] or (parent >= 0 and where_n[parent] < 0):
            continue
        above = where_n[parent] if parent >= 0 else -1
        token = table_vk[columns_cn[0, above] if above >= 0 else root, rank]
        if token >= 0:
            columns_cn[0, count], columns_cn[1, count] = token, above
            columns_cn[2, count], columns_cn[3, count] = shape_cn[2, node], rank
            where_n[node] = count
            count += 1
    return count


def learn(table_vk: Ints, tokens_r: Ints, logits_rv: torch.Tensor) -> None:
    """Keep the best tokens of every row as the candidates of the token that the row was computed from.

    Args:
        table_vk: (v, k) int32, changed in place; columns of the logits beyond v do not count.
        tokens_r: (r,) int32; where a token comes twice, its last row stays.
        logits_rv: (r, v) of any floating type, on any device.
    """
    import torch

    width = min(logits_rv.shape[1], len(table_vk))
    if logits_rv.device.type != "cpu":
        best_rk = logits_rv[:, :width].topk(min(CANDIDATES, width)).indices.cpu().numpy()
        for token, best_k in zip(tokens_r.tolist(), best_rk, strict=True):
            table_vk[token, : len(best_k)] = best_k
        return
    if logits_rv.dtype not in (torch.bfloat16, torch.float16, torch.float32) or logits_rv.stride(1) != 1:
        logits_rv = logits_rv.float().contiguous()
    rows, pitch = logits_rv.shape[0], logits_rv.stride(0)
    flat = logits_rv.detach().as_strided(((rows - 1) * pitch + width,), (1,))
    kind = torch.int32 if flat.element_size() == 4 else torch.int16
    learn_rows(table_vk, tokens_r, flat.view(kind).numpy(), pitch, width)


TEMPLATE: Final = ("8", "84321111", "832111112100100101100", "5211100010010000001001100", "311001000010100", "20010000")
"""Per level, how many children each node of the level before has, its best candidates first; nodes level by level."""

RANK_CONFIDENCE: Final = (0.62, 0.085, 0.045, 0.025, 0.016, 0.013, 0.010, 0.007)
"""By rank: how often the target took the candidate (the bundled model, greedy, 120 prompts of HumanEval, GSM8K,
Spec-Bench and MT-Bench; 3.4 tokens per step with the whole template).
"""


class CandidateTable:
    """Keeps the candidates that one tenant's requests have shown behind each token.

    Args:
        vocab_size: of the target.

    Attributes:
        candidates_vk: (v, 8) int32, best first; NOBODY where nothing is known.
    """

    def __init__(self, vocab_size: int) -> None:
        self.candidates_vk: Ints = np.full((vocab_size, CANDIDATES), NOBODY, np.int32)

    def to_arrays(self) -> Arrays:
        """See `tables.TenantTable`; only tokens of which something is known."""
        tokens = np.flatnonzero(self.candidates_vk[:, 0] >= 0).astype(np.int32)
        return {"tokens": tokens, "candidates": self.candidates_vk[tokens]}

    def read_arrays(self, arrays: Arrays, stored: int | None = None) -> None:
        """See `tables.TenantTable`."""
        size = len(self.candidates_vk)
        tokens_t = _checked("tokens", arrays["tokens"], 0, stored or size)
        candidates_tk = _checked("candidates", arrays["candidates"], NOBODY, stored or size)
        if tokens_t.ndim != 1 or candidates_tk.shape != (len(tokens_t), CANDIDATES):
            raise ValueError(f"tokens and candidates have shapes {tokens_t.shape} and {candidates_tk.shape}")
        ordered_tk = np.sort(candidates_tk, axis=1)
        if bool(((ordered_tk[:, 1:] == ordered_tk[:, :-1]) & (ordered_tk[:, 1:] >= 0)).any()):
            raise ValueError("a token has the same candidate twice")
        own_t = tokens_t < size
        self.candidates_vk[tokens_t[own_t]] = _below(candidates_tk[own_t], size)


def _below(candidates_tk: Ints, size: int) -> Ints:
    """(t, 8) candidates without ids from `size` on, those that are left in their order."""
    order_tk = np.argsort(candidates_tk >= size, axis=1, kind="stable")
    found_tk: Ints = np.take_along_axis(candidates_tk, order_tk, axis=1)
    found_tk[found_tk >= size] = NOBODY
    return found_tk


def _checked(name: str, array: npt.NDArray[np.generic], least: int, size: int) -> Ints:
    if array.dtype != np.int32:
        raise ValueError(f"{name} must be int32, not {array.dtype}")
    ids: Ints = array.astype(np.int32, copy=False)
    if ids.size and not (least <= int(ids.min()) and int(ids.max()) < size):
        raise ValueError(f"{name} must lie in {least}..{size - 1}")
    return ids


FEW_NEW, PLAIN_EVERY = 0.5, 8
"""Once less than this share of plain steps has a token of which nothing is known, one in so many of them is looked
at.
"""

_RATE = 1 / 32


class RecyclingState:
    """Keeps one sequence, with the table of its tenant."""

    __slots__ = ("context", "table")

    def __init__(self, context: Context, table: CandidateTable) -> None:
        self.context, self.table = context, table


class TokenRecyclingDrafter(SingleDrafter[RecyclingState]):
    """Drafts a tree of what the model considered after these tokens before.

    Args:
        num_speculative_tokens: most nodes to propose; None leaves it to the budget. There are never more than 80.
        tables: folder where tables are read at the start and written by `LLM.save_tables`.
        shared_tables: one table for all tenants.
        max_tenants: most tables at a time.
    Raises:
        ConfigError: a value outside its range.
        DrafterError: tables that do not fit.
    """

    name = "token_recycling"
    catches_up = False
    shares_state = True

    def __init__(
        self,
        args: DrafterArgs,
        *,
        num_speculative_tokens: int | None = None,
        tables: str | None = None,
        shared_tables: bool = False,
        max_tenants: int = MAX_TENANTS,
    ) -> None:
        super().__init__(args, num_speculative_tokens)
        self.shape_cn = static_template(chain=self.chains_only)
        self.tables: TenantTables[CandidateTable] = TenantTables(
            self.name,
            args,
            partial(CandidateTable, args.vocab_size),
            folder=tables,
            shared=shared_tables,
            max_tenants=max_tenants,
        )
        self._confidence = np.asarray(RANK_CONFIDENCE, np.float32)
        self.plain_every, self._new = 1, 1.0

    def _begin(self, context: Context) -> RecyclingState:
        return RecyclingState(context, self.tables.of(context.tenant))

    def observe(
        self,
        states: Sequence[RecyclingState],
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict],
        scores: Scores | None,
    ) -> None:
        """Learn from every scored row, the root's first; from plain steps only what nothing is known of."""
        if scores is None:
            return
        for i, (state, tree, verdict) in enumerate(zip(states, trees, verdicts, strict=True)):
            root, table_vk = state.context.tokens[-1 - len(verdict.tokens)], state.table.candidates_vk
            if not len(tree):
                known = bool(table_vk[root, 0] >= 0)
                self._new += _RATE * ((not known) - self._new)
                if known:
                    continue
            tokens_r = np.empty(1 + len(tree), np.int32)
            tokens_r[0], tokens_r[1:] = root, tree.tokens
            learn(table_vk, tokens_r, scores.of(i))
        self.plain_every = PLAIN_EVERY if self._new < FEW_NEW else 1

    def fork(self, state: RecyclingState, context: Context) -> RecyclingState:
        return RecyclingState(context, state.table)

    def _propose(self, state: RecyclingState, budget: Budget) -> TokenTree:
        shape_cn, nodes = self._shape(budget), min(budget.nodes, self.limit)
        columns_cn = np.empty((4, min(nodes, shape_cn.shape[1])), np.int32)
        n = grow_tree(state.table.candidates_vk, state.context.tokens[-1], shape_cn, (nodes, budget.depth), columns_cn)
        return tree_of(columns_cn[:3, :n].T, self._confidence[columns_cn[3, :n]], self.index)

    def _shape(self, budget: Budget) -> Ints:
        """(3, n) int32: the shape that the controller has in mind, or the template."""
        shape = None if self.chains_only else budget.shape
        return self.shape_cn if shape is None or (shape.ranks_n >= CANDIDATES).any() else shape.columns()


@lru_cache(maxsize=2)
def static_template(*, chain: bool = False) -> Ints:
    """(3, n) int32: parent, rank and depth of the template's nodes, most likely reached first, so that any number of
    them from the front is the best choice of that size.

    Args:
        chain: only the best candidates, for targets that score chains.
    """
    nodes = [node for node in template_nodes() if not chain or not any(node)]
    reach = {node: float(np.prod([RANK_CONFIDENCE[rank] for rank in node])) for node in nodes}
    nodes.sort(key=lambda node: -reach[node])
    where = {node: i for i, node in enumerate(nodes)}
    return np.array([[where.get(node[:-1], -1), node[-1], len(node)] for node in nodes], np.int32).T.copy()


def template_nodes() -> Iterator[tuple[int, ...]]:
    """The template's nodes as paths of ranks, level by level."""
    level: list[tuple[int, ...]] = [()]
    for widths in TEMPLATE:
        level = [(*node, rank) for node, width in zip(level, widths, strict=True) for rank in range(int(width))]
        yield from level
