"""`paceline bench compare` and `paceline bench report`: what is done with the documents of benchmarks."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import outputs
from paceline.cli.options import with_log_level
from paceline.cli.terminal import console, say
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.bench.report import ComparedLine, Comparison

OUTPUT = "--json (or --output)"
Output = Annotated[
    Path | None, typer.Option("--json", "--output", "-o", metavar="FILE", help="Write the JSON document there.")
]


def must_be_writable(output: Path | None, html: Path | None) -> None:
    """Reject files that cannot be written, or hold something else, before the work is done for them.

    Raises:
        ConfigError: see `outputs.must_be_own`; or both are the same file.
    """
    from paceline.bench.run import DOCUMENT_FORMAT

    if output is not None:
        outputs.must_be_own(OUTPUT, output, mark=f'"{DOCUMENT_FORMAT}"', what="a document of `paceline bench`")
    if html is not None:
        from paceline.bench import pyplot

        pyplot()
        _must_be_report("--html", html)
        if output is not None and output.resolve() == html.resolve():
            raise ConfigError(f"{OUTPUT} and --html must be two files, got {str(output)!r} for both")


def _must_be_report(flag: str, path: Path) -> None:
    from paceline.bench.report import REPORT_MARK

    outputs.must_be_own(flag, path, mark=REPORT_MARK, what="a page of `paceline bench`")


def write(document: dict[str, Any], output: Path | None, html: Path | None) -> None:
    """Write the document, and the report made of it, where they are wanted.

    Raises:
        ConfigError: the system cannot.
    """
    if output is not None:
        from paceline.bench.run import save_document

        with outputs.writing(OUTPUT, output):
            save_document(document, output)
    if html is not None:
        from paceline.bench.report import write_report

        with outputs.writing("--html", html):
            write_report(document, html)


@with_log_level
def compare(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="A document of `paceline bench --json`.")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="Another document.")],
    fail_below: Annotated[
        float | None,
        typer.Option(
            "--fail-below",
            metavar="R",
            min=0.0,
            help="Exit with 1 if the lower 95 % bound of a ratio B / A of tokens/s is below R.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Say which differences of two runs are significant."""
    from paceline.bench.report import compare_documents
    from paceline.bench.run import load_document

    comparison = compare_documents(load_document(a), load_document(b))
    if not comparison.lines:
        raise ConfigError(f"{a.name!r} and {b.name!r} have no setting, workload, temperature and batch size in common")
    if as_json:
        print(json.dumps(comparison.to_dict()))
    else:
        _show_comparison(comparison)
    if fail_below is not None and (below := comparison.below(fail_below)):
        print(f"paceline: {_verdict(below, len(comparison.lines), fail_below)}", file=sys.stderr)
        raise typer.Exit(1)


def _verdict(below: Sequence[ComparedLine], number: int, limit: float) -> str:
    """Why --fail-below fails, with the worst line as the example."""
    worst = min(below, key=lambda line: -math.inf if line.speed is None else line.speed.low)
    bound = f"no figure ({worst.reason})" if worst.speed is None else f"a lower 95 % bound of {worst.speed.low:.3f}"
    name = ", ".join(map(str, worst.key))
    return f"{len(below)} of {number} tokens/s ratios B / A may be under {limit:g} (--fail-below); {name} has {bound}"


def _show_comparison(comparison: Comparison) -> None:
    from paceline.bench.report import comparison_table
    from paceline.utils import ENOUGH

    screen = console()
    for table in comparison_table(comparison, screen.width):
        screen.print(table)
        screen.print()
    lines = [
        f"A star marks a difference that is significant after correction for {comparison.comparisons} comparisons "
        f"(Bonferroni)."
    ]
    few = sum(line.speed is not None and line.speed.n < ENOUGH for line in comparison.lines)
    if few:
        lines.append(
            f"{few} of {len(comparison.lines)} lines rest on fewer than {ENOUGH} prompts or batches, too few for a "
            "star."
        )
    lines += [
        f"no figures for {', '.join(map(str, line.key))}: {line.reason}" for line in comparison.lines if line.reason
    ]
    lines += [f"the runs also differ in {warning}" for warning in comparison.warnings]
    lines += [
        f"only in {name}: {', '.join(map(str, key))}"
        for name, keys in (("A", comparison.only_a), ("B", comparison.only_b))
        for key in keys
    ]
    say(*lines, indent="  ")


@with_log_level
def report(
    document: Annotated[Path, typer.Argument(metavar="RUN.json", help="A document of `paceline bench --json`.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The HTML file; default: the document's name with .html."),
    ] = None,
) -> None:
    """Draw a document as one self-contained HTML page."""
    from paceline.bench.report import write_report
    from paceline.bench.run import load_document

    path = output or document.with_suffix(".html")
    _must_be_report("--output", path)
    content = load_document(document)
    with outputs.writing("--output", path):
        write_report(content, path)
    print(path)
