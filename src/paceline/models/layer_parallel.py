"""A runner that runs the attention of neighbouring layers at once, on several devices or threads: EasySpec's way to draft.

In: a ModelSpec with canonical weights, devices; tokens and trees. Out: `Scores`. Not here: when passes may be fuzzy and what
becomes of their keys and values (drafters.easyspec), threads (models.layer_workers), the layers themselves (models.decoder).

The layers but the first and the last lie in groups. An exact pass runs one after the other, as everywhere. In a *fuzzy* pass all
attention sub-layers of a group read the hidden state before the group, each *worker* computing its own; then their outputs are
added in order, each followed by its MLP. A worker has a device, a thread, and the attention weights, keys and values of its layers;
everything else lives on the first worker's device. What passes between workers is one hidden state a row and layer.

Source: EasySpec: layer-parallel speculative decoding for efficient multi-GPU utilization (arXiv:2502.02493), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Final

import torch

from paceline.errors import CapabilityError, ConfigError, UnsupportedModelError
from paceline.models.base import Capabilities, ModelInfo, check_extend, check_score
from paceline.models.cache import NativeCache
from paceline.models.cache_memory import ArenaMemory
from paceline.models.decoder import Decoder, attention_shape
from paceline.models.layer_weights import Weights
from paceline.models.layer_workers import Worker
from paceline.models.segments import Segment, chunk, fed_tokens, offsets, tree_segment
from paceline.models.shape_info import bytes_read, fingerprint
from paceline.models.spec import ModelSpec
from paceline.tree.token_tree import TokenTree
from paceline.tree.types import Scores

ATTENTION = ("attn_norm.weight", "qkv.weight", "qkv.bias", "o.weight", "o.bias", "q_norm.weight", "k_norm.weight")
"""Weights of a layer that live with its worker."""

LEAST: Final = 4
"""Layers of a model in which two can be run at once."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """How a model's layers are to be run at once.

    Attributes:
        size: layers of a group. devices: of the workers, the first of which has all but attention.
    """

    size: int
    devices: tuple[str, ...]


def groups_of(layers: int, size: int) -> list[range]:
    """All layers in order: the first and the last alone, those between in groups of up to `size`."""
    inner = [range(first, min(first + size, layers - 1)) for first in range(1, layers - 1, size)]
    return [range(1), *inner, range(layers - 1, layers)] if layers > 1 else [range(layers)]


class SpreadCache:
    """The handle of one sequence: its part with every worker."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[NativeCache]) -> None:
        self.parts = parts

    @property
    def length(self) -> int:
        """Number of tokens whose keys and values are kept."""
        return self.parts[0].length


class LayerParallelRunner:
    """See `models.base.Runner`.

    Args:
        spec, weights: as for `models.native.NativeRunner`.
        groups: how layers are run at once; more workers than a group has layers are left out.
        name, dtype, max_context: as for `NativeRunner`.

    Attributes:
        fuzzy: whether `score` takes the fuzzy pass for nodes behind inputs that were scored before (`computed`). All other passes
            are exact.
    Raises:
        UnsupportedModelError: rotary angles that depend on the text's length. ConfigError: fewer than four layers.
    """

    capabilities = Capabilities(trees=True, fork=True)

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        groups: LayerGroups,
        *,
        name: str,
        dtype: torch.dtype,
        max_context: int | None = None,
    ) -> None:
        _refuse(spec, name)
        self._blocks = groups_of(spec.num_layers, groups.size)
        widest = max(map(len, self._blocks))
        devices = [torch.device(device) for device in groups.devices[:widest]]
        self.owners = [i % len(devices) for block in self._blocks for i in range(len(block))]
        weight_bytes = bytes_read(spec, weights)
        with torch.inference_mode():
            for layer, owner in enumerate(self.owners):
                for key in [f"layers.{layer}.{part}" for part in ATTENTION]:
                    if key in weights:
                        weights[key] = weights[key].to(devices[owner])
            self._decoder = Decoder(spec, weights)
            shape, share = attention_shape(spec), _threads_each(devices)
            self.workers = [
                Worker(device, self._owned(i), shape=shape, spec=spec, dtype=dtype, threads=share)
                for i, device in enumerate(devices)
            ]
        self.fuzzy, self.memories = False, [ArenaMemory(worker.arena) for worker in self.workers]
        self.info = ModelInfo(
            name=name, family=spec.family, vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, num_layers=spec.num_layers,
            max_context=max_context or spec.max_context, device=devices[0], dtype=dtype, weight_bytes=weight_bytes,
            fingerprint=f"{fingerprint(spec, dtype)}-by-{groups.size}",
        )  # fmt: skip

    def open(self) -> SpreadCache:
        """A new, empty sequence."""
        return SpreadCache([NativeCache(worker.arena) for worker in self.workers])

    @torch.inference_mode()
    def extend(
        self,
        caches: Sequence[SpreadCache],
        tokens: Sequence[Sequence[int]],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Scores:
        """See `Runner.extend`."""
        _no_taps(taps)
        check_extend(self.info, caches, [len(own) for own in tokens])
        parts = [[chunk(cache.parts[i], len(own)) for cache, own in zip(caches, tokens, strict=True)] for i in self._numbers]
        at = offsets(parts[0])
        wanted = None if all_logits else [stop - 1 for stop in at[1:]]
        logits = self._pass(parts, [token for own in tokens for token in own], wanted, fuzzy=False)
        for segment in (segment for part in parts for segment in part):
            segment.cache.length += segment.inputs
        return Scores(logits, at if all_logits else tuple(range(len(caches) + 1)), {})

    @torch.inference_mode()
    def score(
        self,
        caches: Sequence[SpreadCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        *,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> Scores:
        """See `Runner.score`."""
        _no_taps(taps)
        check_score(self.info, caches, trees)
        done = [0] * len(caches) if computed is None else list(computed)
        parts = [self._segments([cache.parts[i] for cache in caches], trees, done) for i in self._numbers]
        logits = self._pass(parts, fed_tokens(roots, trees, parts[0]), None, fuzzy=self.fuzzy and all(done))
        return Scores(logits, offsets(parts[0]), {})

    def commit(self, caches: Sequence[SpreadCache], paths: Sequence[Sequence[int]]) -> None:
        """See `Runner.commit`."""
        for cache, path in zip(caches, paths, strict=True):
            for part in cache.parts:
                part.keep(path)

    def truncate(self, cache: SpreadCache, length: int) -> None:
        """See `Runner.truncate`."""
        for part in cache.parts:
            part.truncate(length)

    def fork(self, cache: SpreadCache) -> SpreadCache:
        """See `Runner.fork`."""
        return SpreadCache([part.fork() for part in cache.parts])

    def release(self, cache: SpreadCache) -> None:
        """See `Runner.release`; a second release does nothing."""
        for part in cache.parts:
            part.release()

    def _owned(self, worker: int) -> list[int]:
        return [layer for layer, owner in enumerate(self.owners) if owner == worker]

    @property
    def _numbers(self) -> range:
        return range(len(self.workers))

    @staticmethod
    def _segments(caches: Sequence[NativeCache], trees: Sequence[TokenTree], done: Sequence[int]) -> list[Segment]:
        found = []
        for cache, tree, count in zip(caches, trees, done, strict=True):
            if not 0 <= count <= min(cache.scratch, len(tree)):
                raise ConfigError(f"computed must lie in 0..{min(cache.scratch, len(tree))} (inputs already scored), got {count}")
            found.append(segment := tree_segment(cache, tree, count))
            cache.reserve(segment.inputs)
            cache.scratch = segment.inputs
        return found

    def _pass(
        self, parts: Sequence[Sequence[Segment]], tokens: Sequence[int], wanted: Sequence[int] | None, *, fuzzy: bool
    ) -> torch.Tensor:
        """(r, v) logits of the wanted rows, all of them for None."""
        for worker, segments in zip(self.workers, parts, strict=True):
            worker.prepare(segments)
        decoder, x = self._decoder, self._decoder.embed(tokens)
        for block in self._blocks:
            found = self._at_once(block, x) if fuzzy and len(block) > 1 else {}
            for layer in block:
                out = found[layer] if found else self.workers[self.owners[layer]].attended(decoder, layer, x)
                decoder.layers[layer].add_attended(x, out)
                decoder.layers[layer].mlp(x)
        return decoder.head(x if wanted is None else x[list(wanted)])

    def _at_once(self, layers: Sequence[int], x: torch.Tensor) -> dict[int, torch.Tensor]:
        """What each layer's attention makes of the same x."""
        running = [worker.begin(self._decoder, layers, x) for worker in self.workers]
        try:
            wait(running)
        finally:  # whatever comes: no thread may work on caches that somebody else has taken back
            wait(running)
        return {layer: out for future in running for layer, out in future.result().items()}


def _refuse(spec: ModelSpec, name: str) -> None:
    if spec.num_layers < LEAST:
        raise ConfigError(
            f"the draft model of method 'easyspec' must have {LEAST} layers or more, {name} has {spec.num_layers}; take method "
            "'draft_model'"
        )
    if any(rope.kind in {"dynamic", "longrope"} for rope in spec.ropes.values()):
        raise UnsupportedModelError(f"{name}: its layers cannot be run at once, since its angles depend on the text's length")


def _threads_each(devices: Sequence[torch.device]) -> int:
    """Threads of PyTorch for each worker: those of the CPU are shared out."""
    return max(torch.get_num_threads() // len(devices), 1) if devices[0].type == "cpu" else 0


def _no_taps(taps: Sequence[int]) -> None:
    if taps:
        raise CapabilityError("a model whose layers run at once gives no taps; draft with another method")
