"""What `auto` decided, in words: for the log and for explanations. Nothing here decides, or takes time unless it is
called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.controllers.auto.trust import State, Trust
from paceline.controllers.explanations import LAST_TOKEN, count

if TYPE_CHECKING:
    from paceline.controllers.auto.acceptance import Acceptance, Stopper
    from paceline.controllers.auto.choice import PlannedDraft


def auto_words(
    planned: Sequence[PlannedDraft],
    names: Sequence[str],
    trusts: Mapping[int, Trust],
    stoppers: Mapping[int, Stopper],
    *,
    remaining: int,
    sizes: tuple[int, int],
    rates: tuple[float, float],
) -> str:
    """The plan for one sequence, a line per decision.

    Args:
        trusts: by drafter.
        remaining: tokens that may still come. sizes: nodes before and after selection.
        rates: tokens per second that time is charged at, and those of plain decoding.
    """
    if remaining <= 1:
        return LAST_TOKEN
    lines = [_planned_words(draft, trusts[draft.drafter], stoppers.get(draft.drafter)) for draft in planned]
    those = {draft.drafter for draft in planned}
    lines += [_unplanned_words(name, trusts[i]) for i, name in enumerate(names) if i not in those]
    return "\n".join([*lines, *_selection(sizes, bool(planned)), _charged(*rates)])


def _planned_words(draft: PlannedDraft, trust: Trust, stopper: Stopper | None) -> str:
    budget = f"a budget of {count(draft.pick.levels, 'level')}"
    gain = f"{draft.gain:.2f} tokens beyond the price of its time".replace("-", "\N{MINUS SIGN}")
    where = f", where those before it are right with a chance of {draft.most:.2f} at most" if draft.most < 1.0 else ""
    if draft.state is State.OFF:
        return f"{draft.name} drafts only because that costs next to nothing, and is not scored; {next_try(trust)}."
    if draft.cheap:
        return f"{draft.name} has {budget}, since it costs next to nothing{where}; nodes that pay are scored."
    if draft.state is State.TRIED:
        asked = "is it faster? By present estimates it would bring"
        return f"{draft.name} is explored with {budget}{where}: {asked} {gain}."
    return f"{draft.name} has {budget}{where}: it should bring {gain}.{_stopped(stopper)}"


def _unplanned_words(name: str, trust: Trust) -> str:
    if trust.state is State.OFF:
        return (
            f"{name} is not in the plan: it cost more time than it saved, or did not pay for long; {next_try(trust)}."
        )
    if trust.state is State.TRIED:
        return f"{name} is not in the plan: exploring it would cost more than the budget for exploration allows yet."
    return f"{name} is not in the plan: it would not pay."


def next_try(trust: Trust) -> str:
    """When what is off is tried again."""
    return f"next try in {count(max(trust.wait, 1), 'step')}"


def _stopped(stopper: Stopper | None) -> str:
    if stopper is None or not stopper.stopped:
        return ""
    return (
        f" It was stopped before level {stopper.stopped}, which would be accepted with a chance of "
        f"{stopper.chance:.2f} and take the time of {stopper.price:.2f} tokens."
    )


def _selection(sizes: tuple[int, int], planned: bool) -> Iterator[str]:
    proposed, kept = sizes
    if planned and not proposed:
        yield "Nothing was found to propose."
    elif kept < proposed:
        few = "none" if not kept else f"{kept}"
        yield (
            f"Of {count(proposed, 'node')}, {few} {'is' if kept == 1 else 'are'} scored; the rest is "
            f"expected to bring less than its time."
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
