"""The timing loop: settings take turns on every item, in an order drawn anew, so that a busy machine hits all alike.

Everything that is timed is timed here. Clocks of their own have only what runs in another process (peers), what is
timed while it streams (first tokens, steps, arrivals of requests) and the recorder of replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np

from paceline.utils.stats import FloatArray

Item = TypeVar("Item")
Output = TypeVar("Output")
Clock = Callable[[], float]
Differs = Callable[[Any, Any, Any], str | None]
"""`differs(item, output, other)`: how an output differs from the first setting's; None if it may be timed."""


class DifferentOutputError(Exception):
    """Settings that write different things are not timed against each other; the text names setting and difference."""


@dataclass(frozen=True, slots=True)
class Turn(Generic[Output]):
    """One item in one repeat, by every setting: what each made of it, and the seconds it took."""

    repeat: int
    item: int
    outputs: Mapping[str, Output]
    seconds: Mapping[str, float]


def timed(call: Callable[[], Output], clock: Clock = perf_counter) -> tuple[Output, float]:
    """What a call returns, and its seconds."""
    start = clock()
    output = call()
    return output, clock() - start


def repeated(call: Callable[[], Any], repeats: int, warm_up: int = 1) -> list[float]:
    """Seconds of each repeat of a call, after some that do not count."""
    return [timed(call)[1] for _ in range(warm_up + repeats)][warm_up:]


def in_turn(
    runs: Mapping[str, Callable[[Item, int], Output]],
    items: Sequence[Item],
    repeats: int,
    *,
    order: np.random.Generator | None = None,
    clock: Clock = perf_counter,
) -> Iterator[Turn[Output]]:
    """Every setting on every item in every repeat, turn by turn: a user may look at each, and end when he has enough.

    Args:
        runs: name -> what is timed, called with an item and the number of the repeat; nothing is run to warm up.
        order: what the order within a turn is drawn from.
    """
    names, order = list(runs), order or np.random.default_rng(0)
    for repeat in range(repeats):
        for number, item in enumerate(items):
            outputs: dict[str, Output] = {}
            seconds: dict[str, float] = {}
            for name in (names[index] for index in order.permutation(len(names)).tolist()):
                outputs[name], seconds[name] = timed(partial(runs[name], item, repeat), clock)
            yield Turn(repeat, number, outputs, seconds)


def time_in_turn(
    runs: Mapping[str, Callable[[Any], Any]],
    items: Sequence[Any],
    repeats: int,
    *,
    differs: Differs | None = None,
) -> dict[str, FloatArray]:
    """Seconds (items, repeats) of every setting, after one run of each to warm up.

    Args:
        runs: name -> what is timed, called with an item; the first is what others are compared with.
        differs: asked about the outputs of every turn.
    Raises:
        DifferentOutputError: a setting's output differs.
    """
    base, *others = runs
    for run in runs.values():
        run(items[0])
    seconds = {name: np.zeros((len(items), repeats)) for name in runs}
    calls = {name: lambda item, _, run=run: run(item) for name, run in runs.items()}
    for turn in in_turn(calls, items, repeats):
        for name, taken in turn.seconds.items():
            seconds[name][turn.item, turn.repeat] = taken
        for name in others if differs is not None else ():
            if differs is not None and (why := differs(items[turn.item], turn.outputs[base], turn.outputs[name])):
                raise DifferentOutputError(f"{name} differs from {base}, nothing is timed: {why}")
    return seconds
