"""Lines as a user types them: edited and recalled where both ends are a terminal, else read from a pipe."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.cli.prompts import MAX_PROMPT_BYTES, decode
from paceline.utils import user_cache

PROMPT = "> "
KEPT = 1000
"""Lines of the history file."""

logger = logging.getLogger("paceline")


def is_terminal() -> bool:
    """Whether a user sits at both ends."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


class LineEditor:
    """Reads messages with the keys of readline and a history that outlives the process.

    A text that is pasted stays one message, line ends included, where the terminal marks pastes.
    """

    def __init__(self) -> None:
        self._readline = self._prepared() if is_terminal() else None

    def read(self) -> str | None:
        """The next message, without its last line end; None at the end of the input.

        Raises:
            KeyboardInterrupt: Ctrl-C instead of a message.
            PromptError: no UTF-8, or a line that is too long.
        """
        if is_terminal():
            try:
                line = input(PROMPT)
            except EOFError:
                print()
                return None
            self._keep_history()
            return line
        if sys.stdin is None:
            return None
        if sys.stdin.isatty():
            print(PROMPT, end="", file=sys.stderr, flush=True)
        line = decode(sys.stdin.buffer.readline(MAX_PROMPT_BYTES + 1), "standard input")
        return line.rstrip("\r\n") if line else None

    def close(self) -> None:
        """Write the history; where that does not work, the log says so."""
        if self._readline is None:
            return
        try:
            self._readline.set_history_length(KEPT)
            self._readline.write_history_file(str(_history_file()))
            _history_file().chmod(0o600)
        except OSError as error:
            logger.warning("the history of the chat cannot be written: %s", error)

    def _keep_history(self) -> None:
        """Write the newest line, so that a terminal that is closed does not take the history with it."""
        if self._readline is not None:
            with suppress(OSError):  # `close` tells
                _history_file().touch(mode=0o600)
                self._readline.append_history_file(1, str(_history_file()))

    def _prepared(self) -> Any:
        try:
            import readline
        except ImportError:  # Windows: lines are read as they are
            return None
        readline.parse_and_bind("set enable-bracketed-paste on")
        try:
            _history_file().parent.mkdir(parents=True, exist_ok=True)
            readline.read_history_file(str(_history_file()))
        except OSError as error:
            logger.debug("no history of earlier chats: %s", error)
        return readline


def _history_file() -> Path:
    return user_cache("history") / "chat"
