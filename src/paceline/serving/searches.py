"""What of a search a request may ask for: methods by name, with numbers, within the limits of the server."""

from __future__ import annotations

from dataclasses import replace

from paceline.config import SamplingParams, ServerConfig
from paceline.errors import PacelineError
from paceline.search import SearchBudget, SearchConfig
from paceline.serving.api_errors import ApiError
from paceline.serving.protocol import DecodingRequest
from paceline.serving.request_errors import named


def search_of(
    request: DecodingRequest, params: SamplingParams, config: ServerConfig
) -> tuple[SearchConfig | None, int]:
    """Return the search that a request asks for, with a budget, and its branches; None and 1 where it asks for none.

    Args:
        params: of the request.
    Raises:
        ApiError: searches are off, or it cannot be honoured.
    """
    if request.search is None:
        return None, 1
    if not config.enable_search:
        why = "search is switched off on this server; its operator may start it with --enable-search"
        raise ApiError(why, param="search", code="search_disabled")
    try:
        found = SearchConfig.of_client(request.search, programs=config.enable_search_programs)
        found.check(params)
        branches = found.open().branches
    except PacelineError as error:
        told = named(error, request)
        raise ApiError(told.message, param=told.param or "search") from None
    if branches > config.max_n:
        why = f"a search may have at most {config.max_n} branches side by side (--max-n), got {branches}"
        raise ApiError(why, param="search")
    budget, most = found.budget, config.max_search_tokens
    if budget.tokens is not None and budget.tokens > most:
        raise ApiError(f"budget_tokens must be at most {most}, got {budget.tokens}", param="search")
    seconds = config.request_timeout if budget.seconds is None else min(budget.seconds, config.request_timeout)
    tokens = most if budget.tokens is None else budget.tokens
    return replace(found, budget=SearchBudget(tokens, seconds)), branches
