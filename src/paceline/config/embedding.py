"""How texts become embeddings by a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paceline.utils import choice, integer, need

POOLINGS: Final = ("last", "mean")
"""The state of a text's last token, or the mean of those of all its tokens."""

WHOLE_CONTEXT: Final = -1
"""`truncate_prompt_tokens` that keeps as many tokens as the model takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingParams:
    """How texts become embeddings.

    Attributes:
        pooling: of `POOLINGS`.
        normalize: to length 1.
        dimensions: so many first numbers are kept, before that; None keeps all.
        truncate_prompt_tokens: the last so many tokens of a text are read; -1 stands for as many as the model takes;
            None rejects texts that are longer than that.
    Raises:
        ConfigError: a value outside its range.
    """

    pooling: str = "last"
    normalize: bool = True
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        choice("pooling", self.pooling, POOLINGS)
        need(isinstance(self.normalize, bool), "normalize", "be True or False", self.normalize)
        if self.dimensions is not None:
            integer("dimensions", self.dimensions, 1)
        if self.truncate_prompt_tokens is not None:
            integer("truncate_prompt_tokens", self.truncate_prompt_tokens, WHOLE_CONTEXT)
            fine = self.truncate_prompt_tokens != 0
            need(fine, "truncate_prompt_tokens", "be -1 or at least 1", self.truncate_prompt_tokens)

    def check_size(self, size: int) -> None:
        """Reject `dimensions` beyond what embeddings have.

        Raises:
            ConfigError: more than `size`.
        """
        if self.dimensions is not None:
            integer("dimensions", self.dimensions, 1, size)

    def most_tokens(self, most: int) -> int | None:
        """How many tokens of a text are kept; None keeps all.

        Args:
            most: as many as the model takes.
        """
        return most if self.truncate_prompt_tokens == WHOLE_CONTEXT else self.truncate_prompt_tokens
