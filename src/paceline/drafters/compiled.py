"""Compiling of hot code of drafters.

In: a function over NumPy arrays and numbers. Out: the same as machine code. Not here: how (`paceline.compiled`).
"""

from __future__ import annotations

from paceline.compiled import compiled

__all__ = ["compiled"]
