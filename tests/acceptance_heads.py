"""Acceptance heads of random weights, for draft models of a width."""

from __future__ import annotations

import torch

from paceline.models.heads import AcceptanceHead


def acceptance_head(hidden: int = 8, blocks: int = 2, seed: int = 0, **facts: object) -> AcceptanceHead:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    maps = [(drawn(hidden, hidden) * hidden**-0.5, drawn(hidden)) for _ in range(blocks)]
    return AcceptanceHead(maps, (drawn(2, hidden), drawn(2)), facts)
