"""A learned filter: a small network looks at the confidences of a block and says which predictions are final.

The slots the filter accepts are written, and the quota of the static baseline.
Source: Learning to Parallel: Accelerating Diffusion Large Language Models via Learnable Parallel Decoding
(arXiv:2509.25188).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from paceline.diffusion.base import Setting, Step
from paceline.diffusion.canvas import Floats
from paceline.diffusion.commit.quotas import QuotaCommit
from paceline.errors import CheckpointError
from paceline.models import Ints
from paceline.utils import need

Filter = Callable[[Step], Floats]
"""Logits for the slots of `step.block`, in order: above 0, more likely final than not."""

NAMES = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


def block_confidences(step: Step) -> Floats:
    """(b,) clean probabilities of the predictions at all slots of the block, written ones included.

    A slot without a prediction (one that a cache policy leaves out) counts as sure.
    """
    slots = np.arange(step.block.start, step.block.stop)
    values = np.ones(slots.size)
    known = step.predictions.known(slots)
    values[known] = step.predictions.confidence_at(slots[known])
    return values


@dataclass(frozen=True, slots=True)
class BlockFilter:
    """Two layers with a rectifier between them, b confidences to b logits.

    Attributes:
        weights: (h, b), (h,), (b, h), (b,) float32, as named in `NAMES`.
    """

    weights: tuple[Floats, Floats, Floats, Floats]

    @classmethod
    def load(cls, path: str | Path) -> BlockFilter:
        """Read a safetensors file with the tensors `NAMES`, of any float type.

        Raises:
            CheckpointError: no such file, other tensors, shapes that do not fit each other.
        """
        file = Path(path)
        if not file.is_file():
            raise CheckpointError(f"no filter at {file}; give the path of a safetensors file with {', '.join(NAMES)}")
        return _load(str(file), file.stat().st_mtime_ns)

    @property
    def block_length(self) -> int:
        """Slots of the blocks it was trained for."""
        return int(self.weights[0].shape[1])

    def save(self, path: str | Path) -> None:
        """Write what `load` reads."""
        from safetensors.numpy import save_file

        tensors = zip(NAMES, self.weights, strict=True)
        save_file({name: np.ascontiguousarray(w, np.float32) for name, w in tensors}, str(path))

    def logits(self, confidences: Floats) -> Floats:
        """(..., b) of (..., b)."""
        first, bias, second, last = self.weights
        return np.asarray(np.maximum(confidences @ first.T + bias, 0.0) @ second.T + last, np.float64)

    def __call__(self, step: Step) -> Floats:
        """A block that was cut short counts as sure beyond its end."""
        confidences = np.ones(self.block_length)
        confidences[: len(step.block)] = block_confidences(step)
        return self.logits(confidences)[: len(step.block)]


@lru_cache(maxsize=8)
def _load(path: str, _changed: int) -> BlockFilter:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:  # NumPy has no bfloat16
            held = set(file.keys())
            if missing := [name for name in NAMES if name not in held]:
                raise CheckpointError(f"{path} lacks {', '.join(missing)}; a filter has {', '.join(NAMES)}")
            first, bias, second, last = (file.get_tensor(name).double().numpy() for name in NAMES)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file, or is cut short ({error})") from error
    hidden, block = first.shape if first.ndim == 2 else (0, 0)
    if not (bias.shape == (hidden,) and second.shape == (block, hidden) and last.shape == (block,) and block):
        shapes = [layer.shape for layer in (first, bias, second, last)]
        raise CheckpointError(f"{path} holds layers that do not fit each other: {shapes}")
    return BlockFilter((first, bias, second, last))


class LearnedCommit(QuotaCommit):
    """Slots whose accepted chance, sigmoid(logit), exceeds the threshold, and those the static baseline would write.

    Args:
        filter: path of a safetensors file (see `BlockFilter.load`), or a function of the step (see `Filter`).
        filter_threshold: 1 is the static baseline.
        denoising_steps: see `QuotaCommit`.
    Raises:
        ConfigError: no filter, or one for longer or shorter blocks.
    """

    reads_written = True

    def __init__(
        self,
        setting: Setting,
        *,
        filter: str | Path | Filter | None = None,
        filter_threshold: float = 0.9,
        denoising_steps: int | None = None,
    ) -> None:
        super().__init__(setting, denoising_steps=denoising_steps)
        need(filter is not None, "filter", "be the path of a trained filter (safetensors) for this method", filter)
        need(
            isinstance(filter, str | Path) or callable(filter), "filter", "be a path or a function of the step", filter
        )
        chosen = BlockFilter.load(filter) if isinstance(filter, str | Path) else filter
        assert chosen is not None
        self.filter: Filter = chosen
        self.threshold = filter_threshold
        if isinstance(self.filter, BlockFilter):
            size, trained_for = len(setting.first_block()), self.filter.block_length
            rule = f"be {trained_for}, the block length that the filter was trained for"
            need(trained_for == size, "block_length", rule, size)

    def choose(self, step: Step) -> Ints:
        logits = np.clip(self.filter(step), -700, 700)
        at = step.eligible - step.block.start
        inside = (at >= 0) & (at < len(step.block))
        accepted = step.eligible[inside][1 / (1 + np.exp(-logits[at[inside]])) > self.threshold]
        return np.union1d(accepted, super().choose(step))
