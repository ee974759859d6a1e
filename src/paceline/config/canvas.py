"""What a request may ask of a diffusion language model beside the choice of tokens: text given in its answer, and
thoughts before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from paceline.errors import ConfigError
from paceline.utils import clear_calls, integer, items, need, reject_unknown, shortened, strings, tokens

OF_DIFFUSION: Final = ("canvas", "think")
"""Sampling parameters that only diffusion language models have."""

MAX_PIECES: Final = 1024
MAX_SLOTS: Final = 2**20
"""Of a canvas: no model has so long a context."""

MAX_CHARACTERS: Final = 2**18
"""Of all texts of a canvas, and of a check prompt."""

MAX_ENDS: Final = 16
RULE: Final = 'be a list of texts, numbers of slots to fill and lists of token ids, as ["The answer is ", 5]'
CHECK: Final = "\n\nCheck the steps above for mistakes. Then give the final answer.\n\n"

Piece = str | int | tuple[int, ...]


def canvas_pieces(given: object) -> tuple[Piece, ...] | None:
    """What stands where in an answer, from its first slot on: given texts or token ids, and numbers of slots to fill.

    Raises:
        ConfigError: another type, nothing given, more than the limits of this module.
    """
    if given is None:
        return None
    found = tuple(_piece(one, given) for one in items("canvas", given, RULE))
    need(any(not isinstance(one, int) for one in found), "canvas", "give a text or token ids", given)
    need(len(found) <= MAX_PIECES, "canvas", f"have at most {MAX_PIECES} pieces", len(found))
    length = sum(len(one) for one in found if isinstance(one, str))
    need(length <= MAX_CHARACTERS, "canvas", f"hold at most {MAX_CHARACTERS} characters", length)
    return found


def _piece(one: Any, given: object) -> Piece:
    if isinstance(one, str):
        need(one != "", "canvas texts", "not be empty", given)
        return one
    if isinstance(one, list | tuple):
        need(len(one) > 0, "canvas lists", "hold token ids", given)
        return tokens("canvas token ids", one)
    need(isinstance(one, int) and not isinstance(one, bool), "canvas", RULE, given)
    integer("canvas slots to fill", one, 1, MAX_SLOTS)
    return int(one)


@clear_calls(example="max_tokens=256")
@dataclass(frozen=True, kw_only=True)
class ThinkParams:
    """Thoughts before the answer: written by the model's method, then checked and answered from left to right.

    Attributes:
        max_tokens: most tokens of thoughts; those of the answer are limited by `SamplingParams.max_tokens`.
        check_prompt: text appended to the thoughts, which asks to check them and to answer.
        end: texts that end the thoughts, as the end of a text does.
    Raises:
        ConfigError: a value of another type, or out of range.
    Source: TDAR (arXiv:2602.09555).
    """

    max_tokens: int
    check_prompt: str = CHECK
    end: Sequence[str] | str = ("</think>",)

    def __post_init__(self) -> None:
        integer("think max_tokens", self.max_tokens, 1, MAX_SLOTS)
        fine = isinstance(self.check_prompt, str) and len(self.check_prompt) <= MAX_CHARACTERS
        need(fine, "think check_prompt", f"be a text of at most {MAX_CHARACTERS} characters", self.check_prompt)
        vars(self)["end"] = strings("think end", self.end)
        need(len(self.end) <= MAX_ENDS, "think end", f"hold at most {MAX_ENDS} texts", len(self.end))

    @classmethod
    def parse(cls, given: object) -> ThinkParams | None:
        """From a dict, or a number of tokens; None and parameters stay as they are."""
        if given is None or isinstance(given, cls):
            return given
        if isinstance(given, int) and not isinstance(given, bool):
            return cls(max_tokens=given)
        if not isinstance(given, Mapping) or "max_tokens" not in given:
            rule = 'be a number of tokens, or a dict with one, as {"max_tokens": 256}'
            raise ConfigError(f"think must {rule}, got {shortened(given)}")
        reject_unknown("think", given, [one.name for one in fields(cls)])
        return cls(**given)
