"""Training of Dovetail heads: EAGLE-1's loss and unrolls, for several layers behind a gated fusion of state and token.

The layers behind the first add nothing at first, and the fusion begins with the state alone, so that a deeper head
begins where a shallow one does.

Source: Dovetail: a CPU/GPU heterogeneous speculative decoding for LLM inference (arXiv:2412.18934).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.config import documented, option
from paceline.models.heads import HeadConfig
from paceline.training.eagle import EagleTrainer
from paceline.training.layer import PrefixLayer, RMSNorm, TrainableDecoderLayer
from paceline.training.mtp import MtpLayer
from paceline.training.train_config import TrainConfig

if TYPE_CHECKING:
    from paceline.models import ModelInfo


@documented
@dataclass(frozen=True, kw_only=True)
class DovetailConfig(TrainConfig):
    """Says how deep a Dovetail head is."""

    num_layers: int = option(5, "Decoder layers of the head.", low=1, high=64)


class GatedFusion(nn.Module):
    """Weighs a state f and an embedding e against each other: z h1 + (1 - z) h2 of h1 = W1 f, h2 = SiLU(W2 norm(e)) and
    z = sigmoid(Wz [h1; h2]).

    Args:
        size: of both.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(size, eps)
        self.state, self.token = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        self.gate = nn.Linear(2 * size, size, bias=False)
        with torch.no_grad():  # z begins near a half, and what it halves is twice the state
            self.state.weight.mul_(0.1).add_(2.0 * torch.eye(size))
            self.gate.weight.mul_(0.1)

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        h1, h2 = self.state(states), F.silu(self.token(self.norm(embedded).to(states.dtype)))
        z = self.gate(torch.cat((h1, h2), -1)).sigmoid()
        fused: Tensor = z * h1 + (1 - z) * h2
        return fused


class DovetailTrainer(EagleTrainer):
    """Trains a head of several layers, whose states are those after the target's final norm."""

    name: ClassVar[str] = "dovetail"
    config_class: ClassVar[type[TrainConfig]] = DovetailConfig

    def make(self, config: HeadConfig) -> None:
        d, layer = config.hidden_size, config.layer
        self.fusion = GatedFusion(d, layer.get("rms_norm_eps") or 1e-6)
        later = (PrefixLayer(layer, d) for _ in range(config.num_layers - 1))
        self.layers = nn.ModuleList([MtpLayer(layer, d), *later])

    def fused(self, embedded: Tensor, states: Tensor) -> Tensor:
        made: Tensor = self.fusion(embedded, states)
        return made

    def attended(self, layer: TrainableDecoderLayer, x: Tensor) -> Tensor:
        normed: Tensor = cast(MtpLayer, layer).input_layernorm(x)
        return normed.to(x.dtype)

    @classmethod
    def config_of(cls, target: ModelInfo, layer: Mapping[str, Any], draft_vocab_size: int, depths: int) -> HeadConfig:
        return replace(super().config_of(target, layer, draft_vocab_size, depths), method="dovetail")

    @classmethod
    def sized(cls, head: HeadConfig, config: TrainConfig) -> HeadConfig:
        assert isinstance(config, DovetailConfig)
        return replace(super().sized(head, config), num_layers=config.num_layers)
