"""How decoded text looks on a terminal: guesses that stood are coloured by drafter, a canvas fills in place.

In: stream chunks, metrics. Out: text on standard output, remarks on standard error. Not here: decoding.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from paceline.diffusion import DiffusionMetrics, Pieces
    from paceline.engine import RequestMetrics

COLOURS = {"green": 32, "cyan": 36, "magenta": 35, "yellow": 33, "blue": 34, "red": 31}
"""Colours of drafters in order, with their codes: rich would expand tabs, without knowing the column."""

CANVAS = {"masked": "dim", "written": "", "new": "green"}
"""Styles of a canvas' slots by state."""

HARMLESS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421, 0x9B: 0x241B}
"""Control characters that a model could send to a terminal -> the signs that stand for them."""


class StreamPrinter:
    """Prints chunks as they come; the bare text when standard output is not a terminal."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.colours: dict[str, str] = {}
        self._shown = 0
        self._at_start = True
        self._live: Live | None = None
        self._held: list[tuple[str, str | None]] = []

    def show(self, segments: Iterable[tuple[str, str | None]], canvas: Pieces = ()) -> None:
        """Print pieces of text, each with the drafter that guessed it, or None.

        Args:
            canvas: of a diffusion language model that still fills: drawn in place on a terminal, text comes when it is
            full.
        """
        self._held += segments
        if canvas and self.console.is_terminal:
            self._draw(canvas)
            return
        self._wipe()
        held, self._held = self._held, []
        for text, source in held:
            if not text:
                continue
            self._shown, self._at_start = self._shown + len(text), text.endswith("\n")
            sys.stdout.write(self._painted(text.translate(HARMLESS), source) if self.console.is_terminal else text)
        sys.stdout.flush()

    def rest(self, text: str) -> None:
        """Print what of the whole text was held back so far."""
        self._held = []
        self.show([(text[self._shown :], None)])

    def end(self) -> None:
        """End the last line; on a terminal only if it is not ended already."""
        self.show([])
        if not (self.console.is_terminal and self._at_start):
            sys.stdout.write("\n")
        sys.stdout.flush()

    def _draw(self, canvas: Pieces) -> None:
        if self.console.is_dumb_terminal:
            return
        text = Text()
        for piece, state in canvas:
            text.append(piece.translate(HARMLESS), style=CANVAS[state])
        if self._live is None:
            self._live = Live(console=self.console, transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(text, refresh=True)

    def _wipe(self) -> None:
        """Take the canvas away, in whose place the text is printed."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _painted(self, text: str, source: str | None) -> str:
        if source is None or self.console.no_color or self.console.color_system in (None, "windows"):
            return text
        colour = self.colours.setdefault(source, list(COLOURS)[len(self.colours) % len(COLOURS)])
        return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"

    def legend(self, metrics: RequestMetrics) -> None:
        """On a terminal: figures of the request, and what the colours mean."""
        if not self.console.is_terminal:
            return
        from paceline.diffusion import DiffusionMetrics

        if isinstance(metrics, DiffusionMetrics):
            remark(_of_diffusion(metrics))
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


def _of_diffusion(metrics: DiffusionMetrics) -> Text:
    tokens, calls = metrics.num_generation_tokens, metrics.num_calls
    numbers = f"{tokens} token{'s' if tokens != 1 else ''}, {metrics.tokens_per_second:.0f} tokens/s"
    passes = f"{calls} call{'s' if calls != 1 else ''} of the model, {metrics.tokens_per_call:.2f} tokens a call"
    return Text(f"{numbers}, {passes} ({metrics.method})", style="dim")


def remark(text: str | Text) -> None:
    """A line on standard error."""
    Console(stderr=True, highlight=False).print(text)
