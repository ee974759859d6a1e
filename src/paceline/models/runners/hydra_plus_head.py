"""Hydra++: Hydra's heads, which read what a decoder layer makes of the target's states.

Source: Hydra: sequentially-dependent draft heads for Medusa decoding (arXiv:2402.05109).
"""

from __future__ import annotations

from paceline.models.heads.head_config import HeadConfig
from paceline.models.heads.hydra_head import HydraHead
from paceline.models.layers.own_weights import Weights
from paceline.models.runners.prefix_heads import PrefixHeads


class HydraPlusHead(PrefixHeads, HydraHead):
    """See `HydraHead`; with a prefix layer."""

    method = "hydra++"

    def _build(self, config: HeadConfig, weights: Weights) -> None:
        super()._build(config, weights)
        self._build_prefix(config, weights)
