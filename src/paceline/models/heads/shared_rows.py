"""The rows of a target's head, read off what it makes of unit vectors, so that any runner with a head can give them."""

from __future__ import annotations

from typing import Final

import torch

from paceline.models.base import HasHead, ModelInfo

AT_ONCE: Final = 64
"""Unit vectors that the head is asked of at once."""


@torch.inference_mode()
def target_rows(target: HasHead, info: ModelInfo, tokens: torch.Tensor) -> torch.Tensor:
    """(n, hidden) rows of the tokens (n,), in the target's dtype."""
    units = torch.eye(info.hidden_size, device=info.device, dtype=info.dtype)
    columns = [target.head(block, norm=False)[:, tokens] for block in units.split(AT_ONCE)]
    return torch.cat(columns).T.contiguous()
