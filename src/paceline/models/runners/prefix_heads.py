"""Heads that begin with what a decoder layer makes of the target's states of the whole text (Hydra++, Clover)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.models.heads.head_config import HeadConfig
from paceline.models.heads.path_heads import PathHeads
from paceline.models.layers.linear import make_norm
from paceline.models.layers.own_weights import Weights
from paceline.models.runners.state_layer import layer_spec, state_layer
from paceline.models.state.cache import NativeCache
from paceline.tree import EMPTY_TREE, TokenTree


class PrefixHeads(PathHeads):
    """See `PathHeads`; with a prefix layer, which sees committed tokens alone.

    Attributes:
        runner: the prefix layer, for its caches and their memory.
    """

    def _build_prefix(self, config: HeadConfig, weights: Weights) -> None:
        """Make the layer of the weights `prefix.*`."""
        spec = layer_spec(config, weights, "prefix.")
        self._norm = (
            make_norm(weights["prefix.norm.weight"], spec.norm_eps) if "prefix.norm.weight" in weights else None
        )
        self.runner = state_layer(spec, weights, self.target.info, name=self.name, prefix="prefix.", head=None)
        self.open, self.fork = self.runner.open, self.runner.fork
        self.truncate, self.release = self.runner.truncate, self.runner.release

    @torch.inference_mode()
    def read(self, caches: Sequence[NativeCache], counts: Sequence[int], states: torch.Tensor) -> torch.Tensor:
        """(b, hidden) what the prefix layer makes of the last state of each sequence, where heads begin.

        Args:
            counts: of new states of each, one at least; they stay in the caches. states: (r, hidden) of the target's
                committed tokens.
        """
        trees = [TokenTree.chain([0] * (count - 1)) if count > 1 else EMPTY_TREE for count in counts]
        after = self.runner.run_states(caches, trees, [0] * len(trees), states, picked=()).states
        self.runner.commit(caches, [range(count - 1) for count in counts])
        last = after[torch.tensor(counts, device=after.device).cumsum(0) - 1]
        return last if self._norm is None else self._norm(last)
