"""A linear judge on a model's states: how likely it is that the token which a state has read is good.

The state is that of the last layer, before the final norm; the chance is sigmoid(w . h + b). In a folder of its own:
model.safetensors with `weight` (hidden,) and `bias` (1,), and config.json with the key `paceline_judge`.

Source: Judge Decoding: Faster Speculative Sampling Requires Going Beyond Model Alignment (arXiv:2501.19309).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from paceline.checkpoints import Checkpoint, resolve
from paceline.errors import CapabilityError, CheckpointError
from paceline.models.abilities import has_ability
from paceline.models.heads.head_files import check_trained_for, stored_config, stored_tensors, write_folder

if TYPE_CHECKING:
    from paceline.models.base import Runner

KEY: Final = "paceline_judge"


@dataclass(frozen=True, slots=True)
class StateJudge:
    """Judges tokens by the states that have read them.

    Attributes:
        weight: (hidden,) float32. bias: added to its product with a state.
        target: `name`, `fingerprint` and `tokenizer` of the model that it was trained for, where known.
        provenance: how it was trained; for people.
    """

    weight: torch.Tensor
    bias: float
    target: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def logits(self, states_rd: torch.Tensor) -> torch.Tensor:
        """(r,) float32 log-odds that tokens are good, from the (r, hidden) states that have read them."""
        return states_rd.float() @ self.weight.to(states_rd.device) + self.bias

    def write(self, folder: str | Path) -> Path:
        """Write it into a folder.

        Raises:
            CheckpointError: it cannot be written.
        """
        config = {KEY: {"hidden_size": len(self.weight), "target": dict(self.target), **dict(self.provenance)}}
        return write_folder(Path(folder), config, {"weight": self.weight, "bias": torch.tensor([self.bias])})

    @classmethod
    def read(cls, judge: str | Path, runner: Runner, *, tokenizer: Callable[[], str] = str) -> StateJudge:
        """The judge in a folder, or of a hub id, for a model.

        Args:
            tokenizer: gives the fingerprint of the model's tokenizer, "" where it is not known.
        Raises:
            CheckpointError: no such files, or a judge of another model.
            CapabilityError: a model that does not give its states.
        """
        if not has_ability(runner, "taps"):
            raise CapabilityError(f"a judge reads states of the model, which {runner.info.name} does not give here")
        folder = resolve(judge)
        stored = stored_config(folder).get(KEY)
        if not isinstance(stored, dict) or not isinstance(stored.get("target", {}), dict):
            raise CheckpointError(f"{folder} holds no judge; give a folder that `paceline train judge` has written")
        checkpoint = Checkpoint(folder)
        shapes = {name: tuple(entry.shape) for name, entry in checkpoint.entries.items()}
        if set(shapes) != {"weight", "bias"} or len(shapes["weight"]) != 1 or shapes["bias"] != (1,):
            raise CheckpointError(f"{folder} must hold weight (hidden,) and bias (1,), got {shapes}; train it again")
        sizes = [("hidden_size", shapes["weight"][0], runner.info.hidden_size)]
        check_trained_for(stored.get("target", {}), folder, runner.info, tokenizer, sizes=sizes)
        tensors = stored_tensors(checkpoint, {"weight": "weight", "bias": "bias"}, folder)
        weight = tensors["weight"].float().to(runner.info.device)
        return cls(weight, float(tensors["bias"]), stored.get("target", {}), stored)
