"""A runner that speaks other token ids than the model inside it.

In: a runner, where each outer id goes and which column of its logits belongs to which outer id. Out: a runner of the
outer ids, whose logits are -inf for tokens that have no column. Not here: why ids differ (models.decoder.head_rows,
drafters.vocabularies).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import ConfigError
from paceline.models.base import Capabilities, Runner, SequenceCache
from paceline.tree import Scores

if TYPE_CHECKING:
    from paceline.models.decoder.head_rows import HeadRows
    from paceline.tree import TokenTree

Ids = npt.NDArray[np.int64]


class MappedRunner:
    """See `models.base.Runner`.

    Args:
        inner: the model.
        into: (u,) inner id of each outer id, -1 for those that the model cannot be fed; u may exceed `vocab_size`.
        columns: (k,) columns of the inner logits that are kept, None for all in order. tokens: (k,) their outer ids.
        vocab_size: outer ids that logits are given for.
    """

    def __init__(self, inner: Runner, into: Ids, columns: Ids | None, tokens: Ids, vocab_size: int) -> None:
        self.inner, self.into, self.tokens, self.vocab_size = inner, into, tokens, vocab_size
        able = inner.capabilities
        self.capabilities = Capabilities(trees=able.trees, taps=able.taps, fork=able.fork)
        self.info = replace(inner.info, vocab_size=vocab_size, fingerprint=f"{inner.info.fingerprint}-of-{vocab_size}")
        self._columns = None if columns is None else torch.from_numpy(columns).to(inner.info.device)
        self._tokens = torch.from_numpy(tokens).to(inner.info.device)

    @classmethod
    def of_head(cls, inner: Runner, rows: HeadRows) -> MappedRunner:
        """The ids of a model whose head was cut to `rows`."""
        return cls(inner, np.arange(rows.vocab_size), None, rows.kept, rows.vocab_size)

    def renamed(self, into: Ids, names: Ids, vocab_size: int) -> MappedRunner:
        """The same model under other ids again.

        Args:
            into: (u,) id of this runner for each new id, or -1. names: (v,) new id of each id of this runner, or -1.
        """
        inside = np.where(into < 0, -1, self.into[np.maximum(into, 0)])
        named = names[self.tokens]
        if (fine := named >= 0).all():
            return MappedRunner(self.inner, inside, self._kept(), named, vocab_size)
        held = np.arange(len(named)) if self._columns is None else self._kept()
        assert held is not None
        return MappedRunner(self.inner, inside, held[fine], named[fine], vocab_size)

    def _kept(self) -> Ids | None:
        return None if self._columns is None else self._columns.cpu().numpy()

    def open(self) -> SequenceCache:
        """A new, empty sequence."""
        return self.inner.open()

    def extend(
        self,
        caches: Sequence[SequenceCache],
        tokens: Sequence[Sequence[int]],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Scores:
        """See `Runner.extend`."""
        fed = [self.inside(own) for own in tokens]
        return self._outside(self.inner.extend(caches, fed, taps=taps, all_logits=all_logits))

    def score(
        self,
        caches: Sequence[SequenceCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        *,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> Scores:
        """See `Runner.score`."""
        fed = [tree.replace(tokens=self.into[tree.tokens].astype(np.int32)) if len(tree) else tree for tree in trees]
        return self._outside(self.inner.score(caches, self.inside(roots), fed, taps=taps, computed=computed))

    def inside(self, tokens: Sequence[int]) -> list[int]:
        """Inner ids.

        Raises:
            ConfigError: an id that the model has no place for.
        """
        if len(tokens) == 1 and 0 <= (token := tokens[0]) < len(self.into) and (only := int(self.into[token])) >= 0:
            return [only]
        ids = np.asarray(tokens, np.int64)
        if not ((ids >= 0) & (ids < len(self.into))).all() or (found := self.into[ids]).min(initial=0) < 0:
            raise ConfigError(
                f"{self.info.name} was fed a token that it does not have; ids must lie below {len(self.into)}"
            )
        whole: list[int] = found.tolist()
        return whole

    def _outside(self, scores: Scores) -> Scores:
        """Logits by outer id."""
        given = scores.logits if self._columns is None else scores.logits.index_select(1, self._columns)
        logits = given.new_full((len(given), self.vocab_size), float("-inf"))
        logits.index_copy_(1, self._tokens, given)
        return Scores(logits, scores.rows, scores.taps)

    def commit(self, caches: Sequence[SequenceCache], paths: Sequence[Sequence[int]]) -> None:
        """See `Runner.commit`."""
        self.inner.commit(caches, paths)

    def truncate(self, cache: SequenceCache, length: int) -> None:
        """See `Runner.truncate`."""
        self.inner.truncate(cache, length)

    def fork(self, cache: SequenceCache) -> SequenceCache:
        """See `Runner.fork`."""
        return self.inner.fork(cache)

    def release(self, cache: SequenceCache) -> None:
        """See `Runner.release`."""
        self.inner.release(cache)
