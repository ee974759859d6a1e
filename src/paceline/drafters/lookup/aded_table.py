"""A bounded table of tri-grams: what came after two tokens, and how often lately.

In: a text's tokens. Out: rows of next tokens with their chances. Not here: tenants and files (`tables`), trees
(`aded_search`).

A row belongs to a pair of tokens and holds its `width` most frequent followers. A new follower takes the place of the
weakest; each update multiplies the row's other weights by `DECAY`, so that the row follows the present text and model.
Rows lie in sets of `WAYS` by a hash of their pair; in a full set a new pair takes the place of the one that was updated
longest ago. So the table never grows beyond 8 + 8 + 8 * width bytes a row.

Source: ADED (arXiv:2407.12021), whose table is neither bounded nor forgets; both are our choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.drafters.common.tables import Arrays, OtherOptionError
from paceline.utils import MAX_COUNT, compiled

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
Rows = tuple[LongArray, LongArray, IntArray, FloatArray]
"""Pairs as first * 2**32 + second, -1 for none (r,); times of the last update (r,); followers, -1 for none, and weights
(r, w).
"""

WAYS: Final = 8
DECAY: Final = 0.9
DOUBT: Final = 0.5
"""Added to a row's weights when they become chances: what a follower that was never seen counts. With 0.5, chances are
right within 0.1 on prose, word problems and Python sources.
"""

DTYPES: Final = {"pairs": np.int64, "times": np.int64, "followers": np.int32, "weights": np.float32}


@compiled
def find_trigram(rows: Rows, first: int, second: int) -> int:
    """The row of a pair, or -1."""
    pairs = rows[0]
    pair = (int(first) << 32) + int(second)
    start = _set(pair, len(pairs))
    for r in range(start, start + WAYS):
        if pairs[r] == pair:
            return r
    return -1


@compiled
def _set(pair: int, count: int) -> int:
    """Where the set of a pair begins (the finaliser of SplitMix64, Steele et al., 2014)."""
    value = np.uint64(pair) + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return int(value % np.uint64(count // WAYS)) * WAYS


@compiled
def place(rows: Rows, pair: int) -> int:
    """The row of a pair, made if need be, in place of the set's oldest."""
    pairs, times, followers, weights = rows
    start = _set(pair, len(pairs))
    oldest = start
    for r in range(start, start + WAYS):
        if pairs[r] == pair:
            return r
        if times[r] < times[oldest]:
            oldest = r
    pairs[oldest], followers[oldest], weights[oldest] = pair, -1, 0.0
    return oldest


@compiled
def learn(rows: Rows, text: LongArray, time: int) -> None:
    """Count every three tokens in a row of `text`; `time` is that of the first, and each is one later."""
    followers, weights = rows[2], rows[3]
    for i in range(2, len(text)):
        row = place(rows, (text[i - 2] << 32) + text[i - 1])
        rows[1][row] = time + i
        weakest, found = 0, -1
        for k in range(followers.shape[1]):
            weights[row, k] *= DECAY
            if followers[row, k] == text[i]:
                found = k
            if weights[row, k] < weights[row, weakest]:
                weakest = k
        if found < 0:
            found = weakest
            followers[row, found], weights[row, found] = text[i], 0.0
        weights[row, found] += 1.0


class TrigramTable:
    """What one tenant's texts taught.

    Args:
        rows: pairs of tokens that are kept, a multiple of `WAYS`. width: followers of a pair. vocab_size: ids lie below
        it.
    """

    def __init__(self, rows: int, width: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.rows: Rows = (
            np.full(rows, -1, np.int64),
            np.zeros(rows, np.int64),
            np.full((rows, width), -1, np.int32),
            np.zeros((rows, width), np.float32),
        )
        self.time = 1

    @property
    def nbytes(self) -> int:
        """Most memory that the table ever takes."""
        return sum(array.nbytes for array in self.rows)

    def learn(self, text: Sequence[int]) -> None:
        """Count every three tokens in a row."""
        if len(text) > 2:
            learn(self.rows, np.asarray(text, np.int64), self.time)
            self.time += len(text)

    def to_arrays(self) -> Arrays:
        """The rows in use, oldest first."""
        used = np.flatnonzero(self.rows[0] >= 0)
        used = used[np.argsort(self.rows[1][used], kind="stable")]
        return {name: array[used] for name, array in self._by_name().items()}

    def _by_name(self) -> dict[str, npt.NDArray[Any]]:
        return dict(zip(DTYPES, self.rows, strict=True))

    def read_arrays(self, arrays: Arrays) -> None:
        """Take over rows; of more than the table holds, the newest.

        Raises:
            OtherOptionError: rows of another width. ValueError: arrays that are missing, of another dtype, or out of
            range.
        """
        given: dict[str, npt.NDArray[Any]] = {name: arrays[name] for name in DTYPES if name in arrays}
        count = len(given["pairs"]) if "pairs" in given else -1
        own, width = self._by_name(), self.rows[2].shape[1]
        kept = given["followers"].shape[-1] or width if "followers" in given and given["followers"].ndim == 2 else width
        shapes = {name: (count, *[kept] * (array.ndim - 1)) for name, array in own.items()}
        for name, dtype in DTYPES.items():
            if name not in given or given[name].dtype != dtype or given[name].shape != shapes[name]:
                raise ValueError(f"{name} is missing, or not of dtype {np.dtype(dtype).name} and shape {shapes[name]}")
        _check(given, self.vocab_size)
        if kept != width:
            raise OtherOptionError("table_width", kept, width)
        for index, pair in enumerate(given["pairs"].tolist()):
            row = place(self.rows, pair)
            for name in ("times", "followers", "weights"):
                own[name][row] = given[name][index]
        self.time = int(given["times"].max(initial=0)) + 1


def _check(given: Mapping[str, npt.NDArray[Any]], vocab_size: int) -> None:
    """Raises ValueError for values that no table has."""
    pairs, followers, weights, times = (given[name] for name in ("pairs", "followers", "weights", "times"))
    tokens = np.concatenate([pairs >> 32, pairs & 0xFFFFFFFF])
    if ((tokens < 0) | (tokens >= vocab_size)).any() or ((followers < -1) | (followers >= vocab_size)).any():
        raise ValueError(f"token ids must lie in 0..{vocab_size - 1}")
    if not np.isfinite(weights).all() or (weights < 0).any() or (times < 1).any():
        raise ValueError("weights and times must be finite and positive")
    if (times > MAX_COUNT).any():
        raise ValueError(f"times must be at most {MAX_COUNT}")
    ordered = np.sort(followers, axis=1)
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        raise ValueError("the followers of a pair must differ")
