"""Medusa's heads: each predicts a token so many places ahead from one state of the target.

Head k makes of a state, which predicts the token behind it, logits of the token k + 1 places behind that one: by
residual blocks x + SiLU(W x + b), and rows of its own or the target's.

Source: Medusa: simple LLM inference acceleration framework with multiple decoding heads (arXiv:2401.10774).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from paceline.errors import CapabilityError, CheckpointError
from paceline.models.base import HasHead, Runner
from paceline.models.decoder.linear import Map, make_linear
from paceline.models.heads.head_files import read_head
from paceline.models.heads.shared_rows import target_rows


class MedusaHead:
    """The heads in a folder, for one target.

    Args:
        head: folder or hub id. tokenizer: as of `read_head`.
    Attributes:
        taps: the layer of the target whose states are read. depths: heads, which is tokens ahead.
        tokens: (n,) int64 the target's token of each column of `logits`; None where that is the column itself.
    Raises:
        CheckpointError: as `read_head`, and heads of another method, or that read states before the final norm.
        CapabilityError: they share the head of a target that cannot give it.
    """

    def __init__(self, head: str | Path, target: Runner, *, tokenizer: Callable[[], str] = str) -> None:
        config, weights = read_head(head, target.info, tokenizer=tokenizer)
        if config.method != "medusa":
            raise CheckpointError(f"the head {head} is of method {config.method!r}, not 'medusa'; name that one")
        if not config.normed and not config.taps:
            raise CheckpointError(
                f"the head {head} reads states before the final norm, as heads of medusa do not; train it anew"
            )
        self.taps, self.depths = config.taps_in(target.info.num_layers), config.num_heads
        self.tokens = weights.get("draft_to_target")
        shared = None
        self._blocks: list[list[Map]] = []
        self._heads: list[Map] = []
        for k in range(config.num_heads):
            names = [f"heads.{k}.blocks.{j}" for j in range(config.num_layers)]
            self._blocks.append([_linear(weights[f"{name}.weight"], weights.get(f"{name}.bias")) for name in names])
            own = weights.get(f"heads.{k}.head.weight", weights.get("head.weight"))
            if own is None:
                shared = shared or _linear(_rows_of(target, head, self.tokens))
            self._heads.append(shared if own is None else _linear(own))  # type: ignore[arg-type]

    @torch.inference_mode()
    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """(b, n) logits of head `depth`, from 0 on, of states (b, hidden) after the target's final norm."""
        x = states
        for block in self._blocks[depth]:
            x = x + F.silu(block(x))
        return self._heads[depth](x)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Map:
    return make_linear(weight, bias, row_invariant=False)


def _rows_of(target: Runner, head: object, tokens: torch.Tensor | None) -> torch.Tensor:
    if not target.capabilities.head or not isinstance(target, HasHead):
        raise CapabilityError(
            f"the head {head} takes its head from the target, which {target.info.name} does not give as it runs here; "
            "use one with its own, or another method"
        )
    wanted = torch.arange(target.info.vocab_size) if tokens is None else tokens
    return target_rows(target, target.info, wanted)
