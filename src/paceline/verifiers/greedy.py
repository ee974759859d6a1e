"""Equal or reject: at temperature 0 a drafted token is accepted if it is the target's argmax.

Source: blockwise parallel decoding (arXiv:1811.03115); over trees, SpecInfer (arXiv:2305.09781).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

from paceline.errors import NumericsError
from paceline.tree import CANDIDATE, ROOT, TokenTree, Verdict, chain_columns, first_nodes
from paceline.verifiers.base import ArgmaxVerifier, bad_row, before_bad_row

if TYPE_CHECKING:
    from paceline.tree import Scores
    from paceline.verifiers.base import Draws


class GreedyVerifier(ArgmaxVerifier):
    """The exact verifier at temperature 0."""

    name = "greedy"

    def verify(
        self, trees: Sequence[TokenTree], rows: Sequence[torch.Tensor], draws: Sequence[Draws] = ()
    ) -> list[Verdict | NumericsError]:
        """See `Verifier.verify`; `draws` are not used."""
        return [_walk(tree, *top) for tree, top in zip(trees, _tops(rows), strict=True)]

    def verify_scores(self, trees: Sequence[TokenTree], scores: Scores) -> list[Verdict | NumericsError]:
        """The same for all rows of a pass.

        The runner's own best tokens where it has looked and all of them are numbers, else one reduction over the batch
        and one transfer to the host.
        """
        best, offsets = scores.best, scores.rows
        if best is None or min(best) < 0:
            return self.verify_stacked(trees, scores.logits, offsets)
        if len(best) == len(trees):
            return [Verdict((), (), token) for token in best]
        if len(trees) == 1:
            return [_walk(trees[0], (), best)]
        return [_walk(tree, (), best[i:j]) for tree, (i, j) in zip(trees, pairwise(offsets), strict=True)]

    def verify_stacked(
        self, trees: Sequence[TokenTree], logits: torch.Tensor, offsets: Sequence[int]
    ) -> list[Verdict | NumericsError]:
        """The same for one tensor (r, v) whose rows `offsets[i] : offsets[i + 1]` belong to sequence i (as in
        `Scores`): one reduction over the batch, one transfer to the host.
        """
        ((largest, tokens),) = _tops([logits])
        spans = pairwise(offsets)
        return [_walk(tree, largest[i:j], tokens[i:j]) for tree, (i, j) in zip(trees, spans, strict=True)]


Top = tuple[list[float], list[int]]


def _tops(rows: Sequence[torch.Tensor]) -> list[Top]:
    """Per tensor (n, v) the largest entry of each row (NaN if there is one) and the lowest index where it stands, or -1
    where the largest entry is not finite. On a device: one transfer for all of them.
    """
    if not rows:
        return []
    if rows[0].device.type == "cpu":
        return [_tops_on_host(rows_nv) for rows_nv in rows]
    found = [rows_nv.max(-1) for rows_nv in rows]
    pairs = [torch.stack((values_n.double(), indices_n.double())) for values_n, indices_n in found]
    values, indices = torch.cat(pairs, dim=1).tolist()
    ends = list(accumulate(pair.shape[1] for pair in pairs))
    return [_where_finite(values[i:j], [int(index) for index in indices[i:j]]) for i, j in pairwise((0, *ends))]


def _tops_on_host(rows_nv: torch.Tensor) -> Top:
    """NumPy's argmax is about ten times as fast as torch's, with the same ties and NaNs."""
    wide_nv = (rows_nv if rows_nv.dtype == torch.float64 else rows_nv.float()).numpy()
    indices = wide_nv.argmax(-1).tolist()
    return _where_finite([float(row_v[index]) for row_v, index in zip(wide_nv, indices, strict=True)], indices)


def _where_finite(values: list[float], indices: list[int]) -> Top:
    return values, [index if math.isfinite(value) else -1 for value, index in zip(values, indices, strict=True)]


def _walk(tree: TokenTree, largest: Sequence[float], tokens: Sequence[int]) -> Verdict | NumericsError:
    """Descend along the argmax tokens; entry 0 is the root's, entry 1 + i that of node i."""
    drafted: list[int] = tree.tokens.tolist()
    path: tuple[int, ...] = ()
    if drafted:
        columns = chain_columns(len(drafted))
        chain = tree.kinds is columns.kinds and (tree.parents is columns.parents or tree.is_chain)
        path = _chain_path(drafted, tokens) if chain else _tree_path(tree, drafted, tokens)
    row = path[-1] + 1 if path else 0
    accepted = tuple(drafted[:row]) if row == len(path) else tuple([drafted[node] for node in path])
    if tokens[row] < 0:
        return before_bad_row(path, accepted) if path else bad_row(largest[row], 0)
    return Verdict(path, accepted, tokens[row])


def _chain_path(drafted: Sequence[int], tokens: Sequence[int]) -> tuple[int, ...]:
    for count, token in enumerate(drafted):
        if token != tokens[count]:
            return first_nodes(count)
    return first_nodes(len(drafted))


def _tree_path(tree: TokenTree, drafted: Sequence[int], tokens: Sequence[int]) -> tuple[int, ...]:
    path: list[int] = []
    at: int = ROOT
    columns = zip(drafted, tree.parents.tolist(), tree.kinds.tolist(), strict=True)
    for node, (token, parent, kind) in enumerate(
        columns
    ):  # children come after their parents, so one pass finds the path
        if parent == at and token == tokens[at + 1] and kind == CANDIDATE:
            path.append(node)
            at = node
    return tuple(path)
