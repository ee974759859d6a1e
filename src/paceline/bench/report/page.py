"""A benchmark document as one HTML page that needs nothing else: headline, figures, warnings, how it was measured."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.bench.report import figures
from paceline.bench.report.peers import fastest_setting, peer_ratio
from paceline.bench.report.table import NOTHING, grouped, interval, length, milliseconds, percent, place_name, same
from paceline.bench.run.document import write_whole
from paceline.explain import rendered
from paceline.utils import ENOUGH, rates_differ, stats

Record = Mapping[str, Any]
MOST_ROWS = 40
"""Entries of a list that are shown; the rest is in the document."""

DEFINITIONS = (
    (
        "tokens/s",
        "Delivered tokens over all seconds of a repeat, prompt processing included; the median of the repeats.",
    ),
    (
        "speed-up",
        "Every prompt is decoded by every setting and plainly, one right after the other in an order drawn anew. The "
        "ratio of tokens per second is taken within each such round; given is the median over prompts, with the 95 % "
        "interval of a bootstrap over prompts and repeats. Nothing is dropped: a prompt that failed counts as speed 0.",
    ),
    (
        "accepted length",
        "Mean tokens that one pass of the target yields: 1 + accepted tokens / steps, by the target's own counts. "
        "Plain decoding has 1.",
    ),
    (
        "outputs",
        "Token ids compared with plain decoding's. A near tie is a first difference where both tokens lie within "
        "rounding of the best score. Where outputs differ beyond the claimed class, all speeds of the setting are "
        "withheld.",
    ),
    ("TTFT", "Time to first token: from the arrival of the request to the end of the step that gave its first token."),
    ("ITL", "Inter-token latency: tokens that one step yields share the time since the step before."),
    (
        "share of the limit",
        "Time that reading the weights and the cache once takes at the measured bandwidth, over the time that a step "
        "took.",
    ),
    (
        "acceptance by position",
        "Drafted tokens at a depth that ended up in the text, over all that were proposed there; a tree proposes "
        "several.",
    ),
    (
        "time split",
        "The engine's own clock; 'outside' is the rest of the wall time: the caller's loop and the text made of the "
        "tokens.",
    ),
    (
        "others",
        "Other engines ran in processes of their own on the same weights, token ids, threads and lengths, greedily, "
        "in turn with our settings. Their seconds were taken inside their processes. Their rounding differs, so near "
        "ties are taken wider.",
    ),
)

COLUMNS = (
    "setting",
    "tokens/s [95 %]",
    "speed-up [95 %]",
    "accepted length",
    "claimed",
    "outputs equal",
    "TTFT ms",
    "ITL ms p50 / p99",
    "limit",
    "peak memory",
    "failed",
)


def headline(document: Record, cells: Sequence[Record]) -> list[dict[str, Any]]:
    """Rows of the headline table at one place."""
    claimed = {setting["name"]: setting["claimed"] for setting in document["settings"]}
    return [_row(cell, claimed.get(cell["setting"])) for cell in cells]


def _row(cell: Record, claimed: Record | None) -> dict[str, Any]:
    gain, between, memory = cell["speedup"], cell["inter_token_latency"], cell["memory"]
    peak = memory["cuda_peak_bytes"] or memory["rss_peak_bytes"]
    rate = None if claimed is None else claimed["greedy" if cell["temperature"] == 0 else "sampled"]
    is_baseline = cell["equality"]["mode"] == "baseline"
    words = [
        interval(cell["tokens_per_second"], 0),
        NOTHING if is_baseline else interval(gain) if cell["comparable"] else "withheld",
        f"{cell['mean_acceptance_length']:.2f}",
        NOTHING if is_baseline else rate or NOTHING,
        same(cell["equality"]),
        milliseconds(cell["time_to_first_token"]["p50"]),
        f"{milliseconds(between['p50'])} / {milliseconds(between['p99'])}",
        percent(cell["limit"]["share_of_step"]),
        NOTHING if peak is None else size(peak),
        f"{cell['failed']} of {cell['prompts']}" if cell["failed"] else "0",
    ]
    verdict = (
        "" if is_baseline or gain is None or not rates_differ(**gain) else "faster" if gain["low"] > 1 else "slower"
    )
    bad = not cell["comparable"]
    return {"name": cell["setting"], "words": words, "verdict": verdict, "bad": bad, "failed": bool(cell["failed"])}


def size(count: float) -> str:
    """Write a number of bytes in words."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def peers_table(peers: Sequence[Record]) -> list[list[str]]:
    """A line a peer, see `PEER_COLUMNS`."""
    return [
        [
            f"{peer['name']} {peer['setting']}",
            interval(peer["tokens_per_second"], 0) if peer["comparable"] else "withheld",
            interval(peer["speedup"]) if peer["comparable"] else "withheld",
            length(peer["mean_acceptance_length"]),
            NOTHING if peer["equality"] is None else same(peer["equality"]),
            percent(peer["equal_share"]),
            NOTHING if peer["first_difference"] is None else str(peer["first_difference"]),
            peer["precision"] or NOTHING,
            NOTHING if peer["threads"] is None else str(peer["threads"]),
            peer["version"] or NOTHING,
            ", ".join(f"{key} {value}" for key, value in sorted(peer["options"].items())) or NOTHING,
            f"{peer['failed']} of {peer['prompts']}" if peer["failed"] else "0",
        ]
        for peer in peers
    ]


PEER_COLUMNS = (
    "engine, method",
    "tokens/s [95 %]",
    "over our plain [95 %]",
    "our fastest over it [95 %]",
    "mean length",
    "outputs equal",
    "equal tokens",
    "first difference at token",
    "precision",
    "threads",
    "version",
    "ran with",
    "failed",
)


def warnings(document: Record) -> list[str]:
    """List what the reader must know first: interruptions, failures, differences."""
    lines = []
    if document["interrupted"]:
        lines.append("This run was interrupted: the figures are of what was done until then.")
    if not document["cells"] and not document["load"]:
        lines.append("Nothing was measured.")
    if document["model"]["random"]:
        lines.append("The weights are random: speeds mean something, texts and acceptance do not.")
    for record in (*document["cells"], *document["peers"]):
        if record["reason"] is not None:
            lines.append(f"No speed for {_who(record)} on {place_name(record)}: {record['reason']}")
    return lines


def _who(record: Record) -> str:
    """A setting of ours, or a peer with its own."""
    return f"{record['name']} {record['setting']}" if "name" in record else str(record["setting"])


def failures(document: Record) -> list[list[str]]:
    """Distinct failures: who, where, prompt, error and how often."""
    counts = Counter[tuple[str, ...]]()
    for record in (*document["cells"], *document["peers"]):
        prompts = ((f"{row['prompt']}, turn {row['turn'] + 1}", row["error"]) for row in record["rows"])
        counts.update((_who(record), place_name(record), *prompt) for prompt in prompts if prompt[-1])
    for run in document["load"]:
        requests = ((f"request {number}", row["error"]) for number, row in enumerate(run["rows"], 1))
        place = f"{run['workload']}, rate {run['rate']:g}"
        counts.update((run["setting"], place, *request) for request in requests if request[-1])
    return [[*key, str(count)] for key, count in counts.items()]


def differences(document: Record) -> list[list[str]]:
    """First differences of outputs from plain decoding's, each once however many repeats show it."""
    counts = Counter[tuple[str, ...]]()
    for record in (*document["cells"], *document["peers"]):
        for d in record["equality"]["differences"] if record["equality"] is not None else ():
            tokens = f"{_token(d['baseline_token'])} / {_token(d['token'])}"
            gap = f"{d['gap']:.3g} / {d['epsilon']:.3g}"
            where = (
                f"{d['prompt']}, turn {d['turn'] + 1}",
                str(d["position"]),
                tokens,
                gap,
                "yes" if d["near_tie"] else "no",
            )
            counts[(_who(record), place_name(record), *where)] += 1
    return [[*key, str(count)] for key, count in sorted(counts.items(), key=lambda item: item[0][6])]


def _token(token: int | None) -> str:
    return "end" if token is None else str(token)


def facts(document: Record) -> list[tuple[str, str]]:
    """Provenance: (what, value)."""
    provenance, model, options = document["provenance"], document["model"], document["options"]
    machine = provenance["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in provenance["packages"].items())
    works = "; ".join(
        f"{w['name']} ({w['format']}, {w['source']}): {w['conversations']} conversations" for w in document["workloads"]
    )
    sampling = (
        f"seed {provenance['seed']}, at most {options['max_tokens']} "
        f"tokens{', end tokens ignored' if options['ignore_eos'] else ''}"
    )
    return [
        ("command", provenance["command"]),
        ("date", provenance["date"]),
        (
            "processor",
            f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, {machine['capability']}",
        ),
        ("GPU", machine["gpu"] or "none"),
        ("memory", size(machine["memory_bytes"])),
        ("bandwidth", _bandwidth(document["bandwidth"])),
        ("system", machine["system"]),
        ("versions", f"paceline {provenance['paceline']}, Python {provenance['python']}, {packages}"),
        (
            "model",
            f"{model['name']}: {model['family']}, {model['num_layers']} layers, {model['vocab_size']} tokens",
        ),
        ("read in a step", f"{size(model['weight_bytes'])} of weights, {_cache(model)} of cache per token"),
        ("fingerprint", model["fingerprint"]),
        ("workloads", works or "none"),
        ("sampling", sampling),
        ("repeats", str(options["repeats"])),
        *_energy(document),
    ]


def _bandwidth(bandwidth: Record | None) -> str:
    return NOTHING if bandwidth is None else f"{bandwidth['bytes_per_second'] / 1e9:.1f} GB/s ({bandwidth['method']})"


def _cache(model: Record) -> str:
    count = model["cache_bytes_per_token"]
    return NOTHING if count is None else f"{count:,} bytes"


def _energy(document: Record) -> list[tuple[str, str]]:
    """What a token took with every setting, at its first workload and batch size, or why that is not known; nothing
    where no cell was measured."""
    by_setting: dict[str, Record] = {}
    for cell in document["cells"]:
        if cell["energy"]["joules_per_token"] is not None:
            by_setting.setdefault(cell["setting"], cell["energy"])
    if by_setting:
        each = ", ".join(f"{name} {energy['joules_per_token']:.3g}" for name, energy in by_setting.items())
        return [("energy", f"joules a token ({next(iter(by_setting.values()))['source']}): {each}")]
    reasons = [cell["energy"]["reason"] for cell in document["cells"]]
    return [("energy", f"not measured: {reasons[0] or 'no meter'}")] if reasons else []


NAME = 40
"""Characters of a setting's name among the key figures."""
REPORT_MARK = '<meta name="generator" content="paceline bench report">'


def write_report(document: Record, path: Path) -> None:
    """Write the report in one piece: a reader sees the old file or the new one.

    Args:
        document: checked, as from `load_document`.
    Raises:
        OSError: the file cannot be written.
    """
    write_whole(path, report_html(document))


def report_html(document: Record) -> str:
    """The page. It takes a theme from its address (`?theme=dark`, `?theme=light`), else from the system."""
    page = rendered(Path(__file__).with_name("report.html"), REPORT_MARK, **view(document))
    return re.sub(r"[\ud800-\udfff]", "\ufffd", page)  # half a surrogate pair cannot be written as UTF-8


def view(document: Record) -> dict[str, Any]:
    """Collect what the template of the page shows."""
    palette = figures.Palette(document["baseline"], [setting["name"] for setting in document["settings"]])
    places = list(_places(document, palette))
    traces = list(dict.fromkeys(run["workload"] for run in document["load"]))
    return {
        "title": f"Benchmark of {document['model']['name']}",
        "setup": _setup(document),
        "figures": _key_figures(document),
        "warnings": warnings(document),
        "columns": COLUMNS,
        "places": places,
        "sweeps": list(_sweeps(document, palette)),
        "loads": [
            (trace, figures.load([r for r in document["load"] if r["workload"] == trace], palette)) for trace in traces
        ],
        "peers": list(_peers(document, palette)),
        "peer_columns": PEER_COLUMNS,
        "failures": failures(document),
        "differences": differences(document),
        "most": MOST_ROWS,
        "enough": ENOUGH,
        "skipped": [
            (skipped["name"], skipped["why"]) for skipped in (*document["skipped"], *document["peers_skipped"])
        ],
        "facts": facts(document),
        "definitions": DEFINITIONS,
        "parts": figures.PARTS,
    }


def _setup(document: Record) -> str:
    model, machine = document["model"], document["provenance"]["machine"]
    device = machine["gpu"] if model["device"].startswith("cuda") and machine["gpu"] else machine["cpu"]
    return (
        f"{model['family']}, {size(model['weight_bytes'])}, {model['dtype']} on {device}, {machine['threads']} "
        f"threads; {document['provenance']['date'][:10]}"
    )


def _key_figures(document: Record) -> list[tuple[str, str, str]]:
    """(what, value, small print): the best setting of the first place, and how sure everything is."""
    key_figures: list[tuple[str, str, str]] = []
    cells = document["cells"]
    first = [cell for cell in cells if place_name(cell) == place_name(cells[0])] if cells else []
    plain = next((cell for cell in first if cell["setting"] == document["baseline"]), None)
    others = [
        cell
        for cell in first
        if cell is not plain and cell["speedup"] is not None and cell["setting"] not in _dials(document)
    ]
    if others:
        key_figures += _best(others)
    if plain is not None and plain["tokens_per_second"] is not None:
        key_figures.append(("Plain tokens/s", f"{plain['tokens_per_second']['value']:.0f}", f"batch {plain['batch']}"))
    compared = [cell["equality"] for cell in cells if cell["equality"]["mode"] == "tokens"]
    if compared:
        equal, ties = sum(e["identical"] for e in compared), sum(e["near_ties"] for e in compared)
        total = sum(e["compared"] for e in compared)
        key_figures.append(("Outputs equal", f"{equal} of {total}", f"{ties} near ties" if ties else ""))
    if cells:
        prompts, failed = sum(cell["prompts"] for cell in cells), sum(cell["failed"] for cell in cells)
        key_figures.append(("Failed", f"{failed} of {prompts}", ""))
    return key_figures


def _best(others: Sequence[Record]) -> list[tuple[str, str, str]]:
    """The best of the settings that are shown to be faster than plain decoding; chance is not called the best."""
    shown = [cell for cell in others if stats.shown_faster(cell["speedup"])]
    if not shown:
        return [("No setting shown faster than plain", "-", f"of {len(others)}")]
    best = max(shown, key=lambda cell: float(cell["speedup"]["value"]))
    gain = best["speedup"]
    name = best["setting"] if len(best["setting"]) <= NAME else best["setting"][: NAME - 3] + "..."
    return [
        (f"Best: {name}", f"{gain['value']:.2f}x", f"{gain['low']:.2f} to {gain['high']:.2f}"),
        ("Its tokens/s", interval(best["tokens_per_second"], 0).split(" ")[0], f"batch {best['batch']}"),
    ]


def _dials(document: Record) -> set[str]:
    """Settings that measure and could not be used."""
    return {setting["name"] for setting in document["settings"] if setting["acceptance"] is not None}


def _usable(document: Record, cell: Record) -> bool:
    """Whether a setting could be used, and is shown to be faster than plain decoding."""
    return cell["setting"] not in _dials(document) and stats.shown_faster(cell["speedup"])


def _places(document: Record, palette: figures.Palette) -> Iterator[dict[str, Any]]:
    """One entry per workload, temperature and batch size."""
    for name, cells in grouped(document["cells"], place_name).items():
        yield {
            "name": name,
            "rows": [row | {"colour": palette.colour(row["name"])} for row in headline(document, cells)],
            "bars": [bars for bars in (figures.by_task(cells, palette), figures.limits(cells, palette)) if bars],
            "plots": _present(
                figures.acceptance(cells, palette),
                figures.inter_token(cells, palette),
                figures.first_token(cells, palette),
            ),
            "split": figures.time_split(cells, palette),
            "notes": [f"{cell['setting']}: {note}" for cell in cells for note in cell["notes"]],
        }


def _present(*figures_or_none: figures.Figure | None) -> Sequence[figures.Figure]:
    return [figure for figure in figures_or_none if figure is not None]


def _sweeps(document: Record, palette: figures.Palette) -> Iterator[tuple[str, figures.Figure]]:
    """Throughput by batch size, for every workload and temperature with several."""
    groups = grouped(document["cells"], lambda cell: f"{cell['workload']}, temperature {cell['temperature']:g}")
    for name, cells in groups.items():
        if (figure := figures.batches(cells, palette)) is not None:
            yield name, figure


def _peers(document: Record, palette: figures.Palette) -> Iterator[dict[str, Any]]:
    for name, peers in grouped(document["peers"], place_name).items():
        ours = [cell for cell in document["cells"] if place_name(cell) == name]
        best = fastest_setting(
            [cell for cell in ours if cell["setting"] == document["baseline"] or _usable(document, cell)]
        )
        gains = [None if best is None else peer_ratio(best, peer) for peer in peers]
        table = [
            [*row[:3], NOTHING if g is None else interval(g.to_dict()), *row[3:]]
            for row, g in zip(peers_table(peers), gains, strict=True)
        ]
        yield {
            "name": name,
            "bars": figures.against(ours, peers, palette),
            "rows": table,
            "best": best and best["setting"],
        }
