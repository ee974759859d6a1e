"""The bundled denoisers: a plain masked one, or a block-causal one, trained from scratch on tasks and text.

In:  a corpus folder (recipes/bundled_pair/prepare.py), the bundled target's tokenizer.
Out: OUT/state.safetensors (weights, optimizer, how far), OUT/history.json (held-out bound and exact match over time).
Not here: the model folder (write.py), the full measurement (evaluate.py).

The defaults make the bundled shape (2.4 million parameters) in about an hour of one CPU core. The same command goes on where a run
was cut short; time is counted by the clock.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from evaluate import exact_match
from lessons import batches, documents, task_lessons
from losses import Batch, block_loss, plain_loss
from model import HEADS, Net, make_spec, read_state, take_over
from tokenizers import Tokenizer
from torch import nn

from paceline.bench.parallel_tasks import TASKS

sys.path.append(str(Path(__file__).parents[1] / "bundled_pair"))
from common import learning_rate
from resume import Progress, keep, take_up

TOKENIZER = Path(__file__).parents[2] / "src" / "paceline" / "bundled" / "target" / "tokenizer.json"
Loss = Callable[[Net, Batch, torch.Generator], torch.Tensor]


def groups(model: nn.Module, decay: float = 0.05) -> list[dict[str, object]]:
    """Weight decay for matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


@torch.no_grad()
def bound(net: Net, loss: Loss, rows: Sequence[Batch]) -> float:
    """Mean loss of batches under fixed masks."""
    generator = torch.Generator().manual_seed(0)
    return sum(loss(net, batch, generator).item() for batch in rows) / len(rows)


def held_out(options: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, list[Batch]]:
    """A few batches of test tasks, and of held-out text."""
    tasks = task_lessons(tokenizer, split="test", count=24, seed=options.seed)
    random.Random(0).shuffle(tasks)
    texts = documents(options.corpus, tokenizer, heldout=True)
    makers = {
        "tasks": batches(tasks, [], size=options.batch, text_share=0.0, seed=1),
        "text": batches(tasks, texts, size=options.batch, text_share=1.0, seed=1),
    }
    return {name: [next(maker) for _ in range(4)] for name, maker in makers.items()}


def training(options: argparse.Namespace, tokenizer: Tokenizer, seed: int) -> Iterator[Batch]:
    tasks = task_lessons(tokenizer, split="train", count=options.items, seed=seed)
    texts = documents(options.corpus, tokenizer, heldout=False)
    return batches(tasks, texts, size=options.batch, text_share=options.text, seed=seed, lengths=options.lengths)


@dataclass(slots=True)
class Run:
    """A training run and where it stands."""

    net: Net
    optimizer: torch.optim.Optimizer
    loss: Loss
    options: argparse.Namespace
    progress: Progress
    history: list[dict[str, object]] = field(default_factory=list)

    @property
    def on(self) -> bool:
        return self.progress.minutes < self.options.minutes and self.progress.step < self.options.most_steps

    def step(self, batch: Batch, generator: torch.Generator) -> float:
        """One update; the rate falls with the clock."""
        started, progress, peak = time.perf_counter(), self.progress, self.options.rate
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(progress.minutes / self.options.minutes, progress.step, peak, warmup=200)
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(self.net, batch, generator)
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.minutes += (time.perf_counter() - started) / 60
        return loss.item()

    def keep(self) -> None:
        keep(self.options.out / "state.safetensors", self.net, self.optimizer, self.progress)

    def report(self, rows: dict[str, list[Batch]], tokenizer: Tokenizer) -> None:
        """Held-out bounds, and exact match of static decoding on a few test items."""
        facts: dict[str, object] = {"step": self.progress.step, "minutes": round(self.progress.minutes, 1)}
        facts |= {name: round(bound(self.net, self.loss, group), 4) for name, group in rows.items()}
        facts["exact"] = exact_match(self.net.denoiser(), tokenizer, count=self.options.count, tasks=self.options.exact)
        self.history.append(facts)
        (self.options.out / "history.json").write_text(json.dumps(self.history, indent=1))
        print(json.dumps(facts), flush=True)


def begin(options: argparse.Namespace) -> Run:
    """A new run, or the one that OUT holds."""
    net = Net(make_spec(options.kind, width=options.width, layers=options.layers, heads=HEADS, mlp=options.mlp))
    optimizer = torch.optim.AdamW(groups(net), lr=options.rate, betas=(0.9, 0.98), fused=True)
    options.out.mkdir(parents=True, exist_ok=True)
    history = options.out / "history.json"
    progress = take_up(options.out / "state.safetensors", net, optimizer)
    run = Run(net, optimizer, plain_loss if options.kind == "plain" else block_loss, options, progress)
    if progress.step and history.is_file():
        run.history = json.loads(history.read_text())
    print(f"{sum(p.numel() for p in net.parameters()):,} parameters, from step {progress.step}", flush=True)
    return run


def train(options: argparse.Namespace) -> dict[str, object]:
    """Train until minutes or steps are used up; returns the last line of the history."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    run = begin(options)
    rows, lessons = held_out(options, tokenizer), training(options, tokenizer, options.seed + run.progress.step)
    if options.start and not run.progress.step:
        take_over(run.net, read_state(options.start), next(lessons).ids)
    generator = torch.Generator().manual_seed(options.seed + run.progress.step)
    kept = reported = time.perf_counter()
    while run.on:
        value = run.step(next(lessons), generator)
        if run.progress.step % 50 == 0:
            print(f"step {run.progress.step}  loss {value:.3f}  {run.progress.minutes:.1f} min", flush=True)
        if time.perf_counter() - kept > 120:
            run.keep()
            kept = time.perf_counter()
        if time.perf_counter() - reported > 60 * options.report or not run.on:
            run.report(rows, tokenizer)
            reported = time.perf_counter()
    run.keep()
    return run.history[-1]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["plain", "block"])
    parser.add_argument("--corpus", type=Path, default=Path("../bundled_pair/build/corpus"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="state.safetensors of a plain model that a block-causal one goes on from")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--mlp", type=int, default=384)
    parser.add_argument("--items", type=int, default=12000, help="different training items of each task (%(default)s)")
    parser.add_argument("--text", type=float, default=0.25, help="share of text windows in a batch (%(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 16, 24, 32], help="answer slots of tasks (%(default)s)")
    parser.add_argument("--minutes", type=float, default=55, help="minutes to train for (%(default)s)")
    parser.add_argument("--most-steps", type=int, default=1_000_000, help="steps to train for at most (%(default)s)")
    parser.add_argument("--count", type=int, default=12, help="test items of each task in a report (%(default)s)")
    parser.add_argument("--exact", nargs="+", default=list(TASKS), choices=TASKS, help="tasks of a report (all)")
    parser.add_argument("--report", type=float, default=6, help="minutes between reports (%(default)s)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
