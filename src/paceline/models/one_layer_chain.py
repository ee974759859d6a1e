"""Chains of drafts from a one-layer model in compiled code, for many sequences in one call.

In: the tables of models.one_layer_tables, caches, tokens to feed. Out: drafted tokens and their chances. Not here: compiled code
(models.kernels.draft), the same arithmetic step by step in NumPy (models.one_layer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from paceline.errors import ConfigError, DrafterError
from paceline.models.kernels import draft_frame as of
from paceline.models.kernels import frame as at
from paceline.models.kernels.program import ROWS
from paceline.models.one_layer_tables import MOST_FED, MOST_STEPS, OUT, DraftTables

if TYPE_CHECKING:
    from paceline.models.one_layer_cache import OneLayerCache

Found = tuple[list[int], list[float]]
Stop = Callable[[int, float], bool]

PAUSE: Final = 0.3
"""Compiled code asks whether to go on only where the chance of the path so far is no greater: above, the answer is nearly always
yes, and a token drafted in vain costs about as much as the question."""

_RECORD = of.SEQUENCE_FIELDS // at.FIELD
_STEPS, _PAUSE, _DONE = of.STEPS // at.FIELD, of.PAUSE // at.FIELD, of.DONE // at.FIELD


@dataclass(slots=True)
class _Chain:
    """One chain under construction.

    Attributes:
        feed: tokens to feed next. fed: length of the cache without drafted tokens. reach: chance of the path so far.
    """

    cache: OneLayerCache
    feed: Sequence[int]
    fed: int
    steps: int
    stop: Stop | None
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    reach: float = 1.0

    def take(self, tokens: Sequence[int], chances: Sequence[float]) -> bool:
        """Add tokens up to the first one behind which `stop` says stop, and set the cache back to them; whether to go on."""
        going = True
        for token, chance in zip(tokens, chances, strict=True):
            if not chance > 0.0:
                raise DrafterError("the draft model gave NaN; check its checkpoint")
            self.tokens.append(token)
            self.chances.append(chance)
            self.reach *= chance
            depth = len(self.tokens) + 1
            if depth > self.steps or (self.stop is not None and self.stop(depth, self.reach)):
                going = False
                break
        self.cache.length, self.feed = self.fed + len(self.tokens) - 1, self.tokens[-1:]
        return going


class Chains:
    """Drafts for up to `ROWS` sequences at once."""

    most_fed = MOST_FED

    def __init__(self, tables: DraftTables) -> None:
        self.tables = tables

    def once(
        self, caches: Sequence[OneLayerCache], feeds: Sequence[Sequence[int]], steps: int, pause: float
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Append `feeds`, then draft up to `steps` tokens of each row; stops where no row's chance exceeds `pause`.

        Caches must have room; all drafted tokens but the last are appended too. Returns (rows, tokens) and their chances.
        """
        tables = self.tables
        tables.ready()
        fed, records, data = tables.fed, tables.records, tables.data
        place = record = 0
        for cache, feed in zip(caches, feeds, strict=True):
            records[record], records[record + 1], records[record + 2] = cache.places
            records[record + 3], records[record + 5] = cache.length, len(feed)
            for i, token in enumerate(feed, place):
                fed[i] = token
            place, record = place + MOST_FED, record + _RECORD
        data[_STEPS], tables.data_floats[2 * _PAUSE] = steps, pause
        tables.run(of.CHAINS, len(caches))
        done = data[_DONE]
        for cache, feed in zip(caches, feeds, strict=True):
            cache.length += len(feed) + done - 1
        starts = range(0, len(caches) * OUT, OUT)
        drafted: list[list[int]] = [tables.drafted[start : start + done].tolist() for start in starts]
        sure: list[list[float]] = [tables.sure[2 * start : 2 * (start + done) : 2].tolist() for start in starts]  # type: ignore[misc]  # typeshed: always int
        return drafted, sure

    def draft(
        self, caches: Sequence[OneLayerCache], feeds: Sequence[Sequence[int]], steps: Sequence[int], stops: Sequence[Stop | None]
    ) -> list[Found]:
        """See `OneLayerRunner.draft_chains`; any number of sequences."""
        if len(caches) == 1 and stops[0] is None and steps[0] <= MOST_STEPS:
            return [self._alone(caches[0], feeds[0], steps[0])]
        each = zip(caches, feeds, steps, stops, strict=True)
        chains = [_Chain(cache, feed, cache.length + len(feed), most, stop) for cache, feed, most, stop in each]
        active, pause = chains, PAUSE if any(stop is not None for stop in stops) else 0.0
        while active:
            now, later = active[:ROWS], active[ROWS:]
            burst = min([MOST_STEPS, *(one.steps - len(one.tokens) for one in now)])
            for one in now:
                self._check(one.fed + len(one.tokens) + burst - 1)
                one.cache.reserve(one.fed + len(one.tokens) + burst - 1)
            answers = self.once([one.cache for one in now], [one.feed for one in now], burst, pause)
            active = [one for one, tokens, chances in zip(now, *answers, strict=True) if one.take(tokens, chances)] + later
        return [(one.tokens, one.chances) for one in chains]

    def _alone(self, cache: OneLayerCache, feed: Sequence[int], steps: int) -> Found:
        """One chain that nobody stops, without the bookkeeping of several: at this size it costs as much as a token."""
        tables, count, length = self.tables, len(feed), cache.length
        end = length + count + steps - 1
        self._check(end)
        cache.reserve(end)
        tables.ready()
        records, data = tables.records, tables.data
        records[0], records[1], records[2] = cache.places
        records[3], records[5] = length, count
        for i, token in enumerate(feed):
            tables.fed[i] = token
        data[_STEPS], tables.data_floats[2 * _PAUSE] = steps, 0.0
        tables.run(of.CHAINS, 1)
        done = data[_DONE]
        tokens: list[int] = tables.drafted[:done].tolist()
        chances: list[float] = tables.sure[: 2 * done : 2].tolist()  # type: ignore[assignment]  # typeshed: always int
        if not all(chance > 0.0 for chance in chances):
            raise DrafterError("the draft model gave NaN; check its checkpoint")
        cache.length = length + count + done - 1
        return tokens, chances

    def _check(self, length: int) -> None:
        if length > self.tables.context:
            raise ConfigError(f"position {length - 1} lies outside the context of {self.tables.context} tokens")
