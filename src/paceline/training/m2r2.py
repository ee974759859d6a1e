"""Training of M2R2's accelerator adapters, with a frozen target.

The accelerated stream runs one of R layers; its rows see the states' keys and values of all tokens before theirs, as
the target's own layers have made them, and their own. So each layer runs over a text twice in one pass: rows of the
target's states, which see each other, and rows of the stream, which see the former up to the token before and
themselves. Behind a layer the former become the target's true states, the latter what the adapter makes of them.

    loss = cross-entropy of the target's distributions by its norm and head on p_K
           + mean over steps k of |p_k - h_{kR}|^2 / |h_{kR}|^2          early alignment

A drafted token sees those drafted before it as the stream has made them, where training has the target's. The losses'
forms and weights, 1 each, are our reading.

Source: Mixture of Multi-Rate Residuals for efficient transformer inference (arXiv:2502.02040).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.config import documented, option
from paceline.models.heads import root_mean_square, stream_layers, write_rate_adapters
from paceline.training.batches import Batch, TargetView
from paceline.training.draft_model import embedding_of, sliced
from paceline.training.next_token import NextTokenTrainer, seeing
from paceline.training.train_config import TrainConfig
from paceline.utils import integer

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models import ModelInfo


@documented
@dataclass(frozen=True, kw_only=True)
class M2R2Config(TrainConfig):
    """Says how fast the stream is, and how large its adapters are."""

    stream_rate: int = option(4, "Of m2r2: one of so many layers runs.", low=1)
    adapter_rank: int = option(64, "Of m2r2's adapters.", low=1, high=4096)


class M2R2Trainer(NextTokenTrainer):
    """Trains the adapters; at first they change nothing.

    Args:
        folder: of the target's checkpoint. layers: how many it has. rows: as above.
    Raises:
        CapabilityError: a checkpoint whose layers are not those of a causal model of Hugging Face.
    """

    name: ClassVar[str] = "m2r2"
    config_class: ClassVar[type[TrainConfig]] = M2R2Config

    def __init__(self, folder: Path, layers: int, config: M2R2Config, rows: Tensor) -> None:
        super().__init__(rows, config.depths)
        self.layers, self.stream_rate = layers, config.stream_rate
        runs, width, rank = stream_layers(layers, config.stream_rate), rows.shape[1], config.adapter_rank
        model, self.embed = sliced(folder, runs)
        self.model = (model.requires_grad_(False),)  # in a tuple: no part of what is trained and kept
        sizes = {"down": (width, rank), "up": (rank, width)}
        self.steps = nn.ModuleList([
            nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
            for _ in runs
        ])  # fmt: skip
        for step in self.steps:
            nn.init.zeros_(cast(nn.Linear, cast(nn.ModuleDict, step)["up"]).weight)

    @classmethod
    def check(cls, target: ModelInfo, config: TrainConfig) -> None:
        assert isinstance(config, M2R2Config)
        integer("stream_rate", config.stream_rate, 1, target.num_layers)

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[M2R2Trainer, TargetView]:
        """See `Trainer.init`; it learns the whole vocabulary."""
        assert isinstance(config, M2R2Config)
        layers, rate = llm.runner.info.num_layers, config.stream_rate
        ends = tuple(min(layer + rate, layers) - 1 for layer in stream_layers(layers, rate))
        every = torch.arange(llm.runner.info.vocab_size)
        view = TargetView(llm.runner, ends, every, keep_bytes=config.feature_cache_bytes)
        return cls(llm.folder, layers, config, view.rows), view

    def states(self, batch: Batch) -> Tensor:
        return self.streamed(batch)[-1]

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        tokens = (batch.columns.flatten() >= 0).nonzero().squeeze(1)
        *behind, normed = self.streamed(batch)
        found = normed.flatten(0, 1)[tokens - 1]
        said = self.soft_targets(batch).loss(found, self.rows, tokens) / max(1, len(tokens))
        return said + self.distances(batch, behind).mean()

    def distances(self, batch: Batch, behind: list[Tensor]) -> Tensor:
        """(steps,) squared distances of the stream from the target's states, over the latter's squared length, on
        average over the tokens.

        Args:
            behind: (b, t, d) of the stream, behind each step.
        """
        here = batch.documents >= 0
        true = batch.taps.chunk(len(self.steps), -1)
        apart = [
            ((ours[here] - its[here]) / root_mean_square(its[here])).square().mean()
            for ours, its in zip(behind, true, strict=True)
        ]
        return torch.stack(apart)

    def streamed(self, batch: Batch) -> list[Tensor]:
        """(b, t, d) states of the stream behind each step, and at last behind the final norm, too."""
        model, true = self.model[0].to(batch.tokens.device), batch.taps.chunk(len(self.steps), -1)
        behind, length = list[Tensor](), batch.tokens.shape[1]

        def passed(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            behind.append(self._moved(len(behind), output[:, length:]))
            return torch.cat((true[len(behind) - 1], behind[-1]), 1)

        handles = [layer.register_forward_hook(passed) for layer in cast(nn.ModuleList, model.layers)]
        try:
            embedded = embedding_of(self.embed, batch).repeat(1, 2, 1)
            normed = seeing(model, embedded, seen(batch), batch.positions.repeat(1, 2))
        finally:
            for handle in handles:
                handle.remove()
        return [*behind, normed[:, length:]]

    def _moved(self, step: int, states: Tensor) -> Tensor:
        """(b, t, d) as `RateAdapters.moved`."""
        adapter, size = cast(nn.ModuleDict, self.steps[step]), root_mean_square(states)
        moved: Tensor = states + size * adapter["up"](F.silu(adapter["down"](states / size)))
        return moved

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        dtype = llm.runner.info.dtype
        tensors = {name: parameter.to(dtype) for name, parameter in self.named_parameters()}
        write_rate_adapters(folder, tensors, rate=self.stream_rate, num_layers=self.layers, facts=facts)

    def speculative_config(self, folder: Path) -> dict[str, Any]:
        return {"method": "m2r2", "model": str(folder)}


def seen(batch: Batch) -> Tensor:
    """(b, 2 t, 2 t) bool: rows of the target's states see these up to their own, those of the stream the states before
    their own, and themselves.
    """
    states, itself = batch.visible(), torch.eye(batch.tokens.shape[1], dtype=torch.bool, device=batch.tokens.device)
    of_states = torch.cat((states, torch.zeros_like(states)), -1)
    of_stream = torch.cat((states & ~itself, itself.expand_as(states)), -1)
    return torch.cat((of_states, of_stream), 1)
