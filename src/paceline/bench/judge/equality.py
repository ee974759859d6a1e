"""Are two outputs the same, within the exactness class that is claimed for a setting?

In: outputs of the baseline and of a setting for the same prompts, with the runner that made them. Out: counts and
differences; the verdict whether speeds may be compared. Not here: speeds.

    claimed                     at temperature 0, and above it with a seed
    bit-equal                   every token equal
    bit-equal up to near ties   equal, or different first where both tokens are within rounding of the best
    (`bench.compare`; above
                                temperature 0, of the best after the seed's noise)
    equal in law                other tokens of the same law: not compared, no seed is given; `paceline verify` tests
    the law approximate                 compared and counted; any difference is allowed and the label says so
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.judge.tokens import TIE_UNITS, Difference, Sampling, first_difference
from paceline.config import GREEDY_EPSILON
from paceline.models import Runner

CLASSES = ("bit-equal", "bit-equal up to near ties", "equal in law", "approximate")
BIT_EQUAL, UP_TO_NEAR_TIES, IN_DISTRIBUTION, APPROXIMATE = CLASSES
LABELS = {
    BIT_EQUAL: "tokens compared, all must be equal",
    UP_TO_NEAR_TIES: "tokens compared, near ties allowed",
    IN_DISTRIBUTION: "equal in law: tokens differ by nature and are not compared",
    APPROXIMATE: "approximate by its own claim: differences are allowed",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two outputs of one prompt.

    Attributes:
        seed: of the request, for temperatures above 0.
    """

    prompt: str
    turn: int
    repeat: int
    prompt_ids: Sequence[int]
    base: Sequence[int]
    other: Sequence[int]
    seed: int = 0


@dataclass(slots=True)
class Equality:
    """What the comparison found; `to_dict` is its entry in the document."""

    claimed: str
    compared: int = 0
    identical: int = 0
    near_ties: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list)

    @property
    def different(self) -> int:
        """Outputs that differ first elsewhere than at a near tie."""
        return self.compared - self.identical - self.near_ties

    @property
    def allowed(self) -> bool:
        """Whether all differences stay within the claim."""
        if self.claimed in (IN_DISTRIBUTION, APPROXIMATE):
            return True
        return not self.different and (self.claimed != BIT_EQUAL or not self.near_ties)

    @property
    def reason(self) -> str | None:
        """Why speeds must not be compared, naming the first difference."""
        if self.allowed:
            return None
        first = next(d for d in self.differences if self.claimed == BIT_EQUAL or not d["near_tie"])
        count = self.different + (self.near_ties if self.claimed == BIT_EQUAL else 0)
        where = f"prompt {first['prompt']!r}, turn {first['turn'] + 1}, token {first['position']}"
        tokens = f"{first['baseline_token']} against {first['token']}, {first['gap']:.3g} from the best"
        return (
            f"{count} of {self.compared} outputs differ beyond the claim {self.claimed!r}, first at {where} ({tokens})"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        mode = {IN_DISTRIBUTION: "law", APPROXIMATE: "approximate"}.get(self.claimed, "tokens")
        return {
            "mode": mode,
            "compared": self.compared,
            "identical": self.identical,
            "near_ties": self.near_ties,
            "different": self.different,
            "allowed": self.allowed,
            "label": LABELS.get(self.claimed, self.claimed),
            "differences": self.differences,
        }


def baseline_pairs(outputs: int) -> dict[str, Any]:
    """The entry of the baseline itself."""
    counts = {"compared": outputs, "identical": outputs, "near_ties": 0, "different": 0}
    return {"mode": "baseline", **counts, "allowed": True, "label": "what others are compared with", "differences": []}


def compare_pairs(
    runner: Runner, pairs: Iterable[Pair], claimed: str, temperature: float, units: float = TIE_UNITS
) -> Equality:
    """Compare outputs; each distinct pair is judged once.

    Args:
        claimed: exactness class at this temperature.
        units: of rounding that a near tie may be wide (see `bench.compare.epsilon_of`); more for another engine.
    """
    found = Equality(claimed)
    if claimed == IN_DISTRIBUTION:
        return found
    known: dict[tuple[Any, ...], Difference | None] = {}
    for pair in pairs:
        key = (tuple(pair.prompt_ids), tuple(pair.base), tuple(pair.other), pair.seed)
        if key not in known:
            known[key] = difference(runner, pair, temperature, units)
        one = known[key]
        found.compared += 1
        if one is None:
            found.identical += 1
            continue
        found.near_ties += one.near_tie
        found.differences.append(
            {
                "prompt": pair.prompt,
                "turn": pair.turn,
                "repeat": pair.repeat,
                "position": one.position,
                "baseline_token": one.plain,
                "token": one.fast,
                "gap": one.gap,
                "epsilon": one.epsilon,
                "near_tie": one.near_tie,
            }
        )
    return found


def difference(runner: Runner, pair: Pair, temperature: float, units: float = TIE_UNITS) -> Difference | None:
    """The first difference of two outputs, or None; above temperature 0, near ties are those of logits with the seed's
    noise.
    """
    sampling = None if temperature < GREEDY_EPSILON else Sampling(temperature, pair.seed)
    return first_difference(runner, pair.prompt_ids, pair.base, pair.other, units, sampling=sampling)
