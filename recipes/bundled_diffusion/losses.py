"""What the bundled denoisers are trained on: masked cross-entropy, over whole canvases or block by block.

`plain_loss` is LLaDA's objective (arXiv:2502.09992) in its form of less variance: of G answer slots, exactly l ~
U{1..G} are masked, and the loss is G / l times their cross-entropy over G; it bounds the negative log-likelihood per
slot from above. `block_loss` is that of block diffusion (arXiv:2503.09573) in one pass over [clean ; noisy]: a noisy
block sees itself and the clean blocks before it, and every block has its own number of masks. Only those noisy blocks
that hold answer slots are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.bundled_diffusion.model import Net


@dataclass(frozen=True, slots=True)
class Batch:
    """Clean texts side by side.

    Attributes:
        ids: (b, n) int64, anything beyond a text's length.
        start: (b,) first answer slot.
        length: (b,) slots of the text.
    """

    ids: Tensor
    start: Tensor
    length: Tensor

    @property
    def slots(self) -> Tensor:
        """(b, n) the slot of each place."""
        return torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)

    @property
    def answer(self) -> Tensor:
        """(b, n) True at slots that may be masked."""
        return (self.slots >= self.start[:, None]) & (self.slots < self.length[:, None])

    @property
    def seen(self) -> Tensor:
        """(b, 1, 1, n) True at slots of the text, as a Net takes who sees whom."""
        return (self.slots < self.length[:, None])[:, None, None, :]


def draw_masks(free: Tensor, group: Tensor, groups: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Masks of a uniform number of the free slots of each group, and the weight of each masked slot.

    Args:
        free: (b, n) slots that may be masked. group: (b, n) of each slot, in 0..groups-1.
    Returns:
        masked (b, n) bool; weight (b, n), such that the weights of a group's masks sum to its free slots.
    """
    noise = torch.rand(free.shape, generator=generator).masked_fill(~free, 2.0)
    masked, weight = torch.zeros_like(free), torch.zeros(free.shape)
    for g in range(groups):
        own = free & (group == g)
        size = own.sum(1)
        count = (torch.rand(len(free), generator=generator) * size).long() + 1
        ranks = noise.masked_fill(~own, 3.0).argsort(1).argsort(1)
        chosen = own & (ranks < count[:, None])
        masked |= chosen
        weight += chosen * (size / count)[:, None]
    return masked, weight


def plain_loss(net: Net, batch: Batch, generator: torch.Generator) -> Tensor:
    """Nats a slot, an upper bound in expectation."""
    free = batch.answer
    masked, weight = draw_masks(free, torch.zeros_like(batch.slots), 1, generator)
    noisy = batch.ids.masked_fill(masked, net.spec.mask_token_id)
    logits = net(noisy, batch.slots, batch.seen, masked)
    return _weighed(logits, batch.ids[masked], weight[masked], free)


def _weighed(logits: Tensor, targets: Tensor, weight: Tensor, free: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * weight).sum() / free.sum()


def two_halves(slots: Tensor, valid: Tensor, noisy: Tensor, block_length: int) -> Tensor:
    """Who sees whom in one pass over clean and noisy copies (b, 1, t, t).

    Clean slots see clean blocks up to their own, noisy ones their own noisy block and the clean blocks before it.
    """
    block = slots // block_length
    ours, theirs = block[:, :, None], block[:, None, :]
    from_noisy, to_noisy = noisy[:, :, None], noisy[:, None, :]
    seen = torch.where(from_noisy, torch.where(to_noisy, ours == theirs, theirs < ours), ~to_noisy & (theirs <= ours))
    itself = torch.eye(slots.shape[1], dtype=torch.bool, device=slots.device)
    return ((seen & valid[:, None, :]) | itself)[:, None]


def block_loss(net: Net, batch: Batch, generator: torch.Generator) -> Tensor:
    """Nats a slot, an upper bound in expectation, of the block-causal model."""
    length = net.spec.block_length
    assert length is not None
    free, block = batch.answer, batch.slots // length
    masked, weight = draw_masks(free, block, int(block.max()) + 1, generator)
    noisy = batch.ids.masked_fill(masked, net.spec.mask_token_id)
    first = int((batch.start // length * length).min())  # prompts alone need no noisy copy
    halves = [torch.cat((a, b[:, first:]), 1) for a, b in ((batch.ids, noisy), (batch.slots, batch.slots))]
    is_noisy = torch.arange(halves[0].shape[1]).expand_as(halves[0]) >= batch.ids.shape[1]
    seen = two_halves(halves[1], halves[1] < batch.length[:, None], is_noisy, length)
    rows = torch.cat((torch.zeros_like(masked), masked[:, first:]), 1)
    return _weighed(net(halves[0], halves[1], seen, rows), batch.ids[masked], weight[masked], free)
