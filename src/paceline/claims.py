"""What is claimed of every method under every sampling parameter: the exactness table.

In: the registry's declarations. Out: one class per cell. Not here: the proof. The contract suite goes through these
very cells and proves each, and docs/exactness.md is written from them.

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


def page() -> str:
    """docs/exactness.md."""
    lines = [_INTRODUCTION, registry.STRICT_NOTE, ""]
    drafters = list(registry.DRAFTERS)
    for verifier in verifiers():
        lines += [f"## `{verifier}`", "", f"| parameter | {' | '.join(f'`{name}`' for name in drafters)} |"]
        lines += ["|---" * (1 + len(drafters)) + "|"]
        for parameter in (*PARAMETERS, *REFUSED):
            found = [_letters(drafter, verifier, parameter) for drafter in drafters]
            lines.append(f"| `{parameter}` | {' | '.join(found)} |")
        lines.append("")
    return "\n".join(lines)


def _letters(drafter: str, verifier: str, parameter: str) -> str:
    found = [LETTERS[claim(drafter, verifier, parameter, mode)] for mode in MODES]
    return found[0] if len(set(found)) == 1 else " ".join(found)


_INTRODUCTION = """# Exactness

Written by `python docs/generate.py` from the claims that the contract suite goes through: every cell below is run
against plain decoding on a toy model whose arithmetic is exact: one prompt alone, four together, and prompts of
different lengths together. All pairs of values are run on the bundled model as well. A claim without a proof fails the
suite.

| letter | what is claimed |
|---|---|
| B | bit-equal: the same tokens, texts, finish reasons and logprobs |
| N | bit-equal up to near ties: the same where rounding cannot change the best token; `paceline verify` counts ties |
| L | equal in law: the same distribution of outputs |
| A | approximate: the bound that the verifier's page states holds for every accepted token |
| R | refused by name, in one line, before anything runs |

A cell with three letters says what holds at temperature 0, above it, and above it for a request with a seed; one letter
holds for all three.
"""
