"""A target's states of what it wrote, together with the keys and values of the sources that it wrote it from.

Axes as in `batches`, besides: s = rows of a source, l = layers of the draft, g = key-value heads, e = their dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.models import Runner
from paceline.models.heads import target_bias
from paceline.models.runners import EncoderDecoderRunner
from paceline.training.answers import SourcePrompt
from paceline.training.batches import AT_ONCE, Batch, Document, TargetView
from paceline.training.shown import Shown


@dataclass(frozen=True, slots=True)
class SourceBatch(Batch):
    """Holds a batch and what its documents were written from.

    Attributes:
        memories: by row and document, (l, s, 2 * g, e): keys and then values.
    """

    memories: Sequence[Sequence[Tensor]]

    def to(self, device: torch.device) -> SourceBatch:
        """Copy all tensors to a device."""
        own = {field.name: getattr(self, field.name).to(device) for field in fields(Batch)}
        return SourceBatch(**own, memories=[[memory.to(device) for memory in row] for row in self.memories])


class SourceView(TargetView):
    """What training a draft on sources needs of a target.

    Args:
        target: with an encoder. vocabulary, keep_bytes: as of `TargetView`.
        sources: what each document's `text` was written from. layers: whose keys and values the draft reads.
    Attributes:
        rows: (v, d) of the head, or (v, d + 1) where it has a bias, by which the last state, a one, is multiplied.
        biased: whether it has.
    """

    def __init__(
        self,
        target: EncoderDecoderRunner,
        vocabulary: Tensor,
        *,
        sources: Mapping[str, SourcePrompt],
        layers: Sequence[int],
        keep_bytes: int,
    ) -> None:
        super().__init__(cast(Runner, target), (), vocabulary, keep_bytes=keep_bytes)
        self.target, self.sources, self._read = target, sources, tuple(layers)
        bias = target_bias(target, target.info, vocabulary)
        self.biased = bias is not None
        if bias is not None:
            self.rows = torch.cat((self.rows, bias.float()[:, None]), 1)

    def batch(self, rows: Sequence[Sequence[Document]], length: int) -> SourceBatch:
        """See `TargetView.batch`."""
        states = self.states_of([document for row in rows for document in row])
        batch = self.filled(rows, length, states)
        values = {field.name: getattr(batch, field.name) for field in fields(Batch)}
        if self.biased:
            values["final"] = F.pad(batch.final, (0, 1), value=1.0)
        memories = [[states[document][2].float() for document in row] for row in rows]
        return SourceBatch(**values, memories=memories)

    def read_ahead(self, documents: Sequence[Document]) -> None:
        """Read the sources of documents as far as there is memory for them; others are read when they are wanted."""
        with Shown("sources", len(documents)) as shown:
            for start in range(0, len(documents), AT_ONCE):
                part = documents[start : start + AT_ONCE]
                self.states_of(part)
                if not self.keeps(part):
                    return
                done = start + len(part)
                shown.update(done, f"{done} of {len(documents)}")

    def _computed(self, documents: Sequence[Document]) -> Iterator[tuple[Tensor, ...]]:
        for start in range(0, len(documents), AT_ONCE):
            yield from self._read_together(documents[start : start + AT_ONCE])

    @torch.inference_mode()
    def _read_together(self, documents: Sequence[Document]) -> Iterator[tuple[Tensor, ...]]:
        """Of each document no taps, (n, d) states behind the final norm, and its source as `SourceBatch.memories` has
        it, in half the size.
        """
        target, last = self.target, self.target.info.num_layers
        given = [self.sources[document.text].read().inputs for document in documents]
        caches = [target.open(0, inputs) for inputs in given]
        try:
            target.encode(caches)
            scores = target.extend(caches, [document.tokens for document in documents], taps=(last,))
            memories = [target.memory_of(inputs) for inputs in given]
            kept = [torch.stack([memory.read(layer) for layer in self._read]).bfloat16() for memory in memories]
        finally:
            for cache in caches:
                target.release(cache)
        finals = scores.taps[last].split([len(document.tokens) for document in documents])
        for final, memory in zip(finals, kept, strict=True):
            yield final[:, :0].clone(), final.clone(), memory
