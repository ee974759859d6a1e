"""What drafters with a model share: how many tokens they draft, whether these are drawn or the likeliest, and the
model's upkeep.

In: values of `num_speculative_tokens` and `draft_sample_method`, contexts, budgets. Out: checks, and how far and how a
sequence
drafts. Not here: drawing (`draft_rows`), caches (`draft_state`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Generic, Literal, TypeVar

from paceline.drafters.base import Context, Drafter, DrafterArgs
from paceline.drafters.common.draft_state import Follower
from paceline.utils import integer, need

if TYPE_CHECKING:
    from paceline.models import Runner
    from paceline.tree import Budget

SampleMethod = Literal["probabilistic", "greedy"]
METHODS: Final = ("probabilistic", "greedy")
UNLIMITED: Final = 2**31


def limit_of(given: int | None) -> int:
    """`num_speculative_tokens`, UNLIMITED for None, where the budget alone decides.

    Raises:
        ConfigError: no number of tokens.
    """
    limit = UNLIMITED if given is None else given
    integer("num_speculative_tokens", limit, 0)
    return limit


def check_method(method: str | None) -> None:
    """`draft_sample_method`.

    Raises:
        ConfigError: a name that is not known.
    """
    need(method in (None, *METHODS), "draft_sample_method", f"be one of {', '.join(METHODS)}", method)


def draws_for(context: Context, method: str | None) -> bool:
    """Whether tokens are drawn for this sequence rather than the likeliest ones taken: above temperature 0, but by
    default not for requests with a seed of their own, which then get the tokens of that seed whatever is drafted.
    """
    return context.temperature > 0 and (method == "probabilistic" or (method is None and not context.seeded))


S = TypeVar("S", bound=Follower)


class ModelDrafter(Drafter, Generic[S]):
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

    def end(self, states: Sequence[S]) -> None:
        for state in states:
            self.runner.release(state.cache)

    def _steps(self, state: S, budget: Budget) -> int:
        """Levels to draft: within the budget, the option and the model's context."""
        return min(budget.nodes, budget.depth, self.limit, self.runner.info.max_context - len(state.context.tokens) + 1)
