"""A head of fewer rows: weights of a draft model whose head knows some tokens only.

In: canonical weights one by one, the ids to keep. Out: the same weights with a head of those rows. Not here: which
tokens are worth keeping (drafters.vocab_trim), translation of ids (models.mapped). Source: VocabTrim
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
