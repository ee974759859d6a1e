"""A benchmark document as one HTML page that needs nothing else.

In: a document. Out: an HTML file. Not here: measuring, what is plotted (`bench.report_figures`, `report_sweeps`), the
words (`report_words`), plots (`report_plots`), the looks (`pages/report.html` and `report.css`, on the variables of
`explain.css`).

Whatever a document lacks is left out. All texts of the document are escaped by the template; a content security policy
keeps the page from loading anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.bench.explain.page import PAGES
from paceline.bench.peers import ratio
from paceline.bench.report import figures, sweeps, words
from paceline.bench.report.table import NOTHING, interval
from paceline.bench.run.document import write_whole
from paceline.bench.stats import ENOUGH

Record = Mapping[str, Any]
NAME = 40
"""Characters of a setting's name among the key figures."""
REPORT_MARK = '<meta name="generator" content="paceline bench report">'


def write_report(document: Record, path: Path) -> None:
    """Write the report in one piece: a reader sees the old file or the new one.

    Args:
        document: checked, as from `document.load`.
    Raises:
        OSError: the file cannot be written.
    """
    write_whole(path, report_html(document))


def report_html(document: Record) -> str:
    """The page. It takes a theme from its address (`?theme=dark`, `?theme=light`), else from the system."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup, escape

    pages = Environment(loader=FileSystemLoader(PAGES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    pages.filters["breakable"] = lambda name: Markup(re.sub("([_+(,=])", r"\1<wbr>", str(escape(name))))
    page = pages.get_template("report.html").render(view(document), mark=Markup(REPORT_MARK))
    return re.sub(r"[\ud800-\udfff]", "\ufffd", page)  # half a surrogate pair cannot be written as UTF-8


def view(document: Record) -> dict[str, Any]:
    """What the template shows."""
    palette = figures.Palette(document["baseline"], [setting["name"] for setting in document["settings"]])
    places = list(_places(document, palette))
    traces = list(dict.fromkeys(run["workload"] for run in document["load"]))
    return {
        "title": f"Benchmark of {document['model']['name']}",
        "setup": _setup(document),
        "figures": _key_figures(document),
        "warnings": words.warnings(document),
        "columns": words.COLUMNS,
        "places": places,
        "sweeps": list(_sweeps(document, palette)),
        "loads": [
            (trace, sweeps.load([r for r in document["load"] if r["workload"] == trace], palette)) for trace in traces
        ],
        "peers": list(_peers(document, palette)),
        "peer_columns": words.PEER_COLUMNS,
        "failures": words.failures(document),
        "differences": words.differences(document),
        "most": words.MOST,
        "enough": ENOUGH,
        "skipped": [(one["name"], one["why"]) for one in (*document["skipped"], *document["peers_skipped"])],
        "facts": words.facts(document),
        "definitions": words.DEFINITIONS,
        "parts": figures.PARTS,
    }


def _setup(document: Record) -> str:
    model, machine = document["model"], document["provenance"]["machine"]
    device = machine["gpu"] if model["device"].startswith("cuda") and machine["gpu"] else machine["cpu"]
    return (
        f"{model['family']}, {words.size(model['weight_bytes'])}, {model['dtype']} on {device}, {machine['threads']} "
        f"threads; {document['provenance']['date'][:10]}"
    )


def _key_figures(document: Record) -> list[tuple[str, str, str]]:
    """(what, value, small print): the best setting of the first place, and how sure everything is."""
    found: list[tuple[str, str, str]] = []
    cells = document["cells"]
    first = [cell for cell in cells if words.place_name(cell) == words.place_name(cells[0])] if cells else []
    plain = next((cell for cell in first if cell["setting"] == document["baseline"]), None)
    others = [
        cell
        for cell in first
        if cell is not plain and cell["speedup"] is not None and cell["setting"] not in _dials(document)
    ]
    if others:
        best = max(others, key=lambda cell: cell["speedup"]["value"])
        gain = best["speedup"]
        name = best["setting"] if len(best["setting"]) <= NAME else best["setting"][: NAME - 3] + "..."
        what = "Best" if gain["value"] >= 1.0 else "Nearest to plain"
        found.append((f"{what}: {name}", f"{gain['value']:.2f}x", f"{gain['low']:.2f} to {gain['high']:.2f}"))
        found.append(("Its tokens/s", interval(best["tokens_per_second"], 0).split(" ")[0], f"batch {best['batch']}"))
    if plain is not None and plain["tokens_per_second"] is not None:
        found.append(("Plain tokens/s", f"{plain['tokens_per_second']['value']:.0f}", f"batch {plain['batch']}"))
    compared = [cell["equality"] for cell in cells if cell["equality"]["mode"] == "tokens"]
    if compared:
        equal, ties = sum(e["identical"] for e in compared), sum(e["near_ties"] for e in compared)
        total = sum(e["compared"] for e in compared)
        found.append(("Outputs equal", f"{equal} of {total}", f"{ties} near ties" if ties else ""))
    if cells:
        prompts, failed = sum(cell["prompts"] for cell in cells), sum(cell["failed"] for cell in cells)
        found.append(("Failed", f"{failed} of {prompts}", ""))
    return found


def _dials(document: Record) -> set[str]:
    """Settings that measure and could not be used."""
    return {setting["name"] for setting in document["settings"] if setting["acceptance"] is not None}


def _places(document: Record, palette: figures.Palette) -> Iterator[dict[str, Any]]:
    """One entry per workload, temperature and batch size."""
    groups: dict[str, list[Record]] = {}
    for cell in document["cells"]:
        groups.setdefault(words.place_name(cell), []).append(cell)
    for name, cells in groups.items():
        yield {
            "name": name,
            "rows": [row | {"colour": palette.colour(row["name"])} for row in words.headline(document, cells)],
            "bars": [one for one in (figures.by_task(cells, palette), figures.limits(cells, palette)) if one],
            "plots": _present(
                figures.acceptance(cells, palette),
                figures.inter_token(cells, palette),
                figures.first_token(cells, palette),
            ),
            "split": figures.time_split(cells, palette),
            "notes": [f"{cell['setting']}: {note}" for cell in cells for note in cell["notes"]],
        }


def _present(*found: figures.Figure | None) -> Sequence[figures.Figure]:
    return [one for one in found if one is not None]


def _sweeps(document: Record, palette: figures.Palette) -> Iterator[tuple[str, figures.Figure]]:
    """Throughput by batch size, for every workload and temperature with several."""
    groups: dict[str, list[Record]] = {}
    for cell in document["cells"]:
        groups.setdefault(f"{cell['workload']}, temperature {cell['temperature']:g}", []).append(cell)
    for name, cells in groups.items():
        if (figure := sweeps.batches(cells, palette)) is not None:
            yield name, figure


def _peers(document: Record, palette: figures.Palette) -> Iterator[dict[str, Any]]:
    groups: dict[str, list[Record]] = {}
    for peer in document["peers"]:
        groups.setdefault(words.place_name(peer), []).append(peer)
    for name, peers in groups.items():
        ours = [cell for cell in document["cells"] if words.place_name(cell) == name]
        best = ratio.fastest_setting([cell for cell in ours if cell["setting"] not in _dials(document)])
        gains = [None if best is None else ratio.peer_ratio(best, peer) for peer in peers]
        table = [
            [*row[:3], NOTHING if g is None else interval(g.to_dict()), *row[3:]]
            for row, g in zip(words.peers_table(peers), gains, strict=True)
        ]
        yield {
            "name": name,
            "bars": sweeps.against(ours, peers, palette),
            "rows": table,
            "best": best and best["setting"],
        }
