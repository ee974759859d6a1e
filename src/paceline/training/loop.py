"""The loop that trains any head: AdamW with warm-up and cosine, judged on held-out texts, safe against a kill.

What a step does depends on its number and the seed alone: the order of rows, the noise. So a run of so many steps that
goes on from its state on disk ends in the weights of one that was never stopped, bit for bit on one machine with as
many threads. In a run of so many minutes the learning rate follows the clock.

The state is on disk before every judgement, every minute, and before Ctrl-C or SIGTERM has its effect. What is judged
follows from the state, so that a judgement that was cut off is made again.

Of several processes (paceline.training.processes) each takes rows of its own in every step and judges a part of the
texts that choose the best state; the first one writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.training.batches import Document, TargetView, packed
from paceline.training.heads import Trainer
from paceline.training.judging import Evaluated, Judged, counted, words
from paceline.training.optimizing import groups, keep, learning_rate, put, set_rate, take_up
from paceline.training.processes import accelerator, agreed
from paceline.training.shown import Shown
from paceline.training.splits import TextSplit
from paceline.training.stopping import Deferred
from paceline.training.train_config import Fitting
from paceline.utils import replacing

BAR: Final = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"

STATE, BEST, CURVE = "state.safetensors", "best.safetensors", "curve.json"

SAVED: Final = 60.0
"""Seconds after which the state is put on the disk, where that takes at most `SAVING` of them."""

SAVING: Final = 0.05
"""Most of the time that goes into that."""

Rows = list[list[Document]]


@dataclass(slots=True)
class LearningCurve:
    """Keeps a run's judgements, seconds so far, and what was found on the texts for testing: before training, and of
    the best state after it.
    """

    judged: list[Judged] = field(default_factory=list)
    seconds: float = 0.0
    tests: list[Evaluated] = field(default_factory=list)

    @property
    def best(self) -> Judged:
        """The last of those with the longest drafts."""
        return max(self.judged, key=lambda judgement: (judgement.length, judgement.step))

    def save(self, path: Path) -> None:
        with replacing(path) as fresh:
            fresh.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> LearningCurve:
        if not path.is_file():
            return cls()
        stored = json.loads(path.read_text())
        judged, tests = [Judged(**row) for row in stored["judged"]], [Evaluated(**row) for row in stored["tests"]]
        return cls(judged, stored["seconds"], tests)


def fit(
    head: Trainer, view: TargetView, texts: TextSplit, how: Fitting, folder: Path, *, phase: str = "training"
) -> LearningCurve:
    """Train a head, or go on where a run that was stopped has left its state in `folder`.

    Args:
        head: ends with the weights that were judged best.
        texts: to learn, to judge by, and to test it on before and after.
        phase: what this is called while it lasts.
    """
    for torn in folder.glob(".tmp*"):  # of a save that was killed
        torn.unlink()
    run = _Run(head, view, texts, how, folder)
    run.go(phase)
    run.processes.wait_for_everyone()
    head.load_state_dict(load_file(folder / BEST), strict=False)
    head.choose(view, texts.validation, how.row_tokens)
    run.curve.tests.append(run.tested())
    return run.curve


class _Run:
    def __init__(self, head: Trainer, view: TargetView, texts: TextSplit, how: Fitting, folder: Path) -> None:
        self.head, self.view, self.how, self.texts = head, view, how, texts
        self.training, self.validation = (packed(part, how.row_tokens) for part in (texts.training, texts.validation))
        self.folder, self.rate = folder, how.learning_rate or head.rate
        self.device, self.processes = head.rows.device, accelerator()
        self.head.to(self.device)
        self.optimizer = torch.optim.AdamW(groups(head, how.weight_decay), lr=self.rate, betas=(0.9, 0.95))
        self.curve = LearningCurve.load(folder / CURVE)
        self.at = take_up(folder / STATE, head, self.optimizer)
        self.curve.judged = [judgement for judgement in self.curve.judged if judgement.step <= self.at.step]
        if self.curve.judged and self.curve.judged[-1].step == self.at.step:
            self.at.losses = []  # they are in that judgement
        self.seconds, self.start = 60 * self.at.minutes, perf_counter()
        self.due = perf_counter() + SAVED
        self.bf16 = bool(agreed(bf16_is_faster(self.device))) if how.bf16 is None else how.bf16
        self.loss = self.processes.prepare_model(head, device_placement=False)
        self.done = self._progress()
        self.signals = Deferred()

    @property
    def spent(self) -> float:
        return self.seconds + perf_counter() - self.start

    def go(self, phase: str) -> None:
        """Train to the end, judging on the way."""
        quiet, done = not self.processes.is_main_process, 100 * min(1.0, self.done)
        with self.signals, Shown(phase, 100, done=done, quiet=quiet, bar_format=BAR) as shown:
            while True:
                if not self.curve.judged or self._to_be_judged():
                    self._judge()
                if self.done >= 1.0 or self._stale():
                    return
                loss = self._step()
                self.done = self._progress()
                self._keep_in_time()
                can = words(self.curve.judged[-1].acceptance, drafts=self.head.drafts)
                shown.update(100 * min(1.0, self.done), f"step {self.at.step}, loss {loss:.3f}, judged {can}")

    def tested(self) -> Evaluated:
        """What the head can do now on the texts for testing, of which every process looks at all."""
        rows = packed(self.texts.test, self.how.row_tokens)
        return Evaluated.of(torch.cat([*self._counts(rows)], -1), self.texts.sizes()["test"].tokens)

    def _progress(self) -> float:
        """How much of the run is done, from 0 on."""
        if not self.head.learns:
            return 1.0
        return self.at.step / self.how.steps if self.how.steps else agreed(self.spent / 60 / self.how.minutes)

    def _to_be_judged(self) -> bool:
        step = self.at.step
        return step > self.curve.judged[-1].step and (step % self.how.eval_steps == 0 or self.done >= 1.0)

    def _stale(self) -> bool:
        lengths = [judgement.length for judgement in self.curve.judged]
        return len(lengths) - 1 - lengths.index(max(lengths)) >= self.how.patience

    def _step(self) -> float:
        """Learn from one batch; returns its loss."""
        head, step = self.head, self.at.step
        rows = [self.training[i] for i in self._picked(step)]
        batch = self.view.batch(rows, self.how.row_tokens).to(self.device)
        set_rate(self.optimizer, learning_rate(self.done, step, self.rate, self.how.warmup_steps))
        head.train()
        head.done = self.done
        with self._precision():
            loss = self.loss(batch, torch.Generator().manual_seed(self.how.seed * 1_000_003 + step))
        self.processes.backward(loss)
        torch.nn.utils.clip_grad_norm_(head.parameters(), self.how.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.at.losses.append(loss.item())
        self.at.step = step + 1
        return self.at.losses[-1]

    def _picked(self, step: int) -> list[int]:
        """Rows of a step, of this process: every epoch has an order of its own."""
        count, size = len(self.training), self.how.batch_rows
        first = (step * self.processes.num_processes + self.processes.process_index) * size
        picked = []
        for place in range(first, first + size):
            epoch, index = divmod(place, count)
            order = torch.randperm(count, generator=torch.Generator().manual_seed(self.how.seed * 7919 + epoch))
            picked.append(int(order[index]))
        return picked

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def _judge(self) -> None:
        """Judge the state, which is put on the disk before, and the curve and the best weights so far after it."""
        self._keep()
        if not self.curve.tests:
            self.curve.tests.append(self.tested())
        rows = self.validation[self.processes.process_index :: self.processes.num_processes]
        none = torch.zeros(2, self.head.depths, device=self.device)
        counts = sum((part.sum(-1) for part in self._counts(rows)), none)
        right, reached = self.processes.reduce(counts)
        tokens = self.at.step * self.processes.num_processes * self.how.batch_rows * self.how.row_tokens
        loss = sum(self.at.losses) / max(1, len(self.at.losses))
        judgement = Judged(self.at.step, tokens, loss, (right / reached.clamp(min=1)).tolist())
        self.at.losses = []
        self.curve.judged.append(judgement)
        self.curve.seconds = self.spent
        if self.processes.is_main_process:
            if judgement is self.curve.best:
                weights = {name: parameter.detach().clone() for name, parameter in self.head.named_parameters()}
                put(self.folder / BEST, weights)
            self.curve.save(self.folder / CURVE)

    def _keep_in_time(self) -> None:
        """Put the state on the disk where it is time, or a signal came, which then has its effect."""
        came = int(agreed(self.signals.came))
        if came or perf_counter() >= self.due:
            self._keep()
        if came:
            self.signals.came = came
            self.signals.deliver()

    def _keep(self) -> None:
        began, self.at.minutes = perf_counter(), self.spent / 60
        if self.processes.is_main_process:
            keep(self.folder / STATE, self.head, self.optimizer, self.at)
        self.due = perf_counter() + max(SAVED, (perf_counter() - began) / SAVING)

    def _counts(self, rows: Rows) -> Iterator[Tensor]:
        """(2, depths, n) of the texts of each batch, as `counted` says."""
        size, head = self.how.batch_rows, self.head.eval()
        for i in range(0, len(rows), size):
            self.signals.deliver()
            batch = self.view.batch(rows[i : i + size], self.how.row_tokens).to(self.device)
            with torch.no_grad(), self._precision():
                yield counted(head, batch)


def bf16_is_faster(device: torch.device) -> bool:
    """Whether products of the usual size take less time in bfloat16, as on GPUs and on CPUs with a matrix unit."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    seconds = {}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = torch.ones(512, 576, dtype=dtype), torch.ones(576, 2048, dtype=dtype)
        taken = []
        for _ in range(6):
            start = perf_counter()
            a @ b
            taken.append(perf_counter() - start)
        seconds[dtype] = min(taken)
    return seconds[torch.bfloat16] < seconds[torch.float32]
