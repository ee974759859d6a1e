"""What a runner is: one model behind six operations, with its capabilities declared.

A runner serves many sequences. The cache of a sequence covers its committed tokens *except the last*, the pending root:
scoring feeds the root and the nodes of the tree, so that plain decoding is scoring with an empty tree and the first
token comes from the same code path as every other.

    cache = runner.open()                           a new, empty sequence
    runner.extend([cache], [prompt[:-1]])           chunked prefill (also catch-up of a draft model)
    scores = runner.score([cache], [prompt[-1]], [tree])
    runner.commit([cache], [verdict])               root + accepted path stay, the rest is dropped
    other = runner.fork(cache); runner.release(cache)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from paceline.errors import CapabilityError, ConfigError, PromptError
from paceline.models.inputs import NO_INPUTS, Inputs

if TYPE_CHECKING:
    import torch

    from paceline.tree import Scores, TokenTree


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a runner can do beyond chains of one sequence.

    A method that needs more is rejected before it runs, with an error that says what is missing (`registry.ABILITIES`).

    `trees`: it scores trees that branch, not chains only. `blocks`: caches are made of blocks, which sequences share
    and which can be counted: the runner has a `memory`. `truncate`: `Runner.truncate` goes back to any length; without
    it, only `commit` takes back what was scored.
    """

    trees: bool = False
    taps: bool = False
    layer_subsets: bool = False
    early_exit: bool = False
    head: bool = False
    input_embeddings: bool = False
    fork: bool = False
    blocks: bool = False
    truncate: bool = True

    def within(self, parts: PartAbilities) -> Capabilities:
        """Those that are left where a sequence's state can do so much."""
        trees, truncate = self.trees and parts.branches, self.truncate and parts.rollback == Rollback.ANY
        return replace(self, trees=trees, truncate=truncate)


class Rollback(IntEnum):
    """To which lengths a part of a sequence's state can go back, beside the one that it has."""

    NONE = 0
    CHECKPOINTS = 1
    """To those at which it has kept a copy."""
    ANY = 2


@dataclass(frozen=True, slots=True)
class PartAbilities:
    """What can be done with a part of a sequence's state (models.state.parts).

    Attributes:
        rollback: how `truncate` can be used. Whatever it says, `keep` takes back drafts that were not accepted.
        branches: it can follow a tree that branches; else chains only.
        shared: another sequence can begin with the first tokens of this one, and a new part stands beside keys and
            values of such a beginning that an ended sequence has left.
    """

    rollback: Rollback = Rollback.ANY
    branches: bool = True
    shared: bool = True

    @classmethod
    def common(cls, parts: Collection[PartAbilities]) -> PartAbilities:
        """What all of these can do."""
        return cls(
            rollback=min(part.rollback for part in parts),
            branches=all(part.branches for part in parts),
            shared=all(part.shared for part in parts),
        )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the rest of the engine may know of a model.

    Attributes:
        name: folder or hub id, for messages.
        family: `model_type` of the checkpoint.
        vocab_size: columns of the logits; token ids lie below it.
        hidden_size, num_layers: shape.
        max_context: most tokens a sequence may have.
        device, dtype: where and in what the model computes.
        weight_bytes: bytes read by one forward pass.
        fingerprint: short text that identifies the model's shape, for measured costs kept on disk.
        quantization: how its weights are rounded ("int8"), or None.
        declared_context: most tokens that the checkpoint allows a sequence; None where it does not say.
        rope_border: a prompt of at most so many tokens does not outgrow that length, since the rotary angles of the
            whole text would be others there; None where no text has such a border.
        stored_rows: of embedding and head in its files, where those from `vocab_size` on, which are no tokens, are left
            out; else None.
        passes: what computes a forward pass, on which its costs depend: "compiled" (models.cpu), "operators"
            (PyTorch's), "strict operators" or "transformers".
    """

    name: str
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_context: int
    device: torch.device
    dtype: torch.dtype
    weight_bytes: int
    fingerprint: str
    quantization: str | None = None
    declared_context: int | None = None
    rope_border: int | None = None
    stored_rows: int | None = None
    passes: str = ""


NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """Which part of the stack a pass runs.

    Attributes:
        first, stop: layers first .. stop - 1 (None: all that follow); the input is the hidden state before layer
            `first`.
        skip_attention, skip_mlp: layers whose sub-layer is left out; a layer in both is skipped as a whole.
    """

    first: int = 0
    stop: int | None = None
    skip_attention: Collection[int] = NOTHING
    skip_mlp: Collection[int] = NOTHING


ALL_LAYERS: Final[LayerPlan] = LayerPlan()


class SequenceCache(Protocol):
    """A runner's handle of one sequence; opaque but for its length."""

    @property
    def length(self) -> int:
        """Number of tokens whose keys and values are kept."""


class CacheMemory(Protocol):
    """The blocks of all caches of a runner.

    How many there may be, who needs more, and which beginnings of texts are kept.

    Keys and values are kept and shared by whole blocks. A text's *pieces* are its full blocks in a form that can be
    looked up.
    """

    block_size: int
    """Tokens of a block."""

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block, all layers."""

    @property
    def shares(self) -> bool:
        """Whether a sequence can begin with what another has, or has left: all parts of its state agree to that."""

    @property
    def capacity(self) -> int:
        """Most blocks that sequences may hold together."""

    @property
    def changes(self) -> int:
        """A number that changes whenever blocks change hands."""

    @property
    def widest(self) -> int:
        """Most inputs that a step of one sequence has had so far."""

    def limit(self, size: int | None, sequences: int = 1, chunk: int = 0) -> None:
        """Limit the blocks to `size` bytes; None takes a share of the free memory.

        A step that needs more gets it all the same.

        Args:
            sequences, chunk: so many run at once, and so many tokens of prompts are fed in a step: how much the layers
                with a sliding window can need.
        """

    @property
    def used(self) -> int:
        """Blocks that somebody holds, kept prefixes included. A report: other threads may ask while blocks change
        hands, unlike for all else here.
        """

    def spare(self) -> int:
        """Blocks that can be taken at no cost: free ones, those by which the cache may grow."""

    def left(self) -> int:
        """Blocks that can be taken: spare ones and those of kept prefixes."""

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""

    def let_go(self, cache: SequenceCache) -> None:
        """Layers with a sliding window may forget what is behind that of a sequence's committed tokens: none of these
        will be taken back.
        """

    @property
    def windowed(self) -> bool:
        """Whether there are layers with a sliding window that give back what is behind it."""

    def present(self, cache: SequenceCache, blocks: int) -> int:
        """With how many of the first blocks of a sequence another one can begin."""

    def windows_fit(self, lengths: Iterable[int]) -> bool:
        """Whether layers with a sliding window have room for sequences of so many tokens side by side."""

    def need(self, cache: SequenceCache, inputs: int) -> int:
        """Blocks that a sequence must take for `inputs` more tokens."""

    def trim(self, cache: SequenceCache, inputs: int) -> None:
        """Give back what a sequence holds beyond its next `inputs` tokens."""

    def save(self, lean: bool) -> None:
        """Whether sequences shall take single blocks, or runs in which they can grow."""

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """The full blocks of a text, to be looked up."""

    def known(self, key: str, pieces: Sequence[bytes]) -> int:
        """With how many kept blocks of a text's beginning a sequence can begin.

        Args:
            key: of those who share: only what was kept under the same one is found.
        """

    def adopt(self, key: str, pieces: Sequence[bytes], fresh: SequenceCache | None = None) -> SequenceCache:
        """A sequence that begins with the kept blocks of this text, and lets go as above.

        Args:
            fresh: an empty one, which takes them over; None makes one.
        """

    def share(self, cache: SequenceCache, blocks: int) -> SequenceCache:
        """The same with the first blocks of another sequence, so many of which are present."""

    def keep(self, cache: SequenceCache, key: str, pieces: Sequence[bytes]) -> None:
        """Keep the blocks of a sequence whose text this is, as far as they are full, for texts to come."""

    def forget(self) -> None:
        """Give up all kept prefixes."""


class Runner(Protocol):
    """One model that scores trees of many sequences."""

    info: ModelInfo
    capabilities: Capabilities

    def open(self, prompt_length: int = 0, inputs: Inputs = NO_INPUTS) -> SequenceCache:
        """A new, empty sequence.

        Args:
            prompt_length: tokens of the text that it begins with, the first scored root included; 0 where that is not
                known. Models whose rotary angles depend on the length of the text take that length from it.
            inputs: what it has beside its tokens.
        Raises:
            PromptError: inputs that the model does not take (`context_of`).
        """

    def extend(
        self,
        caches: Sequence[SequenceCache],
        tokens: Sequence[Sequence[int]],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Scores:
        """Append known tokens (a prompt chunk) to each sequence's cache, ragged lengths allowed, none empty.

        Returns logits of each sequence's last token (one row a sequence), or of every token with `all_logits`; taps
        always cover every token, in order.

        Raises:
            ConfigError: more tokens than the model's context holds; nothing has changed.
        """

    def score(
        self,
        caches: Sequence[SequenceCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        *,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> Scores:
        """One forward pass over the roots and tree nodes, each of which sees the cache, the root and its ancestors.

        Keys and values go to scratch slots until `commit`. With `computed[i] = k`, the first k of sequence i's 1 + n
        inputs were already scored by the previous call on the same growing tree: they are neither fed nor returned, and
        `Scores.rows` counts the remaining inputs only (at least one).

        Raises:
            ConfigError: a path of a tree is longer than the model's context; nothing has changed.
        """

    def commit(self, caches: Sequence[SequenceCache], paths: Sequence[Sequence[int]]) -> None:
        """Keep each sequence's root and accepted path (node indices of the tree last scored), drop the rest."""

    def truncate(self, cache: SequenceCache, length: int) -> None:
        """Forget all but the first `length` committed tokens, and everything in scratch slots.

        Raises:
            ConfigError: the sequence cannot go back to this length; nothing has changed.
        """

    def fork(self, cache: SequenceCache) -> SequenceCache:
        """A second sequence that shares the committed prefix; scratch slots are not carried over."""

    def release(self, cache: SequenceCache) -> None:
        """Give the sequence's blocks back; the handle must not be used again, and a second release does nothing."""


@runtime_checkable
class RunsLayers(Runner, Protocol):
    """A runner that can run part of its stack."""

    def run_layers(
        self,
        caches: Sequence[SequenceCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        *,
        plan: LayerPlan,
        hidden: torch.Tensor | None = None,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """A pass over the planned layers: layer subsets, early exit, resumption, input embeddings.

        Args:
            caches, roots, trees, computed: as for `score`; roots and tokens are not looked at when `hidden` is given.
            hidden: (r, hidden) states before layer `plan.first`, instead of tokens: embeddings if that is 0, or what an
                earlier call returned that stopped there, whose keys and values are still in scratch. Not modified.
        Returns:
            (r, hidden) states behind the last layer that was run, before the final norm, and the taps.
        """


@runtime_checkable
class HasHead(Protocol):
    """A runner whose head can be applied to any hidden state."""

    def head(self, hidden: torch.Tensor, *, norm: bool = True) -> torch.Tensor:
        """(r, v) logits of hidden states (r, hidden) of any layer, after the final norm unless `norm` is False."""


@runtime_checkable
class HasEmbedding(Protocol):
    """A runner that embeds tokens."""

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """(r, hidden) input embeddings of tokens, the family's multiplier included."""


@runtime_checkable
class TakesInputs(Protocol):
    """A runner whose sequences may have more than tokens."""

    input_kinds: Collection[str]
    """Which attributes of `Inputs`."""

    def most_tokens(self, inputs: Inputs) -> int:
        """Most tokens that a sequence with these inputs may have.

        Raises:
            PromptError: inputs of the right kinds that do not fit the model.
        """


@runtime_checkable
class HasMemory(Protocol):
    """A runner whose caches are made of blocks that can be counted."""

    memory: CacheMemory


class LayeredRunner(RunsLayers, HasHead, Protocol):
    """A runner that can stop behind any layer, apply the head there, and go on."""


def memory_of(runner: Runner) -> CacheMemory | None:
    """The blocks of a runner's caches; None for one that does not declare `blocks`."""
    return runner.memory if runner.capabilities.blocks and isinstance(runner, HasMemory) else None


class HasInfo(Protocol):
    """A runner, whatever its caches are."""

    @property
    def info(self) -> ModelInfo:
        """Of its model."""


def context_of(runner: HasInfo, inputs: Inputs = NO_INPUTS) -> int:
    """Most tokens that a sequence with these inputs may have.

    Raises:
        PromptError: inputs that the model does not take.
    """
    taking = runner if isinstance(runner, TakesInputs) else None
    kinds = () if taking is None else taking.input_kinds
    if any(kind not in kinds for kind in inputs.kinds):
        raise PromptError(
            f"{runner.info.name} takes {' and '.join(['tokens', *kinds])} as inputs, got {inputs.described()}; leave "
            "out what it does not take"
        )
    return runner.info.max_context if taking is None else taking.most_tokens(inputs)


def check_chains(what: str, trees: Sequence[TokenTree]) -> None:
    """Reject trees that branch.

    Args:
        what: scores chains only, for the message.
    Raises:
        CapabilityError: one that does.
    """
    for tree in trees:
        if not tree.is_chain:
            raise CapabilityError(
                f"score: {what} scores chains only, but drafter number {int(tree.sources[-1])} proposed a tree that "
                "branches; choose a method or settings that draft chains"
            )


def check_extend(info: ModelInfo, caches: Sequence[SequenceCache], counts: Sequence[int]) -> None:
    """Reject chunks that do not fit into the context.

    Args:
        counts: tokens that each sequence shall get.
    Raises:
        ConfigError: the first sequence that would become too long.
    """
    for cache, count in zip(caches, counts, strict=True):
        if cache.length + count > info.max_context:
            raise _too_long(info, cache.length, count)


def check_score(info: ModelInfo, caches: Sequence[SequenceCache], trees: Sequence[TokenTree]) -> None:
    """Reject trees with a path that does not fit into the context.

    Raises:
        ConfigError: the first sequence that would become too long.
    """
    for cache, tree in zip(caches, trees, strict=True):
        if cache.length + 1 + len(tree.tokens) > info.max_context < cache.length + 1 + tree.max_depth:
            raise _too_long(info, cache.length, 1 + tree.max_depth)


def check_tokens(info: ModelInfo, tokens: Sequence[int], rows: int) -> None:
    """Reject tokens without a row in the embedding, which compiled passes would read from beyond it.

    Raises:
        ConfigError: the first of them.
    """
    if tokens and not 0 <= min(tokens) <= max(tokens) < rows:
        wrong = next(token for token in tokens if not 0 <= token < rows)
        raise ConfigError(
            f"{info.name} was fed token {wrong}, and its ids lie in 0..{rows - 1}; use a model that has all tokens of "
            "the text"
        )


def _too_long(info: ModelInfo, length: int, count: int) -> ConfigError:
    most = info.max_context
    return ConfigError(
        f"{length} + {count} tokens exceed the context of {most} tokens; shorten the text or raise max_model_len"
    )


def cache_bytes(runner: Runner, tokens: int) -> int | None:
    """What a sequence of so many tokens holds, in whole blocks; None for a runner whose caches are not counted."""
    memory = memory_of(runner)
    return None if memory is None else memory.block_bytes * memory.blocks_for(tokens)


def slot_bytes(runner: Runner) -> int | None:
    """Keys and values of one token, all layers; None as above."""
    memory = memory_of(runner)
    return None if memory is None else memory.block_bytes // memory.block_size


def save_memory(runner: Runner) -> None:
    """Let sequences take single blocks instead of runs in which they could grow."""
    if (memory := memory_of(runner)) is not None:
        memory.save(lean=True)
