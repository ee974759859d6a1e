"""Filling caches with texts, a limited number of tokens in each pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline.models import Runner, SequenceCache


def fill_caches(
    runner: Runner, caches: Sequence[SequenceCache], texts: Sequence[Sequence[int]], most_tokens: int
) -> None:
    """Feed each cache the tokens that it lacks, those of the first ones first.

    Args:
        texts: by cache, in its order; may be empty.
        most_tokens: of a pass, all caches together.
    """
    waiting = deque((cache, list(tokens)) for cache, tokens in zip(caches, texts, strict=True) if tokens)
    while waiting:
        fed, chunks, room = list[SequenceCache](), list[list[int]](), most_tokens
        while waiting and room > 0:
            cache, tokens = waiting.popleft()
            fed.append(cache)
            chunks.append(tokens[:room])
            if len(tokens) > room:
                waiting.appendleft((cache, tokens[room:]))
            room -= len(chunks[-1])
        runner.extend(fed, chunks)
