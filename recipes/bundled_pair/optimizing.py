"""One step of an optimizer: its rate, its groups, the update.

In:  a model, its AdamW, a loss. Out: the model, a step on. Not here: losses, how long a run goes on, the state on disk
(resume.py).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def learning_rate(progress: float, step: int, peak: float, warmup: int = 100) -> float:
    """Linear warm-up over `warmup` steps, then a cosine fall to 2 % of the peak at progress 1."""
    fall = 0.02 + 0.49 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return peak * min(1.0, (step + 1) / warmup) * fall


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The same rate for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def groups(model: nn.Module, decay: float = 0.1) -> list[dict[str, object]]:
    """Weight decay for matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, most: float = 1.0) -> None:
    """One step down the gradient of a loss, clipped to norm `most`."""
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), most)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
