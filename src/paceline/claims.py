"""What is claimed of every method, against plain decoding of the same model: the exactness table.

The claims are read from what the registry declares. The contract suite goes through these very cells and proves each
under every sampling parameter; docs/exactness.md is written from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Final, Literal

from paceline import registry
from paceline.config import SamplingParams
from paceline.registry import Exactness

Mode = Literal["greedy", "sampled", "seeded"]

PARAMETERS: Final = tuple(field.name for field in fields(SamplingParams))
"""A claim holds under each of them."""

REFUSED: Final = (
    "allowed_token_ids",
    "best_of",
    "guided_decoding",
    "logits_processors",
    "structured_outputs",
    "truncate_prompt_tokens",
    "use_beam_search",
)
"""vLLM's parameters that every method rejects with an error that names them."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What is claimed of a drafter and a verifier at temperature 0, above it, or above it for a request with a seed."""

    drafter: str
    verifier: str
    mode: Mode
    claim: Exactness


def verifiers() -> list[str]:
    """Verifiers of sampled tokens; at temperature 0 the greedy verifier decides, whichever of them is chosen."""
    return [name for name in registry.VERIFIERS if name != "greedy"]


def claim(drafter: str, verifier: str, mode: Mode) -> Exactness:
    """The class of one cell.

    Raises:
        ConfigError: a method that is not known.
    """
    entry = registry.lookup("drafters", drafter)
    if mode == "greedy":
        return entry.exactness[0]
    if registry.lookup("verifiers", verifier).exactness[1] == "approximate":
        return "approximate"
    return entry.exactness[1] if mode == "sampled" else entry.seeded


def cells() -> Iterator[Cell]:
    """Every cell of the methods that come with the package."""
    above: tuple[Mode, ...] = ("sampled", "seeded")
    for drafter in registry.DRAFTERS:
        yield Cell(drafter, "greedy", "greedy", claim(drafter, "greedy", "greedy"))
        for verifier in verifiers():
            for mode in above:
                yield Cell(drafter, verifier, mode, claim(drafter, verifier, mode))


def page() -> str:
    """docs/exactness.md."""
    rows: dict[tuple[Exactness, ...], dict[str, list[str]]] = {}
    for verifier in verifiers():
        for drafter in registry.DRAFTERS:
            modes: tuple[Mode, ...] = ("greedy", "sampled", "seeded")
            found = tuple(claim(drafter, verifier, mode) for mode in modes)
            rows.setdefault(found, {}).setdefault(drafter, []).append(verifier)
    lines = [_INTRODUCTION]
    for found, group in rows.items():
        for taking in dict.fromkeys(map(tuple, group.values())):
            drafters = [name for name, theirs in group.items() if tuple(theirs) == taking]
            names = "every drafter" if len(drafters) == len(registry.DRAFTERS) else _listed(drafters)
            lines.append(f"| {names} | {_listed(taking)} | {' | '.join(found)} |")
    lines += ["", registry.STRICT_NOTE, "", f"Every claim holds under each sampling parameter: {_listed(PARAMETERS)}."]
    lines += ["", f"These parameters are rejected with an error that names them: {_listed(REFUSED)}.", ""]
    return "\n".join(lines)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


_INTRODUCTION = """# Exactness

Written by `python docs/generate.py` from the claims that the contract suite goes through: every cell below is run
under every sampling parameter against plain decoding on a toy model whose arithmetic is exact, a prompt alone and
among others of other lengths. All pairs of values are run on the bundled model as well. A claim without a proof fails
the suite.

- **bit-equal**: the same tokens, texts, finish reasons and logprobs.
- **bit-equal up to near ties**: the same where rounding cannot change the best token; `paceline verify` counts ties.
- **equal in distribution**: the same probability for every output.
- **approximate**: the bound that the verifier's page states holds for every accepted token.

| drafters | verifier | temperature 0 | above it | above it, with a seed |
|---|---|---|---|---|"""
