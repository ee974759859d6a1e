"""The timing loop: settings take turns on every item, in an order drawn anew, so that a busy machine hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from paceline.bench.stats import FloatArray

Differs = Callable[[Any, Any, Any], str | None]
"""`differs(item, output, other)`: how an output differs from the first setting's; None if it may be timed."""


class DifferentOutputError(Exception):
    """Settings that write different things are not timed against each other; the text names setting and difference."""


def turns(
    settings: int, items: int, repeats: int, order: np.random.Generator | None = None
) -> Iterator[tuple[int, int, list[int]]]:
    """Repeat, item, and the settings (by number) in the order in which they take their turn."""
    order = order or np.random.default_rng(0)
    for repeat in range(repeats):
        for item in range(items):
            yield repeat, item, order.permutation(settings).tolist()


def time_in_turn(
    runs: Mapping[str, Callable[[Any], Any]],
    items: Sequence[Any],
    repeats: int,
    *,
    differs: Differs | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, FloatArray]:
    """Seconds (items, repeats) of every setting, after one run of each to warm up.

    Args:
        runs: name -> what is timed, called with an item; the first is what others are compared with.
        differs: asked about the outputs of every turn.
        progress: told the turns that are done, and all.
    Raises:
        DifferentOutputError: a setting's output differs.
    """
    names = list(runs)
    for run in runs.values():
        run(items[0])
    seconds = {name: np.zeros((len(items), repeats)) for name in names}
    for done, (repeat, number, order) in enumerate(turns(len(names), len(items), repeats)):
        outputs = {}
        for name in (names[index] for index in order):
            start = clock()
            outputs[name] = runs[name](items[number])
            seconds[name][number, repeat] = clock() - start
        for name in names[1:] if differs is not None else ():
            if differs is not None and (why := differs(items[number], outputs[names[0]], outputs[name])):
                raise DifferentOutputError(f"{name} differs from {names[0]}, nothing is timed: {why}")
        progress(done + 1, repeats * len(items))
    return seconds
