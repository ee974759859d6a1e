"""The parts a decoding method of diffusion language models is put together from; each is a small protocol.

In: a canvas, what the model says of it. Out: where to write what, what to compute next. Not here: any method; how parts
are driven (`diffusion.loop`).

A part is made anew for every canvas, so what it remembers is of one canvas by construction, and nothing leaks between
the members of a batch. Parts with a memory (`stateless = False`) cannot be asked "what if", which drafting verification
does; that is refused when a method is put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from paceline.diffusion.canvas import Canvas, Floats
from paceline.diffusion.predictions import Predictions
from paceline.models.denoiser import Ints

NONE: Ints = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Step:
    """What rules may look at when they decide on one round.

    Attributes:
        canvas: as it stands; rules only read it.
        predictions: of the masked slots computed in the last pass; of the written and given ones behind the prompt too
            where the method edits or a rule says `reads_written = True`.
        eligible: (e,) masked slots with a prediction that may be written now, ascending.
        scores: (e,) of `eligible`; the highest goes first, the leftmost among equals.
        block: slots of the current block.
    """

    canvas: Canvas
    predictions: Predictions
    eligible: Ints
    scores: Floats
    block: range

    @property
    def ranked(self) -> Ints:
        """`eligible`, best first."""
        return self.eligible[np.argsort(-self.scores, kind="stable")]


@dataclass(frozen=True, slots=True)
class Changes:
    """What an edit or remask rule does besides writing: tokens at committed slots, slots to be masked again."""

    slots: Ints = field(default_factory=lambda: NONE)
    tokens: Ints = field(default_factory=lambda: NONE)
    remask: Ints = field(default_factory=lambda: NONE)


@dataclass(frozen=True, slots=True)
class Ending:
    """What a stop rule decides: write the prediction at all masked slots (`fill`), cut the canvas to `length`, or both.

    Where the cache policy has computed the current block only, only its slots are filled, and decoding goes on.
    """

    fill: bool = False
    length: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One pass: which slots are computed, which are read from the cache, whether what is computed is stored.

    Attributes:
        wanted: rows of `slots` whose logits somebody reads, ascending; set by the loop, None is all of them.
    """

    slots: Ints
    read: Ints | None = None
    write: bool = False
    wanted: Ints | None = None

    @property
    def predicted(self) -> Ints:
        """The slots whose logits are read, in the order of their rows."""
        return self.slots if self.wanted is None else self.slots[self.wanted]


class Schedule(Protocol):
    """Which block is being worked on, which slots may be written."""

    stateless: bool

    def block(self, canvas: Canvas) -> range:
        """The current block, by slots; the last one when nothing is masked."""

    def eligible(self, canvas: Canvas) -> Ints:
        """Masked slots that may be written now, ascending; never empty while a slot is masked."""


class Score(Protocol):
    """How sure the model is of a slot; the highest score is written first."""

    stateless: bool

    def score(self, predictions: Predictions, canvas: Canvas) -> Floats:
        """(k,) of the (k,) predictions, all of eligible slots."""


class Correction(Protocol):
    """Corrects what the model says before any rule looks at it: penalties on logits."""

    stateless: bool

    def correct(self, predictions: Predictions, canvas: Canvas) -> Predictions:
        """Predictions of the same slots."""


class Modifier(Protocol):
    """Corrects scores after they are taken: factors on ends of text, bars, priorities of blocks."""

    stateless: bool

    def modify(self, step: Step) -> Floats:
        """(e,) scores in place of `step.scores`; -inf bars a slot for this round, unless all are barred."""


class Commit(Protocol):
    """Which eligible slots are written this round.

    A rule that counts its rounds and ends by itself may write nothing in some of them; it says so by an attribute
    `waits = True`.
    """

    stateless: bool

    def choose(self, step: Step) -> Ints:
        """A subset of `step.eligible`; the loop writes the best slot where it is empty."""


class Edit(Protocol):
    """Rewrites or masks again what was written."""

    stateless: bool

    def changes(self, step: Step, chosen: Ints) -> Changes:
        """Besides `chosen`, which is written in the same round."""

    def pending(self, canvas: Canvas) -> bool:
        """Whether a canvas without masked slots still needs a pass."""


class Check(Protocol):
    """A hard constraint on the text: a grammar, a regular expression, a schema."""

    stateless: bool

    def settle(self, step: Step, chosen: Ints) -> tuple[Ints, Ints]:
        """Slots and tokens in place of `chosen` and the predictions there, all of them allowed; at least one of each.

        Raises:
            UnsatisfiableError: nothing can be written any more.
        """

    def cuts(self, canvas: Canvas, length: int) -> bool:
        """Whether a canvas may be cut to `length` slots, as a stop rule asks."""


class Stop(Protocol):
    """Whether the rest can be written at once, or is not needed."""

    stateless: bool

    def ending(self, step: Step, chosen: Ints) -> Ending | None:
        """Before `chosen` is written."""


class Cache(Protocol):
    """What is recomputed and what is read from stored keys and values.

    Attributes:
        exact: predictions are those of passes without a cache, but for rounding.
    """

    exact: bool

    def plans(self, canvas: Canvas, block: range) -> list[Plan]:
        """Passes before the next decision: the last predicts, those before it only store (the write pass of a finished
        block).
        """

    def ahead(self, canvas: Canvas, block: range) -> Plan | None:
        """A pass over a later canvas beside the one that `plans` has asked for last, with the predictions `plans` would
        lead to.

        It reads only what was stored before that pass, and stores nothing. None where the policy would store anew
        first: such a canvas is not computed ahead.
        """


class Verification(Protocol):
    """Several canvases ahead in one pass, of which the furthest that the plain method would have reached is kept."""

    def drafts(self, canvas: Canvas, predictions: Predictions) -> list[Canvas]:
        """Canvases to compute next; the first is what the plain method writes now."""

    def choose(self, drafts: Sequence[Canvas], predictions: Sequence[Predictions]) -> int:
        """The draft that is kept; there may be fewer predictions than drafts (`Cache.ahead`), never none."""
