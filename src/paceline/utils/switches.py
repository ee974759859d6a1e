"""Environment variables that switch something off."""

from __future__ import annotations

import os

from paceline.utils.validation import need


def switched_on(variable: str, what: str) -> bool:
    """Whether the environment leaves on what an environment variable can switch off.

    Args:
        what: is switched, in words.
    Raises:
        ConfigError: it says neither.
    """
    word = os.environ.get(variable, "").strip().lower()
    off = ("0", "off", "no", "false")
    need(word in ("", "1", "on", "yes", "true", *off), variable, f"be 0 ({what} off) or 1 (on, as without it)", word)
    return word not in off
