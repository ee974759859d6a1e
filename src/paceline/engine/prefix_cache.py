"""Which beginning of a prompt needs no prefill, because another sequence has the same one in its cache, or had.

At least the last token of a text is always computed, since it is the root of the next step. Requests that need
something of every position of their prompt (prompt logprobs) take nothing over, and where drafters want the hidden
states of a prompt's last tokens, these are computed; what they leave can be taken over. Tenants share nothing, nor do
the same tokens with other inputs. Where a sequence keeps more than keys and values, all of it must be shareable. Layers
with a sliding window may have given back what is behind it: then less is taken over, or nothing. Source: automatic
prefix caching of vLLM (PagedAttention, arXiv:2309.06180).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.request import Request
from paceline.engine.sequence import DecodingSequence
from paceline.models import CacheMemory


class PrefixCache:
    """Shares whole blocks of texts that begin alike.

    Args:
        memory: of the runner.
        tap_window: of how many tokens at the end of a prompt drafters want the hidden states; None is all.
    """

    def __init__(self, memory: CacheMemory, *, tap_window: int | None = 0) -> None:
        self._memory, self._tap_window = memory, tap_window

    def begin(
        self, sequence: DecodingSequence, ahead: Sequence[DecodingSequence], live: Sequence[DecodingSequence]
    ) -> bool:
        """Give a sequence whose cache is empty the longest beginning that is at hand.

        Args:
            ahead: sequences that are being filled and come first in turn.
            live: these and all others with a cache, but itself.
        Returns:
            False if it should wait, since a sequence ahead of it is about to compute more of its beginning.
        """
        request = sequence.request
        keys = self._wanted(sequence)
        known = self._memory.known(request.prefix_key, keys) if keys else 0
        best, source = known, None
        for other in live if keys else ():
            common = self._common(request, keys, other)
            reached = min(common, other.cache.length // self._memory.block_size)
            if reached < common and common > known and other in ahead:
                return False
            if reached > best and (present := self._memory.blocks_present(other.cache, reached)) > best:
                best, source = present, other
        if best:
            if source is None:
                self._memory.adopt(request.prefix_key, keys, sequence.cache)
            else:
                self._memory.share(source.cache, best, sequence.cache)
        request.note_cached(sequence.cache.length)
        return True

    def expected(self, request: Request, live: Sequence[DecodingSequence]) -> int:
        """How many blocks of its prompt a request that begins now will share with these sequences."""
        keys = self._of_prompt(request)
        return max((self._to_share(request, keys, other) for other in live), default=0)

    def _to_share(self, request: Request, keys: Sequence[bytes], other: DecodingSequence) -> int:
        common = self._common(request, keys, other)
        behind = common * self._memory.block_size <= other.cache.length
        return self._memory.blocks_present(other.cache, common) if behind else common

    def _wanted(self, sequence: DecodingSequence) -> list[bytes]:
        """The full blocks that may be taken over: those of the text without its last token."""
        if sequence.begun:
            return self._memory.pieces(sequence.context.tokens[:-1])
        return self._of_prompt(sequence.request)

    def _of_prompt(self, request: Request) -> list[bytes]:
        """The full blocks of a prompt that may be taken over."""
        if self._tap_window is None or request.params.prompt_logprobs is not None:
            return []
        most = (len(request.prompt_ids) - 1 - self._tap_window) // self._memory.block_size
        return request.block_keys(self._memory)[: max(most, 0)]

    def _common(self, request: Request, keys: Sequence[bytes], other: DecodingSequence) -> int:
        """How many blocks a text has in common with the beginning of another request's prompt."""
        if other.request.prefix_key != request.prefix_key:
            return 0
        theirs = other.request.block_keys(self._memory)
        pairs = enumerate(zip(keys, theirs, strict=False))
        return next((i for i, (key, other_key) in pairs if key != other_key), min(len(keys), len(theirs)))

    def keep(self, sequence: DecodingSequence) -> None:
        """A sequence gives its cache up: keep its blocks until their room is needed."""
        cache = sequence.cache
        if cache.length >= self._memory.block_size:
            tokens = sequence.context.tokens[: cache.length]
            self._memory.retain(cache, sequence.request.prefix_key, self._memory.pieces(tokens))
