"""What drafting from each exit and verifying cost on this machine, for DEL's choice.

In: a target with its partial passes. Out: `ExitCosts`, in layers as in the paper, or in measured seconds. Not here: the choice.

A small model's step is not its layers: the head and the calls weigh as much, and a row more in a pass is not free. There the pieces
are timed once, in some tens of milliseconds; a model whose step is longer is mostly its layers, and is counted in them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np
import torch

from paceline.drafters.exit_choice import Array, ExitCosts
from paceline.models.base import Runner, SequenceCache
from paceline.models.decoder import LayerPlan
from paceline.models.layer_drafts import LayerDrafts
from paceline.tree.token_tree import EMPTY_TREE, TokenTree

SHORT = 0.02
"""Seconds of a plain step above which layers are counted."""
TURNS = 15
CONTEXT = 128
SIZES = (0, 1, 2, 4, 8)
LONG = 4
RECENT = 15
"""Rounds, of those with and of those without a draft, whose median says what is beside drafting and verifying."""
FIRST = 12
"""Rounds without a draft that are timed before it is chosen whether to draft."""
LATE = 512
"""Rounds of one kind after which the other kind is to be timed anew."""


def in_layers(exits: Sequence[int], layers: int, most: int) -> ExitCosts:
    """The paper's: a drafted token costs its exit's layers, a verification all layers once."""
    return ExitCosts(np.zeros(len(exits)), np.array(exits, np.float64), np.full(most + 1, float(layers)), counted=True)


def measured(
    runner: Runner, drafts: LayerDrafts, plans: Sequence[LayerPlan], most: int, *, resumes: bool = False
) -> ExitCosts | None:  # fmt: skip
    """Seconds, for one sequence; None where a step is long enough to be counted in layers.

    Args:
        plans: of the exits, by rising layer. most: tokens of the longest draft.
        resumes: scoring goes on behind the exit; what that saves is taken off what a drafted token costs.
    """
    cache = runner.open()
    try:
        length = min(CONTEXT, runner.info.max_context - max(SIZES) - LONG - 2)
        runner.extend([cache], [[i % runner.info.vocab_size for i in range(max(length, 1))]])
        return _measure(runner, drafts, plans, most, cache, resumes=resumes)
    finally:
        runner.release(cache)


def _measure(
    runner: Runner, drafts: LayerDrafts, plans: Sequence[LayerPlan], most: int, cache: SequenceCache, *, resumes: bool
) -> ExitCosts | None:  # fmt: skip
    trees = {size: TokenTree.chain([0] * size) if size else EMPTY_TREE for size in SIZES}

    def verify(size: int) -> None:
        runner.score([cache], [0], [trees[size]])

    def draft(plan: LayerPlan, size: int) -> None:
        drafts.chains([cache], [0], [size], [None], plan=plan, least=[0.0])

    def both(plan: LayerPlan, size: int) -> None:
        states: list[torch.Tensor] = []
        ((tokens, _),) = drafts.chains([cache], [0], [size], [None], plan=plan, least=[0.0], states=states)
        drafts.score([cache], [0], [TokenTree.chain(tokens)], [states[0][:size]], plan)

    if min(_seconds(partial(verify, 0)) for _ in range(4)) > SHORT:
        return None
    ends = (plans[0], plans[-1])
    calls: list[Callable[[], None]] = [partial(verify, size) for size in SIZES]
    sizes = (LONG, SIZES[-1]) if resumes else (1, LONG)
    calls += [partial(both if resumes else draft, plan, size) for plan in ends for size in sizes]
    times = np.min([[_seconds(call) for call in calls] for _ in range(TURNS)], axis=0)
    passes = np.interp(np.arange(most + 1), SIZES, times[: len(SIZES)])
    beyond = np.arange(most + 1) - SIZES[-1]
    per_row = (times[len(SIZES) - 1] - times[0]) / SIZES[-1]
    passes = np.where(beyond > 0, times[len(SIZES) - 1] + beyond * per_row, passes)
    short, long = (times[len(SIZES) + i :: 2] - (times[SIZES.index(size)] if resumes else 0.0) for i, size in enumerate(sizes))
    token = np.maximum(long - short, 0.0) / (sizes[1] - sizes[0])
    return ExitCosts(_between(short - sizes[0] * token, len(plans)), _between(token, len(plans)), passes)


def _between(ends: Array, count: int) -> Array:
    """(count,) values on the line between the first exit's and the last's."""
    found: Array = np.interp(np.linspace(0.0, 1.0, count), [0.0, 1.0], np.maximum(ends, 0.0))
    return found


def _seconds(call: Callable[[], None]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


class RoundClock:
    """What a round takes beside drafting and verifying, from the times at which drafts are asked for.

    It is kept apart for rounds with and without a draft, and forgotten where only the other kind went on for long.

    Attributes:
        exit: index of the exit that drafts next.
    """

    def __init__(self) -> None:
        self._rounds: list[list[float]] = []  # by exit and length, what drafting and verifying take
        self.exit = 0
        self._beside: tuple[deque[float], deque[float]] = deque(maxlen=RECENT), deque(maxlen=RECENT)
        self._seen, self._since = [0, 0], [0, 0]  # rounds of each kind, and since the last one
        self._last: int | None = None
        self._began, self._expected, self._drafted = 0.0, 0.0, False

    def know(self, costs: ExitCosts) -> None:
        """What drafting and verifying take, in seconds."""
        lengths = np.arange(len(costs.verify))
        drafting = costs.start[:, None] * (lengths > 0) + costs.token[:, None] * lengths
        self._rounds = (drafting + costs.verify).tolist()

    @property
    def is_new(self) -> bool:
        """Whether too few rounds without a draft were seen to compare with them; never where nothing is measured."""
        return bool(self._rounds) and self._seen[False] < FIRST

    def whole(self, verify: Array) -> Array:
        """(most + 1,) what verification takes with all that is beside it, by length."""
        resting = median(self._beside[False]) if self._beside[False] else 0.0
        found: Array = verify + (median(self._beside[True]) if self._beside[True] else resting)
        found[0] = verify[0] + resting
        return found

    def round(self, key: int | None, length: int, now: float, slept: int = 0) -> None:
        """A round of one sequence began at `now`, with a draft of so many tokens, after so many of which nobody said anything.

        Args:
            key: of the sequence; None for a round that is not to be timed.
        """
        if not self._rounds:
            return
        if key is not None and key == self._last:
            self._beside[self._drafted].append((now - self._began) / (1 + slept) - self._expected)
        self._last, self._began, self._drafted = key, now, length > 0
        own = self._rounds[self.exit]
        self._expected = own[min(length, len(own) - 1)]
        if slept:
            self._count(slept, drafted=False)
        self._count(1, drafted=self._drafted)

    def _count(self, rounds: int, *, drafted: bool) -> None:
        self._seen[drafted] += rounds
        self._since[drafted] = 0
        other = not drafted
        self._since[other] += rounds
        if self._since[other] > LATE:
            self._seen[other] = self._since[other] = 0
            self._beside[other].clear()
