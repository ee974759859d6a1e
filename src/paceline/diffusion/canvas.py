"""The canvas: a text of fixed slots, some given, some masked, some written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from paceline.models import Ints
from paceline.utils import integer, need

Floats = NDArray[np.float64]
GIVEN = "hold no mask token (leave it out; slots to fill are numbers in SamplingParams.canvas)"


class Status(IntEnum):
    """What a slot holds: the prompt, text given in advance, nothing yet, or a token written by decoding."""

    PROMPT = 0
    PRIOR = 1
    MASKED = 2
    COMMITTED = 3


@dataclass(slots=True)
class Canvas:
    """One text in the making.

    Prompt and prior slots never change; what is written stays unless an edit or remask rule is on.

    Attributes:
        tokens: (n,) int64, `mask_token_id` at masked slots.
        status: (n,) int8, `Status`.
        born: (n,) int64, the round in which a slot was written last; -1 otherwise.
        confidence: (n,) float64, probability of the token when it was written; NaN otherwise.
        start: first slot after the prompt.
        mask_token_id: what stands at a masked slot.
        eos_token_ids: tokens that end a text.
        round: rounds of writing so far.
    """

    tokens: Ints
    status: NDArray[np.int8]
    born: Ints
    confidence: Floats
    start: int
    mask_token_id: int
    eos_token_ids: tuple[int, ...] = ()
    round: int = 0

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        length: int,
        *,
        mask_token_id: int,
        eos_token_ids: tuple[int, ...] = (),
        priors: Mapping[int, int] | None = None,
    ) -> Canvas:
        """A prompt, then `length` masked slots; `priors` (slot -> token, counted from the prompt's end) are given.

        Raises:
            ConfigError: no slot to fill, a prior outside, a mask token in the prompt or a prior.
        """
        need(length > 0, "the length of a canvas", "leave at least one slot after the prompt", length)
        tokens = np.concatenate([np.asarray(prompt, np.int64), np.full(length, mask_token_id, np.int64)])
        status = np.full(tokens.size, Status.MASKED, np.int8)
        status[: len(prompt)] = Status.PROMPT
        for slot, token in (priors or {}).items():
            need(
                0 <= slot < length,
                "the slot of a prior",
                f"lie in 0..{length - 1}, counted from the end of the prompt",
                slot,
            )
            tokens[len(prompt) + slot] = token
            status[len(prompt) + slot] = Status.PRIOR
        fixed = tokens[status != Status.MASKED]
        need(not (fixed == mask_token_id).any(), "a prompt or prior", GIVEN, mask_token_id)
        empty = np.full(tokens.size, np.nan)
        return cls(tokens, status, np.full(tokens.size, -1, np.int64), empty, len(prompt), mask_token_id, eos_token_ids)

    @classmethod
    def infill(cls, template: Sequence[int], *, mask_token_id: int) -> Canvas:
        """A text with gaps: `template` holds the mask token wherever something is to be written.

        Raises:
            ConfigError: a template without a gap.
        """
        tokens = np.asarray(template, np.int64)
        gaps = tokens == mask_token_id
        need(
            bool(gaps.any()),
            "a template",
            f"hold the mask token {mask_token_id} where text is to be written",
            list(template),
        )
        first = int(gaps.argmax())
        status = np.where(gaps, Status.MASKED, Status.PRIOR).astype(np.int8)
        status[:first] = Status.PROMPT
        size = tokens.size
        born, empty = np.full(size, -1, np.int64), np.full(size, np.nan)
        return cls(tokens.copy(), status, born, empty, first, mask_token_id, ())

    @property
    def length(self) -> int:
        """Slots, the prompt included."""
        return int(self.tokens.size)

    @property
    def output(self) -> list[int]:
        """The tokens after the prompt, masked ones included."""
        return [int(token) for token in self.tokens[self.start :]]

    def masked(self, low: int = 0, high: int | None = None) -> Ints:
        """Masked slots within [low, high), ascending."""
        return np.flatnonzero(self.status[low:high] == Status.MASKED) + low

    def copy(self) -> Canvas:
        """An independent copy."""
        arrays = (self.tokens.copy(), self.status.copy(), self.born.copy(), self.confidence.copy())
        return Canvas(*arrays, self.start, self.mask_token_id, self.eos_token_ids, self.round)

    def write(self, slots: Ints, tokens: Ints, confidence: Floats) -> None:
        """Commit tokens at masked slots."""
        assert (self.status[slots] == Status.MASKED).all(), "only masked slots are committed"
        assert not (tokens == self.mask_token_id).any(), "the mask token is never committed"
        self._put(slots, tokens, confidence)
        self.status[slots] = Status.COMMITTED

    def edit(self, slots: Ints, tokens: Ints, confidence: Floats) -> None:
        """Put other tokens at committed slots (token editing)."""
        assert (self.status[slots] == Status.COMMITTED).all(), "only committed slots are edited"
        self._put(slots, tokens, confidence)

    def remask(self, slots: Ints) -> None:
        """Take committed tokens back (remasking samplers)."""
        assert (self.status[slots] == Status.COMMITTED).all(), "only committed slots are masked again"
        self.tokens[slots] = self.mask_token_id
        self.status[slots] = Status.MASKED
        self.born[slots] = -1
        self.confidence[slots] = np.nan

    def truncate(self, length: int) -> None:
        """Drop slots from `length` on; the prompt stays."""
        assert length >= self.start, "the prompt is never cut"
        self.tokens, self.status = self.tokens[:length].copy(), self.status[:length].copy()
        self.born, self.confidence = self.born[:length].copy(), self.confidence[:length].copy()

    def _put(self, slots: Ints, tokens: Ints, confidence: Floats) -> None:
        self.tokens[slots] = tokens
        self.born[slots] = self.round
        self.confidence[slots] = confidence


def given_slots(
    pieces: Sequence[str | int | Sequence[int]],
    encode: Callable[[str], list[int]],
    *,
    slots: int,
    vocab_size: int,
    mask_token_id: int,
) -> dict[int, int]:
    """The slots that a text with gaps gives, counted from the end of the prompt -> their tokens.

    Args:
        pieces: see `SamplingParams.canvas`.
        encode: the token ids of a text.
        slots: of the answer.
    Raises:
        ConfigError: more slots than that, ids outside the vocabulary, a mask token.
    """
    token_of: dict[int, int] = {}
    slot = 0
    for piece in pieces:
        if isinstance(piece, int):
            slot += piece
            continue
        for token in encode(piece) if isinstance(piece, str) else piece:
            integer("canvas token ids", token, 0, vocab_size - 1)
            need(token != mask_token_id, "canvas", GIVEN, mask_token_id)
            token_of[slot] = token
            slot += 1
    need(slot <= slots, "canvas", f"fit the {slots} slots that max_tokens and the context leave", slot)
    return token_of
