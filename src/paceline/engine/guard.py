"""Keeps what one drafter does wrong to one sequence from harming it.

In: what takes a drafter off a sequence. Out: a block whose exceptions do just that. Not here: when drafters are called
(`crew`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.engine.sequence import Sequence


class Guard:
    """Turns an exception of drafter `index` into dropping it for one sequence."""

    def __init__(self, drop: Callable[[int, Sequence, Exception], None], index: int, sequence: Sequence) -> None:
        self._drop, self._index, self._sequence = drop, index, sequence

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Exception):
            self._drop(self._index, self._sequence, error)
            return True
        return False
