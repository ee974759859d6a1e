"""Passes that leave out work, asked for by name: the seam of `skipping={...}`, and the runner of models whose later
rows leave out layers.

A method opens the model as it needs it, and gives a runner in its place. What it writes is not what the model would
write: it is approximate by name, and no other part of the engine chooses it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Protocol, cast

from paceline.errors import UnsupportedModelError
from paceline.models.abilities import check_inputs
from paceline.models.attention.kv_selection import KVSelection
from paceline.models.base import Runner
from paceline.models.inputs import NO_INPUTS, Inputs
from paceline.models.passes.skipping import RowSkipping, SkippingPasses
from paceline.models.runners.native import NativeRunner
from paceline.models.state.cache_memory import ArenaMemory
from paceline.models.state.parts import State, StateOperations
from paceline.models.state.skipping_cache import SkippingCache
from paceline.models.state.window_slots import BLOCK


class Opens(Protocol):
    """Opens the model that was asked for."""

    def __call__(self, *, lora: Path | None = None, selection: KVSelection | None = None) -> Runner:
        """With an adapter merged in, or what its attention reads."""


class PassSkipping(ABC):
    """A method that leaves out a part of the model's work.

    Attributes:
        name: in the registry.
    """

    name: ClassVar[str]

    @abstractmethod
    def open(self, load: Opens, *, name: str) -> Runner:
        """Open a model.

        Args:
            name: of the model, for messages.
        Raises:
            UnsupportedModelError: it is none that the method can serve.
            ConfigError, CheckpointError: as the method says.
        """


def native_with_layers(runner: Runner, method: str, *, name: str) -> NativeRunner:
    """The native runner of a model whose layers are independent of each other and keep nothing but keys and values.

    Raises:
        UnsupportedModelError: another model.
    """
    if not isinstance(runner, NativeRunner):
        raise UnsupportedModelError(
            f"{name} has an encoder, recurrent states, a head of fewer rows, or no native runner, for which "
            f"skipping={method!r} is not there; leave it out"
        )
    spec = runner.spec
    lacking = {
        "layers that read keys or states of other layers": spec.shares_across_layers,
        "angles that depend on the length of the text": runner.rotary.depends_on_length,
        "layers without attention": not all(layer.attention for layer in spec.layers),
        "states between layers in another dtype": spec.wide_sums,
    }
    if found := [what for what, there in lacking.items() if there]:
        raise UnsupportedModelError(f"{name} has {found[0]}, for which skipping={method!r} is not there; leave it out")
    return runner


class SkippingMemory(ArenaMemory):
    """See `ArenaMemory`; what rows with all layers have left is shared, and nothing else."""

    def blocks_present(self, cache: State, blocks: int) -> int:
        """See `ArenaMemory.blocks_present`."""
        return super().blocks_present(cache, min(blocks, _whole_blocks(cache)))

    def retain(self, cache: State, key: str, pieces: Sequence[bytes]) -> None:
        """See `ArenaMemory.retain`."""
        super().retain(cache, key, pieces[: _whole_blocks(cache)])


def _whole_blocks(cache: State) -> int:
    border, length = cast(SkippingCache, cache).border, cache.length
    return (length if border is None else min(border, length)) // BLOCK


class SkippingRunner(StateOperations[SkippingCache]):
    """See `models.base.Runner`; it runs no part of its layers alone, and takes no rows beside those of a tree.

    Args:
        native: the model; its passes become those of a `SkippingPasses`.
        skipping: which rows run which layers. method: its name. key: tells settings apart whose passes cost
            differently.

    Attributes:
        native, method: as given.
    """

    def __init__(self, native: NativeRunner, skipping: RowSkipping, *, method: str, key: str) -> None:
        self.native, self.spec, self.method = native, native.spec, method
        native.passes, native.graphs = SkippingPasses(native.passes, skipping), None
        self.info = replace(native.info, fingerprint=f"{native.info.fingerprint}-{method}-{key}")
        self.capabilities = native.capabilities
        self.memory = SkippingMemory(native.arena)
        self.extend, self.score = native.extend, native.score
        self.embed, self.head = native.embed, native.head

    def open(self, prompt_length: int = 0, inputs: Inputs = NO_INPUTS) -> SkippingCache:
        """See `Runner.open`."""
        check_inputs(self, inputs)
        return SkippingCache(self.native.arena, prompt_length)
