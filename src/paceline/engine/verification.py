"""The verdicts of a step: the rules of each request are applied to its rows, once, and its verifier judges its tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.engine.overlap import with_none
from paceline.engine.parts import EngineParts
from paceline.engine.scoring import StepScores
from paceline.engine.sequence import DecodingSequence
from paceline.errors import NumericsError
from paceline.sampling import Rules
from paceline.tree import Scores, TokenTree, Verdict
from paceline.verifiers import Draws, Likeliest, Rows, Verifier, departures_at

if TYPE_CHECKING:
    import torch


def verify(
    parts: EngineParts,
    batch: Sequence[DecodingSequence],
    trees: Sequence[TokenTree],
    step: StepScores,
) -> list[Verdict | NumericsError]:
    """Every sequence's verdict, by the verifier of its temperature."""
    scores, longer, reflected = step.steered, step.longer, parts.sampled.reflection is not None
    for sequence in batch:
        if reflected or not sequence.plain:
            break
    else:
        at_zero = parts.greedy.after(_texts(batch)) if parts.greedy.reads_text else parts.greedy
        if parts.sampled.taps:
            at_zero = at_zero.seeing(_states(parts.sampled.taps, scores, range(len(batch))))
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
            if parts.sampled.taps:
                rule = rule.seeing(_states(parts.sampled.taps, scores, positions))
            found = rule.verify(grown, rows, draws)
            if reflected:
                own = [apply(batch[i].rules, _own(step, batch, i), trees[i]) for i in positions]
                found = [_counted(*each, greedy) for each in zip(found, grown, own, draws, strict=True)]
            verdicts.update(zip(positions, found, strict=True))
    return [_with_reason(verdicts[i], sequence, scores, i) for i, sequence in enumerate(batch)]


def _texts(batch: Sequence[DecodingSequence]) -> list[list[int]]:
    return [sequence.context.tokens for sequence in batch]


def _states(taps: Sequence[int], scores: Scores, positions: Sequence[int]) -> list[torch.Tensor]:
    """(1 + n, hidden) of each sequence, of the only layer."""
    (layer,) = taps
    return [scores.taps[layer][scores.rows[i] : scores.rows[i + 1]] for i in positions]


def _own(step: StepScores, batch: Sequence[DecodingSequence], index: int) -> torch.Tensor:
    """(1 + n, v) logits of a sequence without reflection; one that is steered has none."""
    return (step.raw if batch[index].companion is None else step.steered).of(index)


def _counted(
    verdict: Verdict | NumericsError, tree: TokenTree, rows: Rows, draws: Draws, greedy: bool
) -> Verdict | NumericsError:
    """A verdict on mixed rows, with its departures from exact verification by the target's own, `rows`."""
    if isinstance(verdict, NumericsError) or verdict.next_token is None:
        return verdict
    if greedy:
        tree, draws = tree.replace(trials={}) if tree.trials else tree, Likeliest()
    try:
        return replace(verdict, departures=departures_at(tree, verdict, rows, draws))
    except NumericsError:  # rows of the target's own that hold no distribution
        return verdict


def _with_reason(
    verdict: Verdict | NumericsError, sequence: DecodingSequence, scores: Scores, index: int
) -> Verdict | NumericsError:
    """The error of a sequence whose root has no distribution, where its request is to blame and not the model."""
    if isinstance(verdict, NumericsError) and (why := sequence.rules.blame(scores.of(index)[:1])) is not None:
        return NumericsError(why)
    return verdict
