"""What decoding takes of memory, predicted from a setting: weights, caches of the texts, and what drafts take beside.

Speculation is counted as in `controllers.memory_limit`, by whose limit trees are cut. What is left out is what does not
grow with the setting: activations of a pass, the program itself, what the allocator keeps; and trained heads, which
are small beside all else.

Source: SpecMemo, Speculative decoding is in your pocket (arXiv:2506.01986): memory as a function of nodes, batch and
length, and the configuration within a budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from paceline.assembly.controller_setup import footprint_of, runners_of
from paceline.drafters import Drafter
from paceline.engine import StepRecord
from paceline.errors import ConfigError
from paceline.models import Runner, cache_bytes, memory_of
from paceline.models.runners import native_of


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes.

    Attributes:
        weights: of the target. drafts: weights of the models that draft.
        caches: keys and values, and states, of the texts, with what `kv_selection` keeps beside them.
        speculation: of tree nodes (keys and values, rows of logits) and of the caches of draft models.
    """

    weights: int
    drafts: int
    caches: int
    speculation: int

    @property
    def total(self) -> int:
        return self.weights + self.drafts + self.caches + self.speculation

    def to_dict(self) -> dict[str, int]:
        """JSON-ready."""
        return asdict(self) | {"total": self.total}


def memory_use(
    runner: Runner, drafters: Sequence[Drafter], lengths: Sequence[int], nodes: int, temperature: float = 0.0
) -> MemoryUse:
    """What a step takes at its peak.

    Args:
        lengths: of the texts that are decoded together, in tokens.
        nodes: of the tree of each; 0 is plain decoding, which takes nothing for speculation.
    Raises:
        ConfigError: caches that are not counted.
    """
    caches = [cache_bytes(runner, length) for length in lengths]
    if None in caches:
        raise ConfigError(f"memory is not counted with {runner.info.name}: its caches are not counted; leave it out")
    footprint = footprint_of(runner, drafters) if drafters and nodes else None
    natives = {id(native_of(model) or model): model for drafter in drafters for model in runners_of(drafter)}
    natives.pop(id(native_of(runner)), None)  # what drafts with the target's own layers
    return MemoryUse(
        weights=held_weights(runner),
        drafts=sum(held_weights(model) for model in natives.values()),
        caches=sum(size or 0 for size in caches) + sum(_beside(runner, length) for length in lengths),
        speculation=sum(footprint.sequence(length, nodes, temperature) for length in lengths) if footprint else 0,
    )


def held_weights(runner: Runner) -> int:
    """Bytes of a model's weights, in the form in which it keeps them; of one that is no native runner, those that a
    pass reads.
    """
    native = native_of(runner)
    return runner.info.weight_bytes if native is None else native.held_bytes


def _beside(runner: Runner, tokens: int) -> int:
    """Most bytes that a selection of keys keeps beside a text's cache."""
    native = native_of(runner)
    if native is None or native.selection is None:
        return 0
    return native.selection.held_bytes(tokens, runner.info.dtype.itemsize)


class MemoryMeter:
    """A watcher of an engine (`engine.watching`): what decoding has held at its peak, beside weights.

    Attributes:
        caches: bytes of blocks of the target that somebody held, those of tree nodes and of kept prefixes included,
            and of what `kv_selection` keeps.
        speculation: of draft models' blocks, and of rows of logits.
        peak: the most that both came to in one step. nodes: most of one tree.
    """

    def __init__(self, runner: Runner, drafters: Sequence[Drafter]) -> None:
        self._runner = runner
        self._drafts = {id(model): model for drafter in drafters for model in runners_of(drafter)}
        self.caches = self.speculation = self.peak = self.nodes = 0

    def __call__(self, record: StepRecord) -> None:
        """Count a step."""
        rows = sum(map(len, record.trees)) * self._runner.info.vocab_size * self._runner.info.dtype.itemsize
        native = native_of(self._runner)
        selected = 0 if native is None or native.selection is None else native.selection.held
        caches = _used(self._runner) + selected
        speculation = rows + sum(_used(model) for model in self._drafts.values() if model is not self._runner)
        self.caches, self.speculation = max(self.caches, caches), max(self.speculation, speculation)
        self.peak = max(self.peak, caches + speculation)
        self.nodes = max(self.nodes, *map(len, record.trees))


def _used(runner: Runner) -> int:
    memory = memory_of(runner)
    return 0 if memory is None else memory.used * memory.block_bytes
