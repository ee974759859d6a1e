"""SpecDec++'s head: the chance that a drafted token is accepted, from the draft model's state that has read it.

    logits of (rejected, accepted) = W (x + SiLU(W_m x + b_m) of m blocks in turn) + b,   chance = softmax(logits)[1]

with x the state behind the draft model's final norm. In a folder of its own: model.safetensors with the names of the
authors' files, `model.0.linear.weight` (hidden, hidden) and `.bias` (hidden,) of each block, `model.m.weight` (2,
hidden) and `.bias` (2,) of the last map; config.json with `hidden_size` and `num_layers`, the blocks, and in
`paceline_acceptance_head` how it was trained. The authors' own files are read too: all their blocks share one weight,
so that the others may be absent.

Source: SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths (arXiv:2405.19715).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional as F

from paceline.checkpoints import Checkpoint, resolve
from paceline.errors import CapabilityError, CheckpointError
from paceline.models.abilities import has_ability
from paceline.models.heads.head_files import check_trained_for, stored_config, stored_tensors, write_folder

if TYPE_CHECKING:
    from paceline.models.base import ModelInfo, Runner

KEY: Final = "paceline_acceptance_head"
REJECTED, ACCEPTED = 0, 1
"""Columns of its logits."""

MOST_BLOCKS: Final = 64

Map = tuple[torch.Tensor, torch.Tensor]
"""Weight and bias."""


@dataclass(frozen=True, slots=True)
class AcceptanceHead:
    """Foretells whether drafted tokens are accepted.

    Attributes:
        blocks: weight (hidden, hidden) and bias (hidden,) of each, float32. last: (2, hidden) and (2,).
        provenance: how it was trained: `draft` and `target` (name, fingerprint, tokenizer), `rejection_weight`,
            `temperature`; for the check of the models, and for people.
    """

    blocks: Sequence[Map]
    last: Map
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def logits(self, states_rd: torch.Tensor) -> torch.Tensor:
        """(r, 2) float32, of rejected and accepted, from the (r, hidden) states that have read the tokens."""
        found = states_rd.float()
        for weight, bias in self.blocks:
            found = found + F.silu(F.linear(found, weight, bias))
        return F.linear(found, *self.last)

    def chances(self, states_rd: torch.Tensor) -> list[float]:
        """As foretold, of each token."""
        chances: list[float] = self.logits(states_rd).softmax(-1)[:, ACCEPTED].tolist()
        return chances

    def write(self, folder: str | Path) -> Path:
        """Write it into a folder.

        Raises:
            CheckpointError: it cannot be written.
        """
        hidden = self.last[0].shape[1]
        config = {"hidden_size": hidden, "num_layers": len(self.blocks), KEY: dict(self.provenance)}
        tensors: dict[str, torch.Tensor] = {}
        for name, (weight, bias) in zip(_names(len(self.blocks)), [*self.blocks, self.last], strict=True):
            tensors |= {f"{name}.weight": weight, f"{name}.bias": bias}
        return write_folder(Path(folder), config, tensors)

    @classmethod
    def read(
        cls, head: str | Path, draft: Runner, target: ModelInfo | None, *, tokenizer: Callable[[], str] = str
    ) -> AcceptanceHead:
        """The head in a folder, or of a hub id, for a draft model and its target.

        Args:
            target: None is not checked. tokenizer: gives the fingerprint of their tokenizer, "" where it is not known.
        Raises:
            CheckpointError: no such files, or a head of other models.
            CapabilityError: a draft model that does not give its states.
        """
        if not has_ability(draft, "taps"):
            raise CapabilityError(
                f"acceptance_head reads states, which {draft.info.name} does not give as it runs here"
            )
        folder = resolve(head)
        config, checkpoint = stored_config(folder), Checkpoint(folder)
        names = _stored_names(config, checkpoint, folder, draft.info.hidden_size)
        facts = config.get(KEY, {})
        facts = facts if isinstance(facts, dict) else {}
        for name, info in (("draft", draft.info), ("target", target)):
            known = facts.get(name)
            if isinstance(known, dict) and info is not None:
                check_trained_for(known, folder, info, tokenizer)
        tensors = stored_tensors(checkpoint, {stored: stored for pair in names for stored in pair}, folder)
        device = draft.info.device
        maps = [(tensors[weight].float().to(device), tensors[bias].float().to(device)) for weight, bias in names]
        return cls(maps[:-1], maps[-1], facts)


def _names(blocks: int) -> list[str]:
    """Of each block's map, and of the last."""
    return [*(f"model.{number}.linear" for number in range(blocks)), f"model.{blocks}"]


def _stored_names(
    config: Mapping[str, Any], checkpoint: Checkpoint, folder: Path, hidden: int
) -> list[tuple[str, str]]:
    """Names of weight and bias of each map in a checkpoint.

    Raises:
        CheckpointError: no acceptance head, or one of another width.
    """
    blocks, entries = config.get("num_layers"), checkpoint.entries
    if not isinstance(blocks, int) or isinstance(blocks, bool) or not 0 <= blocks <= MOST_BLOCKS:
        raise CheckpointError(
            f"{folder} holds no acceptance head; give a folder that `paceline train specdec_pp` has written"
        )
    found = []
    for name in _names(blocks):
        shared = f"{name}.weight" not in entries and name.endswith(".linear")
        stored = "model.0.linear" if shared else name
        rows = hidden if name.endswith(".linear") else 2
        for part, shape in (("weight", (rows, hidden)), ("bias", (rows,))):
            entry = entries.get(f"{stored}.{part}")
            its = None if entry is None else tuple(entry.shape)
            if its != shape:
                raise CheckpointError(
                    f"{folder}: {stored}.{part} must be {shape} for this draft model, got {its}; use the head that "
                    "was trained for it"
                )
        found.append((f"{stored}.weight", f"{stored}.bias"))
    return found
