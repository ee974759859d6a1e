"""What `auto` decided, in words: for the log and for explanations. Nothing here decides, or costs anything while nobody
asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.controllers.auto.trust import State, Trust
from paceline.controllers.words import count

if TYPE_CHECKING:
    from paceline.controllers.auto.acceptance import Acceptance
    from paceline.controllers.auto.choice import Pick
    from paceline.controllers.auto.controller import Stopper


@dataclass(frozen=True, slots=True)
class Asked:
    """A drafter that is asked under a plan.

    Attributes:
        state: what was thought of it; OFF: it is only listened to.
        worth: tokens a step expected of it beyond those that its time would bring otherwise.
        cheap: asking costs next to nothing.
    """

    name: str
    drafter: int
    state: State
    pick: Pick
    worth: float
    cheap: bool


def off_words(running: int, limit: int | None) -> str:
    """Why nothing is drafted for anybody, whatever pays."""
    if limit is not None and running >= limit:
        return f"Nothing is drafted: {count(running, 'sequence')} at once, and disable_by_batch_size is {limit}."
    return "Nothing is drafted: there is no drafter."


def auto_words(
    asked: Sequence[Asked],
    names: Sequence[str],
    guards: Mapping[int, Trust],
    stoppers: Mapping[int, Stopper],
    *,
    remaining: int,
    sizes: tuple[int, int],
    rates: tuple[float, float],
) -> str:
    """The plan for one sequence, a line per decision.

    Args:
        guards: by drafter.
        remaining: tokens that may still come. sizes: nodes before and after selection.
        rates: tokens per second that time is charged at, and those of plain decoding.
    """
    if remaining <= 1:
        return "Nothing is drafted: this is the last token."
    lines = [_asked_words(one, guards[one.drafter], stoppers.get(one.drafter)) for one in asked]
    those = {one.drafter for one in asked}
    lines += [_unasked_words(name, guards[i]) for i, name in enumerate(names) if i not in those]
    return "\n".join([*lines, *_selection(sizes, bool(asked)), _charged(*rates)])


def _asked_words(one: Asked, guard: Trust, stopper: Stopper | None) -> str:
    levels = count(one.pick.levels, "level")
    worth = f"{one.worth:.2f} tokens beyond the price of its time".replace("-", "\N{MINUS SIGN}")
    where = ", where those before it found nothing" if one.pick.fallback else ""
    if one.state is State.OFF:
        return f"{one.name} is asked only because that costs next to nothing, and not scored; {next_try(guard)}."
    if one.cheap:
        return f"{one.name} is asked for up to {levels}, which costs next to nothing{where}; what pays of it is scored."
    if one.state is State.TRIED:
        return (
            f"{one.name} is tried with {levels}{where} to learn whether it pays; as things look it would bring {worth}."
        )
    return f"{one.name} is asked for up to {levels}{where}: it should bring {worth}.{_stopped(stopper)}"


def _unasked_words(name: str, guard: Trust) -> str:
    if guard.state is State.OFF:
        return (
            f"{name} is not asked: it cost more time than it saved, or was not worth asking for long; "
            f"{next_try(guard)}."
        )
    why = (
        "a try would cost more than may be spent on learning yet" if guard.state is State.TRIED else "it would not pay"
    )
    return f"{name} is not asked: {why}."


def next_try(guard: Trust) -> str:
    """When what is off is tried again."""
    return f"next try in {count(max(guard.wait, 1), 'step')}"


def _stopped(stopper: Stopper | None) -> str:
    if stopper is None or not stopper.stopped:
        return ""
    return (
        f" It was stopped before level {stopper.stopped}, which would be accepted with a chance of "
        f"{stopper.chance:.2f} and take the time of {stopper.price:.2f} tokens."
    )


def _selection(sizes: tuple[int, int], asked: bool) -> Iterator[str]:
    proposed, kept = sizes
    if asked and not proposed:
        yield "Nothing was found to propose."
    elif kept < proposed:
        few = "none" if not kept else f"{kept}"
        yield (
            f"Of {count(proposed, 'node')}, {few} {'is' if kept == 1 else 'are'} scored; the rest is worth less "
            f"than its time."
        )


def _charged(rate: float, plain: float) -> str:
    faster = f", {plain:.0f} without drafts" if rate > plain * 1.005 else ""
    return f"Time is charged at {rate:.0f} tokens/s, the recent rate{faster}."


def beliefs(speedup: float, names: Sequence[str], acceptance: Acceptance, states: Sequence[str]) -> list[str]:
    """What `auto` believes at present, over all sequences."""
    lines = [f"auto: {speedup:.2f} times as fast as plain decoding lately"]
    for name, source, state in zip(names, acceptance.sources, states, strict=True):
        chances = " ".join(f"{source.level(bucket):.2f}" for bucket in range(1, len(source.levels)))
        lines.append(
            f"{name}: accepted at depth 1, 2, 3-4, 5-8, 9+: {chances}; proposes in {source.finds:.0%}; {state}"
        )
    return lines
