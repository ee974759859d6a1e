"""What commands print beside their results: wrapped text, remarks, log records, progress bars and spinners.

Text is wrapped by words at the width of the terminal, which COLUMNS overrides; 80 columns where there is none. Nothing
moves where standard error is no terminal. rich is imported where it is used, so that help is fast.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final

from paceline.cli.interrupts import raise_from_now_on
from paceline.errors import ConfigError
from paceline.utils import user_cache

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

HARMLESS: Final = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0x80, 0xA0), 0x241B),
    0x7F: 0x2421,
}
"""Control characters that a terminal could obey -> the signs that stand for them, for `str.translate`."""

WIDEST = 100
LEVELS = ("debug", "info", "warning", "error")
BUNDLED = str(Path(__file__).parent.parent / "bundled")


def console(**options: Any) -> Console:
    """A console of rich's. Where the variable NO_COLOR is set it writes no styles: nothing dim or bold either.

    Args:
        options: of `rich.console.Console`.
    """
    from rich.console import Console

    if os.environ.get("NO_COLOR"):
        options["color_system"] = None
    return Console(highlight=False, **options)


def width() -> int:
    """Give the columns to use."""
    return min(console().width, WIDEST)


def short(text: str) -> str:
    """The same text with models that ship with the package called bundled/NAME, wherever they are installed."""
    return text.replace(BUNDLED, "bundled")


def wrapped(paragraphs: Iterable[str], indent: str = "") -> list[str]:
    """Lines of at most `width` columns, as far as words go; the first of a paragraph keeps its own indentation.

    Args:
        indent: of a paragraph's further lines, beside that of the first.
    """
    columns, lines = width(), []
    for paragraph in (text.translate(HARMLESS) for text in paragraphs):
        margin = " " * (len(paragraph) - len(paragraph.lstrip()))
        manner: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        lines += wrap(short(paragraph), columns, subsequent_indent=margin + indent, **manner) or [""]
    return lines


def say(*paragraphs: str, indent: str = "") -> None:
    """Print paragraphs on standard output."""
    for line in wrapped(paragraphs, indent):
        print(line, flush=True)  # whoever reads it through a pipe waits for it


def remark(text: str | Text) -> None:
    """Print a line on standard error; a terminal obeys nothing that is in a text."""
    shown = short(text).translate(HARMLESS) if isinstance(text, str) else text
    console(stderr=True, markup=False).print(shown)


def tell_once(name: str, text: str) -> None:
    """A hint on standard error, where that is a terminal, that this user has not been given before.

    Args:
        name: of the hint; a file of that name in the cache folder says that it was given.
    """
    if not sys.stderr.isatty():
        return
    given = user_cache("hints") / name
    if given.exists():
        return
    remark(text)
    with suppress(OSError):  # a folder that cannot be written: the hint comes again
        given.parent.mkdir(parents=True, exist_ok=True)
        given.touch()


def report(line: str) -> None:
    """An error on standard error: one line, wrapped by words on a terminal."""
    lines = wrapped([line], "  ") if sys.stderr.isatty() else [short(line).translate(HARMLESS)]
    print("\n".join(lines), file=sys.stderr, flush=True)


def counted(number: int, noun: str) -> str:
    """As in "1 prompt", "2 prompts", "2 batches"."""
    plural = noun if number == 1 else f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {plural}"


def listed(names: Iterable[str]) -> str:
    """Join names, as in "a, b and c"."""
    words = list(names)
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


class StandardError(logging.Handler):
    """Writes to whatever standard error is at the time, each warning once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            if (key := f"{record.name} {record.getMessage()}") in self.seen:
                return
            self.seen.add(key)
        print(short(self.format(record)).translate(HARMLESS), file=sys.stderr)


def start_logging() -> None:
    """Send log records to standard error, warnings and worse to begin with, and Python's warnings among them."""
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, StandardError)]:
        root.removeHandler(old)
    handler = StandardError()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    logging.captureWarnings(True)
    set_log_level("warning")


def log_json() -> None:
    """Write log records as lines of JSON from now on."""
    from paceline.serving import JsonLines

    for handler in logging.getLogger().handlers:
        if isinstance(handler, StandardError):
            handler.setFormatter(JsonLines())


def set_log_level(level: str) -> None:
    """Choose how much is reported; Python's warnings, meant for programmers, are shown from "info" on.

    Raises:
        ConfigError: not a level.
    """
    if level.lower() not in LEVELS:
        raise ConfigError(f"--log-level must be one of {', '.join(LEVELS)}, got {level!r}")
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger("paceline").setLevel(number)
    logging.getLogger("py.warnings").setLevel(logging.ERROR if number >= logging.WARNING else logging.WARNING)


def progress_bar(*columns: Any) -> Any:
    """A transient progress bar on standard error; nothing where that is no terminal.

    From here on Ctrl-C raises KeyboardInterrupt, so that the bar is taken away again.

    Args:
        columns: of rich; by default what is done, a bar, how much of how much, and the time so far.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    raise_from_now_on()
    usual = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    screen = console(stderr=True)
    return Progress(SpinnerColumn(), *columns or usual, console=screen, transient=True, disable=not screen.is_terminal)


def stages(bar: Any) -> Callable[[str, int, int], None]:
    """Shows (stage, done, total) on a progress bar, the last stage only."""
    tasks: dict[str, Any] = {}

    def progress(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            for task in tasks.values():
                bar.update(task, visible=False)
            tasks[stage] = bar.add_task(stage[:60], total=total)
        bar.update(tasks[stage], completed=done, total=total)

    return progress


@contextmanager
def spinner(what: str) -> Iterator[Callable[[float], None] | None]:
    """Show what is waited for, on a terminal that no other display moves on at the time; it leaves no trace.

    Where it shows something, it gives a function that turns it into a bar, of a share that is done.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.file_proxy import FileProxy
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    if isinstance(sys.stderr, FileProxy):  # put there by the display that is on
        yield None
        return
    screen = console(stderr=True)
    waits = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    works = (*waits[:2], BarColumn(), TaskProgressColumn(), waits[2])
    with Progress(*waits, console=screen, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(what, total=None)
        screen.show_cursor()  # an interrupt may end the process from here

        def move(share: float) -> None:
            bar.columns = works
            bar.update(task, total=1.0, completed=share)

        yield move
