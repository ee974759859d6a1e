"""From raw runs to the figures of the document.

A speed is given only where the outputs stay within the claimed exactness class (`paceline.verify`); otherwise
every speed and every time of the cell that invites comparison is null, `comparable` is false and `reason` names
the first difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.bench.run.measures import histogram, quantiles
from paceline.bench.run.records import BenchPrompt, MeasuredCell, TimedRun, seed_of
from paceline.models import Runner
from paceline.utils import stats
from paceline.verify import Pair, baseline_pairs, compare_pairs

Matrices = tuple[stats.FloatArray, stats.FloatArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Holds what figures need besides the runs.

    Attributes:
        runner: for near ties. seed: of the run.
        bandwidth: bytes per second, or None.
        energy: {"source", "reason"} of the meter.
        rss_scope: see `machine.MemoryMeter`.
    """

    runner: Runner
    seed: int
    bandwidth: float | None
    energy: dict[str, Any]
    rss_scope: str


def cells(measured: Sequence[MeasuredCell], around: Surroundings) -> list[dict[str, Any]]:
    """The document's cells, each compared with the baseline of its workload, temperature and batch size."""
    records = []
    for cell in measured:
        base = next(b for b in measured if b.setting.config is None and _place(b) == _place(cell))
        records.append(_cell(cell, base, around))
    return records


def _place(cell: MeasuredCell) -> tuple[str, float, int]:
    return cell.workload, cell.temperature, cell.batch


def _cell(cell: MeasuredCell, base: MeasuredCell, around: Surroundings) -> dict[str, Any]:
    is_baseline = cell is base
    rows = [row for run in cell.runs for row in run.rows] + [_failure(piece) for piece in cell.failed]
    outputs = sum(output is not None for run in cell.runs for output in run.outputs)
    same = (
        None
        if is_baseline
        else compare_pairs(around.runner, output_pairs(base, cell, around.seed), cell.claimed, cell.temperature)
    )
    reason = why_withheld(None if same is None else same.reason, rows)
    record: dict[str, Any] = {
        "setting": cell.setting.name,
        "workload": cell.workload,
        "temperature": cell.temperature,
        "batch": cell.batch,
        "prompts": sum(map(len, cell.groups)) + len(cell.failed),
        "failed": len({(row["prompt"], row["turn"]) for row in rows if row["error"]}),
        "repeats": _repeats(cell),
        "equality": baseline_pairs(outputs) if same is None else same.to_dict(),
        "comparable": reason is None,
        "reason": reason,
    }
    return (
        record
        | cell_speeds(base, cell, withheld=reason is not None)
        | _times(cell, rows, reason is None)
        | _work(cell, around)
        | figures_by_task(base, cell, reason)
        | {
            "rows": rows,
            "notes": sorted(cell.notes),
        }
    )


def why_withheld(different: str | None, rows: Sequence[dict[str, Any]]) -> str | None:
    """Why no speed is given: outputs differ, or nothing was decoded; None where one is."""
    if different is None and rows and not any(row["tokens"] for row in rows):
        return f"no prompt was decoded: {rows[0]['error']}"
    return different


def _failure(piece: BenchPrompt) -> dict[str, Any]:
    """The row of a prompt that nobody could decode."""
    counts = dict.fromkeys(("repeat", "group", "tokens", "steps", "drafts", "draft_tokens", "accepted_tokens"), 0)
    nothing = dict.fromkeys(("latency", "time_to_first_token", "finish_reason"))
    who = {"prompt": piece.prompt, "turn": piece.turn, "prompt_tokens": len(piece.token_ids), "error": piece.error}
    return {**who, "seconds": 0.0, **counts, **nothing}


def _repeats(cell: MeasuredCell) -> int:
    """Repeats that every group has."""
    counts = [sum(run.group == group for run in cell.runs) for group in range(len(cell.groups))]
    return min(counts, default=0)


def output_pairs(base: MeasuredCell, cell: MeasuredCell, seed: int) -> Iterator[Pair]:
    """Outputs of the baseline and of a setting for the same prompt in the same repeat; failures have none."""
    known = {(run.group, run.repeat): run for run in base.runs}
    for run in cell.runs:
        other = known.get((run.group, run.repeat))
        for index, piece in enumerate(cell.groups[run.group] if other is not None else ()):
            a, b = other.outputs[index] if other is not None else None, run.outputs[index]
            if a is not None and b is not None:
                yield Pair(piece.prompt, piece.turn, run.repeat, piece.token_ids, a, b, seed_of(piece, seed))


def matrices(
    base: MeasuredCell, cell: MeasuredCell, keep: Callable[[BenchPrompt], bool] = lambda piece: True
) -> tuple[Matrices, Matrices]:
    """((tokens, seconds) of the baseline, of the setting), each (groups, repeats), of measurements that both have.

    Only groups count whose pieces are all to be kept: the pieces of a batch share its seconds.
    After an interruption, groups without a whole first repeat are left out, and repeats that some group lacks.
    """
    groups = [i for i, group in enumerate(cell.groups) if all(keep(piece) for piece in group)]
    runs = [{(run.group, run.repeat): run for run in each.runs} for each in (base, cell)]
    both = set(runs[0]) & set(runs[1])
    groups = [group for group in groups if (group, 0) in both]
    repeats = min((sum((group, repeat) in both for repeat in range(_most(cell))) for group in groups), default=0)

    def table(which: dict[tuple[int, int], TimedRun]) -> Matrices:
        tokens = [[which[g, r].tokens for r in range(repeats)] for g in groups]
        seconds = [[which[g, r].seconds for r in range(repeats)] for g in groups]
        return np.array(tokens, float).reshape(len(groups), repeats), np.array(seconds, float).reshape(
            len(groups), repeats
        )

    return table(runs[0]), table(runs[1])


def _most(cell: MeasuredCell) -> int:
    return 1 + max((run.repeat for run in cell.runs), default=-1)


def cell_speeds(
    base: MeasuredCell,
    cell: MeasuredCell,
    keep: Callable[[BenchPrompt], bool] = lambda piece: True,
    *,
    withheld: bool = False,
) -> dict[str, Any]:
    """The three speeds of a cell; None where they are withheld, or nothing was measured."""
    slow, fast = matrices(base, cell, keep)
    empty = withheld or not fast[0].size
    estimates = {
        "tokens_per_second": None if empty else stats.tokens_per_second(*fast),
        "speedup": None if empty else stats.speedup(*slow, *fast),
        "speedup_total": None if empty else stats.speedup_total(*slow, *fast),
    }
    return {name: None if estimate is None else estimate.to_dict() for name, estimate in estimates.items()}


def _times(cell: MeasuredCell, rows: Sequence[dict[str, Any]], comparable: bool) -> dict[str, Any]:
    """Latencies; withheld like every speed where outputs differ."""
    good = [row for row in rows if not row["error"]] if comparable else []
    between = cell.totals.latencies if comparable else []
    return {
        "time_to_first_token": quantiles(
            [row["time_to_first_token"] for row in good if row["time_to_first_token"] is not None]
        ),
        "inter_token_latency": quantiles(between),
        "latency": quantiles([row["latency"] for row in good if row["latency"] is not None]),
        "latency_histogram": histogram(between),
    }


def _work(cell: MeasuredCell, around: Surroundings) -> dict[str, Any]:
    totals, tokens = cell.totals, sum(run.tokens for run in cell.runs)
    joules = cell.joules
    return {
        "tokens": tokens,
        "steps": totals.steps,
        "mean_acceptance_length": totals.mean_acceptance_length,
        "acceptance_by_position": totals.by_position(),
        "drafters": totals.by_drafter(),
        "time_split": totals.split(),
        "memory": {"rss_peak_bytes": cell.rss, "rss_scope": around.rss_scope, "cuda_peak_bytes": cell.cuda},
        "energy": {
            **around.energy,
            "joules": joules,
            "joules_per_token": joules / tokens if joules is not None and tokens else None,
        },
        "limit": totals.limit(around.bandwidth),
    }


def figures_by_task(base: MeasuredCell, cell: MeasuredCell, reason: str | None) -> dict[str, Any]:
    """Figures by task; speeds only of batches of one task, since mixed batches tell nothing about any of them."""
    everything = [piece for group in cell.groups for piece in group] + cell.failed
    task_of = {(piece.prompt, piece.turn): piece.task for piece in everything}
    records = []
    for task in sorted(set(task_of.values())):
        mine = [row for run in cell.runs for row in run.rows if task_of[row["prompt"], row["turn"]] == task]
        lost = {(row["prompt"], row["turn"]) for row in mine if row["error"]}
        lost |= {(piece.prompt, piece.turn) for piece in cell.failed if piece.task == task}
        fast = cell_speeds(base, cell, lambda piece, task=task: piece.task == task, withheld=reason is not None)  # type: ignore[misc]
        steps, accepted = sum(row["steps"] for row in mine), sum(row["accepted_tokens"] for row in mine)
        records.append(
            {
                "task": task,
                "prompts": sum(piece.task == task for piece in everything),
                "failed": len(lost),
                "tokens_per_second": fast["tokens_per_second"],
                "speedup": fast["speedup"],
                "mean_acceptance_length": 1.0 + accepted / steps if steps else 1.0,
            }
        )
    return {"tasks": records}
