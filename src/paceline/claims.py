"""What is claimed of every method, against plain decoding of the same model: the exactness table.

The claims are read from what the registry declares. The contract suite goes through these very cells and proves each
under every sampling parameter; the table of the documentation is made from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final, Literal

from paceline import registry
from paceline.config import OF_DIFFUSION, SamplingParams
from paceline.registry import Exactness

Mode = Literal["greedy", "sampled", "seeded"]

MODES: Final[tuple[Mode, ...]] = ("greedy", "sampled", "seeded")
"""Temperature 0, above it, above it for a request with a seed."""

PARAMETERS: Final = tuple(field.name for field in fields(SamplingParams) if field.name not in OF_DIFFUSION)
"""A claim holds under each of them."""

REFUSED: Final = (
    "best_of",
    "guided_decoding",
    "use_beam_search",
)
"""vLLM's parameters that every method rejects with an error that names them."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What is claimed of a drafter and a verifier at temperature 0, above it, or above it for a request with a seed.

    At temperature 0 the verifier is "greedy", or a rule that decides there in its place.
    """

    drafter: str
    verifier: str
    mode: Mode
    claim: Exactness


def verifiers() -> list[str]:
    """Verifiers of sampled tokens; at temperature 0 the greedy one decides, unless they name another (`at_zero`)."""
    return [name for name in registry.VERIFIERS if name != "greedy"]


def claim(drafter: str, verifier: str, mode: Mode) -> Exactness:
    """The class of one cell.

    Raises:
        ConfigError: a method that is not known.
    """
    entry = registry.lookup("drafters", drafter)
    if registry.lookup("verifiers", verifier).exactness[mode != "greedy"] == "approximate":
        return "approximate"
    if mode == "greedy":
        return entry.exactness[0]
    return entry.exactness[1] if mode == "sampled" else entry.seeded


def cells() -> Iterator[Cell]:
    """Every cell of the methods that come with the package, but for drafters of trees under rules for chains."""
    for drafter, entry in registry.DRAFTERS.items():
        yield Cell(drafter, "greedy", "greedy", claim(drafter, "greedy", "greedy"))
        for verifier in verifiers():
            if "trees" in entry.needs and registry.load("verifiers", verifier).chains_only:
                continue
            if claim(drafter, verifier, "greedy") == "approximate":
                yield Cell(drafter, verifier, "greedy", "approximate")
            for mode in MODES[1:]:
                yield Cell(drafter, verifier, mode, claim(drafter, verifier, mode))
