"""`paceline analyze scaling`: what more data and larger drafters bring, by the reports of trainings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import outputs
from paceline.cli.options import with_log_level
from paceline.cli.terminal import wrapped
from paceline.errors import ConfigError
from paceline.utils import integer, number

if TYPE_CHECKING:
    from paceline.bench import ScalingAnalysis

BATCHES = "1,2,4,8,16,32"


@with_log_level
def command(
    reports: Annotated[
        list[Path], typer.Argument(metavar="TRAINING...", help="Folders that `paceline train` wrote, or report.json.")
    ],
    *,
    least_gain: Annotated[
        float, typer.Option("--least-gain", help="Percent more tokens per pass by which doubled data is worth it.")
    ] = 1.0,
    passes: Annotated[
        Path | None,
        typer.Option("--passes", metavar="FILE", help="Output of `paceline doctor --json`: drafts by batch size."),
    ] = None,
    batches: Annotated[str, typer.Option("--batches", metavar="LIST", help="With --passes: batch sizes.")] = BATCHES,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the law (.png or .svg).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
) -> None:
    """Fit the scaling law of drafters to trainings, predict the next one, and say when more data stops paying."""
    number("--least-gain", least_gain, 0.0, 100.0, "be above 0 and at most 100", open_low=True)
    if plot is not None:
        from paceline.bench import pyplot

        pyplot()
        outputs.must_be_writable("--plot", plot)
    sizes = _sizes(batches)
    from paceline.bench import analyze_scaling, best_drafts, draw_scaling, read_training

    seconds = None if passes is None else _seconds(passes)
    found = analyze_scaling([read_training(path) for path in reports], least_gain / 100)
    best = None
    if seconds is not None:
        chance = 1 - 1 / found.held_out.tokens_per_pass  # of endless chains with equal chances
        best = best_drafts(seconds, chance, sizes)
    if plot is not None:
        with outputs.writing("--plot", plot):
            draw_scaling(found, plot)
    print(json.dumps(found.to_dict() | {"best_drafts": best}) if as_json else words(found, best))


def _sizes(text: str) -> list[int]:
    """Batch sizes from a list with commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 6 for part in parts):
        raise ConfigError(f"--batches must be integers, separated by commas, got {text[:80]!r}")
    for part in parts:
        integer("--batches", int(part), 1, 1024)
    return sorted({int(part) for part in parts})


def _seconds(path: Path) -> dict[int, float]:
    """Seconds of a pass by its rows, of the doctor's object.

    Raises:
        ConfigError: something else.
    """
    try:
        read: Any = json.loads(path.read_text(encoding="utf-8"))["passes"]["seconds"]
        found = {int(rows): float(seconds) for rows, seconds in read.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--passes {str(path)!r} is no output of `paceline doctor --json` ({error})") from None
    if len(found) < 2:
        raise ConfigError(f"--passes {str(path)!r} holds passes of one number of rows; two are needed")
    return found


def words(found: ScalingAnalysis, best: dict[int, int] | None) -> str:
    """The law, how far it holds, and what follows from it."""
    law, last = found.law, found.held_out
    terms = "".join(
        f" {'+' if value >= 0 else '-'} {abs(value):.3g} log10({name})"
        for name, value in (("tokens", law.data), ("parameters", law.size))
        if value
    )
    lines = [f"{'training':<24} {'tokens':>12} {'parameters':>12} {'a pass':>7} {'law':>7} {'speed':>6}"]
    for point in found.points:
        speed = "-" if point.speed is None else f"{point.speed:.2f}"
        fitted = law.predict(point.tokens, point.parameters)
        lines.append(
            f"{point.name[:24]:<24} {point.tokens:>12,.0f} {point.parameters:>12,.0f} {point.tokens_per_pass:>7.3f} "
            f"{fitted:>7.3f} {speed:>6}"
        )
    told = [
        f"tokens per pass = {law.start:.3g}{terms}; R^2 {law.r_squared:.3f}, scatter {law.scatter:.3f}.",
        f"Held out, {last.name} has {last.tokens_per_pass:.3f}, by the others it should have {found.predicted:.3f}.",
    ]
    if found.ended:
        told.append("That is less than half of what the last step in data should bring: more of it has stopped paying.")
    told.append(
        f"With {found.next_tokens:,.0f} tokens the law says {found.next_length:.3f}, give or take {found.error:.3f}."
    )
    told.append(_worth(found))
    if best is not None:
        told.append("Drafts by batch size: " + ", ".join(f"{size}: {drafts}" for size, drafts in best.items()) + ".")
    return "\n".join([*lines, "", *wrapped(told)])


def _worth(found: ScalingAnalysis) -> str:
    """From where on a doubling is hardly worth it."""
    share, until = f"{100 * found.least_gain:g} %", found.worth_until
    if until is None:
        return "More data has made nothing better."
    if until <= found.held_out.tokens:
        return f"Doubling the data from here on gives less than {share} more tokens per pass."
    far = "; that is far beyond what was trained, and no more than a guess" if until > 4 * found.next_tokens else ""
    amount = f"{until:,.0f}" if until < 1e15 else f"{until:.1e}"
    return f"Doubling the data gives {share} more tokens per pass up to {amount} tokens, then less{far}."
