"""LoopServe: prompts are read along lines, and answers attend to a part of the text that is chosen anew as they grow.

*Prompts.* Of every chunk that is read each head attends to the columns and diagonals that hold most of the attention
of some of the chunk's queries (models.attention.attention_lines). A turn of a dialogue is read behind the turns before
it, whose keys and values are there, so that each turn finds lines of its own.

*Answers.* When the first token behind a prompt is scored, and again every `interval` tokens, the last queries say what
they attend to in the whole text, and each head keeps the tokens that get most. Rows attend to these and to all that
came since. Nothing is given up: what was left out is there again for the next choice.

Borders lie at fixed distances behind the prompt, and what is chosen at one depends on the text before it alone: rows of
a draft tree that lie behind a border choose by the queries on their own path. So drafts are verified against the tokens
that plain decoding with the same selection would write. Heads that share keys choose together, by the sum of what they
attend to. The paper leaves open how many tokens, how often and by how many queries; the defaults are choices of this
package. Which tokens of a prompt share a chunk depends on `max_num_batched_tokens` and on the requests beside it.

Source: LoopServe: An Adaptive Dual-phase LLM Inference Acceleration System for Multi-Turn Dialogues (arXiv:2507.13681).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from paceline.models.attention.attention_lines import attend_along, lines_of, shares_of
from paceline.models.attention.kv_selection import KVSelection, attend_rows, slots_of
from paceline.models.attention.segments import Segment
from paceline.models.attention.tree_attention import Masks, SequenceStep, WritingStep
from paceline.models.spec import AttentionShape, ModelSpec
from paceline.models.state.arena import Arena
from paceline.models.state.recent_queries import QueriesCache
from paceline.utils import integer, need, number

MOST_TOKENS: Final = 1 << 20


class LoopServe(KVSelection):
    """Reads prompts along lines, and chooses what answers attend to anew every so many tokens.

    Args:
        tokens: of the text before the last choice that each head attends to; a text that is no longer is attended to
            whole.
        interval: tokens from one choice to the next; None chooses once, behind the prompt.
        observed: last tokens before a choice whose queries make it, and which are always among `tokens`.
        coverage: share of the attention of a prompt's sampled queries that lines must hold; 1 reads prompts whole.
        sampled: queries of a chunk by which its lines are found.
    Raises:
        ConfigError: a value outside its range, or fewer `tokens` than `observed`.
    """

    name = "loopserve"

    def __init__(
        self,
        *,
        tokens: int = 1024,
        interval: int | None = 32,
        observed: int = 16,
        coverage: float = 0.95,
        sampled: int = 64,
    ) -> None:
        integer("tokens", tokens, 1, MOST_TOKENS)
        if interval is not None:
            integer("interval", interval, 1, MOST_TOKENS)
        integer("observed", observed, 1)
        need(observed <= tokens, "tokens", f"be at least observed = {observed}", tokens)
        number("coverage", coverage, 0.0, 1.0, "lie in 0..1")
        integer("sampled", sampled, 1)
        self.tokens, self.interval, self.observed = tokens, interval, observed
        self.coverage, self.sampled = coverage, sampled
        self.layers: frozenset[int] = frozenset()

    @property
    def key(self) -> str:
        """See `KVSelection`."""
        chosen = f"{self.tokens}-{self.interval or 'once'}-{self.observed}"
        return f"{self.name}-{chosen}-{self.coverage:g}-{self.sampled}"

    def prepare(self, spec: ModelSpec, device: torch.device, *, name: str) -> None:
        """See `KVSelection`."""
        super().prepare(spec, device, name=name)
        self.layers = frozenset(
            index for index, layer in enumerate(spec.layers) if layer.attention and layer.window is None
        )

    def cache(self, arena: Arena, prompt_length: int) -> QueriesCache:
        """See `KVSelection`."""
        return QueriesCache(arena, prompt_length, most=self.observed + (self.interval or self.observed))

    def step(self, shape: AttentionShape, masks: Masks, segment: Segment) -> WritingStep:
        """See `KVSelection`."""
        cache = segment.cache
        if segment.unit > 1 or not isinstance(cache, QueriesCache):
            return SequenceStep(shape, masks, segment)
        if segment.known:
            cache.begin_known()
            return ReadingStep(self, shape, masks, segment, cache)
        cache.begin_scored()
        return AnsweringStep(self, shape, masks, segment, cache)

    def border(self, first: int, position: int) -> int:
        """The last border that is not behind a position; `first` is the first one."""
        return first if self.interval is None else first + (position - first) // self.interval * self.interval


class NotingStep(ABC):
    """The rows of one sequence, which attend to everything and whose queries are noted. Axes as in `tree_attention`,
    m = tokens.
    """

    def __init__(
        self, method: LoopServe, shape: AttentionShape, masks: Masks, segment: Segment, cache: QueriesCache
    ) -> None:
        self._method, self._shape, self._masks = method, shape, masks
        self._segment, self._cache = segment, cache
        self._whole = SequenceStep(shape, masks, segment)

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        """See `SequenceStep.write`."""
        self._whole.write(layer, qkv)

    def attend(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See `AttentionStep`."""
        if layer not in self._method.layers:
            return self._whole.attend(layer, qkv, sinks)
        shape = self._shape
        queries = qkv.narrow(1, 0, shape.heads).view(-1, shape.groups, shape.kv_heads, shape.head_dim)
        self._note(layer, queries)
        if not self._chooses():
            return self._whole.attend(layer, qkv, sinks)
        self._whole.write(layer, qkv)
        return self._attend_to_part(layer, queries, sinks)

    @abstractmethod
    def _note(self, layer: int, queries: torch.Tensor) -> None:
        """Remember the queries (n, g, h, d)."""

    @abstractmethod
    def _chooses(self) -> bool:
        """Whether less than everything is attended to."""

    @abstractmethod
    def _attend_to_part(self, layer: int, queries: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """(n, g * h * d), with the rows' own keys and values in the cache."""

    def _keys_and_values(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(h, s, d) each of slots (s,)."""
        rows = self._cache.arena.layers[layer][slots].transpose(0, 1)
        return rows[: self._shape.kv_heads], rows[self._shape.kv_heads :]


class ReadingStep(NotingStep):
    """A chunk of known tokens."""

    def _note(self, layer: int, queries: torch.Tensor) -> None:
        self._cache.note_known(layer, queries)

    def _chooses(self) -> bool:
        return self._method.coverage < 1.0 and self._cache.length + self._segment.slots > self._method.tokens

    def _attend_to_part(self, layer: int, queries: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        rows, start = self._segment.rows, self._cache.length
        keys, values = self._keys_and_values(layer, slots_of(self._segment, 0, start + rows, queries.device))
        count = min(self._method.sampled, rows)
        sample = torch.linspace(0, rows - 1, count, device=queries.device).round_().long()
        seen = torch.arange(start + rows, device=queries.device)
        shares = shares_of(queries[sample], start + sample, keys, seen, self._shape)
        lines = lines_of(shares, start + sample, self._method.coverage)
        return attend_along(lines, queries, (keys, values), self._shape, sinks)


@dataclass(frozen=True, slots=True)
class Sight:
    """Rows of a pass that lie behind the same choice.

    Attributes:
        rows: which they are.
        border: position before which the choice is made.
        before, after: slots before the border and from it on, of what any of them sees.
        places: (before,) positions of the former.
        path: inputs before the border that have not been committed.
        mask: (rows, after) additive, what each sees of the latter.
    """

    rows: torch.Tensor
    border: int
    before: torch.Tensor
    after: torch.Tensor
    places: torch.Tensor
    path: tuple[int, ...]
    mask: torch.Tensor


class AnsweringStep(NotingStep):
    """Scored rows: a root with its tree."""

    def __init__(
        self, method: LoopServe, shape: AttentionShape, masks: Masks, segment: Segment, cache: QueriesCache
    ) -> None:
        super().__init__(method, shape, masks, segment, cache)
        deepest = cache.length + int(segment.depths.max())
        self._some = method.border(cache.begin_scored(), deepest) > method.tokens
        self._sights = list(self._find_sights()) if self._some else []

    def _find_sights(self) -> Iterator[Sight]:
        """The groups of rows."""
        segment, length, first = self._segment, self._cache.length, self._cache.begin_scored()
        depths, sees = segment.depths, segment.sees
        groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for row in range(segment.done, segment.slots):
            border = self._method.border(first, length + int(depths[row]))
            before = np.nonzero(sees[row] & (depths < border - length))[0]
            groups.setdefault((border, tuple(before.tolist())), []).append(row)
        device = self._masks.device
        slots = slots_of(segment, 0, length + segment.slots, device)
        for (border, path), rows in groups.items():
            own = np.nonzero(sees[rows].any(0) & (depths >= border - length))[0]
            committed = min(border, length)
            earlier = torch.cat((slots[:committed], slots[[length + one for one in path]]))
            places = torch.cat((torch.arange(committed), length + torch.from_numpy(depths[list(path)])))
            seen = np.concatenate((np.ones((len(rows), length - committed), np.bool_), sees[rows][:, own]), 1)
            mask = torch.zeros(seen.shape, dtype=self._masks.dtype)
            mask.masked_fill_(torch.from_numpy(~seen), -torch.inf)
            after = torch.cat((slots[committed:length], slots[(length + own).tolist()]))
            index = torch.tensor(rows, device=device) - segment.done
            yield Sight(index, border, earlier, after, places.to(device), path, mask.to(device))

    def _note(self, layer: int, queries: torch.Tensor) -> None:
        self._cache.note_scored(layer, queries, self._segment.done)

    def _chooses(self) -> bool:
        return self._some

    def _attend_to_part(self, layer: int, queries: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        out = queries.new_empty(len(queries), self._shape.heads * self._shape.head_dim)
        for sight in self._sights:
            out[sight.rows] = self._seen_by(layer, sight, queries[sight.rows], sinks)
        return out

    def _seen_by(self, layer: int, sight: Sight, queries: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """(n, g * h * d) attention of the rows (n, g, h, d) of a group."""
        keys, values = self._keys_and_values(layer, sight.after)
        old_keys, old_values = self._chosen(layer, sight)
        keys, values = torch.cat((old_keys, keys), 1), torch.cat((old_values, values), 1)
        mask = torch.nn.functional.pad(sight.mask, (old_keys.shape[1], 0))
        return attend_rows(queries, keys, values, mask, self._shape, sinks=sinks)

    def _chosen(self, layer: int, sight: Sight) -> tuple[torch.Tensor, torch.Tensor]:
        """(h, m, d) keys and values of what was chosen before a border, or of all that there is."""
        chosen = self._choice(layer, sight) if len(sight.before) > self._method.tokens else None
        if chosen is None:
            return self._keys_and_values(layer, sight.before)
        kv_heads, head_dim = self._shape.kv_heads, self._shape.head_dim
        kept = self._cache.arena.layers[layer].view(-1, head_dim)
        places = sight.before[chosen] * (2 * kv_heads) + torch.arange(kv_heads, device=chosen.device)[:, None]
        keys, values = (kept.index_select(0, at.flatten()) for at in (places, places + kv_heads))
        return keys.view(kv_heads, -1, head_dim), values.view(kv_heads, -1, head_dim)

    def _choice(self, layer: int, sight: Sight) -> torch.Tensor | None:
        """(h, m) rising, which of the positions before a border; None where no query before it is known."""
        cache = self._cache
        if not sight.path and (kept := cache.choices.get(layer, {}).get(sight.border)) is not None:
            return kept
        start = max(0, sight.border - self._method.observed)
        first, queries = cache.known(layer, start, min(sight.border, cache.length))
        asking = [] if queries is None else [queries]
        places = [] if queries is None else list(range(first, first + len(queries)))
        late = [one for one in sight.path if cache.length + self._segment.depths[one] >= start]
        if late:
            asking.append(cache.scored(layer, late))
            places += [cache.length + int(self._segment.depths[one]) for one in late]
        if not asking:
            return None
        keys, _ = self._keys_and_values(layer, sight.before)
        at = torch.tensor(places, device=keys.device)
        sums = shares_of(torch.cat(asking), at, keys, sight.places, self._shape).sum((1, 2))
        sums = sums.masked_fill_(sight.places >= start, torch.inf)
        chosen = sums.topk(self._method.tokens, sorted=False).indices.sort().values
        if not sight.path:
            cache.keep_choice(layer, sight.border, chosen)
        return chosen
