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

COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")


class StreamPrinter:
    """Prints chunks as they come; plain text when standard output is not a terminal."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.colours: dict[str, str] = {}

    def show(self, segments: Iterable[tuple[str, str | None]]) -> None:
        """Print pieces of text, each with the drafter that guessed it, or None."""
        if not self.console.is_terminal:
            sys.stdout.write("".join(text for text, _ in segments))
            sys.stdout.flush()
            return
        line = Text()
        for text, source in segments:
            line.append(text, style=self._colour(source))
        self.console.print(line, end="")

    def _colour(self, source: str | None) -> str:
        if source is None:
            return ""
        return self.colours.setdefault(source, COLOURS[len(self.colours) % len(COLOURS)])

    def legend(self, metrics: RequestMetrics) -> Text:
        """One line of figures, with the colours' meaning."""
        line = Text(
            f"{metrics.num_generation_tokens} tokens, {metrics.tokens_per_second:.0f} tokens/s, "
            f"{metrics.num_steps} steps, mean acceptance length {metrics.mean_acceptance_length:.2f}",
            style="dim",
        )
        for name, counts in metrics.drafters.items():
            line.append(f"  {name} {counts.num_accepted_tokens}/{counts.num_draft_tokens}", style=self.colours.get(name, "dim"))
        return line


def remark(text: str | Text) -> None:
    """A line on standard error."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text)
