"""What a request on a diffusion language model costs, and what canvases and tokens look like as text."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np

from paceline.checkpoints import Tokenizer, token_bytes
from paceline.diffusion.canvas import Canvas, Status
from paceline.diffusion.trajectory import Trajectory
from paceline.engine import RequestMetrics, StreamChunk

State = Literal["masked", "written", "new"]

Pieces = tuple[tuple[str, State], ...]

DOT = "·"
"""What stands for a masked slot."""


@dataclass(slots=True)
class DiffusionMetrics(RequestMetrics):
    """Counts and times of one request; `num_steps` is `num_calls`, nothing is drafted.

    The waiting for room in a batch of canvases (`max_num_seqs`) is part of `time_to_first_token`, and of
    `generation_time` where it lies between canvases of the request.

    Attributes:
        method: of decoding.
        num_reasoning_tokens: of the `num_generation_tokens`, those of thoughts.
        num_calls: passes of the model; drafts computed together are one.
        num_rounds: rounds of writing.
        num_slots_computed: queries, summed over passes.
        seconds: in passes and rules; canvases decoded side by side share that of their passes.
    """

    method: str = ""
    num_reasoning_tokens: int = 0
    num_calls: int = 0
    num_rounds: int = 0
    num_slots_computed: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_call(self) -> float:
        """Tokens that are in the outputs per pass of the model; 0 without a pass."""
        return self.num_generation_tokens / self.num_calls if self.num_calls else 0.0

    def add(self, trajectory: Trajectory) -> None:
        """Count one output."""
        self.num_calls += trajectory.calls
        self.num_steps = self.num_calls
        self.num_rounds += len(trajectory.rounds)
        self.num_slots_computed += trajectory.slots_computed
        self.seconds += trajectory.seconds

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "method": self.method,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_generation_tokens": self.num_generation_tokens,
            "num_reasoning_tokens": self.num_reasoning_tokens,
            "num_calls": self.num_calls,
            "num_rounds": self.num_rounds,
            "num_slots_computed": self.num_slots_computed,
            "tokens_per_call": round(self.tokens_per_call, 4),
            "seconds": self.seconds,
            "time_to_first_token": self.time_to_first_token,
            "generation_time": self.generation_time,
            "tokens_per_second": round(self.tokens_per_second, 2),
        }


@dataclass(frozen=True, slots=True)
class CanvasChunk(StreamChunk):
    """What a round changed. Text comes as far as it is final: up to the first masked slot, and where written slots may
    change, in the last chunk of an output; `pieces` show it on the way.

    Attributes:
        pieces: the text from left to right, in runs of slots that are masked (a dot each), written, or new in this
            round; nothing after a token that ends it.
    """

    pieces: Pieces = ()


class Painter:
    """Reads canvases as pieces.

    Args:
        tokenizer: whose tokens the slots hold.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = token_bytes(tokenizer)

    def pieces(self, canvas: Canvas, slots: int, ends: frozenset[int], since: int) -> Pieces:
        """The first `slots` slots after the prompt.

        Args:
            ends: tokens after which nothing is shown.
            since: rounds from this one on are new.
        """
        tokens = canvas.tokens[canvas.start : canvas.start + slots]
        stop = np.flatnonzero(np.isin(tokens, list(ends)))
        last = canvas.start + (int(stop[0]) if stop.size else tokens.size)
        runs = groupby(range(canvas.start, last), lambda slot: _state(canvas, slot, since))
        return tuple((self._text(canvas, list(run), state), state) for state, run in runs)

    def _text(self, canvas: Canvas, slots: list[int], state: State) -> str:
        if state == "masked":
            return DOT * len(slots)
        known = len(self._bytes)
        spellings = [self._bytes[token] for token in canvas.tokens[slots].tolist() if token < known]
        return b"".join(spelling for spelling in spellings if spelling).decode("utf-8", "replace")


def _state(canvas: Canvas, slot: int, since: int) -> State:
    if canvas.status[slot] == Status.MASKED:
        return "masked"
    return "new" if canvas.born[slot] >= since else "written"


class TokenTexts:
    """The text of each token as it reads inside a text, a leading space included.

    None for special tokens, for ids beyond the vocabulary, and for tokens that hold a part of a character only: a
    constrained text does without them. A tokenizer that drops a space at the start of a text shows a text that starts
    with one without it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.texts = [_read(spelling) for spelling in token_bytes(tokenizer)]

    def __call__(self, token: int) -> str | None:
        """See `base.TokenText`."""
        return self.texts[token] if token < len(self.texts) else None


def _read(spelling: bytes | None) -> str | None:
    if not spelling:
        return None
    try:
        return spelling.decode("utf-8")
    except UnicodeDecodeError:
        return None
