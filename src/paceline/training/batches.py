"""Texts as rows of tokens: several documents a row, which do not see each other, with the target's states of all.

Axes: b = rows, t = tokens of a row, d = hidden size of the target, n = layers whose states are read, v = tokens of the
draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from paceline.models.heads import target_rows
from paceline.training.answers import TrainingText
from paceline.training.shown import Shown
from paceline.training.state_shards import States, StateShards

if TYPE_CHECKING:
    from paceline.models import Runner

AT_ONCE: Final = 8
"""Documents whose states are computed in one pass."""

PAD: Final = -1
"""Document of positions that hold no token."""


@dataclass(frozen=True, slots=True)
class Document:
    """Holds one text as token ids, and says which of them are learned.

    Attributes:
        tokens: its ids. first: the first one that is learned, behind the prompt.
        text: the id of the `TrainingText` that it was made of.
    """

    tokens: tuple[int, ...]
    first: int
    text: str = ""


def documents_of(answers: Sequence[TrainingText], longest: int) -> list[Document]:
    """Answers behind their prompts, cut to `longest` tokens; those of which nothing is left to learn are left out."""
    documents = [
        Document(tuple(text.prompt + text.answer)[:longest], max(2, len(text.prompt)), text.id) for text in answers
    ]
    return [document for document in documents if len(document.tokens) > document.first]


def pieces(texts: Sequence[TrainingText], longest: int) -> list[Document]:
    """Whole texts as documents of at most `longest` tokens each, one behind the other."""
    found = []
    for text in texts:
        tokens = tuple(text.prompt + text.answer)
        parts = [tokens[start : start + longest] for start in range(0, len(tokens), longest)]
        found += [Document(part, 2, text.id) for part in parts if len(part) > 2]
    return found


def packed(documents: Sequence[Document], length: int) -> list[list[Document]]:
    """Rows of documents with at most `length` tokens: each goes to the first row that has room, the longest first.

    The order depends on the documents alone. Source: first-fit decreasing bin packing.
    """
    rows: list[list[Document]] = []
    room: list[int] = []
    for document in sorted(documents, key=lambda document: (-len(document.tokens), document.tokens)):
        size = len(document.tokens)
        at = next((i for i, left in enumerate(room) if left >= size), None)
        if at is None:
            at = len(rows)
            rows.append([])
            room.append(length)
        rows[at].append(document)
        room[at] -= size
    return rows


@dataclass(frozen=True, slots=True)
class Batch:
    """Holds packed rows of documents with all that a loss may read.

    Attributes:
        tokens: (b, t) int64; documents: (b, t) int64, PAD where there is none; positions: (b, t) int64 in the document.
        columns: (b, t) int64 place of each token in the draft vocabulary where it is to be learned; -1 elsewhere.
        wanted: (b, t) bool, tokens that are to be learned, those that the draft vocabulary lacks included.
        embedded: (b, t, d) embeddings. taps: (b, t, n * d) states of the layers that are read. final: (b, t, d) states
            after the target's final norm.
    """

    tokens: Tensor
    documents: Tensor
    positions: Tensor
    columns: Tensor
    wanted: Tensor
    embedded: Tensor
    taps: Tensor
    final: Tensor

    def to(self, device: torch.device) -> Batch:
        """Copy all tensors to a device."""
        return type(self)(*(getattr(self, field.name).to(device) for field in fields(self)))

    def ahead(self, values: Tensor, steps: int) -> Tensor:
        """(b, t, ...) `values` of the token `steps` further on; zeros behind the row's end."""
        moved = torch.zeros_like(values)
        moved[:, : values.shape[1] - steps] = values[:, steps:]
        return moved

    def learned(self, steps: int) -> tuple[Tensor, Tensor]:
        """Where the token `steps` further on is learned, 2 or more, and so is the one that drafts begin with: (m,) flat
        positions, and (m,) its column, -1 where it has none.
        """
        inside = self.ahead(self.documents + 1, steps) == self.documents + 1
        places = (inside & self.ahead(self.wanted, 2) & self.ahead(self.wanted, steps)).flatten().nonzero().squeeze(1)
        return places, self.ahead(self.columns + 1, steps).flatten()[places] - 1

    def visible(self) -> Tensor:
        """(b, t, t) bool: what each position may see, itself and what comes before it in its document."""
        same = self.documents[:, :, None] == self.documents[:, None, :]
        return same & torch.ones(same.shape[-2:], dtype=torch.bool, device=same.device).tril()


@dataclass(frozen=True, slots=True)
class RecordedBatch(Batch):
    """Holds a batch with distributions of the target that were recorded, in place of those that follow from `final`.

    Attributes:
        chances: (m, v) float32, of the m tokens that are to be learned, over the draft vocabulary.
    """

    chances: Tensor

    @classmethod
    def of(cls, batch: Batch, chances: Tensor) -> RecordedBatch:
        """A batch with these."""
        return cls(**{field.name: getattr(batch, field.name) for field in fields(Batch)}, chances=chances)


class TargetView:
    """What training needs of a target: its states, embeddings and the rows of its head.

    Args:
        runner: of the target, with taps, head and embeddings.
        layers: whose states are read, beside those behind the final norm; None reads none at all.
        vocabulary: (v,) int64 ids of the draft vocabulary, ascending.
        keep_bytes: states of so many bytes are kept between epochs.
    Attributes:
        rows: (v, d) float32 of the head.
        shards: states on disk; None where there are none.
    """

    def __init__(self, runner: Runner, layers: Sequence[int] | None, vocabulary: Tensor, *, keep_bytes: int) -> None:
        self.runner, self.vocabulary = runner, vocabulary
        self.layers = tuple(layers or ())
        self.reads = layers is not None
        self.rows = target_rows(cast(Any, runner), runner.info, vocabulary).float().clone()
        self._column = torch.full((runner.info.vocab_size,), -1, dtype=torch.int64)
        self._column[vocabulary] = torch.arange(len(vocabulary))
        self._kept: dict[Document, tuple[Tensor, ...]] = {}
        self._left = keep_bytes
        self.shards: StateShards | None = None

    @property
    def parts(self) -> Sequence[int | str]:
        """What is read of a token beside its state behind the final norm, as it is called on disk."""
        return self.layers

    @property
    def width(self) -> int:
        """Numbers that are read of a token, beside those behind the final norm."""
        return len(self.layers) * self.runner.info.hidden_size

    def batch(self, rows: Sequence[Sequence[Document]], length: int) -> Batch:
        """Rows of at most `length` tokens, padded to it."""
        documents = [document for row in rows for document in row]
        return self.filled(rows, length, self.states_of(documents) if self.reads else {})

    def filled(
        self, rows: Sequence[Sequence[Document]], length: int, states: Mapping[Document, tuple[Tensor, ...]]
    ) -> Batch:
        """The same with given states, of taps and behind the final norm; none where none are read."""
        size = (len(rows), length)
        tokens, positions = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
        documents, wanted = torch.full(size, PAD), torch.zeros(size, dtype=torch.bool)
        d, device = self.runner.info.hidden_size, self.rows.device
        taps = torch.zeros(*size, self.width, device=device)
        final = torch.zeros(*size, d if self.reads else 0, device=device)
        for i, row in enumerate(rows):
            start = 0
            for number, document in enumerate(row):
                at = slice(start, start + len(document.tokens))
                tokens[i, at], positions[i, at] = torch.tensor(document.tokens), torch.arange(len(document.tokens))
                documents[i, at], wanted[i, start + document.first : at.stop] = number, True
                if self.reads:
                    taps[i, at], final[i, at] = states[document][:2]
                start = at.stop
        columns = torch.where(wanted, self._column[tokens], -1)
        embedded = self.runner.embed(tokens.flatten().tolist()).float().view(*size, d)  # type: ignore[attr-defined]
        return Batch(tokens, documents, positions, columns, wanted, embedded.clone(), taps, final)

    def identity(self) -> str:
        """Names the model with its weights, as it runs here: what it makes of a short text."""
        tokens = tuple(token % self.runner.info.vocab_size for token in range(1, 33))
        ((_, final, *_),) = self._computed([Document(tokens, 0)])
        return sha256(final.float().cpu().numpy().tobytes()).hexdigest()[:16]

    def keep(self, documents: Sequence[Document], shards: StateShards) -> None:
        """Compute what these shards do not have of some documents' states, as far as there is room for it."""
        if not self.reads:
            return
        missing = [document for document in dict.fromkeys(documents) if not shards.has(document.tokens)]
        total, done = sum(len(document.tokens) for document in missing), 0
        try:
            with Shown("states", total, unit="token") as shown:
                for start in range(0, len(missing), AT_ONCE):
                    part = missing[start : start + AT_ONCE]
                    for document, states in zip(part, self._computed(part), strict=True):
                        shards.put(document.tokens, cast("States", states))
                        done += len(document.tokens)
                    shown.update(done, f"{done} of {total} tokens")
        finally:
            shards.write()

    def embedding(self) -> Tensor:
        """(vocabulary, d) float32 embeddings of all tokens."""
        return self.runner.embed(range(self.runner.info.vocab_size)).float().clone()  # type: ignore[attr-defined, no-any-return]

    def states_of(self, documents: Sequence[Document]) -> dict[Document, tuple[Tensor, ...]]:
        """What is read of some documents, kept or computed: states of taps, states behind the final norm, and more."""
        by_document = {document: states for document in documents if (states := self._known(document)) is not None}
        missing = [document for document in dict.fromkeys(documents) if document not in by_document]
        for document, states in zip(missing, self._computed(missing), strict=True):
            by_document[document] = states
            size = sum(part.numel() * part.element_size() for part in states)
            if size <= self._left:
                self._kept[document], self._left = states, self._left - size
            elif self.shards is not None:
                self.shards.put(document.tokens, cast("States", states))
        return by_document

    def keeps(self, documents: Sequence[Document]) -> bool:
        """Whether what was read of all these is in memory."""
        return all(document in self._kept for document in documents)

    def _known(self, document: Document) -> tuple[Tensor, ...] | None:
        if document in self._kept or self.shards is None:
            return self._kept.get(document)
        return self.shards.get(document.tokens)

    def _computed(self, documents: Sequence[Document]) -> Iterator[tuple[Tensor, ...]]:
        if not documents:
            return
        last = self.runner.info.num_layers
        caches = [self.runner.open() for _ in documents]
        try:
            scores = self.runner.extend(caches, [document.tokens for document in documents], taps=(*self.layers, last))
        finally:
            for cache in caches:
                self.runner.release(cache)
        sizes = [len(document.tokens) for document in documents]
        layers = [scores.taps[layer].split(sizes) for layer in (*self.layers, last)]
        for parts in zip(*layers, strict=True):
            yield torch.cat((parts[-1][:, :0], *parts[:-1]), -1), parts[-1].clone()


def draft_vocabulary(documents: Sequence[Document], size: int, vocab_size: int, always: Sequence[int]) -> Tensor:
    """(v,) int64 the `size` tokens that are learned most often, and `always`, ascending; the lowest ids make up for
    what is not there.
    """
    learned = torch.tensor([token for document in documents for token in document.tokens[document.first :]])
    counts = torch.bincount(learned, minlength=vocab_size)
    counts[torch.tensor(list(always), dtype=torch.int64)] += len(learned)
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[: min(size, vocab_size)].sort().values
