"""A training run of a denoiser: steps until minutes or steps are used up, kept on disk, with reports on the way.

Takes a Net, what a step learns from, what a report measures.
Gives OUT/state.safetensors (weights, optimizer, how far), from which write.py makes a folder; OUT/history.json, the
reports; OUT/NAME.safetensors of other models that the run needs. The same command goes on where a run was cut short.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.training import Progress, groups, keep, learning_rate, set_rate, take_up, update
from recipes.bundled_diffusion.losses import Batch
from recipes.bundled_diffusion.model import Net

Facts = dict[str, object]
Learn = Callable[[torch.Generator], dict[str, float]]
"""One step of learning; what there is to say of it."""
Loss = Callable[[Net, Batch, torch.Generator], Tensor]
RECENT, KEPT_EVERY = 20, 60
"""Steps whose facts are averaged in a report; seconds between two writings of the state."""


@dataclass(slots=True, kw_only=True)
class Run:
    """A run in progress.

    Attributes:
        options: `out`, `minutes`, `most_steps`, `rate`, `report`, `seed` are read.
        warmup: steps in which the rate rises.
        beside: other models that are kept, by name, such as the reference of a policy.
        clock: seconds, of which minutes are counted; of the processor, so that a run does not end early on a busy
            machine.
        history: reports so far.
    """

    net: Net
    optimizer: torch.optim.Optimizer
    options: argparse.Namespace
    progress: Progress
    warmup: int
    beside: Mapping[str, nn.Module] = field(default_factory=dict)
    clock: Callable[[], float] = time.process_time
    history: list[Facts] = field(default_factory=list)

    @property
    def done(self) -> float:
        """The share of the run that is over."""
        return float(max(self.progress.minutes / self.options.minutes, self.progress.step / self.options.most_steps))

    def step(self, learn: Learn, generator: torch.Generator) -> dict[str, float]:
        """One step; the rate falls as the run goes on."""
        started = self.clock()
        set_rate(self.optimizer, learning_rate(self.done, self.progress.step, self.options.rate, self.warmup))
        facts = learn(generator)
        self.progress.step += 1
        self.progress.minutes += (self.clock() - started) / 60
        return facts

    def supervised(self, loss: Loss, batches: Iterator[Batch]) -> Learn:
        """A step that is one update on the next batch."""

        def learn(generator: torch.Generator) -> dict[str, float]:
            with torch.autocast("cpu", torch.bfloat16):
                value = loss(self.net, next(batches), generator)
            update(self.net, self.optimizer, value)
            return {"loss": value.item()}

        return learn

    def keep(self) -> None:
        """Write what the run needs to go on."""
        for name, model in self.beside.items():
            fresh = self.options.out / f"{name}.new"
            save_file(model.state_dict(), fresh)
            fresh.replace(self.options.out / f"{name}.safetensors")
        keep(self.options.out / "state.safetensors", self.net, self.optimizer, self.progress)

    def report(self, facts: Mapping[str, object]) -> None:
        """Add a line to the history."""
        line = {"step": self.progress.step, "minutes": round(self.progress.minutes, 1), **facts}
        self.history.append(line)
        (self.options.out / "history.json").write_text(json.dumps(self.history, indent=1))
        print(json.dumps(line), flush=True)

    def go(self, learn: Learn, measure: Callable[[], Facts], *, lines: int = 50) -> Facts:
        """Go on to the end; the last report.

        Args:
            measure: facts of a report, beside the means of what the last steps said.
            lines: steps between two lines on the screen.
        """
        generator = torch.Generator().manual_seed(self.options.seed + self.progress.step)
        recent: deque[dict[str, float]] = deque(maxlen=RECENT)
        kept = reported = time.perf_counter()
        if not self.history:
            self.report(measure())
        while self.done < 1:
            recent.append(self.step(learn, generator))
            if self.progress.step % lines == 0:
                said = "  ".join(f"{name} {value:.3f}" for name, value in recent[-1].items())
                print(f"step {self.progress.step}  {said}  {self.progress.minutes:.1f} min", flush=True)
            if time.perf_counter() - kept > KEPT_EVERY:
                self.keep()
                kept = time.perf_counter()
            if time.perf_counter() - reported > 60 * self.options.report or self.done >= 1:
                means = {name: round(fmean(one[name] for one in recent), 4) for name in recent[-1]}
                self.report(means | measure())
                reported = time.perf_counter()
        self.keep()
        return self.history[-1]


def set_up(options: argparse.Namespace) -> None:
    """Threads and seed, before any weight is drawn."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)


def begin(
    options: argparse.Namespace,
    net: Net,
    *,
    warmup: int,
    decay: float,
    betas: tuple[float, float] = (0.9, 0.98),
    beside: Mapping[str, nn.Module] | None = None,
    clock: Callable[[], float] = time.process_time,
) -> Run:
    """A new run from a net, or the one that OUT holds."""
    optimizer = torch.optim.AdamW(groups(net, decay), lr=options.rate, betas=betas, fused=True)
    options.out.mkdir(parents=True, exist_ok=True)
    progress, history = take_up(options.out / "state.safetensors", net, optimizer), options.out / "history.json"
    run = Run(
        net=net,
        optimizer=optimizer,
        options=options,
        progress=progress,
        warmup=warmup,
        beside=beside or {},
        clock=clock,
    )
    if progress.step:
        run.history = json.loads(history.read_text()) if history.is_file() else []
        for name, model in run.beside.items():
            model.load_state_dict(load_file(options.out / f"{name}.safetensors"))
    print(f"{sum(p.numel() for p in net.parameters()):,} parameters, from step {progress.step}", flush=True)
    return run
