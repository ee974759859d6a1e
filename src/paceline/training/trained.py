"""What a run of training has made, and what it can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.training.judging import Evaluated
from paceline.training.loop import LearningCurve
from paceline.training.splits import Size


@dataclass(frozen=True, slots=True)
class Trained:
    """Says what a run of training has made, where it is, and what it can do.

    Attributes:
        folder: of what was trained, with report.json and report.html.
        test, before: what it can do on texts that neither the weights nor the choice of the best state have seen, and
            what it could before training.
        curve: its judgements on the texts that choose the best state. sizes: of the three parts of the texts.
        speculative_config: how it is drafted with; empty for what does not draft.
        model: the folder, where it is a model in place of the target.
        speed: what `measured` says of it, where it was timed.
        stages: of a run with several, each by name with its curve, the last one `curve`; `before` is before them all.
        relative_size: weights that a drafted token reads, those of the target's pass being 1, where that is known.
    """

    folder: Path
    test: Evaluated
    before: Evaluated
    curve: LearningCurve
    sizes: Mapping[str, Size]
    speculative_config: Mapping[str, Any]
    model: Path | None
    speed: Mapping[str, Any] | None
    stages: Sequence[tuple[str, LearningCurve]] = ()
    relative_size: float | None = None

    @property
    def mbsu(self) -> float | None:
        """Memory-bound speed-up: tokens a pass with a chain of all depths, by what drafting and the pass read."""
        if self.relative_size is None:
            return None
        return self.test.length / (len(self.test.acceptance) * self.relative_size + 1)
