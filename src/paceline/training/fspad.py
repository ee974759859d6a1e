"""Training of FSPAD heads: EAGLE-1's, but that a state is sampled by the token behind it, and that the vector which is
aligned with the target's next state is not the one that the head reads (partial alignment distillation).

    s = f + down(SiLU(gate(e)) * up(f))           feature sampling; twice as wide as a state
    o = layer(fc([e; s]))
    loss = smooth L1(o + feature_proj(o), f') + 0.1 cross-entropy of the head's tokens on o

A head that was not trained is an EAGLE head that was not: `down` and `feature_proj` begin at zero. The paper shares no
code; the residual projection that decouples, the sampler's width and EAGLE's weights of the losses are our reading.

Source: Boosting lossless speculative decoding via feature sampling and partial alignment distillation
(arXiv:2408.15562).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.heads import HeadConfig
from paceline.training.eagle import EagleTrainer

if TYPE_CHECKING:
    from paceline.models import ModelInfo

WIDER: Final = 2
"""Width of the sampler over that of a state."""


class FspadTrainer(EagleTrainer):
    """Trains an FSPAD head."""

    name: ClassVar[str] = "fspad"

    def __init__(self, config: HeadConfig, rows: Tensor, depths: int = 5) -> None:
        super().__init__(config, rows, depths)
        d, wide = config.hidden_size, config.inner_size or config.hidden_size
        sizes = {"gate": (d, wide), "up": (d, wide), "down": (wide, d)}
        linear = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
        self.sampler = nn.ModuleDict(linear)
        self.feature_proj = nn.Linear(d, d, bias=False)
        nn.init.zeros_(linear["down"].weight)
        nn.init.zeros_(self.feature_proj.weight)

    @classmethod
    def config_of(cls, target: ModelInfo, layer: Mapping[str, Any], draft_vocab_size: int, depths: int) -> HeadConfig:
        eagle = super().config_of(target, layer, draft_vocab_size, depths)
        return replace(eagle, method="fspad", inner_size=WIDER * target.hidden_size)

    def fused(self, embedded: Tensor, states: Tensor) -> Tensor:
        chosen = F.silu(self.sampler["gate"](embedded)) * self.sampler["up"](states)
        sampled: Tensor = states + self.sampler["down"](chosen)
        return super().fused(embedded, sampled)

    def features(self, states: Tensor) -> Tensor:
        aligned: Tensor = states + self.feature_proj(states)
        return aligned
