"""Layouts of drafts besides a call for each of them, and what is changed of their logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from paceline.diffusion.base import NONE, CanvasPass, Layout
from paceline.diffusion.canvas import Canvas
from paceline.models import Call, Denoiser, Flags, Ints, SlotCache


class TreeLayout(Layout):
    """One call for all drafts under a mask that keeps them apart (tree attention), where they read the same slots.

    A call for each where they do not, and for one that stores. The copies share what is read from the cache; a slot
    keeps its position in each of them.

    Equal to the batch layout in exact arithmetic; products of other sizes may round otherwise.
    """

    def __init__(self, denoiser: Denoiser) -> None:
        self.own = denoiser.block_length if denoiser.attention == "block" else None

    def calls(self, drafts: Sequence[Canvas], plans: Sequence[CanvasPass], store: SlotCache | None) -> list[Call]:
        first = _apart(plans)
        calls = super().calls(drafts[:first], plans[:first], store)
        if first < len(plans):
            calls.append(self._along(drafts[first:], plans[first:], store))
        return calls

    def logits(self, outputs: list[torch.Tensor], plans: Sequence[CanvasPass]) -> list[torch.Tensor]:
        first = _apart(plans)
        if first == len(plans):
            return outputs
        return [*outputs[:first], *outputs[first].split([plan.predicted.size for plan in plans[first:]])]

    def _along(self, drafts: Sequence[Canvas], plans: Sequence[CanvasPass], store: SlotCache | None) -> Call:
        ids = np.concatenate([draft.tokens[plan.slots] for draft, plan in zip(drafts, plans, strict=True)])
        slots = np.concatenate([plan.slots for plan in plans])
        starts = np.cumsum([0, *(plan.slots.size for plan in plans[:-1])])
        wanted = [start + _wanted(plan) for start, plan in zip(starts, plans, strict=True)]
        mask = self._mask(plans, slots, _read(plans[0]))
        return Call(ids, slots, store, plans[0].read, mask=mask, wanted=np.concatenate(wanted))

    def _mask(self, plans: Sequence[CanvasPass], slots: Ints, read: Ints) -> Flags:
        """(q, r + q): each copy sees what is read, and itself."""
        copy = np.repeat(np.arange(len(plans)), [plan.slots.size for plan in plans])
        mask: Flags = np.concatenate(
            [np.ones((slots.size, read.size), np.bool_), copy[:, None] == copy[None, :]], axis=1
        )
        if self.own:
            keys = np.concatenate([read, slots])
            mask &= keys[None, :] // self.own <= slots[:, None] // self.own
        return mask


def _apart(plans: Sequence[CanvasPass]) -> int:
    """How many drafts, from the first, have a call of their own."""
    first = int(plans[0].write)
    along = plans[first:]
    shared = len(along) > 1 and all(np.array_equal(_read(plan), _read(along[0])) for plan in along)
    return first if shared else len(plans)


def _wanted(plan: CanvasPass) -> Ints:
    return np.arange(plan.slots.size) if plan.wanted is None else plan.wanted


def _read(plan: CanvasPass) -> Ints:
    return NONE if plan.read is None else plan.read


class BiasedLayout(Layout):
    """Adds a bias to the logits of each draft of one canvas.

    Args:
        inner: lays the drafts out.
        bias: token id -> what is added.
    """

    def __init__(self, inner: Layout, bias: Mapping[int, float]) -> None:
        self.inner, self.bias = inner, dict(bias)

    def calls(self, drafts: Sequence[Canvas], plans: Sequence[CanvasPass], store: SlotCache | None) -> list[Call]:
        return self.inner.calls(drafts, plans, store)

    def logits(self, outputs: list[torch.Tensor], plans: Sequence[CanvasPass]) -> list[torch.Tensor]:
        logits = []
        for rows in self.inner.logits(outputs, plans):
            biased = rows.clone()
            biased[:, list(self.bias)] += torch.tensor(list(self.bias.values()), dtype=rows.dtype, device=rows.device)
            logits.append(biased)
        return logits


class OpenedLayout(Layout):
    """Bars tokens that end a text before a slot that is given, so that the text reaches what stands there.

    Args:
        inner: lays the drafts out.
        ends: tokens that end the text.
        before: the first slot that may hold one of them.
    """

    def __init__(self, inner: Layout, ends: Sequence[int], before: int) -> None:
        self.inner, self.ends, self.before = inner, list(ends), before

    def calls(self, drafts: Sequence[Canvas], plans: Sequence[CanvasPass], store: SlotCache | None) -> list[Call]:
        return self.inner.calls(drafts, plans, store)

    def logits(self, outputs: list[torch.Tensor], plans: Sequence[CanvasPass]) -> list[torch.Tensor]:
        logits = []
        for rows, plan in zip(self.inner.logits(outputs, plans), plans, strict=True):
            early = torch.from_numpy(np.flatnonzero(plan.predicted < self.before)).to(rows.device)
            ends = torch.tensor(self.ends, device=rows.device)
            barred = rows.new_tensor(-torch.inf)
            logits.append(rows.index_put((early[:, None], ends[None, :]), barred, accumulate=True))  # NaN stays
        return logits
