"""M2R2's accelerator adapters: what moves the states of a stream that runs one of R layers to where all R would have
brought them.

    y = what layer (k - 1) R, from 0 on, makes of the stream's state p_{k-1}; p_0 is the embedding
    p_k = y + rms(y) up_k(SiLU(down_k(y / rms(y)))), which stands for the state behind layer k R - 1

In a folder of their own: model.safetensors with `steps.K.down.weight` (rank, hidden) and `steps.K.up.weight` (hidden,
rank) for each layer that runs, and config.json with the key `paceline_rate_adapters`: `rate`, `rank`, `hidden_size`,
`num_layers` of the target, and `target` (`name`, `fingerprint`, `tokenizer`).

The paper's adapters have no public code; that they are bottlenecks behind the whole layer, and that the first of R
layers runs, is our reading.

Source: Mixture of Multi-Rate Residuals for efficient transformer inference (arXiv:2502.02040).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional as F

from paceline.checkpoints import Checkpoint, resolve
from paceline.errors import CheckpointError
from paceline.models.heads.head_files import check_trained_for, stored_config, stored_tensors, write_folder
from paceline.models.layers.linear import Map, make_linear

if TYPE_CHECKING:
    from paceline.models.base import ModelInfo

KEY: Final = "paceline_rate_adapters"
EPS: Final = 1e-6


def stream_layers(num_layers: int, rate: int) -> range:
    """The layers that a stream of that rate runs, of so many."""
    return range(0, num_layers, rate)


def root_mean_square(states: torch.Tensor) -> torch.Tensor:
    """(..., 1) float32 of states (..., hidden)."""
    return states.float().square().mean(-1, keepdim=True).add(EPS).sqrt()


@dataclass(frozen=True, slots=True)
class RateAdapters:
    """The adapters of one target.

    Attributes:
        rate: one of so many layers runs. downs, ups: of each layer that does.
    """

    rate: int
    downs: Sequence[Map]
    ups: Sequence[Map]

    @torch.inference_mode()
    def moved(self, step: int, states: torch.Tensor) -> torch.Tensor:
        """(r, hidden) states (r, hidden) behind the layer of a step, from 0 on, moved to where the stream is then."""
        size = root_mean_square(states)
        added = self.ups[step](F.silu(self.downs[step]((states / size).to(states.dtype))))
        return (states + size * added).to(states.dtype)

    @classmethod
    def read(cls, folder: str | Path, target: ModelInfo, *, tokenizer: Callable[[], str] = str) -> RateAdapters:
        """Those in a folder, or of a hub id, for a target's device and dtype.

        Args:
            tokenizer: gives the fingerprint of the target's tokenizer, "" where it is not known.
        Raises:
            CheckpointError: no such files, or adapters of another model.
        """
        folder = resolve(folder)
        stored = stored_config(folder).get(KEY)
        numbers = ("rate", "rank", "hidden_size", "num_layers")
        if (
            not isinstance(stored, dict)
            or not all(type(stored.get(name)) is int and stored[name] > 0 for name in numbers)
            or not isinstance(stored.get("target", {}), dict)
        ):
            raise CheckpointError(
                f"{folder} holds no adapters of m2r2; give a folder that `paceline train m2r2` has written"
            )
        sizes = [(name, stored[name], getattr(target, name)) for name in numbers[2:]]
        check_trained_for(stored.get("target", {}), folder, target, tokenizer, sizes=sizes)
        rank, hidden, checkpoint = stored["rank"], stored["hidden_size"], Checkpoint(folder)
        steps = range(len(stream_layers(stored["num_layers"], stored["rate"])))
        shapes = {f"steps.{step}.down.weight": (rank, hidden) for step in steps}
        shapes |= {f"steps.{step}.up.weight": (hidden, rank) for step in steps}
        found = {name: tuple(entry.shape) for name, entry in checkpoint.entries.items()}
        for name in sorted(shapes.keys() | found.keys()):
            if shapes.get(name) != found.get(name):
                raise CheckpointError(
                    f"{folder}: {name} must be {shapes.get(name, 'left out')} by its config.json, got "
                    f"{found.get(name, 'none')}; train it again"
                )
        tensors = stored_tensors(checkpoint, {name: name for name in shapes}, folder)
        maps = {
            name: make_linear(one.to(target.device, target.dtype), row_invariant=False) for name, one in tensors.items()
        }
        downs, ups = ([maps[f"steps.{step}.{part}.weight"] for step in steps] for part in ("down", "up"))
        return cls(stored["rate"], downs, ups)


def write_rate_adapters(
    folder: str | Path, tensors: Mapping[str, torch.Tensor], *, rate: int, num_layers: int, facts: Mapping[str, Any]
) -> Path:
    """Write adapters into a folder.

    Args:
        tensors: by their names. num_layers: of the target. facts: where they come from; `facts["target"]` names it.
    Raises:
        CheckpointError: it cannot be written.
    """
    rank, hidden = tensors["steps.0.down.weight"].shape
    sizes = {"rate": rate, "rank": rank, "hidden_size": hidden, "num_layers": num_layers}
    return write_folder(Path(folder), {KEY: {**sizes, **facts}}, tensors)
