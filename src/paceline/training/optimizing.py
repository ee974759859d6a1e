"""One step of an optimizer, and where a training run stands on disk, so that a run that was cut short goes on instead
of beginning again: one safetensors file in full precision, replaced as a whole.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.utils import replacing


def learning_rate(progress: float, step: int, peak: float, warmup: int = 100) -> float:
    """Linear warm-up over `warmup` steps, then a cosine fall to 2 % of the peak at progress 1."""
    fall = 0.02 + 0.49 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return peak * min(1.0, (step + 1) / warmup) * fall


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give all parameters the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def groups(model: nn.Module, decay: float = 0.1) -> list[dict[str, object]]:
    """Make parameter groups for the optimizer, so that only matrices decay."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, most: float = 1.0) -> None:
    """One step down the gradient of a loss, clipped to norm `most`."""
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), most)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@dataclass(slots=True)
class Progress:
    """Steps done, minutes that they took, and losses that nobody has averaged yet."""

    step: int = 0
    minutes: float = 0.0
    losses: list[float] = field(default_factory=list)


def paced(
    optimizer: torch.optim.Optimizer,
    options: argparse.Namespace,
    *,
    warmup: int,
    clock: Callable[[], float] = time.perf_counter,
    at: Progress | None = None,
) -> Iterator[tuple[Progress, bool]]:
    """The steps of a run until its tokens or minutes are used up, each with its rate set: how far the run is with this
    step, and whether the step is the last.

    Args:
        options: `tokens`, `batch`, `length`, `minutes` and `rate` are read.
        at: where a run that was cut short goes on; it is kept current.
    """
    at = at or Progress()
    steps = max(1, options.tokens // (options.batch * options.length))
    start = clock() - 60 * at.minutes
    for step in range(at.step, steps):
        at.step, at.minutes = step + 1, (clock() - start) / 60
        done = max(step / steps, at.minutes / options.minutes)
        set_rate(optimizer, learning_rate(done, step, options.rate, warmup=min(warmup, steps)))
        last = step == steps - 1 or done >= 1
        yield at, last
        if last:
            return


def keep(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write weights, the optimizer's averages, the state of the generator, and how far the run is."""
    tensors = {"rng": torch.get_rng_state()}
    for name, value in model.named_parameters():
        tensors[f"model.{name}"] = value.detach().cpu()
        tensors.update({f"optimizer.{name}.{key}": part.cpu() for key, part in optimizer.state[value].items()})
    facts = {"step": progress.step, "minutes": progress.minutes, "losses": progress.losses}
    put(path, tensors, {name: json.dumps(value) for name, value in facts.items()})


def put(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> None:
    """Write tensors; what is there stays whole until they are on the disk.

    Raises:
        ConfigError: they cannot be written.
    """
    with replacing(path) as fresh:
        try:
            save_file(dict(tensors), fresh, facts)
        except SafetensorError as error:
            raise OSError(str(error)) from None


def take_up(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Put back what `keep` wrote; a new run where there is no file."""
    if not path.is_file():
        return Progress()
    with safe_open(path, "pt") as file, torch.no_grad():
        names = set(file.keys())
        for name, value in model.named_parameters():
            value.copy_(file.get_tensor(f"model.{name}"))
            start = f"optimizer.{name}."
            parts = {key.removeprefix(start): file.get_tensor(key) for key in names if key.startswith(start)}
            optimizer.state[value] = {
                key: part if key == "step" else part.to(value.device) for key, part in parts.items()
            }
        torch.set_rng_state(file.get_tensor("rng"))
        facts = file.metadata()
    return Progress(int(facts["step"]), float(facts["minutes"]), json.loads(facts.get("losses", "[]")))


def steps_of(path: Path) -> int:
    """Steps done when `keep` wrote a file."""
    with safe_open(path, "pt") as file:
        return int(file.metadata()["step"])
