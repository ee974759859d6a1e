"""Shows drafts to the target a second time in the pass that scores them (`Verifier.reflection`), and mixes its answers.

Only the trees that are scored get longer: what is verified, committed and counted are the drafts alone. A draft that
has no room for its second copy, in memory or in the model's context, is scored once, and so are sequences that
steering shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from paceline.tree import Scores, TokenTree

if TYPE_CHECKING:
    from paceline.engine.sequence import DecodingSequence
    from paceline.verifiers import Reflection

Fit = Callable[[Sequence["DecodingSequence"], Sequence[TokenTree]], Sequence[TokenTree]]


def shown_twice(
    reflection: Reflection, batch: Sequence[DecodingSequence], trees: Sequence[TokenTree], fit: Fit, most: int
) -> Sequence[TokenTree]:
    """The trees to be scored: drafts with their second copies where there is room, the same objects elsewhere.

    Args:
        fit: cuts trees to the memory that there is. most: tokens of the model's context.
    """
    wide = [
        tree if sequence.companion is not None else reflection.widened(tree, sequence.context.tokens)
        for sequence, tree in zip(batch, trees, strict=True)
    ]
    fitting = [
        one if len(sequence.context.tokens) + len(one) <= most else tree
        for sequence, one, tree in zip(batch, wide, trees, strict=True)
    ]
    if all(one is tree for one, tree in zip(fitting, trees, strict=True)):
        return trees
    return [
        one if len(one) == len(cut) else tree
        for one, cut, tree in zip(fitting, fit(batch, fitting), trees, strict=True)
    ]


def own_and_mixed(
    reflection: Reflection, scores: Scores, trees: Sequence[TokenTree], shown: Sequence[TokenTree]
) -> tuple[Scores, Scores]:
    """The target's own scores of the trees, and those mixed with what it said of the second copies.

    Args:
        scores: of `shown`.
    """
    first = [range(scores.rows[i], scores.rows[i] + 1 + len(tree)) for i, tree in enumerate(trees)]
    kept = torch.tensor([row for rows in first for row in rows], device=scores.logits.device)
    offsets = tuple(accumulate((len(rows) for rows in first), initial=0))
    best = None if scores.best is None else [scores.best[row] for rows in first for row in rows]
    taps = {layer: states[kept] for layer, states in scores.taps.items()}
    own = Scores(scores.logits[kept], offsets, taps, best)
    mixed = own.logits.to(torch.float32, copy=True)
    for i, (tree, one) in enumerate(zip(trees, shown, strict=True)):
        if one is not tree:
            mixed[offsets[i] : offsets[i + 1]] = reflection.mixed(scores.of(i), len(tree))
    return own, replace(own, logits=mixed, best=None)
