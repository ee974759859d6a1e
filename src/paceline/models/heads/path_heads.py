"""Heads that guess several tokens ahead of one state of the target: one each, from the tokens of a path.

What a head knows of a path is its *memory*, a row (r, w): made of the target's state at first (`begin`), then of each
token that is read (`step`). The state is that of the token before the root; the root is the first token that is read,
so that head 0 predicts the first draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch.nn import functional as F

from paceline.errors import CheckpointError
from paceline.models.base import Runner
from paceline.models.heads.head_config import HeadConfig
from paceline.models.heads.head_files import read_head
from paceline.models.heads.shared_rows import head_of, target_rows
from paceline.models.layers.linear import Map, make_linear
from paceline.models.layers.own_weights import Weights


@dataclass(frozen=True, slots=True)
class HeadStep:
    """What a head makes of paths: logits (r, n) of the next token, and the memory (r, w) behind the tokens so far."""

    logits: torch.Tensor
    memory: torch.Tensor


class DepthHeads(ABC):
    """Heads in a folder, one for each token ahead, for one target.

    Args:
        head: folder or hub id. tokenizer: as of `read_head`.
    Attributes:
        taps: the layer of the target whose states are read. depths: heads, which is tokens ahead.
        tokens: (n,) int64 the target's token of each column of logits; None where that is the column itself.
    Raises:
        CheckpointError: as `read_head`, and heads of another method, or that read states before the final norm.
        CapabilityError: they share with the target what it cannot give.
    """

    method: ClassVar[str]

    def __init__(self, head: str | Path, target: Runner, *, tokenizer: Callable[[], str] = str) -> None:
        config, weights = read_head(head, target.info, tokenizer=tokenizer)
        if config.method != self.method:
            raise CheckpointError(f"the head {head} is of method {config.method!r}, not {self.method!r}; name that one")
        if not config.normed and not config.taps:
            raise CheckpointError(
                f"the head {head} reads states before the final norm, as heads of {self.method} do not; train it anew"
            )
        self.name, self.target = str(head), target
        self.taps, self.depths = config.taps_in(target.info.num_layers), config.num_heads
        self.tokens = weights.get("draft_to_target")
        self._shared: Map | None = None
        self._build(config, weights)

    @abstractmethod
    def _build(self, config: HeadConfig, weights: Weights) -> None:
        """Make maps of the weights."""

    def _rows(self, weights: Weights, head: int) -> Map:
        """The matrix behind a head: its own, that of all heads, or the target's."""
        name = f"heads.{head}.head"
        if f"{name}.weight" in weights:
            return linear(weights, name)
        if f"{name}.bias" in weights:
            raise CheckpointError(f"{self.name}: {name} has a bias and no weight; write it again")
        if self._shared is None:
            rows = weights.get("head.weight")
            self._shared = make_linear(self._target_rows() if rows is None else rows, row_invariant=False)
        return self._shared

    def _target_rows(self) -> torch.Tensor:
        wanted = torch.arange(self.target.info.vocab_size) if self.tokens is None else self.tokens
        return target_rows(head_of(self.target, self.name), self.target.info, wanted)


class PathHeads(DepthHeads):
    """Those that read paths token by token.

    Attributes:
        reads_tokens: whether a path's tokens matter, and not its length alone.
    """

    reads_tokens: ClassVar[bool] = True

    @torch.inference_mode()
    def begin(self, states: torch.Tensor) -> torch.Tensor:
        """(b, w) memory of states (b, hidden) after the target's final norm."""
        return states

    @abstractmethod
    def step(self, memory: torch.Tensor, tokens: Sequence[int], depth: int) -> HeadStep:
        """What head `depth`, from 0 on, makes of the memory (r, w) once the tokens (r,) are read."""


def linear(weights: Weights, name: str) -> Map:
    """The linear layer of that name."""
    return make_linear(weights[f"{name}.weight"], weights.get(f"{name}.bias"), row_invariant=False)


def residual(blocks: Sequence[Map], x: torch.Tensor) -> torch.Tensor:
    """(r, d) x + SiLU(block(x)), block after block."""
    for block in blocks:
        x = x + F.silu(block(x))
    return x


def regressive(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, heads: int) -> torch.Tensor:
    """(r, d) values weighted by the cosine of query and key in each of the heads, all (r, d)."""
    q, k, v = (rows.unflatten(-1, (heads, -1)) for rows in (queries, keys, values))
    weighted: torch.Tensor = F.cosine_similarity(q, k, dim=-1, eps=1e-6).unsqueeze(-1) * v
    return weighted.flatten(-2)


def unit_rows(rows: torch.Tensor) -> torch.Tensor:
    """(v, d) rows, each with a root mean square of 1."""
    units: torch.Tensor = F.normalize(rows, dim=1)
    return units.mul_(rows.shape[1] ** 0.5)
