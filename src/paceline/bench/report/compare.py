"""Two benchmark documents side by side: which differences are more than noise.

For every cell (setting, workload, temperature, batch size) of both documents, batches are paired by the names of their
prompts, and the ratio B / A of tokens per second gets a bootstrap interval over batches and repeats. The two runs were
made at different times, so the machine may have changed between them; the ratio of the two *speed-ups*, each over plain
decoding in its own run, is free of that and is given beside it. With m cells, m intervals at 95 % would show about m /
20 differences where there are none: a difference counts as significant only if the interval at level 1 - 0.05 / m
(Bonferroni) excludes 1, and rests on `stats.ENOUGH` batches or more: an interval from fewer is too narrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.errors import ConfigError
from paceline.utils import Estimate, FloatArray, stats

ERROR = 0.05
Key = tuple[str, str, float, int]
Batch = tuple[tuple[str, int], ...]
Tables = dict[Batch, list[float]]


@dataclass(frozen=True, slots=True)
class ComparedLine:
    """Compares one cell that both documents have.

    Attributes:
        prompts: paired ones.
        speed: B / A of tokens per second; None where one of them gives no speed.
        gain: B / A of the speed-ups over plain decoding; None for plain decoding itself.
        speed_significant, gain_significant: after the correction for the number of comparisons.
        reason: why there is no speed.
    """

    key: Key
    prompts: int
    speed: Estimate | None = None
    gain: Estimate | None = None
    speed_significant: bool = False
    gain_significant: bool = False
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        names = ("setting", "workload", "temperature", "batch")
        estimates = {n: None if (e := getattr(self, n)) is None else e.to_dict() for n in ("speed", "gain")}
        rest = {n: getattr(self, n) for n in ("prompts", "speed_significant", "gain_significant", "reason")}
        return dict(zip(names, self.key, strict=True)) | estimates | rest


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compares all cells that both documents have.

    Attributes:
        warnings: what else differs between the runs.
        only_a, only_b: cells that the other document lacks.
        comparisons: number of intervals that were looked at.
    """

    lines: list[ComparedLine]
    warnings: list[str] = field(default_factory=list)
    only_a: list[Key] = field(default_factory=list)
    only_b: list[Key] = field(default_factory=list)
    comparisons: int = 0

    def below(self, ratio: float) -> list[ComparedLine]:
        """Lines whose speed ratio may be under `ratio`: its lower 95 % bound is, or B gives no speed where A does."""
        return [
            line
            for line in self.lines
            if (line.speed is None and line.reason) or (line.speed and line.speed.low < ratio)
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "lines": [line.to_dict() for line in self.lines],
            "warnings": self.warnings,
            "only_a": [list(key) for key in self.only_a],
            "only_b": [list(key) for key in self.only_b],
            "comparisons": self.comparisons,
        }


def compare_documents(a: Mapping[str, Any], b: Mapping[str, Any]) -> Comparison:
    """Compare two checked documents, cell by cell.

    Raises:
        ConfigError: a document has two cells of the same setting, workload, temperature and batch size.
    """
    cells_a, cells_b = _cells(a, "A"), _cells(b, "B")
    shared = [key for key in cells_a if key in cells_b]
    plain_a, plain_b = str(a["baseline"]), str(b["baseline"])
    looked = sum(2 if key[0] not in (plain_a, plain_b) else 1 for key in shared)
    lines = [_line(key, _Sides(cells_a, cells_b, plain_a, plain_b), max(1, looked)) for key in shared]
    only = [[key for key in mine if key not in other] for mine, other in ((cells_a, cells_b), (cells_b, cells_a))]
    return Comparison(lines, _warnings(a, b), only[0], only[1], looked)


@dataclass(frozen=True, slots=True)
class _Sides:
    a: Mapping[Key, Mapping[str, Any]]
    b: Mapping[Key, Mapping[str, Any]]
    plain_a: str
    plain_b: str


def _cells(document: Mapping[str, Any], name: str) -> dict[Key, Mapping[str, Any]]:
    by_key: dict[Key, Mapping[str, Any]] = {}
    for cell in document["cells"]:
        key = (cell["setting"], cell["workload"], float(cell["temperature"]), int(cell["batch"]))
        if key in by_key:
            raise ConfigError(f"document {name} must have each cell once, and {', '.join(map(str, key))} occurs twice")
        by_key[key] = cell
    return by_key


def _line(key: Key, sides: _Sides, comparisons: int) -> ComparedLine:
    cell_a, cell_b = sides.a[key], sides.b[key]
    for name, cell in (("A", cell_a), ("B", cell_b)):
        if not cell["comparable"]:
            return ComparedLine(key, 0, reason=f"{name}: {cell['reason']}")
    base_a, base_b = sides.a.get((sides.plain_a, *key[1:])), sides.b.get((sides.plain_b, *key[1:]))
    tables = [None if cell is None else _rates(cell) for cell in (cell_a, cell_b, base_a, base_b)]
    speed, speed_wide = _ratio(tables[:2], comparisons)
    gain = gain_wide = None
    if key[0] not in (sides.plain_a, sides.plain_b):
        gain, gain_wide = _ratio(tables, comparisons)
    prompts = sum(map(len, set(tables[0] or ()) & set(tables[1] or ())))
    reason = (
        None
        if speed is not None
        else f"no {'prompt' if key[-1] == 1 else 'batch of the same prompts'} was decoded in both"
    )
    return ComparedLine(key, prompts, speed, gain, _differs(speed_wide), _differs(gain_wide), reason)


def _rates(cell: Mapping[str, Any]) -> Tables:
    """Tokens per second by batch (its prompts and turns, by name), a value per repeat; prompts that failed brought
    nothing.

    The prompts of one batch share its seconds, so that they are one measurement, not several.
    """
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in cell["rows"]:
        groups.setdefault((row["group"], row["repeat"]), []).append(row)
    tables: Tables = {}
    for rows in groups.values():
        fine = [row for row in rows if not row["error"] and row["seconds"]]
        names = tuple(sorted((row["prompt"], row["turn"]) for row in rows))
        speed = sum(row["tokens"] for row in fine) / max(row["seconds"] for row in fine) if fine else 0.0
        tables.setdefault(names, []).append(speed)
    return tables


def _ratio(tables: Sequence[Tables | None], comparisons: int) -> tuple[Estimate | None, Estimate | None]:
    """B / A, or (B / plain B) / (A / plain A): at 95 %, and at the level corrected for the number of comparisons."""
    known = [table for table in tables if table is not None]
    if len(known) < len(tables):
        return None, None
    repeats = min(len(values) for table in known for values in table.values()) if all(known) else 0
    names = [
        name
        for name in known[0]
        if all(name in table and all(table[name][:repeats]) for table in known if table is not known[1])
    ]
    names = [name for name in names if name in known[1]]
    if not names or not repeats:
        return None, None
    columns: list[FloatArray] = [np.array([table[name][:repeats] for name in names], float) for table in known]
    ratios = columns[1] / columns[0]
    if len(columns) == 4:
        ratios = ratios * columns[2] / columns[3]
    draws = max(stats.DRAWS, int(100 * comparisons / ERROR))
    wide = stats.bootstrap([ratios], stats.median_ratio, level=1 - ERROR / comparisons, draws=min(draws, 20_000))
    return stats.bootstrap([ratios], stats.median_ratio), wide


def _differs(estimate: Estimate | None) -> bool:
    return estimate is not None and stats.rates_differ(**estimate.to_dict())


def _warnings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What else differs: a comparison across these means little."""
    lines = []
    for name in ("cpu", "cores", "threads", "gpu"):
        value, other_value = a["provenance"]["machine"][name], b["provenance"]["machine"][name]
        if value != other_value:
            lines.append(f"machine {name}: {value} against {other_value}")
    for name in ("fingerprint", "dtype", "device"):
        if a["model"][name] != b["model"][name]:
            lines.append(f"model {name}: {a['model'][name]} against {b['model'][name]}")
    packages = (a["provenance"]["packages"], b["provenance"]["packages"])
    lines += [
        f"{n}: {packages[0][n]} against {packages[1].get(n)}"
        for n in packages[0]
        if packages[0][n] != packages[1].get(n)
    ]
    if a["options"]["max_tokens"] != b["options"]["max_tokens"]:
        lines.append(f"max_tokens: {a['options']['max_tokens']} against {b['options']['max_tokens']}")
    lines += [f"{name} was interrupted" for name, document in (("A", a), ("B", b)) if document["interrupted"]]
    return lines
