"""Other engines in the same benchmark: the same token ids, precision, threads and lengths, greedily, in turn with our
settings.

A peer that takes one prompt at a time decodes a batch one by one; its seconds are the sum.

Every peer and method is a process of its own that stays open for the whole run; the harness gives it turns like a
setting of ours. Seconds are taken inside that process, so that the way there costs a peer nothing. What cannot run is
left out with the reason.

A peer rounds in other places at every layer, so its greedy text may part from ours where two tokens are nearly tied.
Its outputs are compared with plain decoding's as those of our settings are, but a near tie may be `UNITS` wide; where
one differs beyond that, the peer decodes something else, and it gets no speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lab.peers.peer import PeerRun, agreement_with
from lab.peers.wanted import Lane, WantedPeer, lanes_of
from paceline.bench.run import (
    BenchPrompt,
    BenchSetting,
    MeasuredCell,
    TimedRun,
    cell_speeds,
    output_pairs,
    quantiles,
    waking,
    why_withheld,
)
from paceline.config import GREEDY_EPSILON
from paceline.llm import LLM
from paceline.utils import timed
from paceline.verify import UP_TO_NEAR_TIES, Pair, compare_pairs

UNITS = 4.0
"""Units in the last place of the best logit within which two tokens count as tied for a peer."""

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Played:
    """What one peer did at one workload and batch size; `base` is plain decoding's cell there."""

    lane: Lane
    cell: MeasuredCell
    base: MeasuredCell


class PeersInTurn:
    """The peers of one run, a context manager that ends their processes.

    Args:
        llm: the loaded model, whose checkpoint, precision and threads they take.
        wanted: as from `parse_peers`.
        draft: folder of the draft model, for methods that take one.
        progress: called with a stage, what is done of it, and its whole.
    Attributes:
        skipped: {"name", "why"} of what cannot run here.
    """

    def __init__(
        self, llm: LLM, wanted: Sequence[WantedPeer], *, draft: str | None = None, progress: Progress = lambda *_: None
    ) -> None:
        self.llm, self.played = llm, list[Played]()
        self.skipped: list[dict[str, str]] = []
        self._lanes: list[Lane] = []
        found = lanes_of(llm, wanted, draft or llm.default_draft, self._skip)
        try:
            for done, lane in enumerate(found):
                progress(f"opening {lane.wanted.title}", done, len(found))
                self._open(lane)
            if found:
                progress("opening peers", len(found), len(found))
        except BaseException:
            self.close()
            raise

    def _open(self, lane: Lane) -> None:
        try:
            lane.open()
        except Exception as error:  # a peer's failure is its own; the run goes on without it
            lane.close()
            self._skip(lane.wanted.title, str(error))
        else:
            self._lanes.append(lane)

    def _skip(self, name: str, why: str) -> None:
        if (entry := {"name": name, "why": why}) not in self.skipped:
            self.skipped.append(entry)

    def turns(self, base: MeasuredCell) -> list[Callable[[int, int], None]]:
        """Warmed-up peers for plain decoding's cell.

        Each call decodes one group in one repeat and keeps what came of it.
        """
        found: list[Callable[[int, int], None]] = []
        for lane in self._lanes:
            reason = self._refusal(lane, base)
            if reason is None:
                setting = BenchSetting(lane.wanted.setting, {**lane.wanted.options})
                cell = MeasuredCell(
                    setting,
                    base.workload,
                    base.temperature,
                    base.batch,
                    UP_TO_NEAR_TIES,
                    base.groups,
                    base.failed,
                )
                self.played.append(Played(lane, cell, base))
                found.append(partial(self._timed, cell, lane))
            else:
                self._skip(lane.wanted.title, reason)
        return found

    def _refusal(self, lane: Lane, base: MeasuredCell) -> str | None:
        """Why a peer cannot take part here; tried on the first group, which warms it up."""
        if base.temperature >= GREEDY_EPSILON:
            return f"temperature {base.temperature:g}: peers are compared greedily only"
        try:
            if base.groups:
                lane.decode(base.groups[0])
        except Exception as error:  # as above
            return f"batch {base.batch}: {error}"
        return None

    def _timed(self, cell: MeasuredCell, lane: Lane, group: int, repeat: int) -> None:
        """One timed run of one group."""
        pieces = cell.groups[group]

        def decode() -> tuple[list[PeerRun], str | None]:
            try:
                lane.decode([waking(pieces[0])], counts=False)
                return lane.decode(pieces), None
            except Exception as problem:  # the row says what it was
                return [], str(problem)

        (runs, error), seconds = timed(decode)
        seconds = runs[0].seconds if runs else seconds
        shared = {"group": group, "repeat": repeat, "seconds": seconds, "error": error}
        given = [None] * len(pieces) if error is not None else runs
        ends = self.llm.defaults.eos_ids
        rows = [_row(piece, run, ends) | shared for piece, run in zip(pieces, given, strict=True)]
        outputs = [None if run is None else list(run.token_ids) for run in given]
        cell.runs.append(TimedRun(group, repeat, seconds, rows, outputs))

    def entries(self, seed: int) -> list[dict[str, Any]]:
        """The document's `peers`; `seed` is the run's."""
        return [_entry(self.llm, one, seed) for one in self.played]

    def close(self) -> None:
        """End all processes; may be called again."""
        for lane in self._lanes:
            lane.close()

    def __enter__(self) -> PeersInTurn:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def without_end(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The tokens up to a final end token: some engines hand it out, others do not."""
    kept = list(tokens)
    while kept and kept[-1] in ends:
        kept.pop()
    return kept


def with_one_end(pair: Pair, ends: Sequence[int], most: int) -> Pair:
    """Both outputs with one end token, the same, if they ended before `most` tokens.

    Where only one does, its chance can be looked up like any token's.
    """
    said = next((row[-1] for row in (pair.base, pair.other) if row and row[-1] in ends), ends[0] if ends else None)

    def closed(tokens: Sequence[int]) -> list[int]:
        kept = without_end(tokens, ends)
        return kept if said is None or len(kept) >= most else [*kept, said]

    return replace(pair, base=closed(pair.base), other=closed(pair.other))


def _row(piece: BenchPrompt, run: PeerRun | None, ends: Sequence[int]) -> dict[str, Any]:
    tokens = 0
    if run is not None:  # an end token counts, whether the peer hands it out or not
        tokens = (
            len(run.token_ids) if piece.ignore_eos else min(len(without_end(run.token_ids, ends)) + 1, piece.max_tokens)
        )
    first = None if run is None else run.ttft
    passes = None if run is None else run.passes
    return {
        "prompt": piece.prompt,
        "turn": piece.turn,
        "tokens": tokens,
        "passes": passes,
        "time_to_first_token": first,
    }


def _pairs(one: Played, ends: Sequence[int], seed: int) -> list[Pair]:
    most = {
        (piece.prompt, piece.turn): piece.max_tokens
        for group in one.cell.groups
        for piece in group
        if not piece.ignore_eos
    }
    found = [(pair, most.get((pair.prompt, pair.turn))) for pair in output_pairs(one.base, one.cell, seed)]
    return [pair if limit is None else with_one_end(pair, ends, limit) for pair, limit in found]


def _entry(llm: LLM, one: Played, seed: int) -> dict[str, Any]:
    lane, cell = one.lane, one.cell
    pairs = _pairs(one, llm.defaults.eos_ids, seed)
    same = compare_pairs(llm.runner, pairs, UP_TO_NEAR_TIES, 0.0, UNITS)
    rows: list[dict[str, Any]] = [row for run in cell.runs for row in run.rows]
    lost = {(row["prompt"], row["turn"]) for row in rows if row["error"]} | {(p.prompt, p.turn) for p in cell.failed}
    reason = why_withheld(same.reason, rows)
    speeds = cell_speeds(one.base, cell, withheld=reason is not None)
    first = [row["time_to_first_token"] for row in rows if reason is None and row["time_to_first_token"] is not None]
    counted = [row for row in rows if row.get("passes")]
    passes = sum(row["passes"] for row in counted)
    return {
        "name": lane.wanted.name,
        "setting": lane.wanted.setting + ("" if cell.batch == 1 or lane.at_once else ", one by one"),
        "version": lane.version,
        "precision": lane.dtype,
        "threads": lane.threads,
        "options": lane.settings,
        "workload": cell.workload,
        "batch": cell.batch,
        "temperature": cell.temperature,
        "prompts": sum(map(len, cell.groups)) + len(cell.failed),
        "failed": len(lost),
        "equality": same.to_dict() | {"label": f"tokens compared, ties within {UNITS:g} units of rounding allowed"},
        **_agreement(pairs),
        "comparable": reason is None,
        "reason": reason,
        "tokens_per_second": speeds["tokens_per_second"],
        "speedup": speeds["speedup"],
        "mean_acceptance_length": sum(row["tokens"] for row in counted) / passes if passes else None,
        "time_to_first_token": quantiles(first),
        "rows": rows,
    }


def _agreement(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Of all tokens: the share that is equal, and the first place of a difference."""
    found = [agreement_with(pair.base, pair.other) for pair in pairs]
    length = sum(one.length for one in found)
    return {
        "equal_share": sum(one.equal_share * one.length for one in found) / length if length else None,
        "first_difference": min(
            (one.first_difference for one in found if one.first_difference is not None), default=None
        ),
    }
