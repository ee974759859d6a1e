"""What is claimed of every method under every sampling parameter: the exactness table.

They follow from what the registry declares. The contract suite goes through these very cells and proves each, and the
table of the documentation is made from them.

A cell is a drafter, a verifier of sampled tokens, a sampling parameter and a mode: temperature 0, above it, above it
with a seed. At temperature 0 the greedy verifier decides, whatever the other is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final, Literal

from paceline import registry
from paceline.config import SamplingParams

Mode = Literal["greedy", "sampled", "seeded"]
Claim = Literal["bit-equal", "bit-equal up to near ties", "equal in law", "approximate", "refused"]
MODES: Final[tuple[Mode, ...]] = ("greedy", "sampled", "seeded")

PARAMETERS: Final = tuple(field.name for field in fields(SamplingParams))
REFUSED: Final = (
    "allowed_token_ids",
    "best_of",
    "guided_decoding",
    "logits_processors",
    "structured_outputs",
    "truncate_prompt_tokens",
    "use_beam_search",
)
"""vLLM's parameters that are refused by name, under every method alike."""

LETTERS: Final[dict[Claim, str]] = {
    "bit-equal": "B",
    "bit-equal up to near ties": "N",
    "equal in law": "L",
    "approximate": "A",
    "refused": "R",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination and what is claimed of it, against plain decoding of the same model."""

    drafter: str
    verifier: str
    parameter: str
    mode: Mode
    claim: Claim


def claim(drafter: str, verifier: str, parameter: str, mode: Mode) -> Claim:
    """The class of one cell.

    Raises:
        ConfigError: a method that is not known.
    """
    if parameter in REFUSED:
        return "refused"
    entry = registry.lookup("drafters", drafter)
    if mode == "greedy":
        return entry.exactness[0]
    if registry.lookup("verifiers", verifier).exactness[1] == "approximate":
        return "approximate"
    return entry.exactness[1] if mode == "sampled" else entry.seeded


def verifiers() -> list[str]:
    """Verifiers of sampled tokens."""
    return [name for name in registry.VERIFIERS if name != "greedy"]


def cells() -> Iterator[Cell]:
    """Every cell of the methods that come with the package."""
    for drafter in registry.DRAFTERS:
        for verifier in verifiers():
            for parameter in (*PARAMETERS, *REFUSED):
                for mode in MODES:
                    yield Cell(drafter, verifier, parameter, mode, claim(drafter, verifier, parameter, mode))
