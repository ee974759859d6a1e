"""The loop that trains any head: AdamW with warm-up and cosine, judged on held-out texts, safe against a kill.

What a step does depends on its number and the seed alone: the order of rows, the noise. So a run of so many steps that
goes on from its state on disk ends in the weights of one that was never stopped, bit for bit on one machine with as
many threads. In a run of so many minutes the learning rate follows the clock.

Of several processes (paceline.training.processes) each takes rows of its own in every step and judges a part of the
held-out ones; the first one writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm.auto import tqdm

from paceline.training.batches import Batch, Document, TargetView
from paceline.training.heads import Trainer
from paceline.training.optimizing import Progress, groups, keep, learning_rate, set_rate, take_up
from paceline.training.processes import accelerator, agreed
from paceline.training.train_config import Fitting

BAR: Final = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"

STATE, BEST, CURVE = "state.safetensors", "best.safetensors", "curve.json"

Rows = Sequence[Sequence[Document]]


@dataclass(slots=True)
class Judged:
    """What a head can do on held-out texts.

    Attributes:
        step, tokens: when, and after how many tokens of training, those of later epochs included.
        loss: of training since the last time.
        acceptance: by depth, the share of drafts that are right where all before them are.
    """

    step: int
    tokens: int
    loss: float
    acceptance: list[float]

    @property
    def length(self) -> float:
        """Tokens that a pass gives with a chain of all depths: one, and those drafts that are right from the first."""
        total, reach = 1.0, 1.0
        for share in self.acceptance:
            reach *= share
            total += reach
        return total


@dataclass(slots=True)
class Curve:
    """A run: its judgements, and seconds so far."""

    judged: list[Judged] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def best(self) -> Judged:
        """The last of those with the longest drafts."""
        return max(self.judged, key=lambda one: (one.length, one.step))

    def save(self, path: Path) -> None:
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self)))
        fresh.replace(path)

    @classmethod
    def load(cls, path: Path) -> Curve:
        if not path.is_file():
            return cls()
        found = json.loads(path.read_text())
        return cls([Judged(**one) for one in found["judged"]], found["seconds"])


def fit(head: Trainer, view: TargetView, texts: tuple[Rows, Rows], how: Fitting, folder: Path) -> Curve:
    """Train a head, or go on where a run that was stopped has left its state in `folder`.

    Args:
        head: ends with the weights that were judged best.
        texts: rows of documents to train on, and rows to judge by.
    """
    run = _Run(head, view, texts, how, folder)
    run.go()
    run.processes.wait_for_everyone()
    head.load_state_dict(load_file(folder / BEST), strict=False)
    return run.curve


class _Run:
    def __init__(self, head: Trainer, view: TargetView, texts: tuple[Rows, Rows], how: Fitting, folder: Path) -> None:
        self.head, self.view, self.how, (self.training, self.held_out) = head, view, how, texts
        self.folder, self.rate = folder, how.learning_rate or head.rate
        self.device, self.processes = head.rows.device, accelerator()
        self.head.to(self.device)
        self.optimizer = torch.optim.AdamW(groups(head, how.weight_decay), lr=self.rate, betas=(0.9, 0.95))
        self.curve = Curve.load(folder / CURVE)
        self.at = take_up(folder / STATE, head, self.optimizer)
        self.curve.judged = [one for one in self.curve.judged if one.step <= self.at.step]  # a kill between the two
        self.seconds, self.start = 60 * self.at.minutes, perf_counter()
        self.losses: list[float] = []
        self.bf16 = bool(agreed(bf16_is_faster(self.device))) if how.bf16 is None else how.bf16
        self.loss = self.processes.prepare_model(head, device_placement=False)
        self.done = self._progress()

    @property
    def spent(self) -> float:
        return self.seconds + perf_counter() - self.start

    def go(self) -> None:
        quiet = None if self.processes.is_main_process else True
        with tqdm(total=100, desc="training", unit="%", disable=quiet, bar_format=BAR) as bar:
            if not self.curve.judged:
                self._judge()
            while self.done < 1.0 and not self._stale():
                self._step()
                self.done = self._progress()
                bar.update(min(100.0, 100 * self.done) - bar.n)
                if self.at.step % self.how.eval_steps == 0 or self.done >= 1.0:
                    words = f"step {self.at.step}, {self._judge().length:.2f} tokens a pass"
                    bar.set_postfix_str(words)
                    if not sys.stderr.isatty() and self.processes.is_main_process:
                        tqdm.write(f"training: {min(self.done, 1.0):.0%}, {words}", file=sys.stderr)

    def _progress(self) -> float:
        """How much of the run is done, from 0 on."""
        return self.at.step / self.how.steps if self.how.steps else agreed(self.spent / 60 / self.how.minutes)

    def _stale(self) -> bool:
        lengths = [one.length for one in self.curve.judged]
        return len(lengths) - 1 - lengths.index(max(lengths)) >= self.how.patience

    def _step(self) -> None:
        head, step = self.head, self.at.step
        rows = [self.training[i] for i in self._picked(step)]
        batch = self.view.batch(rows, self.how.row_tokens).to(self.device)
        set_rate(self.optimizer, learning_rate(self.done, step, self.rate, self.how.warmup_steps))
        head.train()
        with self._precision():
            loss = self.loss(batch, torch.Generator().manual_seed(self.how.seed * 1_000_003 + step))
        self.processes.backward(loss)
        torch.nn.utils.clip_grad_norm_(head.parameters(), self.how.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())
        self.at.step = step + 1

    def _picked(self, step: int) -> list[int]:
        """Rows of a step, of this process: every epoch has an order of its own."""
        count, size = len(self.training), self.how.batch_rows
        first = (step * self.processes.num_processes + self.processes.process_index) * size
        found = []
        for place in range(first, first + size):
            epoch, index = divmod(place, count)
            order = torch.randperm(count, generator=torch.Generator().manual_seed(self.how.seed * 7919 + epoch))
            found.append(int(order[index]))
        return found

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def _judge(self) -> Judged:
        """Judge, and put state and curve on the disk; the best weights so far too."""
        with torch.no_grad(), self._precision():
            counts = counted(self.head.eval(), self._batches())
        right, reached = self.processes.reduce(counts)
        shares = (right / reached.clamp(min=1)).tolist()
        tokens = self.at.step * self.processes.num_processes * self.how.batch_rows * self.how.row_tokens
        made = Judged(self.at.step, tokens, sum(self.losses) / max(1, len(self.losses)), shares)
        self.losses = []
        self.curve.judged.append(made)
        self.curve.seconds = self.spent
        if self.processes.is_main_process:
            self._save(best=made is self.curve.best)
        return made

    def _save(self, *, best: bool) -> None:
        if best:
            fresh = self.folder / f"{BEST}.new"
            save_file({name: one.detach().clone() for name, one in self.head.named_parameters()}, fresh)
            fresh.replace(self.folder / BEST)
        self.curve.save(self.folder / CURVE)
        keep(self.folder / STATE, self.head, self.optimizer, Progress(self.at.step, self.spent / 60))

    def _batches(self) -> Iterator[Batch]:
        size = self.how.batch_rows
        held_out = self.held_out[self.processes.process_index :: self.processes.num_processes]
        for i in range(0, len(held_out), size):
            yield self.view.batch(held_out[i : i + size], self.how.row_tokens).to(self.device)


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


def counted(head: Trainer, batches: Iterator[Batch]) -> Tensor:
    """(2, depths) float32: how many of the likeliest drafts are the text's own token where all before them are, and how
    many there are; a token that the draft vocabulary lacks is never drafted.
    """
    right, reached = counts = torch.zeros(2, head.depths, device=head.rows.device)
    for batch in batches:
        alive = torch.ones(batch.tokens.numel(), dtype=torch.bool, device=counts.device)
        for depth, (at, guessed) in enumerate(head.guesses(batch)):
            _, columns = batch.learned(depth + 2)
            hit = torch.zeros_like(alive)
            hit[at] = guessed == columns
            inside = torch.zeros_like(alive)
            inside[at] = True
            reached[depth] += (alive & inside).sum()
            alive = alive & hit
            right[depth] += alive.sum()
    return counts
