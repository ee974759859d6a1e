"""What `verify` found, whether the claims hold, and one sentence about it.

In: comparisons and tests. Out: a Report. Not here: decoding (`bench.verify`), printing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.judge.equality import APPROXIMATE, BIT_EQUAL, UP_TO_NEAR_TIES
from paceline.bench.judge.tokens import Agreement
from paceline.bench.judge.uniformity import LawTest


@dataclass(slots=True)
class VerifyReport:
    """What was found.

    Attributes:
        claimed: exactness class at temperature 0 and above it.
        exactness: the mode it ran in (`LLM.exactness`): in strict mode, tokens must be equal at near ties too.
        prompts: how many were decoded.
        greedy: the comparison at temperature 0; its outputs are the prompts.
        drafted: the same with DRAFTED guesses in every step; None where the configuration fixes their number itself.
        guesses: that were verified in all these comparisons; without one there was nothing to test.
        near_ties, positions: output positions of plain decoding whose two best logits are closer than epsilon, of all.
        temperature: of the tests above 0, or 0.
        seeded: the comparison of outputs with equal seeds above 0; None where it was left out.
        law, plain_law: the test of the law above 0, of accelerated and of plain decoding; None where it was left out.
        mean_acceptance_length: of accelerated decoding at temperature 0.
    """

    model: str
    claimed: tuple[str, str]
    dtype: str
    prompts: int = 0
    exactness: str = ""
    greedy: Agreement = field(default_factory=Agreement)
    drafted: Agreement | None = None
    guesses: int = 0
    near_ties: int = 0
    positions: int = 0
    temperature: float = 0.0
    seeded: Agreement | None = None
    law: LawTest | None = None
    plain_law: LawTest | None = None
    mean_acceptance_length: float = 1.0

    @property
    def greedy_holds(self) -> bool:
        """Whether the class claimed at temperature 0 holds; an approximate method claims nothing."""
        return all(_agrees(self.claimed[0], one) for one in (self.greedy, self.drafted) if one is not None)

    @property
    def seeded_holds(self) -> bool:
        """Whether equal seeds give equal tokens, where that is claimed and was tested."""
        return self.seeded is None or _agrees(self.claimed[1], self.seeded)

    @property
    def law_holds(self) -> bool:
        """Whether the outputs follow the model's law, where that is claimed and was tested."""
        return self.claimed[1] == APPROXIMATE or self.law is None or self.law.holds

    @property
    def holds(self) -> bool:
        """Whether guesses were verified and every claim stands; without guesses plain decoding was compared with
        itself.
        """
        return self.guesses > 0 and self.greedy_holds and self.seeded_holds and self.law_holds

    @property
    def conclusion(self) -> str:
        """One sentence that names what was tested and no more."""
        above = f"at temperature {self.temperature:g}"
        checks = [] if self.claimed[0] == APPROXIMATE else [("at temperature 0", self.greedy_holds)]
        if self.seeded is not None and self.claimed[1] in (BIT_EQUAL, UP_TO_NEAR_TIES):
            checks.append((f"for equal seeds {above}", self.seeded_holds))
        if self.law is not None and self.claimed[1] != APPROXIMATE:
            checks.append((f"in law {above}", self.law_holds))
        broken = [name for name, fine in checks if not fine]
        if broken:
            return f"THE CLAIM DOES NOT HOLD {_listed(broken)}"
        if not self.guesses:
            return "NOTHING WAS DRAFTED, so plain decoding was compared with itself; choose another method or prompts"
        proven = "nothing exact is claimed at temperature 0"
        if checks:
            proven = f"the claim holds {_listed([name for name, _ in checks])}"
        if self.claimed[1] == APPROXIMATE:
            return f"{proven}; nothing exact is claimed above temperature 0"
        return proven if self.law is not None else f"{proven}; nothing was tested above temperature 0"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        laws = {
            name: None if law is None else law.to_dict()
            for name, law in (("law", self.law), ("plain_law", self.plain_law))
        }
        counts = ("prompts", "guesses", "near_ties", "positions", "temperature", "mean_acceptance_length")
        plain = ("model", "claimed", "exactness", "dtype", *counts)
        verdicts = ("holds", "greedy_holds", "seeded_holds", "law_holds", "conclusion")
        return {name: getattr(self, name) for name in plain} | {
            "greedy": self.greedy.to_dict(),
            "drafted": None if self.drafted is None else self.drafted.to_dict(),
            "seeded": None if self.seeded is None else self.seeded.to_dict(),
            **laws,
            "tested": {"temperature_0": True, "equal_seeds": self.seeded is not None, "law": self.law is not None},
            **{name: getattr(self, name) for name in verdicts},
        }


def _listed(names: Sequence[str]) -> str:
    """Names as in a sentence: "a", "a and b", "a, b and c"."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _agrees(claimed: str, found: Agreement) -> bool:
    """Whether a comparison is as its class promises; classes that promise no equal tokens accept all."""
    if claimed == BIT_EQUAL:
        return not found.differences
    return claimed != UP_TO_NEAR_TIES or found.wrong == 0
