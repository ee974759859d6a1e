"""Values of options: ranges beside the types that the parts declare.

In: a part, options by name. Out: nothing, or a ConfigError. Not here: which options exist (`diffusion.methods`), ranges
that a part checks itself, what goes with which canvas or model (the parts).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paceline.utils import check_types

ABOVE_ONE = 2.0
"""Most of a threshold of confidence: above 1 it asks for one slot a round; far above it, it is a typing mistake."""

RANGES: Mapping[str, tuple[float, float]] = {
    "confidence_threshold": (0.0, ABOVE_ONE),
    "confidence_low": (0.0, ABOVE_ONE),
    "confidence_high": (0.0, ABOVE_ONE),
    "relaxed_threshold": (0.0, ABOVE_ONE),
    "entropy_threshold": (-1.0, 1e9),
    "edit_threshold": (0.0, 1.0),
    "filter_threshold": (0.0, 1.0),
    "gap_progress": (0.0, 1.0),
    "factor": (0.0, 1e9),
    "list_growth": (0.0, 1e9),
    "min_information": (0.0, 1e9),
    "penalty_lambda": (0.0, 1e9),
    "alg_temp": (0.0, 1e9),
    "eos_factor_min": (0.0, 1e9),
    "eos_factor_max": (0.0, 1e9),
    "gap_thresholds": (-math.inf, math.inf),
    "min_exploit": (0, 1e9),
    "answer_start": (0, 1e9),
    "answer_template": (0, 1e9),
    "end_token_ids": (0, 1e9),
}
"""Options whose part does not look at their range itself -> least and most value, each entry's where it is a list."""


def check_values(factory: Any, options: Mapping[str, Any]) -> None:
    """Check the values of those options that a part takes.

    Raises:
        ConfigError: one of another type than the part declares, or outside its range.
    """
    check_types(factory, options, RANGES)
