"""Which beginning of a prompt needs no prefill, because another sequence has the same one in its cache, or had.

At least the last token of a text is always computed, since it is the root of the next step. Requests that need
something of every position of their prompt (prompt logprobs) take nothing over, and where drafters want the hidden
states of a prompt's last tokens, these are computed; what they leave can be taken over. Tenants share nothing, nor do
the same tokens with other inputs. Where a sequence keeps more than keys and values, all of it must be shareable. Layers
with a sliding window may have given back what is behind it: then less is taken over, or nothing.

Mixers keep a state of fixed size, which is known behind the last token alone. A text can begin only where a copy of it
was kept: behind every so many blocks of a prompt, behind its last block, where it parts from the texts that were known
when it began, and, at the end of an output, behind the last block that was filled. So chunks of prompts end there.

Sources: automatic prefix caching of vLLM (PagedAttention, arXiv:2309.06180); Marconi (arXiv:2411.19379).
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
        tap_reread: how many tokens at the end of a prompt are read again for drafters that want their hidden states;
            None is all.
    """

    def __init__(self, memory: CacheMemory, *, tap_reread: int | None = 0) -> None:
        self._memory, self._tap_reread = memory, tap_reread

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
            if reached < (planned := self._planned(other, common)) and planned > known and other in ahead:
                return False
            if reached > best and (present := self._memory.blocks_present(other.cache, reached)) > best:
                best, source = present, other
        if best:
            if source is None:
                self._memory.adopt(request.prefix_key, keys, sequence.cache)
            else:
                self._memory.share(source.cache, best, sequence.cache)
        request.note_cached(sequence.cache.length)
        if self._memory.state_interval:
            sequence.state_borders = self._borders(sequence, keys, live)
            self._memory.follow_borders(sequence.cache)
        return True

    def _borders(
        self, sequence: DecodingSequence, keys: Sequence[bytes], live: Sequence[DecodingSequence]
    ) -> tuple[int, ...]:
        """Behind which tokens of a text that begins now the states of its mixers are kept, those included that it has
        taken over.
        """
        request, memory = sequence.request, self._memory
        end, step = len(sequence.context.tokens) - 1, memory.block_size * memory.state_interval
        last = max(end - (self._tap_reread or 0), 0) // memory.block_size
        parting = max(self._common(request, keys, other) for other in live) if live else 0
        parting = max(parting, memory.matching(request.prefix_key, keys))
        borders = {memory.block_size * blocks for blocks in (last, parting)}.union(range(step, end + 1, step))
        begun = sequence.cache.length
        return tuple(sorted({begun, *(border for border in borders if border > begun)} - {0}))

    def chunk_end(self, sequence: DecodingSequence, start: int, stop: int) -> int:
        """Where a chunk that begins at token `start` of a text and may reach to `stop` must end."""
        return next((border for border in sequence.state_borders if start < border < stop), stop)

    def keep_states(self, sequences: Sequence[DecodingSequence]) -> None:
        """Chunks of these texts were read: keep the states of their mixers, of those that stand at a border."""
        for sequence in sequences:
            if sequence.cache.length in sequence.state_borders:
                self._memory.keep_state(sequence.cache)

    def expected(self, request: Request, live: Sequence[DecodingSequence]) -> int:
        """How many blocks of its prompt a request that begins now will share with these sequences."""
        keys = self._of_prompt(request)
        return max((self._to_share(request, keys, other) for other in live), default=0)

    def _to_share(self, request: Request, keys: Sequence[bytes], other: DecodingSequence) -> int:
        common = self._common(request, keys, other)
        behind = common * self._memory.block_size <= other.cache.length
        return self._memory.blocks_present(other.cache, common) if behind else self._planned(other, common)

    def _planned(self, other: DecodingSequence, common: int) -> int:
        """With how many of its first `common` blocks another will be able to begin, when a sequence has read them."""
        if not self._memory.state_interval:
            return common
        size = self._memory.block_size
        return max((border // size for border in other.state_borders if border <= common * size), default=0)

    def _wanted(self, sequence: DecodingSequence) -> list[bytes]:
        """The full blocks that may be taken over: those of the text without its last token."""
        if sequence.begun:
            return self._memory.pieces(sequence.context.tokens[:-1])
        return self._of_prompt(sequence.request)

    def _of_prompt(self, request: Request) -> list[bytes]:
        """The full blocks of a prompt that may be taken over."""
        if self._tap_reread is None or request.params.prompt_logprobs is not None:
            return []
        most = (len(request.prompt_ids) - 1 - self._tap_reread) // self._memory.block_size
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
