"""Drafters that ask for hidden states of layers that are none."""

from __future__ import annotations

from typing import Any

from adversaries import Adversary


class Word(Adversary):
    """Not a list."""

    taps: Any = "3"


class TooDeep(Adversary):
    """Behind the last layer."""

    taps: Any = (0, 1000)


class Fraction(Adversary):
    """Between two layers."""

    taps: Any = (1.5,)
