"""A runner whose fuzzy passes let neighbouring layers read the same state: EasySpec's way to draft.

When passes may be fuzzy, and what becomes of their keys and values, is for drafters.draft_model.easyspec to say.

The layers but the first and the last lie in groups. In a *fuzzy* pass all attention sub-layers of a group read the
hidden state before the group; then their outputs are added in order, each followed by its MLP. All other passes run one
layer after the other, as everywhere.

Source: EasySpec: layer-parallel speculative decoding for efficient multi-GPU utilization (arXiv:2502.02493), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

import torch

from paceline.errors import ConfigError, UnsupportedModelError
from paceline.models.base import LayerPlan
from paceline.models.layers.own_weights import Weights
from paceline.models.runners.native import NativeRunner
from paceline.models.spec import ModelSpec
from paceline.models.state.cache import NativeCache
from paceline.models.state.parts import StateOperations
from paceline.tree import Scores, TokenTree

MIN_LAYERS: Final = 4
"""Layers of a model in which two can be a group."""


def groups_of(layers: int, size: int) -> list[range]:
    """All layers in order: the first and the last alone, those between in groups of up to `size`."""
    inner = [range(first, min(first + size, layers - 1)) for first in range(1, layers - 1, size)]
    return [range(1), *inner, range(layers - 1, layers)] if layers > 1 else [range(layers)]


class GroupedRunner(StateOperations[NativeCache]):
    """A native runner, and fuzzy passes with it.

    Args:
        group_size: layers of a group.

    Attributes:
        native: runs all passes.
        fuzzy: whether `score` takes the fuzzy pass for nodes behind inputs that were scored before (`computed`).
    Raises:
        UnsupportedModelError: rotary angles that depend on the text's length, or layers with mixers.
        ConfigError: fewer than four layers.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        group_size: int,
        *,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        max_context: int | None = None,
        compiled: bool = True,
    ) -> None:
        _refuse(spec, name)
        native = self.native = NativeRunner(
            spec, weights, name=name, device=device, dtype=dtype, max_context=max_context, compiled=compiled
        )
        self.info = replace(native.info, fingerprint=f"{native.info.fingerprint}-by-{group_size}")
        self.fuzzy, self._blocks = False, groups_of(spec.num_layers, group_size)
        self.capabilities, self.memory, self.spec = native.capabilities, native.memory, spec
        self.open, self.extend, self.run_layers = native.open, native.extend, native.run_layers
        self.embed, self.head = native.embed, native.head

    @torch.inference_mode()
    def score(
        self,
        caches: Sequence[NativeCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        *,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> Scores:
        """See `Runner.score`."""
        if not self.fuzzy or taps or computed is None or not all(computed):
            return self.native.score(caches, roots, trees, taps=taps, computed=computed)

        def run(x: torch.Tensor | None, plan: LayerPlan) -> torch.Tensor:
            return self.run_layers(caches, roots, trees, plan=plan, hidden=x, computed=computed).states

        x = run(None, LayerPlan(stop=1))
        for block in self._blocks[1:]:
            if len(block) == 1:
                x = run(x, LayerPlan(first=block.start, stop=block.stop))
                continue
            attended = [run(x, LayerPlan(first=i, stop=i + 1, skip_mlp={i})) - x for i in block]
            for i, added in zip(block, attended, strict=True):
                x = run(x + added, LayerPlan(first=i, stop=i + 1, skip_attention={i}))
        left = (1 + len(tree) - done for tree, done in zip(trees, computed, strict=True))
        return Scores(self.head(x), tuple(accumulate(left, initial=0)))


def _refuse(spec: ModelSpec, name: str) -> None:
    if spec.num_layers < MIN_LAYERS:
        raise ConfigError(
            f"the draft model of method 'easyspec' must have {MIN_LAYERS} layers or more, {name} has "
            f"{spec.num_layers}; use method 'draft_model'"
        )
    if any(rope.kind in {"dynamic", "longrope"} for rope in spec.ropes.values()):
        raise UnsupportedModelError(
            f"{name}: its layers cannot run in groups, since its angles depend on the text's length"
        )
    if spec.states:
        raise UnsupportedModelError(f"{name}: its layers cannot run in groups, since they keep states of the text")
