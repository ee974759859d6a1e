"""What a denoiser learns from itself to need fewer calls: certainty-forcing (dParallel) and discrete-space consistency
(CD4LM).

Certainty-forcing: of one block of the answer, each slot is masked with probability 1/2, and in a second view the other
ones are; blocks before it are clean, those after it masked. A view costs the cross-entropy of the block's masked slots
and `beta` times the mean entropy of those predicted right: a wrong prediction is never made more certain.
Source: dParallel: Learnable Parallel Decoding for dLLMs (arXiv:2509.26488) and its code; there a batch is a single
text.

Consistency: one order of the answer's slots; the student sees all but its first k_s, the teacher all but its first k_t
<= k_s, so that the student learns to say with fewer slots what the teacher says with more, and what stands there.
Source: CD4LM, https://github.com/yihao-liang/CDLM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.bundled_diffusion.losses import Batch
from recipes.bundled_diffusion.model import Net

BETA, CERTAINTY_TEMPERATURE, MASK_RATE = 2.0, 0.5, 0.5
CONSISTENCY_TEMPERATURE, MOST = 2.0, 5.0
FIRST_WEIGHT, LAST_WEIGHT, CONSTANT_SHARE = 0.9, 0.5, 0.1
Visible = Literal["teacher", "data", "skip"]


@dataclass(frozen=True, slots=True)
class Views:
    """Two masks of one block of each text.

    Attributes:
        first, second: (b, n) bool; together the block's slots, none in both.
        later: (b, n) slots of the blocks after it, masked in both views and not counted.
    """

    first: Tensor
    second: Tensor
    later: Tensor


def block_views(batch: Batch, block_length: int, generator: torch.Generator, rate: float | None = MASK_RATE) -> Views:
    """A block of each text, any with the same probability, counted from its prompt's end; the last may be shorter.

    Args:
        rate: share of the block that the first view masks; None draws it anew for each text, uniformly from 0..1
            (ours).
    """
    block = torch.div(batch.slots - batch.start[:, None], block_length, rounding_mode="floor")
    count = -torch.div(batch.start - batch.length, block_length, rounding_mode="floor")
    chosen = torch.minimum((torch.rand(len(count), generator=generator) * count).long(), count - 1)[:, None]
    own = batch.answer & (block == chosen)
    share = torch.rand(len(count), 1, generator=generator) if rate is None else rate
    drawn = torch.rand(own.shape, generator=generator) < share
    return Views(own & drawn, own & ~drawn, batch.answer & (block > chosen))


def entropy(logits: Tensor) -> Tensor:
    """(k,) nats of (k, v) logits."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def certainty(
    logits: Tensor, targets: Tensor, *, beta: float = BETA, temperature: float = CERTAINTY_TEMPERATURE
) -> Tensor:
    """Of one view: mean cross-entropy, and `beta` times the mean entropy at `temperature` where the likeliest token is
    right.

    Args:
        logits: (k, v) of the masked slots of the block. targets: (k,).
    """
    if not len(targets):
        return logits.sum() * 0
    loss = F.cross_entropy(logits, targets)
    right = logits.argmax(-1) == targets
    if beta == 0 or not right.any():
        return loss
    return loss + beta * entropy(logits[right] / temperature).mean()


def dparallel_loss(
    net: Net,
    batch: Batch,
    generator: torch.Generator,
    *,
    block_length: int,
    beta: float = BETA,
    temperature: float = CERTAINTY_TEMPERATURE,
    rate: float | None = MASK_RATE,
) -> Tensor:
    """The sum over both views, in one pass; with `beta` 0 it is masked cross-entropy, block after block."""
    views = block_views(batch, block_length, generator, rate)
    masks = torch.cat((views.first, views.second))
    twice = Batch(batch.ids.repeat(2, 1), batch.start.repeat(2), batch.length.repeat(2))
    logits, own = _logits(net, twice, masks | views.later.repeat(2, 1), masks), int(views.first.sum())
    targets = twice.ids[masks]
    halves = ((logits[:own], targets[:own]), (logits[own:], targets[own:]))
    first, second = (certainty(*half, beta=beta, temperature=temperature) for half in halves)
    return first + second


def mask_counts(length: Tensor, student: Tensor, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """How many of `length` answer slots student and teacher do not see; short answers are guarded.

    Args:
        length: (b,). student: (b,) share of the student's masks. ratio: (b,) of the teacher's share to it, before its
            bounds.
    Returns:
        (b,) the student's, (b,) the teacher's, never more.
    """
    student, length = student.double(), length.long()
    teacher = (student * ratio.double()).clamp(0.10, 0.60)
    student = torch.where(length < 20, student.clamp(max=0.5), student)
    least = torch.maximum(torch.tensor(2), (length / 10).ceil().long())
    hidden = torch.maximum((length * student).long(), least)
    hidden = torch.minimum(torch.where(length <= 10, 2, hidden), length)
    return hidden, torch.minimum(torch.where(length <= 10, 1, (length * teacher).long()), hidden)


def nested_masks(free: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(b, n) what the student does not see, and a part of it that the teacher does not see either; nothing outside
    `free`.
    """
    length, b = free.sum(1), len(free)
    student = 0.40 + 0.50 * torch.rand(b, generator=generator)
    ratio = 0.30 + 0.40 * torch.rand(b, generator=generator)
    order = torch.rand(free.shape, generator=generator).masked_fill(~free, 2.0).argsort(1).argsort(1)
    hidden, deeper = mask_counts(length, student, ratio)
    return free & (order < hidden[:, None]), free & (order < deeper[:, None])


def consistency_weight(done: float) -> float:
    """The weight of the teacher's word after a share `done` of the run: constant at first, then a cosine fall."""
    if done < CONSTANT_SHARE:
        return FIRST_WEIGHT
    fall = 0.5 * (1 + math.cos(math.pi * min(1.0, (done - CONSTANT_SHARE) / (1 - CONSTANT_SHARE))))
    return LAST_WEIGHT + (FIRST_WEIGHT - LAST_WEIGHT) * fall


def consistency(
    student: Tensor,
    teacher: Tensor,
    targets: Tensor,
    *,
    weight: float,
    temperature: float = CONSISTENCY_TEMPERATURE,
    counted: Tensor | None = None,
) -> Tensor:
    """weight * T^2 * KL(teacher || student at T) + (1 - weight) * cross-entropy: means over slots, each cut at MOST.

    Args:
        student: (k, v) logits of the slots that the student does not see. teacher: (k, v) probabilities at T. targets:
            (k,).
        counted: (k,) slots of the first term; all by default.
    """
    log_q = (student / temperature).log_softmax(-1)
    if counted is not None:
        teacher, log_q = teacher[counted], log_q[counted]
    apart = F.kl_div(log_q, teacher, reduction="batchmean") if len(teacher) else student.sum() * 0
    data = F.cross_entropy(student, targets)
    return weight * (temperature**2 * apart).clamp(0, MOST) + (1 - weight) * data.clamp(0, MOST)


def dscd_loss(
    net: Net,
    teacher: Net,
    batch: Batch,
    generator: torch.Generator,
    *,
    weight: float,
    temperature: float = CONSISTENCY_TEMPERATURE,
    visible: Visible = "teacher",
) -> Tensor:
    """Of one batch under masks drawn now.

    Args:
        visible: what the teacher is taken to say of a slot that it sees: its own logits there, the token that stands
            there, or nothing, so that the first term has only slots that neither sees.
    """
    hidden, deeper = nested_masks(batch.answer, generator)
    logits, targets, unseen = _logits(net, batch, hidden, hidden), batch.ids[hidden], deeper[hidden]
    with torch.no_grad():
        said = (_logits(teacher, batch, deeper, hidden) / temperature).softmax(-1)
        if visible == "data":
            said = torch.where(unseen[:, None], said, F.one_hot(targets, said.shape[-1]).to(said.dtype))
    counted = unseen if visible == "skip" else None
    return consistency(logits, said, targets, weight=weight, temperature=temperature, counted=counted)


@torch.no_grad()
def copied(net: Net, batch: Batch, generator: torch.Generator) -> float:
    """Share of the answer's visible slots whose likeliest token is the one that stands there, under the teacher's
    masks.
    """
    hidden, deeper = nested_masks(batch.answer, generator)
    rows = hidden & ~deeper
    return float((_logits(net, batch, deeper, rows).argmax(-1) == batch.ids[rows]).float().mean())


def _logits(net: Net, batch: Batch, masked: Tensor, rows: Tensor) -> Tensor:
    """(k, v) at `rows`, where `masked` is not seen."""
    logits: Tensor = net(batch.ids.masked_fill(masked, net.spec.mask_token_id), batch.slots, batch.seen, rows)
    return logits if logits.dtype == torch.float64 else logits.float()
