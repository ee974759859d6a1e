"""Pseudo-random numbers of toy models: a fixed function of a key."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=2**16)
def normal(size: int, key: tuple[int, ...]) -> np.ndarray:
    """(size,) float32 numbers that depend on the key alone; not to be written to."""
    return np.random.default_rng(key).standard_normal(size).astype(np.float32)
