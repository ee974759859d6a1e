"""What a drafter is: proposes tokens; never decides which are accepted.

In: contexts (the text so far, the request's rules) and budgets. Out: token trees. Not here: the target's logits as a decision,
sampling parameters beyond a drafter's own q, the engine.

The engine calls `begin` once per request after prefill, then `propose` and `observe` in turn, and `end` when the request ends;
one object serves many sequences, so everything per sequence lives in the state that `begin` returns. A drafter that raises is
dropped for that request, which goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from paceline.models.base import Runner
    from paceline.tree.token_tree import TokenTree
    from paceline.tree.types import Budget, Scores, Verdict

Shape = Callable[["torch.Tensor", Sequence[Sequence[int]]], "torch.Tensor"]


@dataclass(slots=True)
class Context:
    """What a drafter may know of one sequence.

    Attributes:
        request_id: unique name.
        tokens: the live text, prompt and output; grows in place. Its last entry is the root. Drafters may only read it: each has a
            copy of its own, so that writing into it changes no output, and the drafter that is seen to do so is dropped.
        prompt_length: how many of `tokens` are prompt.
        temperature: 0 for greedy requests.
        seed: base of the drafter's own draws.
        seeded: the user gave the seed and expects the same tokens again, whatever was drafted; points give that, draws do not.
        shape: applies the request's sampling rules to raw logits (r, v) at the given paths (tokens after the root, one per row) and
            returns float32 log-weights (r, v), so that q can follow the target's rules.
        taps: layer -> (prompt length - 1, hidden) states of the prompt, where the drafter asked for taps.
        tenant: tables learned from text are shared within one tenant only.
        prediction: tokens that the caller expects as output; may be empty, and may hold ids beyond the vocabulary.
    """

    request_id: str
    tokens: list[int]
    prompt_length: int
    temperature: float = 0.0
    seed: int = 0
    seeded: bool = False
    shape: Shape | None = None
    taps: Mapping[int, torch.Tensor] = field(default_factory=dict)
    tenant: str = "default"
    prediction: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterArgs:
    """What the engine hands to a drafter's constructor, besides its part of `speculative_config` as keyword arguments.

    Attributes:
        vocab_size: of the target; proposed ids lie below it.
        index: this drafter's place in the list, the value of `TokenTree.sources` for its nodes.
        target: the target's runner, for drafters that use it.
        load_runner: opens another checkpoint by name, after checking that its tokenizer is the target's.
        max_context: of the target.
        fingerprint: names the tokenizer, so that tables and datastores made with another one are refused; asked only by
            drafters that read such files, since it takes a pass over the vocabulary.
    """

    vocab_size: int
    index: int
    max_context: int
    target: Runner | None = None
    load_runner: Callable[[str], Runner] | None = None
    fingerprint: Callable[[], str] = str


class Drafter(Protocol):
    """Proposes token trees for many sequences.

    A drafter that has `catches_up = True` needs no `observe` after a step without any drafts: it reads the new tokens from its
    contexts when it is next asked. One that has `shares_state = True` learns from all running sequences of a tenant for all of
    them, so that its proposals for one may depend on what the others were; without it they never do.
    """

    name: str
    taps: Sequence[int]
    """Layers of the target whose hidden states this drafter wants, in the prompt and in every score."""

    def begin(self, contexts: Sequence[Context]) -> list[Any]:
        """One new state per sequence, right after prefill; None for one that it will have nothing to say about."""

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        """One tree per sequence within its budget; EMPTY_TREE where there is nothing to say. `so_far` holds the trees that the
        drafters before this one proposed."""

    def observe(
        self, states: Sequence[Any], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], scores: Scores | None
    ) -> None:
        """What became of the (merged) trees that were scored; contexts already hold the new tokens."""

    def fork(self, state: Any, context: Context) -> Any:
        """A state for a copy of the sequence (n > 1, search)."""

    def end(self, states: Sequence[Any]) -> None:
        """The sequences are finished or dropped; free what they hold."""
