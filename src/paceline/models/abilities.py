"""What a runner can do beyond `Runner`: a protocol for each ability that its methods show, and the question by name.

A runner that lacks such an ability does not have the method, or the attribute. What no method shows is declared in
`Capabilities`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from paceline.errors import PromptError
from paceline.models.added_rows import ScoresAddedRows
from paceline.models.base import Capabilities, LayerPlan, ModelInfo, PassResult, Runner, SequenceCache
from paceline.models.block_memory import HasMemory
from paceline.models.inputs import NO_INPUTS, Inputs

if TYPE_CHECKING:
    import torch

    from paceline.tree import TokenTree


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
    ) -> PassResult:
        """A pass over the planned layers: layer subsets, early exit, resumption, input embeddings.

        Args:
            caches, roots, trees, computed: as for `score`; roots and tokens are not looked at when `hidden` is given.
            hidden: (r, hidden) states before layer `plan.first`, instead of tokens: embeddings if that is 0, or what an
                earlier call returned that stopped there, whose keys and values are still in scratch. Not modified.
        Returns:
            States and taps; there are no logits (0, v).
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
class EncodesInputs(Runner, TakesInputs, Protocol):
    """A runner with an encoder, which reads what a sequence was opened with before its first tokens are fed."""

    def rows_to_encode(self, cache: Any) -> int:
        """Rows that the encoder would be fed for a sequence; 0 where it has been read, for this one or another."""

    def encode(self, caches: Sequence[Any]) -> None:
        """Read the inputs of sequences, in one pass; those that were read before are not read again."""


@runtime_checkable
class AttendsToSource(EncodesInputs, Protocol):
    """A runner that shows how its decoder attends to the source."""

    source_heads: Sequence[tuple[int, int]]
    """(layer, query head) of all attention to the source."""

    def attention_to_source(self, cache: Any, tokens: Sequence[int], heads: Sequence[tuple[int, int]]) -> torch.Tensor:
        """(heads, tokens, rows) float32: how these heads attend while tokens are appended to a sequence."""


@runtime_checkable
class EndsPrompts(Protocol):
    """A runner of a model that reads tokens of its own behind every prompt."""

    prompt_end: Sequence[int]
    """Which they are."""


class LastKeys(Protocol):
    """The keys and values of a model's last layer that keeps those of the whole text, to be read and not written.

    Attributes:
        kv_heads, head_dim: of that layer.
    """

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    def read(self, cache: Any) -> torch.Tensor:
        """(n, 2 * kv heads, head dim) of a sequence's committed tokens, keys before values, as attention reads them:
        keys are rotated. It may be a view of the cache, which the next pass changes.
        """

    def turned(self, heads: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """(r, heads, head dim) new tensor: queries at these positions, rotated as that layer rotates its own."""


@runtime_checkable
class ShowsLastKeys(Protocol):
    """A runner whose last layer's keys and values can be read."""

    last_keys: LastKeys


@runtime_checkable
class LayeredRunner(RunsLayers, HasHead, Protocol):
    """A runner that can stop behind any layer, apply the head there, and go on."""


FLAGS: Final = frozenset(flag.name for flag in fields(Capabilities))
"""Abilities that a runner declares."""

PROTOCOLS: Final[Mapping[str, type]] = {
    "layer_subsets": RunsLayers,
    "early_exit": RunsLayers,
    "head": HasHead,
    "input_embeddings": HasEmbedding,
    "blocks": HasMemory,
    "added_rows": ScoresAddedRows,
    "last_keys": ShowsLastKeys,
}
"""Abilities that a runner's methods and attributes show."""


def has_ability(runner: Runner, name: str) -> bool:
    """Whether a runner has an ability, by the names of `registry.ABILITIES`.

    Raises:
        KeyError: no ability has this name.
    """
    if name in FLAGS:
        return bool(getattr(runner.capabilities, name))
    return isinstance(runner, PROTOCOLS[name])


def abilities_of(runner: Runner) -> frozenset[str]:
    """The names of all that a runner has."""
    return frozenset(name for name in (*FLAGS, *PROTOCOLS) if has_ability(runner, name))


class HasInfo(Protocol):
    """Describes its model: a runner of any kind of cache, which `Runner` with its opaque handles cannot say."""

    @property
    def info(self) -> ModelInfo:
        """Of its model."""


def input_kinds_of(runner: HasInfo) -> Collection[str]:
    """Which attributes of `Inputs` a runner takes."""
    return runner.input_kinds if isinstance(runner, TakesInputs) else ()


def check_inputs(runner: HasInfo, inputs: Inputs) -> None:
    """Reject kinds of inputs that a model does not take.

    Raises:
        PromptError: there is one.
    """
    kinds = input_kinds_of(runner)
    if any(kind not in kinds for kind in inputs.kinds):
        raise PromptError(
            f"{runner.info.name} takes {' and '.join(['tokens', *kinds])} as inputs, got {inputs.described()}; leave "
            "out what it does not take"
        )


def context_of(runner: HasInfo, inputs: Inputs = NO_INPUTS) -> int:
    """Most tokens that a sequence with these inputs may have.

    Raises:
        PromptError: inputs that the model does not take, or that do not fit it.
    """
    check_inputs(runner, inputs)
    return runner.most_tokens(inputs) if isinstance(runner, TakesInputs) else runner.info.max_context
