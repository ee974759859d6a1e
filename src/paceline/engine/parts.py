"""What an engine is made of, whichever methods these are."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.controllers import Controller
from paceline.engine.drafter_set import DrafterSet
from paceline.models import Runner
from paceline.verifiers import ArgmaxVerifier, Verifier


@dataclass(slots=True)
class EngineParts:
    """The parts of one engine.

    Attributes:
        controller: decides at present; others take its place through `Engine.use_controller`, or where it fails.
        greedy: the verifier at temperature 0 (equal or reject).
        sampled: the verifier above it.
    """

    runner: Runner
    drafter_set: DrafterSet
    controller: Controller
    greedy: ArgmaxVerifier
    sampled: Verifier
