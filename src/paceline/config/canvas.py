"""What a request may ask of a diffusion language model beside the choice of tokens: text given in its answer, and
thoughts before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from paceline.config.declared import REQUIRED, check_options, documented, option
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


def canvas_pieces(value: object) -> tuple[Piece, ...] | None:
    """What stands where in an answer, from its first slot on: given texts or token ids, and numbers of slots to fill.

    Raises:
        ConfigError: another type, nothing given, more than the limits of this module.
    """
    if value is None:
        return None
    pieces = tuple(_piece(item, value) for item in items("canvas", value, RULE))
    need(any(not isinstance(piece, int) for piece in pieces), "canvas", "give a text or token ids", value)
    need(len(pieces) <= MAX_PIECES, "canvas", f"have at most {MAX_PIECES} pieces", len(pieces))
    length = sum(len(piece) for piece in pieces if isinstance(piece, str))
    need(length <= MAX_CHARACTERS, "canvas", f"hold at most {MAX_CHARACTERS} characters", length)
    return pieces


def _piece(item: Any, value: object) -> Piece:
    if isinstance(item, str):
        need(item != "", "canvas texts", "not be empty", value)
        return item
    if isinstance(item, list | tuple):
        need(len(item) > 0, "canvas lists", "hold token ids", value)
        return tokens("canvas token ids", item)
    need(isinstance(item, int) and not isinstance(item, bool), "canvas", RULE, value)
    integer("canvas slots to fill", item, 1, MAX_SLOTS)
    return int(item)


def _check_prompt(name: str, value: object) -> None:
    fine = isinstance(value, str) and len(value) <= MAX_CHARACTERS
    need(fine, name, f"be a text of at most {MAX_CHARACTERS} characters", value)


def _check_ends(name: str, value: object) -> None:
    count = len(strings(name, value))
    need(count <= MAX_ENDS, name, f"hold at most {MAX_ENDS} texts", count)


@clear_calls(example="max_tokens=256")
@documented
@dataclass(frozen=True, kw_only=True)
class ThinkParams:
    """Thoughts before the answer: written by the model's method, then checked and answered from left to right.

    Raises:
        ConfigError: a value of another type, or out of range.
    Source: TDAR (arXiv:2602.09555).
    """

    max_tokens: int = option(
        REQUIRED, low=1, high=MAX_SLOTS,
        doc="Most tokens of thoughts; those of the answer are limited by `SamplingParams.max_tokens`.",
    )  # fmt: skip
    check_prompt: str = option(
        CHECK, doc="Text appended to the thoughts, which asks to check them and to answer.", check=_check_prompt
    )
    end: Sequence[str] | str = option(
        ("</think>",), doc="Texts that end the thoughts, as the end of a text does.", check=_check_ends
    )

    def __post_init__(self) -> None:
        check_options(self, "think ")
        vars(self)["end"] = strings("think end", self.end)

    @classmethod
    def parse(cls, value: object) -> ThinkParams | None:
        """From a dict, or a number of tokens; None and parameters stay as they are."""
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(max_tokens=value)
        if not isinstance(value, Mapping) or "max_tokens" not in value:
            rule = 'be a number of tokens, or a dict with one, as {"max_tokens": 256}'
            raise ConfigError(f"think must {rule}, got {shortened(value)}")
        reject_unknown("think", value, [field.name for field in fields(cls)])
        return cls(**value)
