"""The benchmark itself: every setting in turn with plain decoding, on the same prompts, in one run.

1. A recording pass decodes every conversation plainly at temperature 0. Its answers become the earlier turns of later
   prompts, for all settings alike, so that every setting decodes the very same token ids; they are also the record of
   the acceptance dial.
2. For every workload, temperature and batch size: each setting warms up on the first group of prompts; then, repeat by
   repeat and group by group, all settings decode the group one after the other, in an order that is drawn anew, since
   whoever came before leaves traces in caches and clocks; peers (other engines) take turns like settings, and then
   every turn begins with a few tokens that do not count.
3. A prompt that fails fails alone: it has a row with the error, zero tokens, and the time that it took.

Ctrl-C ends the run and keeps what was done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from paceline.bench.machine import EnergyMeter, MemoryMeter
from paceline.bench.run.measures import StepLog, Totals
from paceline.bench.run.records import (
    BenchPrompt,
    BenchResults,
    MeasuredCell,
    Options,
    TimedRun,
    params_of,
    prompts_of,
    row_of,
    waking,
)
from paceline.bench.run.settings import BASELINE, BenchSetting, Records
from paceline.config import GREEDY_EPSILON
from paceline.engine import RequestOutput, TimeSplit, watching
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.utils import Conversation, Workload, in_turn, timed

logger = logging.getLogger("paceline.bench")

Progress = Callable[[str, int, int], None]
Turn = Callable[[int, int], None]


class Peers(Protocol):
    """Others that decode the same groups in turn with the settings.

    Attributes:
        skipped: {"name", "why"} of what cannot run here.
    """

    skipped: list[dict[str, str]]

    def turns(self, base: MeasuredCell) -> list[Turn]:
        """Warmed-up calls (group, repeat), which decode a group of plain decoding's cell and keep the result."""

    def entries(self, seed: int) -> list[dict[str, Any]]:
        """The document's `peers`; `seed` is the run's."""


class Harness:
    """Decodes every workload with every setting in turn with plain decoding, and keeps what was measured.

    Args:
        llm: the loaded model, of any setting.
        settings: without the baseline, which is always there.
        progress: called with a stage, what is done of it, and its whole.
        peers: other engines, if any.
    """

    def __init__(
        self,
        llm: LLM,
        settings: Sequence[BenchSetting],
        options: Options,
        progress: Progress = lambda stage, done, total: None,
        peers: Peers | None = None,
    ) -> None:
        self.llm, self.options, self.progress, self.peers = llm, options, progress, peers
        self.settings = [BASELINE, *settings]
        self.results, self.order = BenchResults(), np.random.default_rng(abs(options.seed))
        device = llm.runner.info.device
        self.memory, self.energy = MemoryMeter(device), EnergyMeter(device)
        memory = getattr(llm.runner, "memory", None)
        self.cache_bytes: int | None = None if memory is None else memory.block_bytes // memory.block_size

    def run(self, workloads: Sequence[Workload]) -> BenchResults:
        """Everything but traces; Ctrl-C returns what was done so far, flagged."""
        try:
            for workload in workloads:
                if workload.arrivals is None:
                    pieces = self.record(workload)
                    self.results.pieces += pieces
                    for temperature in self.options.temperatures:
                        for batch in self.options.batches:
                            self._measure(workload.name, pieces, temperature, batch)
        except KeyboardInterrupt:
            self.results.interrupted = True
        return self.results

    def record(self, workload: Workload) -> list[BenchPrompt]:
        """The recording pass: plain decoding at temperature 0, turn by turn."""
        plain, pieces = BASELINE.open(self.llm), []
        for done, conversation in enumerate(workload.conversations):
            self.progress(f"{workload.name}: recording", done, len(workload.conversations))
            pieces += self._record_one(plain, workload.name, conversation)
        self.progress(f"{workload.name}: recording", len(workload.conversations), len(workload.conversations))
        return pieces

    def _record_one(self, plain: LLM, workload: str, conversation: Conversation) -> list[BenchPrompt]:
        messages: list[dict[str, str]] = list(conversation.history)
        limit = conversation.max_tokens or self.options.max_tokens
        ignore = self.options.ignore_eos or conversation.max_tokens is not None
        pieces: list[BenchPrompt] = []
        for turn, text in enumerate(conversation.turns or ("",)):
            piece = BenchPrompt(workload, conversation.id, turn, conversation.task, (), limit, ignore)
            if pieces and pieces[-1].error is not None:
                pieces.append(replace(piece, error="the turn before it failed"))
                continue
            messages.append({"role": "user", "content": text})
            try:
                piece = replace(piece, token_ids=tuple(self._prompt(conversation, messages)))
                (output,) = plain.generate(prompts_of([piece]), params_of([piece], 0.0, None))
                output.raise_for_error()
            except PacelineError as error:
                pieces.append(replace(piece, error=str(error)))
                continue
            pieces.append(replace(piece, reference=tuple(output.outputs[0].token_ids)))
            messages.append({"role": "assistant", "content": output.outputs[0].text})
        return pieces

    def _prompt(self, conversation: Conversation, messages: Sequence[dict[str, str]]) -> Sequence[int]:
        """Token ids of a turn: by the chat template where there is one and the workload is a conversation, else the
        texts.
        """
        if conversation.token_ids is not None:
            return conversation.token_ids
        if conversation.chat and self.options.chat and self.llm.tokenizer.has_chat_template:
            return self.llm.chat_ids(messages)
        return self.llm.tokenizer.encode("\n\n".join(message["content"] for message in messages))

    def _measure(self, workload: str, pieces: Sequence[BenchPrompt], temperature: float, batch: int) -> None:
        """All settings at one temperature and batch size."""
        usable = [piece for piece in pieces if piece.error is None]
        failed = [piece for piece in pieces if piece.error is not None]
        groups = [usable[i : i + batch] for i in range(0, len(usable), batch)]
        engines, cells = [], []
        records = self._records(usable, temperature)
        for setting in self.settings:
            engine = setting.open(self.llm, records if setting.needs_record else None)
            claimed = setting.to_dict(engine)["claimed"]["greedy" if temperature < GREEDY_EPSILON else "sampled"]
            engines.append(engine)
            cells.append(MeasuredCell(setting, workload, temperature, batch, claimed, groups, failed))
        self.results.cells += cells
        stage = f"{workload}: temperature {temperature:g}, batch {batch}"
        total = len(groups) * self.options.repeats
        self.progress(f"{stage}: warm-up", 0, len(cells))
        for done, (cell, engine) in enumerate(zip(cells, engines, strict=True)):
            if groups:
                self._timed(_scratch(cell), engine, 0, 0, turn="warm-up")
            self.progress(f"{stage}: warm-up", done + 1, len(cells))
        others = self.peers.turns(cells[0]) if self.peers is not None else []
        awake = engines[0] if others else None
        ours: list[Turn] = [
            partial(self._turn, cell, engine, awake) for cell, engine in zip(cells, engines, strict=True)
        ]
        runs = {str(number): run for number, run in enumerate([*ours, *others])}
        self.progress(stage, 0, total)
        for done, _ in enumerate(in_turn(runs, range(len(groups)), self.options.repeats, order=self.order)):
            self.progress(stage, done + 1, total)

    def _turn(self, cell: MeasuredCell, engine: LLM, awake: LLM | None, group: int, repeat: int) -> None:
        if awake is not None:
            short = [waking(cell.groups[group][0])]
            awake.generate(prompts_of(short, "waking"), params_of(short, 0.0, None))
        cell.runs.append(self._timed(cell, engine, group, repeat))

    def _records(self, pieces: Sequence[BenchPrompt], temperature: float) -> Records:
        """What plain decoding says to every prompt, for drafters that take it."""
        if temperature < GREEDY_EPSILON or not any(setting.needs_record for setting in self.settings):
            return {piece.token_ids: piece.reference for piece in pieces}
        plain, continuations = BASELINE.open(self.llm), {}
        for piece in pieces:
            (out,) = plain.generate(prompts_of([piece]), params_of([piece], temperature, self.options.seed))
            continuations[piece.token_ids] = tuple(out.outputs[0].token_ids)
        return continuations

    def _timed(self, cell: MeasuredCell, engine: LLM, group: int, repeat: int, *, turn: str | None = None) -> TimedRun:
        """One run of one group, with everything that is measured on the way."""
        pieces = cell.groups[group]
        seed = None if cell.claimed == "equal in distribution" else self.options.seed
        prompts, params = prompts_of(pieces, turn or f"repeat {repeat}"), params_of(pieces, cell.temperature, seed)
        log, before = StepLog(), copy(engine.engine.times)

        def generate() -> tuple[list[RequestOutput], None] | tuple[None, str]:
            try:
                return engine.generate(prompts, params), None
            except Exception as one:  # whatever a method does, the run goes on; the row says what it was
                error = f"{type(one).__name__}: {one}"
                logger.warning("setting %s failed on %s: %s", cell.setting.name, pieces[0].prompt, error)
                return None, error

        self.memory.start()
        self.energy.start()
        with watching(engine.engine, log):
            (outputs, error), seconds = timed(generate)
        joules, (rss, cuda) = self.energy.stop(), self.memory.stop()
        cell.joules = joules if cell.joules is None or joules is None else cell.joules + joules
        cell.rss, cell.cuda = _most(cell.rss, rss), _most(cell.cuda, cuda)
        split = TimeSplit(**{k: v - getattr(before, k) for k, v in engine.engine.times.to_dict().items()})
        info = self.llm.runner.info
        cell.totals.add(
            log, wall=seconds, split=split, weight_bytes=info.weight_bytes, cache_bytes=self.cache_bytes or 0
        )
        answers: Sequence[RequestOutput | None] = [None] * len(pieces) if outputs is None else outputs
        shared: dict[str, Any] = {"group": group, "repeat": repeat, "seconds": seconds, "error": error}
        rows = [row_of(piece, out, **shared) for piece, out in zip(pieces, answers, strict=True)]
        for out in outputs or ():
            cell.notes |= {f"dropped {name}: {why}" for name, why in out.metrics.dropped_drafters.items()}
        tokens = [None if out is None or out.outputs[0].error else out.outputs[0].token_ids for out in answers]
        return TimedRun(group, repeat, seconds, rows, tokens)


def _scratch(cell: MeasuredCell) -> MeasuredCell:
    """A cell of the same kind whose sums are its own, for runs that do not count."""
    return replace(cell, runs=[], totals=Totals(), notes=set())


def _most(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)
