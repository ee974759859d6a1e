"""Where a training run stands, on disk, so that a run that was cut short goes on instead of beginning again.

In:  a model, its optimizer, how far they are. Out: one safetensors file in full precision, replaced as a whole.
Not here: what is trained (early_exit.py), the model folder that others load (common.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn


@dataclass(slots=True)
class Progress:
    """Steps done, and minutes of processor time that they took."""

    step: int = 0
    minutes: float = 0.0


def keep(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write weights, the optimizer's averages, the state of the generator, and how far the run is."""
    tensors = {"rng": torch.get_rng_state()}
    for name, value in model.named_parameters():
        tensors[f"model.{name}"] = value.detach().cpu()
        tensors.update({f"optimizer.{name}.{key}": part.cpu() for key, part in optimizer.state[value].items()})
    fresh = path.with_suffix(".new")
    save_file(tensors, fresh, {"step": str(progress.step), "minutes": str(progress.minutes)})
    fresh.replace(path)


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
    return Progress(int(facts["step"]), float(facts["minutes"]))
