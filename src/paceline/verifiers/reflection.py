"""How drafts are shown to the target a second time in the pass that scores them, and what is made of it.

`reflective` is the rule that uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from paceline.errors import CapabilityError
from paceline.tree import PROBE, TokenTree

if TYPE_CHECKING:
    import torch

CUE: Final = 8
"""Tokens of the text's end that stand before the second copy."""


@dataclass(frozen=True, slots=True)
class Reflection:
    """How a draft is shown a second time, and what is made of it.

    Attributes:
        alpha: share of the reflective logits.
        prompt: token ids of what stands between.
        cue: tokens of the text's end before the second copy.
    """

    alpha: float
    prompt: tuple[int, ...]
    cue: int = CUE

    def widened(self, tree: TokenTree, text: Sequence[int]) -> TokenTree:
        """A chain with its second copy behind it, as probes; the same object where nothing is drafted.

        Args:
            text: prompt and output up to the root, which is its last token.
        Raises:
            CapabilityError: a tree with branches.
        """
        if not (n := len(tree)):
            return tree
        if not tree.is_chain:
            raise CapabilityError(
                "acceptance_method 'reflective' judges chains, got a tree with branches; draft chains, or use "
                "acceptance_method 'rejection_sampler'"
            )
        drafts = tree.tokens.tolist()
        tokens = [*drafts, *self.prompt, *text[max(0, len(text) - self.cue) :], *drafts]
        kinds = np.full(len(tokens), PROBE, np.int32)
        kinds[:n] = tree.kinds
        return TokenTree.build(tokens, range(-1, len(tokens) - 1), kinds=kinds)

    def mixed(self, rows_mv: torch.Tensor, n: int) -> torch.Tensor:
        """(1 + n, v) float32 logits f of a chain of n drafts.

        Args:
            rows_mv: logits of the root and of all nodes of the widened chain.
        """
        own_nv, again_nv = rows_mv[: n + 1].float(), rows_mv[-n - 1 :].float()
        return own_nv + self.alpha * (again_nv - own_nv)
