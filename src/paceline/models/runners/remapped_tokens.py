"""Models that speak other token ids than their weights were made for: a head cut to some tokens, and a runner that
translates ids.

Logits are -inf for tokens that have no column. A head of fewer rows is that of VocabTrim (arXiv:2506.22694); which
tokens are worth keeping is for drafters.vocab to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import ConfigError, PromptError
from paceline.models.abilities import context_of, input_kinds_of
from paceline.models.base import Runner, SequenceCache
from paceline.models.inputs import NO_INPUTS, Inputs
from paceline.models.spec import ModelSpec
from paceline.tree import Scores

if TYPE_CHECKING:
    from paceline.tree import TokenTree


Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Tokens that a head keeps.

    Attributes:
        kept: (k,) ascending ids. vocab_size: ids that the whole model has.
    """

    kept: Ids
    vocab_size: int

    @classmethod
    def of(cls, tokens: Sequence[int], vocab_size: int) -> HeadRows:
        """Those of `tokens` that a model of `vocab_size` tokens has.

        Raises:
            ConfigError: none of them.
        """
        kept = np.unique(np.asarray(tokens, np.int64))
        kept = kept[(kept >= 0) & (kept < vocab_size)]
        if not len(kept):
            raise ConfigError(
                f"a head must keep at least one of the {vocab_size} tokens of its model, got none; name others"
            )
        return cls(kept, vocab_size)

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """The shape of the model with this head, which is tied to nothing."""
        return replace(spec, vocab_size=len(self.kept), tied=False)

    def weights(self, name: str, weight: torch.Tensor, spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that take the place of a canonical one of the whole model."""
        if name != "head.weight":
            yield name, weight
        if name == "head.weight" or (name == "embed.weight" and spec.tied):
            yield "head.weight", weight[torch.from_numpy(self.kept).to(weight.device)]


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
        self.capabilities = inner.capabilities
        self.info = replace(inner.info, vocab_size=vocab_size, fingerprint=f"{inner.info.fingerprint}-of-{vocab_size}")
        self._columns = None if columns is None else torch.from_numpy(columns).to(inner.info.device)
        self._tokens = torch.from_numpy(tokens).to(inner.info.device)
        self.commit, self.truncate, self.fork, self.release = inner.commit, inner.truncate, inner.fork, inner.release
        self.input_kinds = input_kinds_of(inner)

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
        columns: Ids | None = None if self._columns is None else self._columns.cpu().numpy()
        if (fine := named >= 0).all():
            return MappedRunner(self.inner, inside, columns, named, vocab_size)
        held = np.arange(len(named)) if columns is None else columns
        return MappedRunner(self.inner, inside, held[fine], named[fine], vocab_size)

    def open(self, prompt_length: int = 0, inputs: Inputs = NO_INPUTS) -> SequenceCache:
        """See `Runner.open`."""
        return self.inner.open(prompt_length, self._inside_inputs(inputs))

    def most_tokens(self, inputs: Inputs) -> int:
        """See `TakesInputs.most_tokens`."""
        return context_of(self.inner, self._inside_inputs(inputs))

    def _inside_inputs(self, inputs: Inputs) -> Inputs:
        """The same with inner ids.

        Raises:
            PromptError: an id that the model has no place for.
        """
        if not inputs.encoder_tokens:
            return inputs
        try:
            return replace(inputs, encoder_tokens=self.inside(inputs.encoder_tokens))
        except ConfigError as error:
            raise PromptError(str(error)) from error

    def extend(
        self,
        caches: Sequence[SequenceCache],
        tokens: Sequence[Sequence[int]],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Scores:
        """See `Runner.extend`."""
        fed = [self.inside(new) for new in tokens]
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
        if not ((ids >= 0) & (ids < len(self.into))).all() or (inner_ids := self.into[ids]).min(initial=0) < 0:
            raise ConfigError(
                f"{self.info.name} was fed a token that it does not have; ids must lie below {len(self.into)}"
            )
        whole: list[int] = inner_ids.tolist()
        return whole

    def _outside(self, scores: Scores) -> Scores:
        """Logits by outer id."""
        columns = scores.logits if self._columns is None else scores.logits.index_select(1, self._columns)
        logits = columns.new_full((len(columns), self.vocab_size), float("-inf"))
        logits.index_copy_(1, self._tokens, columns)
        return Scores(logits, scores.rows, scores.taps)
