"""What a run of training has made, and what it can do."""

from __future__ import annotations

from collections.abc import Mapping
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
    """

    folder: Path
    test: Evaluated
    before: Evaluated
    curve: LearningCurve
    sizes: Mapping[str, Size]
    speculative_config: Mapping[str, Any]
    model: Path | None
    speed: Mapping[str, Any] | None
