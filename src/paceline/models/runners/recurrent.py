"""Models whose layers have mixers: a native runner, whose sequences keep states beside keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from paceline.models.abilities import ShowsLastKeys, check_inputs
from paceline.models.base import PartAbilities
from paceline.models.inputs import NO_INPUTS, Inputs
from paceline.models.layers.own_weights import Weights
from paceline.models.passes.base import SettlesStates
from paceline.models.runners.native import NativeRunner
from paceline.models.spec import ModelSpec
from paceline.models.state.cache import NativeCache
from paceline.models.state.cache_memory import ArenaMemory
from paceline.models.state.parts import CompositeState, StateOperations
from paceline.models.state.recurrent import RecurrentPart


def opened_states(native: NativeRunner) -> RecurrentPart:
    """Those of the mixers of an empty sequence, as a runner's passes keep them."""
    passes, shapes, device = native.passes, native.spec.states, native.info.device
    with torch.inference_mode():
        if isinstance(passes, SettlesStates):  # they work in float32 between their maps
            return RecurrentPart.opened(shapes, torch.float32, device, passes.settle)
        return RecurrentPart.opened(shapes, native.info.dtype, device)


class RecurrentRunner(StateOperations[CompositeState]):
    """See `models.base.Runner`.

    Args:
        spec: of layers some of which have mixers. Where layers read what others have made in the same pass, none of
            them runs without the others, and there is no `run_layers`.
        options: of `NativeRunner`.

    Attributes:
        native: runs the layers.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, **options: Any) -> None:
        native = self.native = NativeRunner(spec, weights, **options)
        abilities = PartAbilities.common([NativeCache.abilities, RecurrentPart.abilities])
        self.info, self.spec = native.info, spec
        self.capabilities = native.capabilities.within(abilities)
        self.memory = self._memory()
        self.extend, self.extend_embeddings, self.score = native.extend, native.extend_embeddings, native.score
        self.score_added = native.score_added
        self.embed, self.head = native.embed, native.head
        if isinstance(native, ShowsLastKeys):
            self.last_keys = native.last_keys
        if not spec.shares_across_layers:
            self.run_layers = native.run_layers

    def _memory(self) -> ArenaMemory:
        """Beginnings are shared with the states behind them, where both depend on nothing else and blocks can hold
        them.
        """
        arena = self.native.arena
        shares = not self.native.rotary.depends_on_length and arena.block_bytes > 0
        state_bytes = opened_states(self.native).nbytes
        return ArenaMemory(arena, replace(NativeCache.abilities, shared=shares), state_bytes=state_bytes)

    def open(self, prompt_length: int = 0, inputs: Inputs = NO_INPUTS) -> CompositeState:
        """See `Runner.open`."""
        check_inputs(self, inputs)
        return CompositeState(self.native.open(prompt_length), [opened_states(self.native)])
