"""`paceline analyze`, and `acceptance`: each rule of verification against the most that could be accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import analyze_channels, analyze_scaling, outputs
from paceline.cli.options import open_llm, with_flags
from paceline.cli.prompts import read_prompt
from paceline.cli.terminal import console, wrapped
from paceline.errors import ConfigError
from paceline.utils import integer, number

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.bench.acceptance import Analysis

app = typer.Typer(name="analyze", help="Analyses: acceptance, channels, scaling.", add_completion=False)

MOST_DRAFTS, MOST_NODES = 32, 1024
POSITIONS = 32
REAL = "biuf"
"""Kinds of NumPy's types that are real numbers."""

NOTE = """An optimum bounds the exact rules that decide position by position, for drafts drawn in that way. Greedy
drafts and points are chosen in other ways, block verification judges a chain as a whole, and the approximate rule has
no bound. Tokens per pass take positions to be alike and independent, and look at complete trees of one width alone,
chains included; a tree of another shape may do better."""


Probabilities = Annotated[
    Path | None,
    typer.Option(
        "--p",
        metavar="FILE",
        help="The target's probabilities, a row per position (.npy or .json), instead of models.",
    ),
]
DraftProbabilities = Annotated[
    Path | None, typer.Option("--q", metavar="FILE", help="The drafter's probabilities, likewise.")
]
DraftModel = Annotated[
    str | None,
    typer.Option("--draft-model", metavar="MODEL", help="Folder or hub id; default: that of the bundled model."),
]
Positions = Annotated[int, typer.Option("--positions", help="Number of positions analysed, the last of the text.")]
Drafts = Annotated[str, typer.Option("--drafts", metavar="LIST", help="Numbers of drafts at one position.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots of both tables.")]


@app.callback()
def group() -> None:
    """Theory put to use, and what models and trainings show."""


app.command("channels")(analyze_channels.command)
app.command("scaling")(analyze_scaling.command)


@app.command("acceptance")
@with_flags(sampling=False)
def acceptance(
    *,
    text: Annotated[str | None, typer.Argument(help="Text for both models; - or nothing reads standard input.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the text from this file.")
    ] = None,
    p: Probabilities = None,
    q: DraftProbabilities = None,
    draft_model: DraftModel = None,
    temperature: Annotated[float, typer.Option("--temperature", help="Temperature of both models, above 0.")] = 1.0,
    positions: Positions = POSITIONS,
    drafts: Drafts = "1,2,3,4",
    budgets: Annotated[str, typer.Option("--budgets", metavar="LIST", help="Numbers of tree nodes.")] = "2,4,8,16",
    html: Html = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE even if it is not such a page.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
    flag_values: dict[str, Any],
) -> None:
    """Compare how often each rule of verification accepts a draft with the most that any exact rule could accept."""
    counts, nodes = numbers("--drafts", drafts, MOST_DRAFTS), numbers("--budgets", budgets, MOST_NODES)
    number("--temperature", temperature, 0.0, 100.0, "be above 0 and at most 100", open_low=True)
    integer("--positions", positions, 1)
    if html is not None:
        _check_page(html, force)
    if p is None and q is None:
        rows = _scored(read_prompt(text, file), flag_values, draft_model, temperature, positions)
    elif text is not None or file is not None:
        raise ConfigError("give either --p and --q or a text, not both")
    else:
        model_flags = (
            ("draft-model", draft_model, None),
            ("temperature", temperature, 1.0),
            ("positions", positions, POSITIONS),
        )
        rows = _read_both(p, q, [*flag_values, *(name for name, typed, usual in model_flags if typed != usual)])
    from paceline.bench.acceptance import analyze_acceptance

    analysis = analyze_acceptance(*rows, counts, nodes)
    if html is not None:
        _write_page(html, analysis)
    print(json.dumps(analysis.to_dict()) if as_json else words(analysis))


def _check_page(path: Path, force: bool) -> None:
    from paceline.bench import pyplot
    from paceline.bench.acceptance import ACCEPTANCE_MARK

    pyplot()
    outputs.must_be_page("--html", path, mark=ACCEPTANCE_MARK, command="analyze", force=force)


def _write_page(path: Path, analysis: Analysis) -> None:
    from paceline.bench.acceptance import acceptance_html

    with outputs.writing("--html", path):
        path.write_text(acceptance_html(analysis, NOTE), encoding="utf-8")


def _read_both(p: Path | None, q: Path | None, models: list[str]) -> tuple[Any, Any]:
    """Rows of both files; rejects one without the other, and flags that say something about models."""
    if p is None or q is None:
        raise ConfigError("--p and --q belong together; give both files, or a text for two models")
    if models:
        flags = ", ".join("--" + name.replace("_", "-") for name in models)
        raise ConfigError(f"--p and --q are analyzed as they are, without models; leave out {flags}")
    return read_rows(p), read_rows(q)


def numbers(name: str, text: str, most: int) -> list[int]:
    """Different numbers in rising order, from a list with commas.

    Raises:
        ConfigError: something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 8 and 1 <= int(part) <= most for part in parts):
        raise ConfigError(f"{name} must be integers in 1..{most}, separated by commas, got {text[:80]!r}")
    return sorted({int(part) for part in parts})


def read_rows(path: Path) -> Any:
    """What a file of probabilities holds; `paceline.bench.acceptance` checks the values.

    Raises:
        ConfigError: a file that cannot be read, or holds no numbers.
    """
    from zipfile import BadZipFile

    import numpy as np

    try:
        values = (
            np.load(path, allow_pickle=False) if path.suffix == ".npy" else json.loads(path.read_text(encoding="utf-8"))
        )
        rows = np.asarray(values)
        if rows.dtype.kind not in REAL:
            raise TypeError("it holds values that are not real numbers, or integers that are too large")
        return rows.astype(np.float64)
    except (OSError, ValueError, TypeError, RecursionError, OverflowError, EOFError, BadZipFile) as error:
        why = getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]
        why = "its rows differ in length" if "inhomogeneous" in why else why
        raise ConfigError(
            f"cannot read {str(path)!r} ({why}); give one row of probabilities or several, as .npy or .json"
        ) from None


def _scored(
    text: str, flag_values: dict[str, Any], draft: str | None, temperature: float, positions: int
) -> tuple[Any, Any]:
    """Rows of the target and of the draft model on a text."""
    if flag_values.pop("speculative_config", None) is not None:
        raise ConfigError(
            "analyze compares rules itself; leave --speculative-config out and name the draft model with --draft-model"
        )
    from paceline.bench.acceptance import rows_of
    from paceline.cli.tune import default_drafts

    draft = draft or next(iter(default_drafts(flag_values)), None)
    if draft is None:
        raise ConfigError("a draft model is needed beside --model; name it with --draft-model")
    llm = open_llm(flag_values | {"speculative_config": "null"})
    tokens, size = llm.tokenizer.encode(text), llm.runner.info.vocab_size
    other = llm.models.open(draft)
    most = min(llm.runner.info.max_context, other.info.max_context)
    if len(tokens) > most:
        raise ConfigError(f"the text must have at most {most} tokens for these models, got {len(tokens)}; shorten it")
    p, q = (rows_of(runner, tokens, positions, temperature, size) for runner in (llm.runner, other))
    return p, q


def tables(analysis: Analysis) -> list[Table]:
    """Acceptance by drafts, tokens per pass by nodes."""
    from rich import box
    from rich.table import Table

    rich_tables = []
    parts = (
        (
            f"acceptance by number of drafts, mean of {analysis.positions} positions",
            analysis.drafts,
            analysis.acceptance,
            ".4f",
        ),
        ("tokens per pass by nodes of the tree", analysis.budgets, analysis.tokens, ".3f"),
    )
    for title, columns, rows, form in parts:
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("rule", overflow="fold")
        for column in columns:
            table.add_column(str(column), justify="right")
        for name, values in rows.items():
            table.add_row(
                name, *(format(value, form) for value in values), style="bold" if name.startswith("optimum") else None
            )
        rich_tables.append(table)
    return rich_tables


def words(analysis: Analysis) -> str:
    """Write both tables as text."""
    screen = console()
    with screen.capture() as capture:
        for table in tables(analysis):
            screen.print(table)
    return capture.get() + "\n".join(wrapped([NOTE.replace("\n", " ")]))
