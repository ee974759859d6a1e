"""What a runner is: one model behind six operations, with its capabilities declared.

A runner serves many sequences. The cache of a sequence lacks the last token of its text, the *pending root*: scoring
feeds the root and the nodes of the tree, so that plain decoding is scoring with an empty tree and the first token comes
from the same code path as every other. In `models`, *committed* tokens are those in the cache, without the root; where
drafts are planned and verified, the whole text counts, which is one more.

    cache = runner.open()                           a new, empty sequence
    runner.extend([cache], [prompt[:-1]])           chunked prefill (also catch-up of a draft model)
    scores = runner.score([cache], [prompt[-1]], [tree])
    runner.commit([cache], [verdict.path])          root + accepted path stay, the rest is dropped
    other = runner.fork(cache); runner.release(cache)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Protocol

from paceline.models.inputs import NO_INPUTS, Inputs

if TYPE_CHECKING:
    import torch

    from paceline.tree import Scores, TokenTree


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a runner can do beyond chains of one sequence, as far as no method or attribute shows it.

    What one does show is a protocol (models.abilities). A method that needs more than the runner can do is rejected
    before it runs, with an error that says what is missing (`registry.ABILITIES`).

    Attributes:
        trees: it scores trees that branch, not chains only.
        taps: it gives the hidden states behind its layers.
        fork: a second sequence can go on from the committed tokens of another.
        truncate: `Runner.truncate` goes back to any length; without it, only `commit` takes back what was scored.
        drafts: scoring several tokens takes less than a pass for each; without it drafts are refused.
    """

    trees: bool = False
    taps: bool = False
    fork: bool = False
    truncate: bool = True
    drafts: bool = True

    def within(self, parts: PartAbilities) -> Capabilities:
        """Those that are left where a sequence's state can do so much."""
        return replace(self, truncate=self.truncate and parts.rollback == Rollback.ANY)


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
        rollback: how `truncate` can be used. Whatever it says, `commit` takes back drafts that were not accepted.
        shared: a part that was just opened stands beside keys and values of a beginning that another sequence has, or
            that an ended one has left.
    """

    rollback: Rollback = Rollback.ANY
    shared: bool = True

    @classmethod
    def common(cls, parts: Collection[PartAbilities]) -> PartAbilities:
        """What all of these can do."""
        return cls(
            rollback=min(part.rollback for part in parts),
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
        source: what its encoder reads, as `EncoderSpec.reads`; "" of a decoder-only model.
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
    source: str = ""
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


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a forward pass gives, in the model's dtype.

    Attributes:
        logits: (picked, v) of the rows whose logits were wanted.
        states: (r, hidden) behind the last layer that ran, before the final norm; (0, hidden) where they were not
            wanted.
        taps: layer -> (r, hidden), of the layers that were wanted, see `Scores.taps`.
        best: per row of `logits` its best token, as `Scores.best` has it; None where the pass did not look.
    """

    logits: torch.Tensor
    states: torch.Tensor
    taps: dict[int, torch.Tensor] = field(default_factory=dict)
    best: list[int] | None = None


class SequenceCache(Protocol):
    """A runner's handle of one sequence; opaque but for its length."""

    @property
    def length(self) -> int:
        """Number of committed tokens: those whose keys and values are kept, the pending root not among them."""


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
            PromptError: inputs that the model does not take (`models.abilities.check_inputs`).
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
