"""Which replica answers a request: one that has its beginning in the prefix cache, unless it is too busy.

Each replica has a cache of its own. What a replica has seen is remembered as keys of beginnings, so that a prompt is
found to share 4,096 characters with an earlier one, but not the exact length; lengths are weighed against the queues.

Source: routing by approximate prefixes after SGLang: Efficient Execution of Structured Language Model Programs, arXiv
2312.07104, and its router; ties by rendezvous hashing, Thaler and Ravishankar 1998.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from paceline.utils import BEGINNINGS, beginnings

FIELDS: Final = ("tools", "instructions", "previous_response_id", "system", "messages", "prompt", "input")
"""A prompt is made from these fields of a body, in this order."""

NAMES: Final = ("cache_salt", "prompt_cache_key")
"""Fields that say which requests share a prefix."""

WORTH: Final = 256
"""Characters of a shared beginning for which a request waits behind one other more."""

NAMED: Final = 16 * WORTH
"""What a request that comes with one of `NAMES` counts as sharing with those that came with the same."""

MOST_KEYS: Final = 2**16
"""That are remembered of each replica; those not seen for longest are forgotten."""

Affinity = Sequence[tuple[int, bytes]]
"""Characters that are shared with whoever has the key."""


def affinity_of(owner: str, path: str, body: bytes) -> Affinity:
    """Return what a request may share with earlier ones.

    Args:
        owner: of the key it came with; owners share nothing.
        body: as it was sent; what is no JSON object shares nothing, and its replica says so.
    """
    try:
        asked: Any = json.loads(body)
        if not isinstance(asked, dict):
            return ()
        names = [asked.get(name) for name in NAMES]
        text = json.dumps([owner, names, path, *map(asked.get, FIELDS)])
    except (ValueError, RecursionError):
        return ()
    shared = list(zip(BEGINNINGS, beginnings(text), strict=False))
    if any(names):
        named = hashlib.blake2b(json.dumps([owner, names]).encode(), digest_size=16).digest()
        shared.insert(0, (NAMED, named))
    return shared


def ranked(affinity: Affinity, shared: Mapping[str, int], loads: Mapping[str, int]) -> list[str]:
    """Return the names of replicas, the best first.

    Args:
        affinity: of the request; decides between equals.
        shared: characters of the prompt that each has seen.
        loads: requests of each, running or waiting.
    """
    last = affinity[-1][1] if affinity else b""

    def rank(name: str) -> tuple[float, bytes]:
        return loads[name] - shared.get(name, 0) / WORTH, hashlib.blake2b(last + name.encode()).digest()

    return sorted(loads, key=rank)


class SeenPrefixes:
    """Remembers what each replica has been asked, lately."""

    def __init__(self) -> None:
        self._keys: dict[str, OrderedDict[bytes, None]] = {}

    def shared(self, affinity: Affinity) -> dict[str, int]:
        """Return how many characters of a prompt each replica has seen."""
        return {
            name: max((length for length, key in affinity if key in keys), default=0)
            for name, keys in self._keys.items()
        }

    def add(self, affinity: Affinity, name: str) -> None:
        """Remember that a replica has been sent a request."""
        keys = self._keys.setdefault(name, OrderedDict())
        for _, key in affinity:
            keys[key] = None
            keys.move_to_end(key)
        while len(keys) > MOST_KEYS:
            keys.popitem(last=False)

    def keep(self, names: Iterable[str]) -> None:
        """Forget the replicas that are not among these."""
        kept = set(names)
        self._keys = {name: keys for name, keys in self._keys.items() if name in kept}
