"""The scoring pass of a step: the target over all roots and trees, once.

Drafters may work meanwhile (`engine.overlap`) or have computed a part of it already; rows and layers that steering
looks at come with it (`engine.companions`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from paceline.engine.added_rows import DrafterRows, drafter_rows
from paceline.engine.companions import NOTHING_ADDED, Companions, SteeringRows
from paceline.engine.parts import EngineParts
from paceline.engine.reflecting import Fit, own_and_mixed, shown_twice
from paceline.engine.sequence import DecodingSequence
from paceline.engine.step_clock import StepClock
from paceline.models import ScoresAddedRows
from paceline.tree import Scores, TokenTree


@dataclass(slots=True)
class StepScores:
    """What a step's scoring pass gave.

    Attributes:
        raw: the model's own scores.
        steered: the same as steering or reflection shapes them, which verdicts are made of; the same object where
            neither does.
        longer: by position in the batch, the trees that grew by a trial while they were scored.
        added_rows: of drafters, which the pass had beside those of `raw`.
    """

    raw: Scores
    steered: Scores
    longer: Mapping[int, TokenTree]
    added_rows: int = 0


class Scoring:
    """Runs the target for the steps of an engine.

    Args:
        parts: the runner, and the drafters that work beside it.
        companions: what steers the sequences.
        fit: cuts trees to the memory that there is.
    """

    def __init__(self, parts: EngineParts, companions: Companions, fit: Fit) -> None:
        self._runner, self._drafter_set, self._companions = parts.runner, parts.drafter_set, companions
        self._reflection, self._taps, self._fit = parts.sampled.reflection, parts.sampled.taps, fit

    def score(
        self, batch: Sequence[DecodingSequence], roots: Sequence[int], trees: Sequence[TokenTree], clock: StepClock
    ) -> StepScores:
        """Score roots and trees.

        Args:
            clock: told when there are scores, and when the work of drafters beside them has ended.
        """
        with self._drafter_set.ahead(batch, trees) as ahead:
            added, shown = self._companions.added(batch, trees), trees
            if self._reflection is not None:
                shown = shown_twice(self._reflection, batch, trees, self._fit, self._runner.info.max_context)
            most = self._runner.info.max_context
            rows = drafter_rows(self._drafter_set, batch, trees, shown, fit=self._fit, context=most)
            found, of_rows = self._pass(batch, roots, shown, added, rows)
            scores, second = added.split(found)
            clock.scored()
        clock.joined(ahead.waits_for)
        if rows is not None and of_rows is not None:
            rows.read(self._drafter_set, batch, of_rows)
        mixed = scores
        if self._reflection is not None and shown is not trees:
            scores, mixed = own_and_mixed(self._reflection, scores, trees, shown)
        more = 0 if of_rows is None else of_rows.rows[-1]
        return StepScores(scores, self._companions.shape(batch, trees, mixed, second), ahead.longer, more)

    def _pass(
        self,
        batch: Sequence[DecodingSequence],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        added: SteeringRows,
        rows: DrafterRows | None,
    ) -> tuple[Scores, Scores | None]:
        """One pass, with a drafter's rows beside the trees; where a drafter has computed a part of it, the rest."""
        caches, taps = [sequence.cache for sequence in batch], self._drafter_set.score_taps
        if self._taps:
            taps = sorted({*taps, *self._taps})
        if added is not NOTHING_ADDED:
            caches, taps = [*caches, *added.caches], sorted({*taps, *added.taps})
            roots, trees = [*roots, *added.roots], [*trees, *added.trees]
        if rows is not None:
            runner = cast(ScoresAddedRows, self._runner)
            return runner.score_added(caches, roots, trees, rows.among(len(caches)), taps=taps)
        whole = bool(taps) or self._reflection is not None or added is not NOTHING_ADDED
        resumed = None if whole else self._drafter_set.resume(batch, caches, roots, trees)
        return self._runner.score(caches, roots, trees, taps=taps) if resumed is None else resumed, None
