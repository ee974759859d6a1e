"""What a controller decided, in words: for the log and for explanations.

In: the figures of a plan. Out: lines of plain English, one per decision. Not here: any decision, and any cost while nobody asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.controllers.watch import Mode

if TYPE_CHECKING:
    from paceline.controllers.voice import Voice
    from paceline.controllers.watch import Watch


@dataclass(frozen=True, slots=True)
class Decided:
    """What `auto` decided about one drafter for one sequence.

    Attributes:
        mode: what it did.
        depth: levels that the drafter might propose.
        worth: tokens expected of it beyond those that its time would have brought otherwise.
        watch: its guard. voice: the controller's word while it drafted, or None.
    """

    name: str
    mode: Mode
    depth: int
    worth: float
    watch: Watch
    voice: Voice | None = None


def fixed_words(number: int, running: int, limit: int | None, remaining: int) -> str:
    """The fixed policy on one sequence.

    Args:
        number: speculative tokens a step.
        running: sequences of the step.
        limit: no drafts at or above this number of them; None sets no limit.
        remaining: tokens that may still come.
    """
    if limit is not None and running >= limit:
        return f"Nothing is drafted: {count(running, 'sequence')} at once, and disable_by_batch_size is {limit}."
    if number == 0:
        return "Nothing is drafted: 0 speculative tokens are plain decoding."
    if remaining <= 1:
        return "Nothing is drafted: this is the last token."
    cut = f", at most {count(remaining - 1, 'level')} since {remaining} tokens may still come" if remaining <= number else ""
    return f"The number is fixed: up to {count(number, 'node')} in every step{cut}."


def off_words(running: int, limit: int | None, wait: int | None = None) -> str:
    """Why `auto` drafts nothing for anybody.

    Args:
        wait: steps until drafting is tried again, where it is off because it has not paid; 0 where this step is plain to be timed.
    """
    if wait is not None:
        why = f"it has cost more time than it saved lately; next try in {count(wait, 'step')}" if wait else "a plain step is timed"
        return f"Nothing is drafted for {count(running, 'sequence')} at once: {why}."
    if limit is not None and running >= limit:
        return f"Nothing is drafted: {count(running, 'sequence')} at once, and disable_by_batch_size is {limit}."
    return "Nothing is drafted: there is no drafter."


def auto_words(decided: Sequence[Decided], *, rates: tuple[float, float], remaining: int, sizes: Sequence[int]) -> str:
    """`auto` on one sequence.

    Args:
        decided: per drafter that was thought about.
        rates: tokens per second that time is charged at, and those of decoding without drafts.
        remaining: tokens that may still come.
        sizes: nodes before and after selection.
    """
    if not decided:
        return "Nothing is drafted: " + ("this is the last token." if remaining <= 1 else "no drafter can be asked.")
    lines = [drafter_words(one) for one in decided]
    asked = any(one.mode is not Mode.SKIP for one in decided)
    return "\n".join([*lines, *_selection(sizes, asked), *_rates(*rates)])


def drafter_words(one: Decided) -> str:
    """One sentence or two on one drafter."""
    name, levels, worth = one.name, count(one.depth, "level"), f"{_tokens(one.worth)} beyond the price of its time"
    if one.mode is Mode.ASK:
        return f"{name} is asked for up to {levels}: it should bring {worth}.{_stopped(one.voice)}"
    if one.mode is Mode.EXPLORE:
        return f"{name} is tried with {levels} to learn whether it pays again; as things look it would bring {worth}."
    why = "it has cost more time than it saved lately" if one.watch.distrusted else f"it should bring {worth}"
    if one.mode is Mode.LISTEN:
        return f"{name} is asked only because that costs next to nothing: {why}.{_stopped(one.voice)}"
    again = f"; next try in {count(max(one.watch.wait, 1), 'step')}" if one.watch.asleep else ""
    return f"{name} is not asked: {why}{again}."


def _stopped(voice: Voice | None) -> str:
    if voice is None or not voice.stopped:
        return ""
    chance, price = f"{voice.chance:.2f}", _tokens(voice.price)
    return (
        f" It was stopped before level {voice.stopped}, which would stand with a chance of {chance} and take the time of {price}."
    )


def _selection(sizes: Sequence[int], asked: bool) -> Iterator[str]:
    proposed, kept = sizes
    if asked and not proposed:
        yield "Nothing was found to propose."
    elif kept < proposed:
        few = "none" if not kept else f"{kept}"
        yield f"Of {count(proposed, 'node')}, {few} {'is' if kept == 1 else 'are'} scored; the rest is worth less than its time."


def _rates(rate: float, plain: float) -> Iterator[str]:
    faster = f", {plain:.0f} without drafts" if rate > plain * 1.005 else ""
    yield f"Time is charged at {rate:.0f} tokens/s, the recent rate{faster}."


def beliefs(rate: float, plain: float, drafters: Iterable[tuple[str, Sequence[float], float, Set[str]]]) -> list[str]:
    """What `auto` believes at present.

    Args:
        rate, plain: tokens per second lately, and without drafts.
        drafters: name, acceptance by depth bucket from 1 on, share of steps in which it proposes, what it does for whom.
    """
    lines = [f"auto: {rate:.4g} tokens/s lately, plain {plain:.4g}"]
    for name, levels, share, modes in drafters:
        chances, now = " ".join(f"{level:.2f}" for level in levels), ", ".join(sorted(modes)) or "idle"
        lines.append(f"{name}: accepted at depth 1, 2, 3-4, 5-8, 9+: {chances}; proposes in {share:.0%}; now: {now}")
    return lines


def count(number: int, noun: str) -> str:
    """A number with its noun: 1 node, 2 nodes."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _tokens(number: float) -> str:
    return f"{number:.2f} tokens".replace("-", "\N{MINUS SIGN}")
