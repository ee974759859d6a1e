"""Which device a draft model runs on: the one where its levels take the least time, beside a target that stays where it
is.

In: the devices of this machine, a way to load the draft on one of them. Out: the device, and why, in words. Not here:
loading (`engine.models`), what a target's passes cost and how much to draft then (`controllers.cost_model`).

A draft's tokens, and above temperature 0 the distributions they were drawn from, are all that crosses between devices;
so what a level takes on each of them, the way back to the host included, is what decides. It is measured on the device
itself, once per draft model.

Source: Dovetail: a CPU/GPU heterogeneous speculative decoding for LLM inference (arXiv:2412.18934).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

import torch

from paceline.errors import ConfigError, OutOfMemoryError
from paceline.models import Runner, resolve_device

logger = logging.getLogger("paceline.engine")

AUTO: Final = "auto"
LEVELS, CONTEXT, REPEATS = 4, 32, 5
"""Tokens of a timed draft, of the text before it, and how often it is timed; the least time counts."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a draft model goes.

    Attributes:
        device: the chosen one. seconds: of a level, by device; empty where there was no choice.
        full: devices that have no room for it.
    """

    device: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    full: Sequence[str] = ()

    def words(self, model: str) -> str:
        """What was decided, and why."""
        if not self.seconds:
            return f"draft model {model!r} runs on {self.device}: there is no other device here"
        each = ", ".join(f"{1e3 * seconds:.3g} ms on {device}" for device, seconds in self.seconds.items())
        lacking = f"; {', '.join(self.full)} has no room for it" if self.full else ""
        return f"draft model {model!r} runs on {self.device}: a level takes {each}{lacking}"


def place_draft_model(devices: Sequence[str], seconds_of: Callable[[str], float]) -> Placement:
    """The device where a level takes the least time; of equal ones the first.

    Args:
        devices: the target's first; a single one is taken without a measurement.
        seconds_of: loads the draft on a device and times a level.
    Raises:
        OutOfMemoryError: no device has room for the draft.
    """
    if len(devices) == 1:
        return Placement(devices[0])
    seconds: dict[str, float] = {}
    full: dict[str, OutOfMemoryError] = {}
    for device in devices:
        try:
            seconds[device] = seconds_of(device)
        except OutOfMemoryError as error:
            full[device] = error
    if not seconds:
        raise full[devices[0]]
    return Placement(min(seconds, key=lambda device: seconds[device]), seconds, tuple(full))


def devices_for(target: torch.device) -> list[str]:
    """The devices of this machine, the target's first and under its own name."""
    found = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return [str(target), *(device for device in (*found, "cpu") if not _same(torch.device(device), target))]


def requested_device(given: Any, target: torch.device) -> str:
    """`AUTO`, or the device that an option `draft_device` names; None is the target's own.

    Raises:
        ConfigError: no device, or none of this machine.
    """
    if given is not None and not isinstance(given, str):
        raise ConfigError(f"draft_device must be auto, cpu, cuda or cuda:N, got {given!r}")
    if given == AUTO:
        return AUTO
    chosen = target if given is None else resolve_device(given, name="draft_device")
    return str(target if _same(chosen, target) else chosen)


def _same(one: torch.device, other: torch.device) -> bool:
    """Whether both are one device: "cuda" is "cuda:0"."""
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def level_seconds(runner: Runner) -> float:
    """Seconds of a drafted token, the way of the token to the host included."""
    context = max(1, min(CONTEXT, runner.info.max_context - LEVELS - 1))
    cache = runner.open()
    try:
        runner.extend([cache], [[1] * context])
        times = []
        for _ in range(1 + REPEATS):  # the first one warms up
            start = perf_counter()
            _draft(runner, cache)
            times.append(perf_counter() - start)
            runner.truncate(cache, context)
    finally:
        runner.release(cache)
    return min(times[1:]) / LEVELS


def _draft(runner: Runner, cache: Any) -> None:
    """One greedy chain, as drafters draft it."""
    token = 1
    for _ in range(LEVELS):
        token = int(runner.extend([cache], [[token]]).logits[0].argmax())
        token = min(token, runner.info.vocab_size - 1)
