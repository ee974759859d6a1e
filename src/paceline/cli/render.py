"""How decoded text looks on a terminal: guesses that stood are coloured by drafter.

In: stream chunks, metrics. Out: text on standard output, remarks on standard error. Not here: decoding.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from paceline.engine.metrics import RequestMetrics

COLOURS = {"green": 32, "cyan": 36, "magenta": 35, "yellow": 33, "blue": 34, "red": 31}
"""Colours of drafters in order, with their codes: rich would expand tabs, without knowing the column."""

HARMLESS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421, 0x9B: 0x241B}
"""Control characters that a model could send to a terminal -> the signs that stand for them."""


class StreamPrinter:
    """Prints chunks as they come; the bare text when standard output is not a terminal."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.colours: dict[str, str] = {}
        self._shown = 0
        self._at_start = True

    def show(self, segments: Iterable[tuple[str, str | None]]) -> None:
        """Print pieces of text, each with the drafter that guessed it, or None."""
        for text, source in segments:
            if not text:
                continue
            self._shown, self._at_start = self._shown + len(text), text.endswith("\n")
            sys.stdout.write(self._painted(text.translate(HARMLESS), source) if self.console.is_terminal else text)
        sys.stdout.flush()

    def rest(self, text: str) -> None:
        """Print what of the whole text was held back so far."""
        self.show([(text[self._shown :], None)])

    def end(self) -> None:
        """End the last line; on a terminal only if it is not ended already."""
        if not (self.console.is_terminal and self._at_start):
            sys.stdout.write("\n")
        sys.stdout.flush()

    def _painted(self, text: str, source: str | None) -> str:
        if source is None or self.console.no_color or self.console.color_system in (None, "windows"):
            return text
        colour = self.colours.setdefault(source, list(COLOURS)[len(self.colours) % len(COLOURS)])
        return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"

    def legend(self, metrics: RequestMetrics) -> None:
        """On a terminal: figures of the request, and what the colours mean."""
        if not self.console.is_terminal:
            return
        plural = "s" if metrics.num_generation_tokens != 1 else ""
        line = Text(
            f"{metrics.num_generation_tokens} token{plural}, {metrics.tokens_per_second:.0f} tokens/s, "
            f"mean acceptance length {metrics.mean_acceptance_length:.2f}",
            style="dim",
        )
        if metrics.drafters:
            line.append("\nguessed by")
            for name, counts in metrics.drafters.items():
                line.append(" ")
                line.append(f"■ {name}", style=self.colours.get(name, "dim"))
                line.append(f" {counts.num_accepted_tokens} of {counts.num_draft_tokens} kept,")
            line.append(" the rest by the model")
        remark(line)


def remark(text: str | Text) -> None:
    """A line on standard error."""
    Console(stderr=True, highlight=False).print(text)
