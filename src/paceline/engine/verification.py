"""The verdicts of a step: the rules of each request are applied to its rows, once, and its verifier judges its tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.engine.overlap import with_none
from paceline.engine.parts import EngineParts
from paceline.engine.sequence import DecodingSequence
from paceline.errors import NumericsError
from paceline.sampling import Rules
from paceline.tree import Scores, TokenTree, Verdict
from paceline.verifiers import Verifier


def verify(
    parts: EngineParts,
    batch: Sequence[DecodingSequence],
    trees: Sequence[TokenTree],
    scores: Scores,
    longer: Mapping[int, TokenTree],
) -> list[Verdict | NumericsError]:
    """Every sequence's verdict, by the verifier of its temperature.

    Args:
        longer: by position in the batch, trees with a last node that was drafted while they were scored.
    """
    for sequence in batch:
        if not sequence.plain:
            break
    else:
        at_zero = parts.greedy.after(_texts(batch)) if parts.greedy.reads_text else parts.greedy
        return at_zero.verify_scores(trees, scores)
    verdicts: dict[int, Verdict | NumericsError] = {}
    verifiers: tuple[tuple[Verifier, bool], ...] = ((parts.greedy, True), (parts.sampled, False))
    for verifier, greedy in verifiers:
        positions = [i for i, sequence in enumerate(batch) if sequence.greedy is greedy]
        if positions:
            apply = Rules.by_row if verifier.row_by_row and scores.logits.device.type == "cpu" else Rules.apply
            rows: list[Any] = [apply(batch[i].rules, scores.of(i), trees[i]) for i in positions]
            if longer:
                numbered = zip(positions, rows, strict=True)
                rows = [with_none(rows_nv, longer[i]) if i in longer else rows_nv for i, rows_nv in numbered]
            grown, draws = [longer.get(i, trees[i]) for i in positions], [batch[i].draws() for i in positions]
            rule = verifier.after(_texts([batch[i] for i in positions])) if verifier.reads_text else verifier
            verdicts.update(zip(positions, rule.verify(grown, rows, draws), strict=True))
    return [_with_reason(verdicts[i], sequence, scores, i) for i, sequence in enumerate(batch)]


def _texts(batch: Sequence[DecodingSequence]) -> list[list[int]]:
    return [sequence.context.tokens for sequence in batch]


def _with_reason(
    verdict: Verdict | NumericsError, sequence: DecodingSequence, scores: Scores, index: int
) -> Verdict | NumericsError:
    """The error of a sequence whose root has no distribution, where its request is to blame and not the model."""
    if isinstance(verdict, NumericsError) and (why := sequence.rules.blame(scores.of(index)[:1])) is not None:
        return NumericsError(why)
    return verdict
