"""What a decoding method of diffusion language models is put together from: one class for each kind of part.

A part is made anew for every canvas, so what it remembers is of one canvas by construction, and nothing leaks between
the members of a batch. Parts with a memory (`stateless = False`) cannot be asked "what if", which drafting verification
does; that is rejected when a method is put together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from paceline.diffusion.canvas import Canvas, Floats, Status
from paceline.diffusion.predictions import Predictions
from paceline.models import Call, Denoiser, Ints, SlotCache
from paceline.utils import need

NONE: Ints = np.empty(0, np.int64)
MOST_ROUNDS = 16
"""Most rounds for each slot, of methods that may take more rounds than slots; each is a pass, and more of them gain
nothing.
"""

TokenText = Callable[[int], str | None]
"""What a token writes into a text, a leading space included; None for tokens that write nothing (special tokens)."""


@dataclass(frozen=True, slots=True)
class BlockProgress:
    """Of the current block.

    Attributes:
        done: rounds that have written into it.
        slots: that decoding fills in it, written ones included.
        masked: of them.
    """

    done: int
    slots: int
    masked: int


@dataclass(frozen=True, slots=True)
class Step:
    """What rules may look at when they decide on one round.

    Attributes:
        canvas: as it is; rules only read it.
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

    @property
    def progress(self) -> BlockProgress:
        """Of the current block, read off the canvas."""
        part = slice(self.block.start, self.block.stop)
        status, born = self.canvas.status[part], self.canvas.born[part]
        written, masked = status == Status.COMMITTED, int((status == Status.MASKED).sum())
        return BlockProgress(np.unique(born[written]).size, int(written.sum()) + masked, masked)


@dataclass(frozen=True, slots=True)
class Changes:
    """What an edit rule does besides writing: tokens at committed slots, slots to be masked again."""

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
class CanvasPass:
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


class MethodPart:
    """What parts of every kind share. Options are keyword arguments of the constructor.

    Attributes:
        stateless: it decides by the canvas and the predictions alone.
        reads_written: it looks at predictions of slots that are not masked.
    """

    stateless = True
    reads_written = False

    def __init__(self, setting: Setting) -> None:
        """Most parts need nothing of the setting."""

    @staticmethod
    def unread(options: Mapping[str, Any]) -> dict[str, str]:
        """Options without effect beside others -> what to do about them."""
        return {}


class Schedule(MethodPart, ABC):
    """Which block is being worked on, which slots may be written."""

    @abstractmethod
    def block(self, canvas: Canvas) -> range:
        """The current block, by slots; the last one when nothing is masked."""

    @abstractmethod
    def eligible(self, canvas: Canvas) -> Ints:
        """Masked slots that may be written now, ascending; never empty while a slot is masked."""


class Score(MethodPart, ABC):
    """How sure the model is of a slot; the highest score is written first."""

    @abstractmethod
    def score(self, predictions: Predictions, canvas: Canvas) -> Floats:
        """(k,) of the (k,) predictions, all of eligible slots."""


class Correction(MethodPart, ABC):
    """Corrects what the model says before any rule looks at it: penalties on logits."""

    @abstractmethod
    def correct(self, predictions: Predictions, canvas: Canvas) -> Predictions:
        """Predictions of the same slots."""


class Modifier(MethodPart, ABC):
    """Corrects scores after they are taken: factors on ends of text, bars, noise on the order."""

    @abstractmethod
    def modify(self, step: Step) -> Floats:
        """(e,) scores in place of `step.scores`; -inf bars a slot for this round, unless all are barred."""


class Commit(MethodPart, ABC):
    """Which eligible slots are written this round.

    Attributes:
        waits: it counts its rounds and ends by itself, and may write nothing in some of them.
    """

    waits = False

    @abstractmethod
    def choose(self, step: Step) -> Ints:
        """A subset of `step.eligible`; where it is empty, the best slot is written, unless the rule waits."""


class Edit(MethodPart, ABC):
    """Rewrites or masks again what was written."""

    @abstractmethod
    def changes(self, step: Step, chosen: Ints) -> Changes:
        """Besides `chosen`, which is written in the same round."""

    @abstractmethod
    def pending(self, canvas: Canvas) -> bool:
        """Whether a canvas without masked slots still needs a pass."""


class Check(MethodPart, ABC):
    """A hard constraint on the text: a grammar, a regular expression, a schema."""

    @abstractmethod
    def constrain(self, step: Step, chosen: Ints) -> tuple[Ints, Ints]:
        """Slots and tokens in place of `chosen` and the predictions there, all of them allowed; at least one of each.

        Raises:
            UnsatisfiableError: nothing can be written any more.
        """

    @abstractmethod
    def cuts(self, canvas: Canvas, length: int) -> bool:
        """Whether a canvas may be cut to `length` slots, as a stop rule asks."""


class Stop(MethodPart, ABC):
    """Whether the rest can be written at once, or is not needed."""

    @abstractmethod
    def ending(self, step: Step, chosen: Ints) -> Ending | None:
        """Before `chosen` is written."""


class Cache(MethodPart, ABC):
    """What is recomputed and what is read from stored keys and values.

    Attributes:
        exact: predictions are those of passes without a cache, but for rounding.
    """

    exact = False

    @abstractmethod
    def plans(self, canvas: Canvas, block: range) -> list[CanvasPass]:
        """Passes before the next decision.

        The last predicts, those before it only store (the write pass of a finished block).
        """

    @abstractmethod
    def ahead(self, canvas: Canvas, block: range) -> CanvasPass | None:
        """A pass over a later canvas beside the one that `plans` has asked for last, with the predictions `plans` would
        lead to.

        It reads only what was stored before that pass, and stores nothing. None where the policy would store anew
        first: such a canvas is not computed ahead.
        """


@dataclass(slots=True)
class Transition:
    """The rules of a method for one canvas, as one round: from a canvas and the predictions to the next canvas.

    Attributes:
        ended: a stop rule has spoken; the canvas it left is the last.
    """

    schedule: Schedule
    score: Score
    modifiers: Sequence[Modifier]
    commit: Commit
    edit: Edit | None = None
    check: Check | None = None
    stop: Stop | None = None
    correction: Correction | None = None
    ended: bool = False

    @property
    def parts(self) -> list[MethodPart]:
        """All of its rules."""
        optional = (self.edit, self.check, self.stop, self.correction)
        return [self.schedule, self.score, *self.modifiers, self.commit, *(part for part in optional if part)]

    @property
    def stateless(self) -> bool:
        """Whether every rule decides by the canvas and the predictions alone."""
        return all(part.stateless for part in self.parts)

    @property
    def reads_written(self) -> bool:
        """Whether predictions of slots that are not masked are looked at.

        By a rule that says so, or since edits may open them.
        """
        return self.edit is not None or any(part.reads_written for part in self.parts)

    def finished(self, canvas: Canvas) -> bool:
        """Whether nothing is left to do."""
        return self.ended or (not canvas.masked().size and (self.edit is None or not self.edit.pending(canvas)))

    def step(self, canvas: Canvas, predictions: Predictions) -> Step:
        """What the rules see: eligible slots with their scores."""
        if self.correction:
            predictions = self.correction.correct(predictions, canvas)
        eligible = self.schedule.eligible(canvas)
        eligible = eligible[predictions.known(eligible)]
        scores = self.score.score(predictions.at(eligible), canvas)
        step = Step(canvas, predictions, eligible, scores, self.schedule.block(canvas))
        for modifier in self.modifiers:
            changed = modifier.modify(step)
            open_ = ~np.isneginf(changed)
            if open_.any():
                step = Step(canvas, predictions, step.eligible[open_], changed[open_], step.block)
        return step

    def __call__(self, canvas: Canvas, predictions: Predictions) -> Canvas:
        """The canvas after one round; the one given stays as it is."""
        step = self.step(canvas, predictions)
        chosen = self.commit.choose(step) if step.eligible.size else NONE
        if not chosen.size and step.eligible.size and not self.commit.waits:
            chosen = step.ranked[:1]
        ending = self.stop.ending(step, chosen) if self.stop else None
        if ending and ending.fill:
            chosen = canvas.masked()
            chosen = chosen[predictions.known(chosen)]
        changes = self.edit.changes(step, chosen) if self.edit else Changes()
        slots, tokens = self._constrained(step, np.sort(chosen))
        after = canvas.copy()
        after.write(slots, tokens, step.predictions.probability(slots, tokens))
        after.edit(changes.slots, changes.tokens, step.predictions.probability(changes.slots, changes.tokens))
        after.remask(changes.remask)
        after.round += 1
        self._end(after, ending)
        return after

    def what_if(self, canvas: Canvas, predictions: Predictions) -> Canvas:
        """One round that ends nothing, even where a stop rule speaks."""
        ended = self.ended
        after = self(canvas, predictions)
        self.ended = ended
        return after

    def _constrained(self, step: Step, chosen: Ints) -> tuple[Ints, Ints]:
        if self.check and chosen.size:
            return self.check.constrain(step, chosen)
        return chosen, step.predictions.tokens_at(chosen)

    def _end(self, canvas: Canvas, ending: Ending | None) -> None:
        if ending is None:
            return
        if ending.length is not None and (self.check is None or self.check.cuts(canvas, ending.length)):
            canvas.truncate(ending.length)
        self.ended = ending.fill and not canvas.masked().size


@dataclass(slots=True)
class Setting:
    """What parts are told when they are made.

    Made once for each canvas, and filled in the order in which parts are made: schedule, rules, transition, cache,
    verification.

    Attributes:
        canvas: as it is before the first round; it is replaced in decoding, so parts keep facts of it, not the object.
        denoiser: the model, for its facts.
        store: keys and values of this canvas, where the cache policy keeps any.
        seed: of the request.
        temperature: of the tokens predicted; 0 takes the most probable.
        token_text: of the vocabulary, for constraints on the text.
    """

    canvas: Canvas
    denoiser: Denoiser
    seed: int = 0
    store: SlotCache | None = None
    temperature: float = 0.0
    token_text: TokenText | None = None
    schedule: Schedule | None = None
    transition: Transition | None = None
    cache: Cache | None = None

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text: the canvas', or the model's where it names none."""
        return self.canvas.eos_token_ids or tuple(self.denoiser.eos_token_ids)

    def first_block(self) -> range:
        """The block that decoding begins with."""
        assert self.schedule is not None
        return self.schedule.block(self.canvas)

    def whole_text(self, method: str) -> int:
        """The number of slots to fill, for a method that works on the whole text at once.

        Raises:
            ConfigError: a schedule of several blocks, a block-causal model whose block does not hold the text.
        """
        masked, block = self.canvas.masked(), self.first_block()
        in_one_block = not masked.size or (block.start <= masked[0] and masked[-1] < block.stop)
        if self.denoiser.attention == "block" and len(block) == self.denoiser.block_length:
            rule = f"fit one block of {len(block)} slots for {method}, which may write anywhere (full attention)"
            need(in_one_block, "max_tokens of a block-causal model", rule, int(masked.size))
        rule = f"be that of the whole text for {method}, which may write anywhere (leave it out)"
        need(in_one_block, "block_length", rule, len(block))
        return int(masked.size)

    def rounds_of_blocks(self, steps: int | None) -> int:
        """Rounds of the static baseline over the whole text: `steps` for each block, or as many as the block has masked
        slots.

        Args:
            steps: `denoising_steps`; None is a round for each slot.
        Raises:
            ConfigError: fewer than one round.
        """
        assert self.schedule is not None
        need(steps is None or steps >= 1, "denoising_steps", "be at least 1", steps)
        canvas, rounds = self.canvas.copy(), 0
        while canvas.masked().size:
            block = self.schedule.block(canvas)
            slots = canvas.masked(block.start, block.stop)
            rounds += min(steps or slots.size, slots.size)
            canvas.status[slots] = Status.COMMITTED
        return max(1, rounds)

    def rounds_of_text(self, steps: int | None, method: str) -> int:
        """Rounds of a method that decodes the whole text at once, whose rounds may be more than its slots.

        Args:
            steps: `denoising_steps`; None is a round for each slot.
        Raises:
            ConfigError: fewer than one round, or more than `MOST_ROUNDS` for each slot; a schedule of several blocks.
        """
        slots = self.whole_text(method)
        most = MOST_ROUNDS * max(1, slots)
        rule = f"lie in 1..{most}, at most {MOST_ROUNDS} rounds for each of the {slots} slots to fill"
        need(steps is None or 1 <= steps <= most, "denoising_steps", rule, steps)
        return steps or max(1, slots)


class Layout:
    """How the drafts of one pass are laid out as calls of the model: a call for each draft (batch expansion)."""

    def calls(self, drafts: Sequence[Canvas], plans: Sequence[CanvasPass], store: SlotCache | None) -> list[Call]:
        """One pass over drafts of one canvas, each by its own plan."""
        return [
            Call(draft.tokens[plan.slots], plan.slots, store, plan.read, plan.write, wanted=plan.wanted)
            for draft, plan in zip(drafts, plans, strict=True)
        ]

    def logits(self, outputs: list[torch.Tensor], plans: Sequence[CanvasPass]) -> list[torch.Tensor]:
        """(k, v) of each draft, its plan's wanted rows."""
        return outputs


class Verification(MethodPart, ABC):
    """Several canvases ahead in one pass, of which the furthest that the plain method would have reached is kept.

    Attributes:
        layout: of the drafts.
    """

    layout = Layout()

    @abstractmethod
    def drafts(self, canvas: Canvas, predictions: Predictions) -> list[Canvas]:
        """Canvases to compute next; the first is what the plain method writes now."""

    @abstractmethod
    def choose(self, drafts: Sequence[Canvas], predictions: Sequence[Predictions]) -> int:
        """The draft that is kept; there may be fewer predictions than drafts (`Cache.ahead`), never none."""
