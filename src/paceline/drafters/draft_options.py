"""Options that all drafters with a model share: how many tokens they draft, and whether these are drawn or the likeliest.

In: values of `num_speculative_tokens` and `draft_sample_method`, contexts. Out: checks, and how a sequence drafts.
Not here: drawing (`draft_rows`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from paceline.checking import need

if TYPE_CHECKING:
    from paceline.drafters.base import Context

SampleMethod = Literal["probabilistic", "greedy"]
METHODS: Final = ("probabilistic", "greedy")


def check_limit(limit: int | None) -> None:
    """`num_speculative_tokens`, None where the budget alone decides.

    Raises:
        ConfigError: no number of tokens.
    """
    need(limit is None or (isinstance(limit, int) and limit >= 0), "num_speculative_tokens", "be 0 or more", limit)


def check_method(method: str | None) -> None:
    """`draft_sample_method`.

    Raises:
        ConfigError: a name that is not known.
    """
    need(method in (None, *METHODS), "draft_sample_method", f"be one of {', '.join(METHODS)}", method)


def draws_for(context: Context, method: str | None) -> bool:
    """Whether tokens are drawn for this sequence rather than the likeliest ones taken: above temperature 0, but by default not for
    requests with a seed of their own, which then get the tokens of that seed whatever is drafted."""
    return context.temperature > 0 and (method == "probabilistic" or (method is None and not context.seeded))
