"""Double Sparsity: each query attends to the tokens whose keys are largest in a few channels, and to no others.

Of a key's channels a few carry most of its products with queries, and they are the same ones in all texts: `paceline
analyze channels` finds them once (models.attention.channel_statistics). Those of every key, its *label*, are kept
beside the cache. A query is multiplied with all labels, and attends, with whole keys and values, to the tokens that
score highest: labels of a quarter of the channels and 256 tokens read a sixth of a text of 8,192 tokens.

Prompts are read with full attention; only passes that score tokens choose. Each query, so each row of a draft tree and
each head of it, chooses for itself, among what it may see, so that drafts are verified against the tokens that plain
decoding with the same selection would write. Channels are those of a key: query heads that share keys are averaged when
channels are chosen, where the paper keeps some for each query head.

Source: Post-Training Sparse Attention with Double Sparsity (arXiv:2408.07092).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

import torch

from paceline.models.attention.channel_statistics import read_channels
from paceline.models.attention.kv_selection import KVSelection, keys_between, slots_of
from paceline.models.attention.segments import Segment
from paceline.models.attention.tree_attention import Masks, SequenceStep, WritingStep, attention
from paceline.models.spec import AttentionShape, ModelSpec
from paceline.models.state.cache import NativeCache
from paceline.utils import integer, need

MOST_TOKENS: Final = 1 << 20

TOGETHER: Final = 16
"""Positions whose labels lie together, channel by channel, as compiled code reads them."""

READ: Final = 4096
"""Positions whose labels are read at a time, a multiple of TOGETHER."""


class DoubleSparsity(KVSelection):
    """Attends to the tokens that score highest in a few channels.

    Args:
        channels: the file that `paceline analyze channels` has written for this model.
        tokens: that each query attends to; a text that is no longer is attended to whole.
        label_channels: of each key, by which it is scored; None is a quarter of a head's.
        dense_layers: first layers that attend to everything, as layers with a window always do.
        sinks: first tokens of the text that are always among `tokens`.
        recent: last tokens of the text that are always among `tokens`, the query's own included.
    Raises:
        ConfigError: a value outside its range, or more tokens that are always there than `tokens`.
        CheckpointError: no channels in the file, or those of another model.
    """

    name = "double_sparsity"
    compiles = True

    def __init__(
        self,
        *,
        channels: str,
        tokens: int = 256,
        label_channels: int | None = None,
        dense_layers: int = 2,
        sinks: int = 4,
        recent: int = 16,
    ) -> None:
        integer("tokens", tokens, 1, MOST_TOKENS)
        integer("dense_layers", dense_layers, 0)
        integer("sinks", sinks, 0)
        integer("recent", recent, 1)
        need(sinks + recent <= tokens, "tokens", f"be at least sinks + recent = {sinks + recent}", tokens)
        if label_channels is not None:
            integer("label_channels", label_channels, 1)
        self.tokens, self.sinks, self.recent = tokens, sinks, recent
        self._file, self._count, self._dense = channels, label_channels, dense_layers
        self._labels: WeakKeyDictionary[NativeCache, Labels] = WeakKeyDictionary()
        self.channels: Mapping[int, torch.Tensor] = {}

    @property
    def key(self) -> str:
        """See `KVSelection`."""
        return f"{self.name}-{self.tokens}-{self._count or 'quarter'}-{self._dense}"

    def prepare(self, spec: ModelSpec, device: torch.device, *, name: str) -> None:
        """See `KVSelection`: reads the channels, (kv heads, label channels) int64 of each layer that chooses."""
        super().prepare(spec, device, name=name)
        count = max(1, spec.head_dim // 4) if self._count is None else self._count
        integer("label_channels", count, 1, spec.head_dim)
        chosen = read_channels(Path(self._file).expanduser(), spec, name=name)
        self.channels = {
            layer: ranked[:, :count].to(device).contiguous()
            for layer, ranked in chosen.items()
            if layer >= self._dense and spec.layers[layer].window is None
        }

    def held_bytes(self, tokens: int, itemsize: int) -> int:
        """See `KVSelection`: room for labels grows by as much as there is."""
        each = sum(channels.numel() for channels in self.channels.values()) * itemsize
        return 2 * -(-tokens // TOGETHER) * TOGETHER * each

    @property
    def held(self) -> int:
        """See `KVSelection`."""
        return sum(labels.kept.nbytes for labels in self._labels.values())

    def step(self, shape: AttentionShape, masks: Masks, segment: Segment) -> WritingStep:
        """See `KVSelection`."""
        self.forget(segment)
        if not self.chooses(segment):
            return SequenceStep(shape, masks, segment)
        return DoubleSparsityStep(self, shape, masks, segment, self.labels_of(segment))

    def forget(self, segment: Segment) -> None:
        """Forget the labels of tokens that were taken back; before every pass over a text, also one that reads all of
        it, since others may stand in their place when labels are next looked at.
        """
        if (labels := self._labels.get(segment.cache)) is not None:
            labels.valid = min(labels.valid, segment.cache.length)

    def labels_of(self, segment: Segment) -> Labels:
        """Those of the segment's text, as far as they have been read."""
        labels = self._labels.get(segment.cache)
        if labels is None:
            labels = self._labels[segment.cache] = Labels(self.channels)
        return labels

    def chooses(self, segment: Segment) -> bool:
        """Whether rows of a segment may see more than they are to attend to; known text is attended to whole."""
        return bool(self.channels) and not segment.known and segment.cache.length + segment.slots > self.tokens


class Labels:
    """The labels of one text by position, in the layers that choose, sixteen positions together.

    What lies behind the committed tokens may move when some of it is accepted, or be forgotten; so labels are valid up
    to the length that was committed when they were last read, and the rest is read again from the keys.

    Args:
        channels: layer -> (kv heads, label channels).

    Attributes:
        kept: (layers, kv heads, positions / 16, label channels, 16).
        valid: positions whose labels need not be read again, as far as these are committed still.
    """

    def __init__(self, channels: Mapping[int, torch.Tensor]) -> None:
        self._channels, self.valid = channels, 0
        self._index = torch.stack(list(channels.values()))
        self.kept = self._index.new_empty(0)

    def follow(self, segment: Segment) -> None:
        """Have the labels of all that is in the cache before the fed rows of a segment."""
        cache, stop = segment.cache, segment.cache.length + segment.done
        start = min(self.valid, cache.length) // TOGETHER * TOGETHER
        self._make_room(-(-stop // TOGETHER), cache.arena.kv)
        for first in range(start, stop, READ):
            self._read(segment, first, min(first + READ, stop))
        self.valid = cache.length

    def _make_room(self, blocks: int, like: torch.Tensor) -> None:
        before = self.kept
        if not len(before) or before.shape[2] < blocks:
            layers, heads, count = self._index.shape
            self.kept = like.new_zeros(layers, heads, 2 * blocks, count, TOGETHER)
            if len(before):
                self.kept[:, :, : before.shape[2]] = before

    def _read(self, segment: Segment, start: int, stop: int) -> None:
        arena = segment.cache.arena
        slots, (layers, heads, count) = slots_of(segment, start, stop, arena.kv.device), self._index.shape
        places = list(arena.keys)
        chosen = torch.tensor([places.index(layer) for layer in self._channels], device=arena.kv.device)
        keys = arena.kv[chosen[:, None], slots, :heads]
        found = keys.gather(3, self._index.unsqueeze(1).expand(-1, stop - start, -1, -1))
        found = torch.nn.functional.pad(found, (0, 0, 0, 0, 0, -(stop - start) % TOGETHER))
        by_block = found.view(layers, -1, TOGETHER, heads, count).permute(0, 3, 1, 4, 2)
        self.kept[:, :, start // TOGETHER : -(-stop // TOGETHER)] = by_block


class DoubleSparsityStep:
    """The rows of one sequence that choose. Axes: n = rows, g, h, d as in `tree_attention`, s = positions, c = label
    channels, m = tokens.
    """

    def __init__(
        self, method: DoubleSparsity, shape: AttentionShape, masks: Masks, segment: Segment, labels: Labels
    ) -> None:
        self._method, self._shape, self._masks, self._segment = method, shape, masks, segment
        self._whole, self._labels = SequenceStep(shape, masks, segment), labels
        self._stop = segment.cache.length + segment.slots
        self._sight: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        labels.follow(segment)

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        """See `SequenceStep.write`."""
        self._whole.write(layer, qkv)

    def attend(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See `AttentionStep`."""
        if layer not in self._method.channels:
            return self._whole.attend(layer, qkv, sinks)
        self._whole.write(layer, qkv)
        shape = self._shape
        queries = qkv.narrow(1, 0, shape.heads).view(-1, shape.groups, shape.kv_heads, shape.head_dim)
        return self._attend_to(layer, queries, self._choose(layer, queries), sinks)

    def _choose(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """(n, g, h, m) positions, rising, of queries (n, g, h, d)."""
        hidden, always, _ = self._seen()
        index = self._method.channels[layer]
        asked = queries.gather(3, index.expand(*queries.shape[:2], -1, -1)).permute(2, 0, 1, 3).flatten(1, 2)
        scores = self._scores(layer, asked, index).view(len(index), *queries.shape[:2], -1).permute(1, 2, 0, 3)
        scores = scores.masked_fill(always[:, None, None], torch.inf).masked_fill(hidden[:, None, None], -torch.inf)
        return scores.topk(self._method.tokens, sorted=False).indices.sort().values

    def _scores(self, layer: int, asked: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """(h, n * g, s) float32 scores of (h, n * g, c): by labels as far as these go, then by this pass's keys."""
        first = self._segment.cache.length + self._segment.done
        labels = self._labels.kept[list(self._method.channels).index(layer)]
        kept = torch.matmul(asked.unsqueeze(1), labels.narrow(1, 0, -(-first // TOGETHER)))
        kept = kept.transpose(1, 2).flatten(2)[..., :first]
        new = keys_between(self._segment, layer, first, self._stop)
        new = new.gather(2, index.unsqueeze(1).expand(-1, new.shape[1], -1))
        return torch.cat((kept, torch.matmul(asked, new.transpose(1, 2))), -1).float()

    def _attend_to(
        self, layer: int, queries: torch.Tensor, chosen: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """(n, g * h * d) attention of queries (n, g, h, d) over chosen positions (n, g, h, m)."""
        shape, (hidden, _, slots) = self._shape, self._seen()
        rows, groups, kv_heads, head_dim = queries.shape
        heads = torch.arange(kv_heads, device=chosen.device)[:, None]
        kept = self._segment.cache.arena.layers[layer].view(-1, head_dim)
        places = (slots[chosen] * (2 * kv_heads) + heads).flatten()
        by_query = (rows, groups * kv_heads, -1, head_dim)
        keys, values = (kept.index_select(0, at).view(by_query) for at in (places, places + kv_heads))
        unseen = hidden.gather(1, chosen.flatten(1)).view(rows, groups * kv_heads, 1, -1)
        mask = torch.zeros(unseen.shape, dtype=queries.dtype, device=unseen.device).masked_fill_(unseen, -torch.inf)
        by_row = None if sinks is None else sinks.t().reshape(-1, 1, 1)
        asked = queries.reshape(by_query)
        return attention(asked, keys, values, mask, shape, sinks=by_row).reshape(rows, shape.heads * head_dim)

    def _seen(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(n, s) what each row may not see and what it always reads, and the slots (s,); the same in all layers."""
        if self._sight is None:
            segment, method, device = self._segment, self._method, self._masks.device
            mask = self._masks.build(segment, 0, self._stop, None)
            own = segment.cache.length + torch.from_numpy(segment.depths).to(device)
            places = torch.cat((torch.arange(segment.cache.length, device=device), own))
            rows = torch.tensor(list(segment.positions()), device=device)[:, None]
            always = (places < method.sinks) | (places > rows - method.recent)
            self._sight = mask != 0, always, slots_of(segment, 0, self._stop, device)
        return self._sight
