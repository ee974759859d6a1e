"""What speculation takes of memory with the models at hand, and the controller that keeps it within the user's limit.

In: the target's runner, drafters, `EngineConfig.speculative_memory_bytes`. Out: a controller. Not here: the arithmetic
(`controllers.limited`), the target's own cache (`engine.room`).

Weights do not count: they are read once and checked when they are loaded. Nor do tables learned from text, which have
limits of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.controllers import Controller, Footprint, LimitedController
from paceline.drafters import Drafter
from paceline.errors import ConfigError
from paceline.models import MappedRunner, Runner, cache_bytes, save_memory, slot_bytes

SHORTEST = 16
"""Tokens of a text for which at least one drafted token must fit."""

ROW = 4
"""Bytes of a number in the rows that sampling makes."""


def runners_of(drafter: Drafter) -> list[Runner]:
    """The models that a drafter runs beside the target; one with renamed ids for what it wraps."""
    return [one.inner if isinstance(one, MappedRunner) else one for one in drafter.runners()]


def footprint_of(runner: Runner, drafters: Sequence[Drafter]) -> Footprint:
    """What a drafted token takes.

    Raises:
        ConfigError: caches that are not counted.
    """
    slot, drafts = slot_bytes(runner), [one for drafter in drafters for one in runners_of(drafter)]
    rows = sum(drafter.row_bytes for drafter in drafters)
    for one in (runner, *drafts):
        if (slot_bytes(runner) if one is runner else cache_bytes(one, 1)) is None:
            raise ConfigError(
                f"speculative_memory_bytes is not available with {one.info.name}: its caches are not counted"
            )
    for one in drafts:
        save_memory(one)
    vocab = runner.info.vocab_size
    draws = 2 * ROW * vocab if drafts or rows else ROW * vocab
    return Footprint(
        slot or 0,
        vocab * runner.info.dtype.itemsize + rows,
        draws,
        lambda tokens: (
            sum(cache_bytes(one, tokens) or 0 for one in drafts)
            + sum(drafter.held_bytes(tokens) for drafter in drafters)
        ),
        2 if any(drafter.works_ahead for drafter in drafters) else 1,
    )


def limited(controller: Controller, runner: Runner, drafters: Sequence[Drafter], limit: int | None) -> Controller:
    """The controller, kept within the limit.

    Raises:
        ConfigError: not even one drafted token of one sequence fits, or caches that are not counted.
    """
    if limit is None or not drafters:
        return controller
    footprint = footprint_of(runner, drafters)
    least = footprint.sequence(SHORTEST, 1, 0.0)
    if limit < least:
        names = ", ".join(drafter.name for drafter in drafters)
        raise ConfigError(
            f"speculative_memory_bytes must be at least {least}, which one drafted token of one sequence takes with "
            f"{names}, got {limit}; raise it or set speculative_config to None"
        )
    return LimitedController(controller, footprint, limit)
