"""The words of a report: the headline table, what went wrong, where the figures come from, how they were measured.

In: a document. Out: rows and sentences. Not here: plots (`bench.report_figures`), the page (`bench.report`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.bench.report.table import NOTHING, interval, length, milliseconds, percent, same
from paceline.bench.stats import rates_differ

Record = Mapping[str, Any]
MOST = 40
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
        "Mean tokens that one pass of the target yields: 1 + accepted guesses / steps, by the target's own counts. "
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
        "Guesses at a depth of the draft that ended up in the text, over all guesses proposed there; a tree proposes "
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


def place_name(cell: Record) -> str:
    """Workload, temperature, batch."""
    return f"{cell['workload']}, temperature {cell['temperature']:g}, batch {cell['batch']}"


def headline(document: Record, cells: Sequence[Record]) -> list[dict[str, Any]]:
    """Rows of the headline table at one place."""
    claimed = {setting["name"]: setting["claimed"] for setting in document["settings"]}
    return [_row(cell, claimed.get(cell["setting"])) for cell in cells]


def _row(cell: Record, claimed: Record | None) -> dict[str, Any]:
    gain, between, memory = cell["speedup"], cell["inter_token_latency"], cell["memory"]
    peak = memory["cuda_peak_bytes"] or memory["rss_peak_bytes"]
    rate = None if claimed is None else claimed["greedy" if cell["temperature"] == 0 else "sampled"]
    own = cell["equality"]["mode"] == "baseline"
    words = [
        interval(cell["tokens_per_second"], 0),
        NOTHING if own else interval(gain) if cell["comparable"] else "withheld",
        f"{cell['mean_acceptance_length']:.2f}",
        NOTHING if own else rate or NOTHING,
        same(cell["equality"]),
        milliseconds(cell["time_to_first_token"]["p50"]),
        f"{milliseconds(between['p50'])} / {milliseconds(between['p99'])}",
        percent(cell["limit"]["share_of_step"]),
        NOTHING if peak is None else size(peak),
        f"{cell['failed']} of {cell['prompts']}" if cell["failed"] else "0",
    ]
    verdict = "" if own or gain is None or not rates_differ(**gain) else "faster" if gain["low"] > 1 else "slower"
    bad = not cell["comparable"]
    return {"name": cell["setting"], "words": words, "verdict": verdict, "bad": bad, "failed": bool(cell["failed"])}


def size(count: float) -> str:
    """Bytes in words."""
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
    """What the reader must know first."""
    found = []
    if document["interrupted"]:
        found.append("This run was interrupted: the figures are of what was done until then.")
    if not document["cells"] and not document["load"]:
        found.append("Nothing was measured.")
    if document["model"]["random"]:
        found.append("The weights are random: speeds mean something, texts and acceptance do not.")
    for one in (*document["cells"], *document["peers"]):
        if one["reason"] is not None:
            name = one["setting"] if "name" not in one else f"{one['name']} {one['setting']}"
            found.append(f"No speed for {name} on {place_name(one)}: {one['reason']}")
    return found


def failures(document: Record) -> list[list[str]]:
    """Distinct failures: who, where, prompt, error and how often."""
    counts: dict[tuple[str, ...], int] = {}
    for one in (*document["cells"], *document["peers"]):
        name = one["setting"] if "name" not in one else f"{one['name']} {one['setting']}"
        for row in one["rows"]:
            if row["error"]:
                key = (name, place_name(one), f"{row['prompt']}, turn {row['turn'] + 1}", row["error"])
                counts[key] = counts.get(key, 0) + 1
    for run in document["load"]:
        for number, row in enumerate(run["rows"]):
            if row["error"]:
                key = (
                    run["setting"],
                    f"{run['workload']}, rate {run['rate']:g}",
                    f"request {number + 1}",
                    row["error"],
                )
                counts[key] = counts.get(key, 0) + 1
    return [[*key, str(count)] for key, count in counts.items()]


def differences(document: Record) -> list[list[str]]:
    """First differences of outputs from plain decoding's, each once however many repeats show it."""
    found: dict[tuple[str, ...], int] = {}
    for one in (*document["cells"], *document["peers"]):
        name = one["setting"] if "name" not in one else f"{one['name']} {one['setting']}"
        for d in one["equality"]["differences"] if one["equality"] is not None else ():
            tokens = f"{_token(d['baseline_token'])} / {_token(d['token'])}"
            gap = f"{d['gap']:.3g} / {d['epsilon']:.3g}"
            where = (
                f"{d['prompt']}, turn {d['turn'] + 1}",
                str(d["position"]),
                tokens,
                gap,
                "yes" if d["near_tie"] else "no",
            )
            found[(name, place_name(one), *where)] = found.get((name, place_name(one), *where), 0) + 1
    return [[*key, str(count)] for key, count in sorted(found.items(), key=lambda item: item[0][6])]


def _token(token: int | None) -> str:
    return "end" if token is None else str(token)


def facts(document: Record) -> list[tuple[str, str]]:
    """Provenance: (what, value)."""
    made, model, options = document["provenance"], document["model"], document["options"]
    machine, bandwidth = made["machine"], document["bandwidth"]
    packages = ", ".join(f"{name} {version}" for name, version in made["packages"].items())
    works = "; ".join(
        f"{w['name']} ({w['format']}, {w['source']}): {w['conversations']} conversations" for w in document["workloads"]
    )
    cache = model["cache_bytes_per_token"]
    sampling = (
        f"seed {made['seed']}, at most {options['max_tokens']} "
        f"tokens{', end tokens ignored' if options['ignore_eos'] else ''}"
    )
    return [
        ("command", made["command"]),
        ("date", made["date"]),
        (
            "processor",
            f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, {machine['capability']}",
        ),
        ("GPU", machine["gpu"] or "none"),
        ("memory", size(machine["memory_bytes"])),
        (
            "bandwidth",
            NOTHING if bandwidth is None else f"{bandwidth['bytes_per_second'] / 1e9:.1f} GB/s ({bandwidth['method']})",
        ),
        ("system", machine["system"]),
        ("versions", f"paceline {made['paceline']}, Python {made['python']}, {packages}"),
        (
            "model",
            f"{model['name']}: {model['family']}, {model['num_layers']} layers, {model['vocab_size']} tokens",
        ),
        (
            "read in a step",
            f"{size(model['weight_bytes'])} of weights, {NOTHING if cache is None else f'{cache:,} bytes'} of cache "
            f"per token",
        ),
        ("fingerprint", model["fingerprint"]),
        ("workloads", works or "none"),
        ("sampling", sampling),
        ("repeats", str(options["repeats"])),
        *_energy(document),
    ]


def _energy(document: Record) -> list[tuple[str, str]]:
    """What a token took with every setting, at its first workload and batch size, or why that is not known; nothing
    where no cell was measured."""
    found: dict[str, Record] = {}
    for cell in document["cells"]:
        if cell["energy"]["joules_per_token"] is not None:
            found.setdefault(cell["setting"], cell["energy"])
    if found:
        each = ", ".join(f"{name} {energy['joules_per_token']:.3g}" for name, energy in found.items())
        return [("energy", f"joules a token ({next(iter(found.values()))['source']}): {each}")]
    reasons = [cell["energy"]["reason"] for cell in document["cells"]]
    return [("energy", f"not measured: {reasons[0] or 'no meter'}")] if reasons else []
