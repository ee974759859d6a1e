"""A head of fewer rows: weights of a draft model whose head knows some tokens only.

In: canonical weights one by one, the ids to keep. Out: the same weights with a head of those rows, the embedding in another order.
Not here: which tokens are worth keeping (drafters.vocab_trim), translation of ids (models.mapped).

The kept tokens, in ascending order, come first in the embedding: row i of the head and row i of the embedding then belong to one
token, and whatever feeds its own drafts (models.one_layer_chain) needs to know nothing of this. Source: VocabTrim
(arXiv:2506.22694).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import ConfigError
from paceline.models.spec import ModelSpec

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Tokens that a head keeps.

    Attributes:
        kept: (k,) ascending ids. order: (v,) all ids, the kept ones first. places: (v,) where each id stands in `order`.
    """

    kept: Ids
    order: Ids
    places: Ids

    @classmethod
    def of(cls, tokens: Sequence[int], vocab_size: int) -> HeadRows:
        """Those of `tokens` that a model of `vocab_size` tokens has.

        Raises:
            ConfigError: none of them.
        """
        kept = np.unique(np.asarray(tokens, np.int64))
        kept = kept[(kept >= 0) & (kept < vocab_size)]
        if not len(kept):
            raise ConfigError(f"a head must keep at least one of the {vocab_size} tokens of its model, got none; name others")
        order = np.concatenate((kept, np.setdiff1d(np.arange(vocab_size), kept)))
        places = np.empty_like(order)
        places[order] = np.arange(vocab_size)
        return cls(kept, order, places)

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """The shape of the model with this head, which is tied to nothing."""
        return replace(spec, vocab_size=len(self.kept), tied=False)

    def weights(self, name: str, weight: torch.Tensor, spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that take the place of a canonical one of the whole model."""
        if name == "embed.weight":
            yield name, weight[torch.from_numpy(self.order).to(weight.device)]
        if name == "head.weight" or (name == "embed.weight" and spec.tied):
            yield "head.weight", weight[torch.from_numpy(self.kept).to(weight.device)]
        elif name != "embed.weight":
            yield name, weight
