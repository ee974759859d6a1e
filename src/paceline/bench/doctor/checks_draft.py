"""Checks of drafters by a probe: feature layers, speed against the target, and how many guesses stand, and why not.

In: Facts. Out: complaints. Not here: running the probe (`bench.doctor_probe`).

Acceptance is judged against chance: how often the drafter's token at one place is the target's token at another place.
A learned head with wrong feature layers or a missing norm, a draft of another model and shuffled weights all come out
there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Final

from paceline.bench.doctor.facts import Complaint, DraftedToken, Facts, ProbeFacts

ENOUGH: Final = 12
"""Fewer guesses than this prove nothing."""

NEAR_ZERO: Final = 0.1
GOOD: Final = 0.3
"""An acceptance from which on a drafter works, as a whole."""

CODE: Final = frozenset("{}[]()<>=_;/\\|&*+#@$^~`")
TABLE: Final = "table"
"""Kind of drafters that copy text: they have nothing to say on most texts, and that is no fault."""

CAUSES: Final = {
    "head": "check its feature layers, its norm and that it was trained for this very target",
    "model": "check that its weights are whole and of the target's family",
}


def feature_layers(facts: Facts) -> Iterator[Complaint]:
    """Taps that the target does not have."""
    last = facts.target.num_layers
    for probe in facts.probes:
        wrong = [layer for layer in probe.taps if not -1 <= layer <= last]
        if wrong:
            yield Complaint(
                f"{probe.drafter} reads layers {wrong}, the target has -1..{last}",
                "use a head that was trained for this target",
            )


def draft_speed(facts: Facts) -> Iterator[Complaint]:
    """A drafter that takes longer for a token than the target itself, or whose guesses cannot pay."""
    for probe in facts.probes:
        target = probe.target_seconds.get(1)
        if not probe.draft_seconds or not target:
            continue
        times = f"{1e3 * probe.draft_seconds:.3g} ms for a token, the target {1e3 * target:.3g} ms"
        needed = break_even(probe)
        if probe.draft_seconds >= target:
            yield Complaint(
                f"{probe.drafter} takes {times}: guesses {_when(needed)}",
                "take a smaller draft, or none",
            )
        elif (rate := _rate(probe.guesses)) is not None and (needed is None or rate < needed):
            yield Complaint(
                f"{probe.drafter} takes {times}: guesses {_when(needed)}, here {rate:.0%} stand",
                "leave it to controller auto, which drafts less, or take another drafter",
                hint=True,
            )


def break_even(probe: ProbeFacts) -> float | None:
    """The least acceptance per token at which some number of drafted tokens pays; None where none does.

    With acceptance a, k drafted tokens give 1 + a + ... + a^k tokens for a pass over k + 1 rows and k drafted tokens.
    Passes between the measured numbers of rows are interpolated.
    """
    seconds = probe.target_seconds
    one, rows = seconds[1], max(seconds)
    slope = (seconds[rows] - one) / (rows - 1) if rows > 1 else 0.0
    found = []
    for k in range(1, max(2, rows)):
        cost = (one + max(0.0, slope) * k + k * probe.draft_seconds) / one
        if cost < k + 1:
            found.append(_solve(lambda a, k=k: sum(a**i for i in range(k + 1)), cost))  # type: ignore[misc]
    return min(found, default=None)


def _solve(rising: Callable[[float], float], value: float) -> float:
    """Where a rising function on 0..1 reaches a value, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return high


def acceptance(facts: Facts) -> Iterator[Complaint]:
    """Guesses that stand next to never, or no more often than by chance; and what that looks like."""
    for probe in facts.probes:
        rate = _rate(probe.guesses)
        if probe.kind == TABLE or probe.dropped:
            continue
        if rate is None:
            if not probe.guesses:
                yield Complaint(f"{probe.drafter} proposed nothing in the probe", "check its options", hint=True)
            continue
        chance = chance_of(probe.guesses)
        spread = 3 * math.sqrt(chance * (1 - chance) / len(probe.guesses))
        if rate < NEAR_ZERO or (rate < chance + spread and rate < 0.5):
            hits, number = sum(guess.hit for guess in probe.guesses), len(probe.guesses)
            cause = CAUSES.get(probe.kind, "check that it fits this target")
            yield Complaint(
                f"{probe.drafter}: {hits} of {number} guesses stand ({rate:.0%}, by chance {chance:.0%}); "
                f"{_looks(probe)}",
                cause,
            )


def chance_of(guesses: Sequence[DraftedToken]) -> float:
    """How often a guess would be right at another place of the probe: agreement that says nothing."""
    number = len(guesses)
    if number < 2:
        return 0.0
    said, wanted = Counter(guess.token for guess in guesses), Counter(guess.target for guess in guesses)
    agree = sum(count * wanted[token] for token, count in said.items()) - sum(
        guess.token == guess.target for guess in guesses
    )
    return agree / (number * (number - 1))


def _looks(probe: ProbeFacts) -> str:
    """By position, by token class, and whether the drafter knows that it is wrong."""
    first = [guess for guess in probe.guesses if guess.position == 1]
    later = [guess for guess in probe.guesses if guess.position > 1]
    parts = [f"first tokens {_rate_words(first)}" + (f", later ones {_rate_words(later)}" if later else "")]
    classes = [f"{name} {_rate_words(some)}" for name, some in _classes(probe.guesses)[:3]]
    parts.append(", ".join(classes))
    sure = fmean(guess.confidence for guess in probe.guesses)
    rate = _rate(probe.guesses) or 0.0
    if sure > rate + 0.3:
        parts.append(f"it is sure of them ({sure:.0%}), as if trained on another model")
    elif sure < NEAR_ZERO:
        parts.append(f"it is sure of nothing ({sure:.1%}), as if untrained or its weights damaged")
    else:
        parts.append(f"its mean confidence is {sure:.0%}")
    return "; ".join(parts)


def by_position(facts: Facts) -> Iterator[Complaint]:
    """First guesses that stand and second ones that do not."""
    for probe in facts.probes:
        first, second = ([guess for guess in probe.guesses if guess.position == p] for p in (1, 2))
        a, b = _rate(first), _rate(second)
        if probe.kind != TABLE and a is not None and b is not None and a >= GOOD and b < NEAR_ZERO:
            yield Complaint(
                f"{probe.drafter}: {a:.0%} of its first guesses stand, then {b:.0%} of the second ones",
                "draft one token a step, or check how it goes on from its own guesses",
            )


def by_token_class(facts: Facts) -> Iterator[Complaint]:
    """A class of tokens that it never gets right although it works as a whole."""
    for probe in facts.probes:
        if probe.kind == TABLE or (_rate(probe.guesses) or 0.0) < GOOD:
            continue
        for name, some in _classes(probe.guesses):
            rate = _rate(some)
            if rate is not None and rate < NEAR_ZERO / 2:
                yield Complaint(
                    f"{probe.drafter} is never right on {name} ({_rate_words(some)} of {len(some)})",
                    "train it on such text, or add ngram to the methods",
                    hint=True,
                )


def token_class(text: str) -> str:
    """whitespace, digits, code, punctuation or words; special tokens have no text of their own and count as special."""
    bare = text.strip()
    if not bare:
        return "whitespace" if text else "special"
    if bare.startswith("<|") or (bare[0] == "<" and bare[-1] == ">" and len(bare) > 2):
        return "special"
    if any(character.isdigit() for character in bare):
        return "digits"
    if any(character in CODE for character in bare):
        return "code"
    return "words" if any(character.isalpha() for character in bare) else "punctuation"


def _classes(guesses: Sequence[DraftedToken]) -> list[tuple[str, list[DraftedToken]]]:
    """Guesses by the class of the target's token, the largest class first."""
    found: dict[str, list[DraftedToken]] = {}
    for guess in guesses:
        found.setdefault(token_class(guess.text), []).append(guess)
    return sorted(found.items(), key=lambda pair: -len(pair[1]))


def _rate(guesses: Sequence[DraftedToken]) -> float | None:
    """Share that stands; None for too few."""
    return fmean(guess.hit for guess in guesses) if len(guesses) >= ENOUGH else None


def _rate_words(guesses: Sequence[DraftedToken]) -> str:
    return f"{fmean(guess.hit for guess in guesses):.0%}" if guesses else "none"


def _when(needed: float | None) -> str:
    return "cannot pay at all" if needed is None else f"pay from an acceptance of {needed:.0%} on"
