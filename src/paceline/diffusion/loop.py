"""The loop: one pass of the model, one round of rules, until nothing is masked.

    predictions = look(canvas)
    while not finished:
        drafts      = verification.drafts(canvas, predictions)     # the first is the plain method's next canvas
        looks       = look(drafts)                                 # one pass of the model
        best        = verification.choose(drafts, looks)
        canvas, predictions = drafts[best], looks[best]

Plain decoding is this loop with a single draft. Canvases of a batch run side by side: their passes are handed to the
denoiser together, each computed on its own, so a canvas does not depend on its company, and one that fails leaves the
others alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

import numpy as np
import torch

from paceline.diffusion.base import NONE, Cache, CanvasPass, Layout, Transition, Verification
from paceline.diffusion.canvas import Canvas, Status
from paceline.diffusion.predictions import Predictions
from paceline.diffusion.trajectory import Round, Trajectory
from paceline.errors import NumericsError, PacelineError
from paceline.models import Call, Denoiser, SlotCache
from paceline.utils import described

logger = logging.getLogger("paceline")

PATIENCE = 8
"""Rounds in a row in which no slot that may be written has been computed, before a method is given up."""

Watch = Callable[[int, Canvas], None]
Passes = Generator[list[Call], list[torch.Tensor], Canvas]
Look = Generator[list[Call], list[torch.Tensor], list[Predictions]]


@dataclass(slots=True)
class CanvasMethod:
    """A method put together for one canvas.

    Attributes:
        layout: lays the drafts of one pass out as calls.
        needs_left: of the denoiser.
    """

    transition: Transition
    cache: Cache
    verification: Verification
    layout: Layout
    store: SlotCache | None = None
    temperature: float = 0.0
    seed: int = 0
    needs_left: bool = False


@dataclass(slots=True)
class FinishedCanvas:
    """A finished canvas.

    Attributes:
        canvas: complete, unless `error` says why not.
        trajectory: how it came about and what it cost.
        error: what stopped this canvas; the text so far is in `canvas`.
        enough: set by who reads `running`: the rest of this canvas is not needed.
    """

    canvas: Canvas
    trajectory: Trajectory = field(default_factory=Trajectory)
    error: PacelineError | None = None
    enough: bool = False


def decode(
    canvases: Sequence[Canvas], denoiser: Denoiser, parts: Sequence[CanvasMethod], watch: Watch | None = None
) -> list[FinishedCanvas]:
    """Fill canvases side by side.

    Args:
        canvases: of any lengths; not changed.
        parts: the method, made anew for each canvas.
        watch: told (index, canvas) after each round of a canvas.
    Returns:
        An outcome for each canvas, in order.
    """
    outcomes = [FinishedCanvas(canvas) for canvas in canvases]
    for _ in running(outcomes, denoiser, parts, watch):
        pass
    return outcomes


def running(
    outcomes: Sequence[FinishedCanvas], denoiser: Denoiser, parts: Sequence[CanvasMethod], watch: Watch | None = None
) -> Iterator[None]:
    """The same, one pass of the model at a time: `outcomes` hold the canvases and are kept current."""
    live: dict[int, Passes] = {}
    waiting: dict[int, list[Call]] = {}
    for i, outcome in enumerate(outcomes):
        live[i] = _passes(outcome, parts[i], partial(watch, i) if watch else None)
        _advance(i, outcome, live, waiting, None)
    while waiting := {i: calls for i, calls in waiting.items() if not outcomes[i].enough}:
        current, waiting = waiting, {}
        started = perf_counter()
        outputs = denoiser.forward([call for calls in current.values() for call in calls])
        share = (perf_counter() - started) / len(current)
        for i, calls in current.items():
            mine, outputs = outputs[: len(calls)], outputs[len(calls) :]
            trajectory = outcomes[i].trajectory
            trajectory.calls += 1
            trajectory.slots_computed += sum(call.ids.size for call in calls)
            trajectory.seconds += share
            _advance(i, outcomes[i], live, waiting, mine)
        yield


def _advance(
    i: int,
    outcome: FinishedCanvas,
    live: dict[int, Passes],
    waiting: dict[int, list[Call]],
    outputs: list[torch.Tensor] | None,
) -> None:
    """Let one canvas go on to its next pass, or to its end."""
    started = perf_counter()
    try:
        waiting[i] = next(live[i]) if outputs is None else live[i].send(outputs)
    except StopIteration:
        pass
    except PacelineError as error:
        outcome.error = error
    except Exception as error:  # of a rule of a user's own
        logger.debug("the error of a canvas", exc_info=error)
        outcome.error = PacelineError(f"a rule of the diffusion method failed ({described(error)})")
    outcome.trajectory.seconds += perf_counter() - started


def _passes(outcome: FinishedCanvas, parts: CanvasMethod, told: Callable[[Canvas], None] | None) -> Passes:
    """The loop for one canvas, as a generator of passes."""
    transition, verification = parts.transition, parts.verification
    if transition.finished(outcome.canvas):
        return outcome.canvas
    [predictions] = yield from _look([outcome.canvas], parts)
    idle = 0
    while True:
        drafts = verification.drafts(outcome.canvas, predictions)
        best, looks = 0, None
        if not transition.finished(drafts[0]):
            looks = yield from _look(drafts, parts)
            best = verification.choose(drafts, looks)
        idle = idle + 1 if _blind(outcome.canvas, predictions, transition) else 0
        if idle > PATIENCE:
            raise PacelineError(
                f"nothing can be written for {idle} rounds: the method's cache computes no slot that may be"
            )
        outcome.trajectory.rounds += Round.between(outcome.canvas, drafts[best])
        outcome.canvas = drafts[best]
        if told:
            told(outcome.canvas)
        if looks is None:
            return outcome.canvas
        predictions = looks[best]


def _blind(canvas: Canvas, predictions: Predictions, transition: Transition) -> bool:
    """Whether slots wait to be written and the last pass says nothing of any."""
    waiting = transition.schedule.eligible(canvas)
    return bool(waiting.size) and not predictions.known(waiting).any()


def _look(drafts: list[Canvas], parts: CanvasMethod) -> Look:
    """The model's word on drafts, after whatever passes the cache asks for; on the first only, where the cache allows
    no more.
    """
    layout, schedule = parts.layout, parts.transition.schedule
    first = drafts[0]
    *before, plan = parts.cache.plans(first, schedule.block(first))
    for storing in before:
        yield layout.calls([first], [replace(storing, wanted=NONE)], parts.store)
    plans = [plan]
    for draft in drafts[1:]:
        ahead = parts.cache.ahead(draft, schedule.block(draft))
        if ahead is None:
            break
        plans.append(ahead)
    computed = drafts[: len(plans)]
    plans = [_wanting(each, draft, parts.transition) for each, draft in zip(plans, computed, strict=True)]
    outputs = yield layout.calls(computed, plans, parts.store)
    logits = layout.logits(outputs, plans)
    return [_read(rows, draft, each, parts) for rows, draft, each in zip(logits, computed, plans, strict=True)]


def _wanting(plan: CanvasPass, draft: Canvas, transition: Transition) -> CanvasPass:
    """The plan with logits, a whole vocabulary each, only where a rule looks at them: not for the prompt, nor as a rule
    for what is written.
    """
    open_ = plan.slots >= draft.start if transition.reads_written else draft.status[plan.slots] == Status.MASKED
    return replace(plan, wanted=np.flatnonzero(open_))


def _read(logits: torch.Tensor, draft: Canvas, plan: CanvasPass, parts: CanvasMethod) -> Predictions:
    """Sum up the rows that have logits, ascending by slot."""
    slots = plan.predicted
    order = np.argsort(slots, kind="stable")
    if parts.needs_left:  # a slot whose left neighbour was not computed has none
        order = order[np.isin(slots[order] - 1, plan.slots) | (slots[order] == 0)]
    kept = logits[torch.from_numpy(order).to(logits.device)]
    if bool(torch.isnan(kept).any()):
        raise NumericsError("the model's logits hold NaN; load it in float32 or bfloat16 and check the checkpoint")
    return Predictions.of(kept, slots[order], temperature=parts.temperature, seed=parts.seed, round_=draft.round)
