"""Where an output ends, and how much of its text stands.

In:  committed tokens, one at a time. Out: how many of them are kept, why the output ended, its text, and how much of
the text is
safe to show. Not here: which tokens come (sampling, `min_tokens` in the logits), streaming to a user.

A step may commit several tokens. They are looked at one by one, so that the output ends at the very token where plain
decoding would have ended it. The order of the rules is vLLM's: end token, stop token, limits, and a stop string found
in the text of the same token takes the credit; so does one in the text that was held back until the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from paceline.config import SamplingParams
from paceline.engine.detokenize import IncrementalDetokenizer

if TYPE_CHECKING:
    from paceline.models.loading import Tokenizer


def find_stop(text: str, stops: Sequence[str], new_chars: int) -> tuple[int, str] | None:
    """The stop string that starts first among those that end within the last `new_chars` characters of `text`.

    Returns:
        Where it starts and the string (of several that start there, the first in `stops`), or None.
    """
    best: tuple[int, str] | None = None
    for stop in stops:
        start = text.find(stop, max(0, len(text) - new_chars - len(stop) + 1))
        if start >= 0 and (best is None or start < best[0]):
            best = start, stop
    return best


def open_length(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` could be the beginning of a stop string that is not complete yet."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest


class StopChecker:
    """Watches one output.

    Args:
        params: stop, stop_token_ids, ignore_eos, min_tokens, max_tokens, include_stop_str_in_output, detokenize.
        eos_ids: end tokens of the checkpoint.
        tokenizer: None leaves the text empty.
        prompt_ids: of which a short tail is read, so that the text continues the prompt's.
        max_new_tokens: most new tokens that fit into the context; None if only `params.max_tokens` counts.
        at_once: nobody reads the text before the end, so that it is made then, unless a stop string must be looked for.

    Attributes:
        quiet: no text comes out before the end.
        num_tokens: tokens kept so far, the end or stop token included.
        text: of the kept tokens; after the end it is cut at the stop string, or behind it with
            `include_stop_str_in_output`. The text of an end or stop token is not in it, unless with
            `include_stop_str_in_output`.
        finish_reason: None while the output goes on, "stop" (end token, stop token, stop string) or "length".
        stop_reason: the stop token id or stop string; None for an end token or a limit.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_ids: Iterable[int],
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        at_once: bool = False,
    ) -> None:
        self.num_tokens = 0
        self.text = ""
        self.finish_reason: Literal["stop", "length"] | None = None
        self.stop_reason: int | str | None = None
        self._eos_ids = frozenset() if params.ignore_eos else frozenset(eos_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._stops: tuple[str, ...] = tuple(params.stop)
        self._ends = self._eos_ids | self._stop_ids
        self._include, self._min_tokens = params.include_stop_str_in_output, params.min_tokens
        limits = [limit for limit in (params.max_tokens, max_new_tokens) if limit is not None]
        self._limit = min(limits) if limits else None
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, prompt_ids, skip_special_tokens=params.skip_special_tokens
            )
        self.quiet = self._detokenizer is None or (at_once and not self._stops)
        self._unread: list[int] = []  # tokens whose text is not made yet

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def safe_text_length(self) -> int:
        """Length of the part of `text` that will stand whatever comes next."""
        if self.finished or self._include or not self._stops:
            return len(self.text)
        return len(self.text) - open_length(self.text, self._stops)

    def push(self, tokens: Sequence[int]) -> int:
        """Take newly committed tokens in order; returns how many are kept. Those after the end are not looked at."""
        before, count = self.num_tokens, len(tokens)
        roomy = self._limit is None or before + count < self._limit
        if roomy and self.quiet and self.finish_reason is None and self._ends.isdisjoint(tokens):
            self.num_tokens += count
            self._unread += tokens
            return count
        for token in tokens:
            if self.push_one(token):
                break
        return self.num_tokens - before

    def push_one(self, token: int) -> bool:
        """Take one token; returns whether the output ends with it.

        Raises:
            RuntimeError: the output has ended before.
        """
        if self.finished:
            raise RuntimeError("the output has ended; no token can follow it")
        self.num_tokens += 1
        self._check_token(token)
        ended_by_token = self.finish_reason == "stop"
        delta = ""
        if self._include or not ended_by_token:
            delta = self._read(token)
        if not self._check_text(len(delta)) and self.finished:
            self.cut_off()
        return self.finished

    def cut_off(self) -> None:
        """The output ends here whatever its text says: what was held back comes out, cut where a stop string is found
        in it.
        """
        self._check_text(len(self._flush()))

    def _read(self, token: int) -> str:
        """The text that a token adds, or nothing while nobody reads it."""
        if self.quiet or self._detokenizer is None:
            self._unread.append(token)
            return ""
        delta = self._detokenizer.push((token,))
        self.text += delta
        return delta

    def _flush(self) -> str:
        """The output ends here without a stop string: text held back as incomplete characters comes out (as U+FFFD),
        and all text where nobody has read it.
        """
        held = ""
        if self._detokenizer is not None:
            held = self._detokenizer.rest(self._unread) if self.quiet else self._detokenizer.finish()
        self._unread = []
        self.text += held
        return held

    def _check_token(self, token: int) -> None:
        if self.num_tokens >= self._min_tokens:
            if token in self._eos_ids:
                self.finish_reason = "stop"
                return
            if token in self._stop_ids:
                self.finish_reason, self.stop_reason = "stop", token
                return
        if self._limit is not None and self.num_tokens >= self._limit:
            self.finish_reason = "length"

    def _check_text(self, new_chars: int) -> bool:
        """Look for a stop string in the text that came last; cut the text there and end the output."""
        if not self._stops or not new_chars or (self._min_tokens and self.num_tokens <= self._min_tokens):
            return False
        found = find_stop(self.text, self._stops, new_chars)
        if found is None:
            return False
        start, stop = found
        self.text = self.text[: start + len(stop) if self._include else start]
        self.finish_reason, self.stop_reason = "stop", stop
        return True
