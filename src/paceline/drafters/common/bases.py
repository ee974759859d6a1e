"""Base classes of drafters: with a model whose cache follows the text, and from the text alone; and the options that
they share.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

from paceline.drafters.base import Context, Drafter, DrafterArgs
from paceline.drafters.common.draft_state import FEW, CacheFollower, DraftState, catch_up
from paceline.errors import ConfigError
from paceline.models import EncodesInputs
from paceline.tree import EMPTY_TREE, Budget, Scores, TokenTree, Verdict
from paceline.utils import integer, need

if TYPE_CHECKING:
    from paceline.drafters.base import Models
    from paceline.models import Runner, SequenceCache

SampleMethod = Literal["probabilistic", "greedy"]
METHODS: Final = ("probabilistic", "greedy")
UNLIMITED: Final = 2**31


def draft_where(
    steps: Sequence[int], draft: Callable[..., list[TokenTree]], *columns: Sequence[Any]
) -> list[TokenTree]:
    """Draft for those sequences alone of which some steps are wanted; trees of all, empty ones for the others.

    Args:
        steps: of each sequence. draft: makes trees of the columns' values for the sequences that draft.
    """
    trees = [EMPTY_TREE] * len(steps)
    active = [i for i, count in enumerate(steps) if count > 0]
    if active:
        drafted = draft(*([column[i] for i in active] for column in columns))
        for i, tree in zip(active, drafted, strict=True):
            trees[i] = tree
    return trees


def limit_of(num_speculative_tokens: int | None) -> int:
    """`num_speculative_tokens`, UNLIMITED for None, where the budget alone decides.

    Raises:
        ConfigError: no number of tokens.
    """
    limit = UNLIMITED if num_speculative_tokens is None else num_speculative_tokens
    integer("num_speculative_tokens", limit, 0)
    return limit


def model_of(args: DrafterArgs, method: str, model: str | None) -> tuple[str, Models]:
    """The option `model` of a method that needs one, and what opens it.

    Raises:
        ConfigError: it was not given, or models are not loaded from files.
    """
    if not isinstance(model, str) or args.models is None:
        raise ConfigError(f"speculative_config model must be a folder or hub id for method {method!r}, got {model!r}")
    return model, args.models


def check_method(method: str | None) -> None:
    """Reject what is no `draft_sample_method`.

    Raises:
        ConfigError: a name that is not known.
    """
    need(method in (None, *METHODS), "draft_sample_method", f"be one of {', '.join(METHODS)}", method)


def draws_for(context: Context, method: str | None) -> bool:
    """Whether tokens are drawn for this sequence rather than the likeliest ones taken.

    Above temperature 0, but by default not for requests with a seed of their own, which then get the tokens of that
    seed whatever is drafted.
    """
    return context.temperature > 0 and (method == "probabilistic" or (method is None and not context.seeded))


F = TypeVar("F", bound=CacheFollower)


class ModelDrafter(Drafter, Generic[F]):
    """Base of drafters with a model whose cache follows the text.

    Attributes:
        runner: of the model. limit: most tokens to draft. method: `draft_sample_method`.
    """

    catches_up = True
    runner: Runner

    def _keep(self, args: DrafterArgs, limit: int | None, method: str | None) -> None:
        """Check and keep the options."""
        check_method(method)
        self.index, self.vocab_size, self.limit, self.method = args.index, args.vocab_size, limit_of(limit), method

    @property
    def draws_tokens(self) -> bool:
        return self.method != "greedy"

    def runners(self) -> Sequence[Runner]:
        return (self.runner,)

    def end(self, states: Sequence[F]) -> None:
        for state in states:
            self.runner.release(state.cache)

    def _steps(self, state: F, budget: Budget) -> int:
        """Levels to draft: within the budget, the option and the model's context."""
        return min(budget.nodes, budget.depth, self.limit, self.runner.info.max_context - len(state.context.tokens) + 1)


class FollowingDrafter(ModelDrafter[DraftState]):
    """Base of those whose model drafts behind the text, and whose cache keeps what the text confirms (`DraftState`)."""

    takes_back = False
    kind: type[DraftState] = DraftState
    """What is known of one sequence."""

    @abstractmethod
    def _draft(self, states: Sequence[DraftState], budgets: Sequence[Budget], steps: Sequence[int]) -> list[TokenTree]:
        """Trees of at most `steps` levels each, 1 or more; what the text has confirmed is kept."""

    def begin(self, contexts: Sequence[Context]) -> list[DraftState]:
        return [self.kind(context, self._opened(context)) for context in contexts]

    def _opened(self, context: Context) -> SequenceCache:
        """A new sequence; a model with an encoder reads the target's source, once for all sequences that have it."""
        if not (isinstance(self.runner, EncodesInputs) and context.inputs):
            return self.runner.open()
        cache = self.runner.open(0, context.inputs)
        self.runner.encode([cache])
        return cache

    def catch_up(self, states: Sequence[DraftState]) -> None:
        for state in states:
            state.confirm(self.runner)
        catch_up(self.runner, states, FEW)

    def propose(
        self, states: Sequence[DraftState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]
    ) -> list[TokenTree]:
        steps = [self._steps(state, budget) for state, budget in zip(states, budgets, strict=True)]
        for state, count in zip(states, steps, strict=True):
            if count > 0:
                state.confirm(self.runner)
        return draft_where(steps, self._draft, states, budgets, steps)

    def observe(
        self,
        states: Sequence[DraftState],
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict],
        scores: Scores | None,
    ) -> None:
        for state in states:
            state.confirm(self.runner)

    def fork(self, state: DraftState, context: Context) -> DraftState:
        state.confirm(self.runner)
        if not self.runner.capabilities.fork:
            return self.kind(context, self._opened(context))
        return self.kind(context, self.runner.fork(state.cache), state.base)


S = TypeVar("S")


class TextDrafter(Drafter, Generic[S]):
    """Base of these drafters: nothing is learned from scores and nothing held, unless they say so.

    Args:
        args: of the drafter.
        num_speculative_tokens: most nodes or levels to propose, as the method has it; None leaves it to the budget.
    Attributes:
        index, vocab_size: as in `args`.
        limit: `num_speculative_tokens`, or UNLIMITED.
        chains_only: the target scores no branches, or the rule of acceptance takes none.
    Raises:
        ConfigError: a negative number.
    """

    catches_up = True

    def __init__(self, args: DrafterArgs, num_speculative_tokens: int | None = None) -> None:
        self.limit = limit_of(num_speculative_tokens)
        self.index, self.vocab_size = args.index, args.vocab_size
        self.chains_only = not args.branches

    @abstractmethod
    def _begin(self, context: Context) -> S | None:
        """The state of a new sequence; None where nothing will be drafted."""

    @abstractmethod
    def fork(self, state: S, context: Context) -> S:
        """A state for a copy of the sequence."""

    def begin(self, contexts: Sequence[Context]) -> list[Any]:
        return [self._begin(context) for context in contexts]

    def _steps(self, budget: Budget) -> int:
        """Tokens of a chain within the budget and `limit`."""
        return min(budget.nodes, budget.depth, self.limit)


class CountingDrafter(Drafter, Generic[S]):
    """Base of those whose tables count the text: after each step, and when a sequence ends."""

    @abstractmethod
    def _catch_up(self, state: S) -> object:
        """Count what the text has got since the last time."""

    def observe(
        self, states: Sequence[S], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], scores: Scores | None
    ) -> None:
        for state in states:
            self._catch_up(state)

    def end(self, states: Sequence[S]) -> None:
        for state in states:
            self._catch_up(state)
        super().end(states)


class SingleDrafter(TextDrafter[S]):
    """Base of those that draft for one sequence at a time."""

    @abstractmethod
    def _propose(self, state: S, budget: Budget) -> TokenTree:
        """A tree for one sequence; nodes and levels of the budget and `limit` are above 0."""

    def propose(self, states: Sequence[S], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        return [
            self._propose(state, budget) if min(budget.nodes, budget.depth, self.limit) > 0 else EMPTY_TREE
            for state, budget in zip(states, budgets, strict=True)
        ]
