"""The text of one output as it is shown: what of it may go out already, and which drafter guessed which piece.

In: committed tokens with the drafter each came from. Out: how many of them stand, and pieces of text ready to show.
Not here: where an output ends (`engine.stops`), detokenisation (`engine.detokenize`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from paceline.config import SamplingParams
from paceline.engine.stops import StopChecker
from paceline.sampling import Logprob

if TYPE_CHECKING:
    from paceline.models.loading import Tokenizer

Segments = tuple[tuple[str, str | None], ...]


class Transcript:
    """Watches one output and hands out its text in pieces that will stand whatever comes next.

    Attributes:
        quiet: no text comes out before the end, so that nobody needs to know where a token came from.

    Args:
        max_new_tokens: most tokens, context considered.
        tokenizer: None leaves the text empty.
        at_once: nobody reads the text before the end; it is then made in one go, where no stop string must be looked
            for, and comes in no pieces.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        tokenizer: Tokenizer | None,
        eos_ids: Sequence[int],
        max_new_tokens: int,
        *,
        at_once: bool = False,
    ) -> None:
        self._stops = StopChecker(
            params, eos_ids, tokenizer, prompt_ids, max_new_tokens=max_new_tokens, at_once=at_once
        )
        self.quiet = self._stops.quiet
        self._tokenizer = tokenizer
        self._waiting: list[tuple[int, str | None]] = []  # (end of the piece in the text, its drafter), not shown yet
        self._shown = 0

    @property
    def text(self) -> str:
        return self._stops.text

    @property
    def finish_reason(self) -> Literal["stop", "length"] | None:
        return self._stops.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self._stops.stop_reason

    def push(self, tokens: Sequence[int], sources: Sequence[str | None]) -> tuple[Segments, int]:
        """Take committed tokens; returns the pieces that may be shown now, and how many of the tokens stand."""
        if self.quiet:
            return (), self._stops.push(tokens)
        kept = 0
        for token, source in zip(tokens, sources, strict=True):
            ended = self._stops.push_one(token)
            kept += 1
            self._waiting.append((len(self._stops.text), source))
            if ended:
                break
        return self._release(self._stops.safe_text_length), kept

    def flush(self) -> Segments:
        """The output ends here, cut off from outside: all that is left, up to a stop string."""
        if not self._stops.finished:
            self._stops.cut_off()
        if self.quiet:
            return ()
        self._waiting.append((len(self._stops.text), None))
        return self._release(len(self._stops.text))

    def _release(self, safe: int) -> Segments:
        text, pieces = self._stops.text, []
        while self._waiting and self._shown < safe:
            end, source = self._waiting[0]
            stop = min(end, safe)
            if stop > self._shown:
                pieces.append((text[self._shown : stop], source))
                self._shown = stop
            if end > safe:
                break
            self._waiting.pop(0)
        return tuple(pieces)

    def name_tokens(self, entry: dict[int, Logprob]) -> dict[int, Logprob]:
        """The same logprobs with each token's text filled in."""
        if self._tokenizer is None:
            return entry
        return {
            token: replace(one, decoded_token=self._tokenizer.decode([token], False)) for token, one in entry.items()
        }
