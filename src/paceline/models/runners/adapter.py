"""A layer of attention alone that goes on from the states of an early exit: the adapter of Kangaroo.

The published layout: a config.json of a Llama of one layer, and of its weights
`layers.N.self_attn.{q,k,v,o}_proj.weight`, `layers.N.input_layernorm.weight` and `norm.weight`; no embedding, no MLP,
no head. The adapter sees every token of the text, so it has keys and values of its own, and a cache for each sequence.

Source: Kangaroo: lossless self-speculative decoding via double early exiting (arXiv:2404.18911), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Final

import torch

from paceline.checkpoints import Checkpoint, load_weights, read_config, resolve, spec_from_config
from paceline.errors import CheckpointError
from paceline.models.base import LayerPlan, ModelInfo
from paceline.models.layers.own_weights import Weights
from paceline.models.runners.native import NativeRunner
from paceline.models.spec import ModelSpec
from paceline.models.state.cache import NativeCache
from paceline.tree import EMPTY_TREE, TokenTree

UNUSED: Final = 32
"""Size of what never runs, such that compiled passes take it."""

LACKING = ("embed.weight", "head.weight", "mlp_norm.weight", "gate_up.weight", "down.weight")


class Adapter:
    """The adapter's layers over the states of many sequences.

    Args:
        weights: canonical names, but for `LACKING`.
    """

    def __init__(
        self, spec: ModelSpec, weights: Weights, *, name: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        spec = replace(spec, vocab_size=UNUSED, intermediate_size=UNUSED, tied=True)
        self._runner = NativeRunner(
            spec, _filled(spec, weights, device, dtype), name=name, device=device, dtype=dtype, row_invariant=False
        )
        self.open, self.fork = self._runner.open, self._runner.fork
        self.truncate, self.release = self._runner.truncate, self._runner.release
        self._last = spec.num_layers
        self._plan = LayerPlan(skip_mlp=frozenset(range(spec.num_layers)))

    @classmethod
    def load(cls, model: str | Path, target: ModelInfo) -> Adapter:
        """The adapter in a folder, or of a hub id, for a target's device and dtype.

        Raises:
            CheckpointError: no such files, missing weights, another width than the target's.
            UnsupportedModelError: weights that are not in safetensors files, an architecture without a native runner.
        """
        folder = resolve(model)
        spec = spec_from_config(read_config(folder))
        if spec.hidden_size != target.hidden_size:
            raise CheckpointError(
                f"the adapter {model} reads states of width {spec.hidden_size}, but {target.name} has "
                f"{target.hidden_size}; use one that was trained for this model"
            )
        weights = load_weights(Checkpoint(folder), spec, device=target.device, dtype=target.dtype, lacking=LACKING)
        return cls(spec, weights, name=str(model), device=target.device, dtype=target.dtype)

    def extend(self, caches: Sequence[NativeCache], states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Append states (n, hidden) of known tokens to each sequence.

        (r, hidden) normed states after each one's last.
        """
        counts = [len(rows) for rows in states]
        normed = self._run(caches, counts, [0] * len(counts), torch.cat(list(states)))
        self._runner.commit(caches, [tuple(range(count - 1)) for count in counts])
        return normed[torch.tensor(list(accumulate(counts)), device=normed.device) - 1]

    def ahead(self, caches: Sequence[NativeCache], depths: Sequence[int], states: torch.Tensor) -> torch.Tensor:
        """(r, hidden) normed states after drafted token number `depths`, from 1 on, of each sequence, from its state
        (r, hidden); those of the tokens drafted before it were given by earlier calls.
        """
        return self._run(caches, depths, [depth - 1 for depth in depths], states)

    def _run(
        self, caches: Sequence[NativeCache], counts: Sequence[int], done: Sequence[int], states: torch.Tensor
    ) -> torch.Tensor:
        trees = [TokenTree.chain([0] * (count - 1)) if count > 1 else EMPTY_TREE for count in counts]
        result = self._runner.run_layers(
            caches, [0] * len(trees), trees, plan=self._plan, hidden=states, taps=(self._last,), computed=done
        )
        return result.taps[self._last]


def _filled(spec: ModelSpec, weights: Weights, device: torch.device, dtype: torch.dtype) -> Weights:
    """With the parts of a decoder that never run."""
    filled = {"embed.weight": torch.zeros(UNUSED, spec.hidden_size, device=device, dtype=dtype), **weights}
    for layer in range(spec.num_layers):
        filled[f"layers.{layer}.gate_up.weight"] = torch.zeros(2 * UNUSED, spec.hidden_size, device=device, dtype=dtype)
        filled[f"layers.{layer}.down.weight"] = torch.zeros(spec.hidden_size, UNUSED, device=device, dtype=dtype)
    return filled
