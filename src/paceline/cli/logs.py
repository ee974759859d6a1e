"""The logging switch: what libraries and Paceline report goes to standard error, as much as the user asked for.

In: a level by name. Out: a configured `logging`. Not here: errors that end a verb (`cli.main`).
"""

from __future__ import annotations

import logging
import sys

from paceline.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")


class StandardError(logging.Handler):
    """Writes to whatever standard error is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def start() -> None:
    """Send log records to standard error, warnings and worse to begin with, and Python's warnings among them."""
    root = logging.getLogger()
    if not any(isinstance(handler, StandardError) for handler in root.handlers):
        handler = StandardError()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
    logging.captureWarnings(True)
    set_level("warning")


def set_level(level: str) -> None:
    """Choose how much is reported; Python's warnings, meant for programmers, are shown from "info" on.

    Raises:
        ConfigError: not a level.
    """
    if level.lower() not in LEVELS:
        raise ConfigError(f"--log-level must be one of {', '.join(LEVELS)}, got {level!r}")
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger("paceline").setLevel(number)
    logging.getLogger("py.warnings").setLevel(logging.ERROR if number >= logging.WARNING else logging.WARNING)
