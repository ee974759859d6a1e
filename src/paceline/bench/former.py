"""Names that have moved to `paceline.utils`, importable from `paceline.bench` for one more release."""

from paceline.utils import (
    ENOUGH,
    DifferentOutputError,
    Estimate,
    Turn,
    bootstrap,
    in_turn,
    median_ratio,
    no_interval,
    repeated,
    speedup,
    time_in_turn,
    timed,
    tokens_per_second,
    wilson,
)

__all__ = [
    "ENOUGH",
    "DifferentOutputError",
    "Estimate",
    "Turn",
    "bootstrap",
    "in_turn",
    "median_ratio",
    "no_interval",
    "repeated",
    "speedup",
    "time_in_turn",
    "timed",
    "tokens_per_second",
    "wilson",
]
