"""Where an output ends, what of its text may be shown already, and which drafter drafted which piece.

A step may commit several tokens. They are looked at one by one, so that the output ends at the very token where plain
decoding would have ended it. The order of the rules is vLLM's: end token, stop token, limits, and a stop string found
in the text of the same token takes the credit; so does one in the text that was held back until the end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Final, Literal
from weakref import WeakKeyDictionary

from paceline.config import SamplingParams
from paceline.engine.detokenize import IncrementalDetokenizer
from paceline.sampling import Logprob

if TYPE_CHECKING:
    from paceline.models.loading import Tokenizer


_NAMES: Final = WeakKeyDictionary[Any, dict[int, str]]()
"""By tokenizer: the texts of tokens that logprobs were reported of, which may be all of them at every position."""


def find_stop(text: str, stops: Sequence[str], new_chars: int) -> tuple[int, str] | None:
    """The stop string that starts first among those that end within the last `new_chars` characters of `text`.

    Returns:
        Where it starts and the string (of several that start there, the first in `stops`), or None.
    """
    best: tuple[int, str] | None = None
    recent = text[max(0, len(text) - new_chars - max(map(len, stops), default=0) + 1) :]
    for stop in [stop for stop in stops if stop in recent]:  # few of what may be thousands
        start = text.find(stop, max(0, len(text) - new_chars - len(stop) + 1))
        if start >= 0 and (best is None or start < best[0]):
            best = start, stop
    return best


def open_length(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` could be the beginning of a stop string that is not complete yet.

    Args:
        stops: in sorted order, so that there may be thousands: those that begin with an end of the text follow it.
    """
    longest = max(map(len, stops), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        end = text[-size:]
        place = bisect_right(stops, end)
        if place < len(stops) and stops[place].startswith(end):
            return size
    return 0


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
        end_ids: end and stop tokens.
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
        self._sorted_stops = sorted(self._stops)
        self.end_ids = self._eos_ids | self._stop_ids
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
        """Length of the part of `text` that stays whatever comes next."""
        if self.finished or self._include or not self._stops:
            return len(self.text)
        return len(self.text) - open_length(self.text, self._sorted_stops)

    def fork(self) -> StopChecker:
        """Another one at the same point."""
        twin = copy(self)
        twin._unread = list(self._unread)
        if self._detokenizer is not None:
            twin._detokenizer = self._detokenizer.fork()
        return twin

    def push(self, tokens: Sequence[int]) -> int:
        """Take newly committed tokens in order; returns how many are kept. Those after the end are not looked at."""
        before, count = self.num_tokens, len(tokens)
        roomy = self._limit is None or before + count < self._limit
        if roomy and self.quiet and self.finish_reason is None and self.end_ids.isdisjoint(tokens):
            self.num_tokens += count
            if self._detokenizer is not None:
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
        """The output ends here whatever its text says.

        What was held back comes out, cut where a stop string is found in it.
        """
        self._check_text(len(self._flush()))

    def _read(self, token: int) -> str:
        """The text that a token adds, or nothing while nobody reads it."""
        if self._detokenizer is None:
            return ""
        if self.quiet:
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
        stopped = find_stop(self.text, self._stops, new_chars)
        if stopped is None:
            return False
        start, stop = stopped
        self.text = self.text[: start + len(stop) if self._include else start]
        self.finish_reason, self.stop_reason = "stop", stop
        return True


Segments = tuple[tuple[str, str | None], ...]


class Transcript:
    """Watches one output and hands out its text in pieces that stay whatever comes next.

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
        """Take committed tokens; returns the pieces that may be shown now, and how many of the tokens are kept."""
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
        if self._tokenizer is not None:
            known = _NAMES.setdefault(self._tokenizer, {})
            for token, logprob in entry.items():
                if token not in known:
                    known[token] = self._tokenizer.decode([token], False)
                logprob.decoded_token = known[token]
        return entry
