"""`logit_bias` under diffusion decoding.

In: a canvas' layout, a bias by token. Out: a layout whose logits hold it, before anything looks at them. Not here: who
asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.diffusion.base import Plan
from paceline.diffusion.canvas import Canvas
from paceline.diffusion.loop import Layout
from paceline.models.denoiser import Call, SlotCache


class Biased(Layout):
    """Adds a bias to the logits of each draft of one canvas.

    Args:
        inner: lays the drafts out.
        bias: token id -> what is added.
    """

    def __init__(self, inner: Layout, bias: Mapping[int, float]) -> None:
        self.inner, self.bias = inner, dict(bias)

    def calls(self, drafts: Sequence[Canvas], plans: Sequence[Plan], store: SlotCache | None) -> list[Call]:
        """See `Layout`."""
        return self.inner.calls(drafts, plans, store)

    def logits(self, outputs: list[torch.Tensor], plans: Sequence[Plan]) -> list[torch.Tensor]:
        """See `Layout`."""
        found = []
        for rows in self.inner.logits(outputs, plans):
            biased = rows.clone()
            biased[:, list(self.bias)] += torch.tensor(list(self.bias.values()), dtype=rows.dtype, device=rows.device)
            found.append(biased)
        return found
