"""Writes what `hybrids.py` found into `docs/reference.md`, the table of `families.py` into `docs/benchmarks.md`, and
that of `quantized_files.py` into `docs/getting-started.md`.

usage: family_table.py     changes nothing if both are up to date already
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from own_table import NONE, PROCESSORS, RESULTS, ROOT, markdown, number, origin, several, within

DOCS = ROOT / "docs"
PAGES = {
    "hybrids": DOCS / "reference.md",
    "families": DOCS / "benchmarks.md",
    "quantized_files": DOCS / "getting-started.md",
}
"""Result files, whose names are also the marks, and the pages that hold them."""

QUANTIZED = {"quantized_files": "SmolLM2-135M", "quantized_files_qwen05": "Qwen2.5-Coder-0.5B"}
"""Result files of quantised checkpoints -> the model."""

KINDS = ("float32", "bfloat16", "int8", "Q8_0", "int4", "Q4_0")
PASSES = ("step", "chain of 4", "chain of 16")
PROMPTS = ("step", "prompt of 4", "prompt of 16")
HEADS = (
    "",
    "weights",
    "1 row / chain of 4 / of 16, ms",
    "llama.cpp: 1 row / prompt of 4 / of 16, ms",
    "tree of 16 / settling, ms",
    "a tree pays from",
    "prompt of 512, tokens/s: ours / llama.cpp",
    "states",
)
PRECISIONS = ("bf16", "int8", "int4")
FILE_PARTS = ("speed", "logits", "memory")
ERRORS = ("default", "two_bytes", "control")
FILE_HEADS = (
    "",
    "file",
    "tokens/s, plain: the file / our int4 or int8 of the floats",
    "logits, median error: 1 / 2 bytes of activations / scales times 1.1",
    "the same, root mean square",
    "another token, %: 1 / 2 bytes",
    "memory over that of our own form: first start / next",
)


def first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def hybrids(result: Mapping[str, Any]) -> str:
    """A table for each processor, of shapes and kinds of weights."""
    tables = []
    for processor in PROCESSORS:
        shapes = {part.split(", ")[1]: found for part, found in result.items() if part.startswith(f"{processor}, ")}
        if shapes:
            rows = [row for name, found in shapes.items() for row in _kinds(name, found)]
            steps = ", ".join(f"{number(found['transformers'])} ({name})" for name, found in shapes.items())
            made = result["parts"][f"{processor}, {next(reversed(shapes))}"]
            last = f"{first_upper(processor)}: {origin(made)}. A step of transformers, bfloat16, ms: {steps}."
            tables.append(f"{markdown(HEADS, rows)}\n\n{last}{_lacking(shapes)}")
    return "\n\n".join(tables)


def _kinds(name: str, found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    kinds = [kind for kind in KINDS if kind in found]
    for kind in kinds:
        one = found[kind]
        peer = one["llama.cpp"] if isinstance(one.get("llama.cpp"), dict) else {}
        yield (
            name if kind == kinds[0] else "",
            kind,
            several(one, PASSES),
            several(peer, PROMPTS) if peer else NONE,
            several(one, ("tree of 16", "commit")),
            f"{one['pays']:.1f}",
            f"{number(one['prompt'])} / {number(peer.get('prompt'))}",
            f"{number(one['state'], 1e-6)} MB" if kind == kinds[0] else "",
        )


def _lacking(models: Mapping[str, Any]) -> str:
    """Which models llama.cpp does not read, in its own words."""
    said = {name: one["llama.cpp"] for name, found in models.items() for one in found.values()
            if isinstance(one, dict) and isinstance(one.get("llama.cpp"), str)}  # fmt: skip
    return "".join(f" llama.cpp does not read {name}: `{shorten(why, 120)}`." for name, why in said.items())


def families(result: Mapping[str, Any]) -> str:
    """A table for each processor: every family's tokens per second in each precision."""
    heads = ("tokens/s, ours / llama.cpp's (ratio)", *PRECISIONS)
    tables = []
    for processor, found in (("all instructions", result), ("AVX2 alone", result.get("AVX2 alone", {}))):
        if cells := found.get("families"):
            rows = [(name, *(_duel(one.get(precision)) for precision in PRECISIONS)) for name, one in cells.items()]
            runs = _runs(result["parts"], "" if found is result else "AVX2 alone, ", cells)
            last = f"{_span(cells)}{runs}{_lacking(cells)}"
            tables.append("\n\n".join((f"{first_upper(processor)}:", markdown(heads, rows), last)))
    return "\n\n".join(tables)


def _duel(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return NONE
    rates, over = one["tokens_per_second"], one.get("over_llama.cpp")
    beside = f" / {number(rates['llama.cpp'])} ({over['median']:.2f})" if over else f" / {NONE}"
    return f"{number(rates['paceline'])}{beside}"


def _span(cells: Mapping[str, Any]) -> str:
    """The smallest and the largest ratio."""
    ratios = [one["over_llama.cpp"]["median"] for some in cells.values() for one in some.values()
              if "over_llama.cpp" in one]  # fmt: skip
    return f"Ratios from {min(ratios):.2f} to {max(ratios):.2f}. " if ratios else ""


def _runs(parts: Mapping[str, Any], before: str, cells: Mapping[str, Any]) -> str:
    """Which run made which rows, beside which llama.cpp."""
    made: dict[str, list[str]] = {}
    for name, one in cells.items():
        peers = [cell["llama.cpp"]["version"] for cell in one.values() if isinstance(cell["llama.cpp"], dict)]
        beside = f", beside {peers[0]}" if peers else ""
        made.setdefault(f"{origin(parts[f'{before}{name}'])}{beside}", []).append(name)
    return " ".join(f"{', '.join(some)}: {run}." for run, some in made.items())


def quantized(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of quantised files, of each model.

    Args:
        results: what `quantized_files.py` wrote, by model.
    """
    results = {model: found for model, found in results.items() if any(part in found for part in FILE_PARTS)}
    rows = [row for model, found in results.items() for row in _files(model, found)]
    runs: dict[str, None] = {}
    for model, found in results.items():
        runs |= {f"{model}: {origin(made)}.": None for made in found["parts"].values()}
    return f"{markdown(FILE_HEADS, rows)}\n\n{' '.join(runs)}"


def _files(model: str, found: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A row for each form; what was not measured yet is left out."""
    forms = dict.fromkeys(form for part in FILE_PARTS for form in found.get(part, {}))
    for count, form in enumerate(forms):
        rates, errors, memory = (found.get(part, {}).get(form, {}) for part in FILE_PARTS)
        own = next((value for key, value in rates.items() if key not in ("file", "ratio")), None)
        other = [f"{100 * errors[key]['other_token']:.1f}" for key in ERRORS[:2] if key in errors]
        yield (
            "" if count else model,
            form,
            f"{number(rates['file'])} / {number(own)} ({rates['ratio']['median']:.2f})" if rates else NONE,
            _errors(errors, "error_median"),
            _errors(errors, "error"),
            " / ".join(other) or NONE,
            f"{memory['over_own_first']:.2f} / {memory['over_own_next']:.2f}" if memory else NONE,
        )


def _errors(found: Mapping[str, Mapping[str, float]], name: str) -> str:
    values = [found.get(key, {}).get(name) for key in ERRORS]
    return " / ".join(NONE if value is None else f"{value:.3f}" for value in values) if any(values) else NONE


def texts(folder: Path = RESULTS) -> dict[str, str]:
    """Of each mark what the result file says."""
    results = {name: json.loads((folder / f"{name}.json").read_text()) for name in PAGES}
    files = {model: folder / f"{name}.json" for name, model in QUANTIZED.items()}
    return {
        "hybrids": hybrids(results["hybrids"]),
        "families": families(results["families"]),
        "quantized_files": quantized(
            {model: json.loads(path.read_text()) for model, path in files.items() if path.exists()}
        ),
    }


def main() -> None:
    for name, text in texts().items():
        page = PAGES[name]
        page.write_text(within(name, page.read_text(encoding="utf-8"), text), encoding="utf-8")


if __name__ == "__main__":
    main()
