"""Runs the searches of one call side by side: one pass over all branches that they ask for, until each has ended."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

from paceline.config import ALL_DRAFTS
from paceline.engine import CompletionOutput, Engine, Request, StopChecker, Turns, tell
from paceline.errors import CapabilityError, PacelineError
from paceline.registry import ABILITIES
from paceline.search.base import BudgetSpentError, Search, Steps
from paceline.search.branch import Branch, BranchRows, Found, Origin
from paceline.search.forest import DeadEndError, Errors, Forest
from paceline.search.results import SearchTree
from paceline.utils import described, need

if TYPE_CHECKING:
    from paceline.drafters import Models
    from paceline.utils import Advance

logger = logging.getLogger("paceline.search")

Pair = tuple[Request, Search]


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """What a search may spend on a prompt; it then ends with what it has.

    Attributes:
        tokens: rows that are computed for it; None is the method's own limit. seconds: of wall time since it began.
    """

    tokens: int | None = None
    seconds: float | None = None


class _Running:
    """One search on its way."""

    def __init__(self, search: Search, root: Branch, budget: SearchBudget) -> None:
        self.request, self.search, self.budget, self.tree = root.request, search, budget, SearchTree(search.name)
        self.steps: Steps[list[Found]] = search.run(root)
        self.asked: Sequence[Branch] = ()  # each once
        self._places: list[int] = []  # in these, of what it asked for
        self.ended = False
        self._most = search.most_rows(self.request) if budget.tokens is None else budget.tokens
        self._dead_end: PacelineError | None = None  # the first one that the search has dropped
        self.start = perf_counter()
        self._take(lambda: next(self.steps))

    def send(self, rows: BranchRows, errors: Errors) -> None:
        """Hand it what it asked for, or end it where that is no distribution."""
        self.tree.num_tokens += len(self.asked)
        self.tree.num_passes += 1
        spent = self._spent()
        fatal = self._fatal(errors)
        if fatal is not None:
            self._take(lambda: self.steps.throw(fatal))
        elif spent:
            self.tree.budget_spent = True
            self._take(lambda: self.steps.throw(BudgetSpentError()))
        else:
            whole = len(self._places) == len(self.asked)
            mine = rows if whole else BranchRows(rows.logits[self._places], rows.logprobs[self._places])
            self._take(lambda: self.steps.send(mine))

    def fail(self, error: PacelineError) -> None:
        """End it with an error; what it produced before is lost to it."""
        self.steps.close()
        self._end([], str(error))

    def _fatal(self, errors: Errors) -> PacelineError | None:
        """The first error that ends the search; where it drops dead ends, the first of those is only noted."""
        for error in [errors[branch] for branch in self.asked if branch in errors]:
            if not (self.search.drops_dead_ends and isinstance(error, DeadEndError)):
                return error
            self._dead_end = self._dead_end or error
        return None

    def _spent(self) -> bool:
        seconds = self.budget.seconds
        out_of_tokens = self._most is not None and self.tree.num_tokens + self.search.own_rows >= self._most
        return out_of_tokens or (seconds is not None and perf_counter() - self.start >= seconds)

    def _take(self, step: Callable[[], Sequence[Branch]]) -> None:
        try:
            asked = step()
            self.asked = list(dict.fromkeys(asked))
            place = {branch: i for i, branch in enumerate(self.asked)}
            self._places = [place[branch] for branch in asked]
            for branch in self.asked:
                self.tree.note(branch)
        except StopIteration as end:
            self._end(end.value)
        except PacelineError as error:
            self._end([], str(error))
        except Exception as error:  # of a function that a user gave, or a method of his own
            logger.debug("the error of the search", exc_info=error)
            self._end([], f"search method {self.search.name!r} failed ({described(error)})")

    def _end(self, found: Sequence[Found], error: str | None = None) -> None:
        self.ended, self.asked = True, ()
        request, self.tree.seconds = self.request, perf_counter() - self.start
        self.tree.num_tokens += self.search.own_rows
        self.tree.num_passes += self.search.own_passes
        best = found[: request.params.n]
        self.tree.outputs = [self.tree.note(text.branch) for text in best]
        self.tree.scores = [text.score for text in best]
        request.outputs = [output_of(text, index) for index, text in enumerate(best)]
        if not best:
            nothing = "the search has found nothing"
            if self.tree.budget_spent:
                nothing += ", and its budget is spent; raise budget_tokens or budget_seconds"
            elif self._dead_end is not None:
                nothing = str(self._dead_end)
            why = error or nothing
            request.outputs = [CompletionOutput(0, finish_reason="error", error=why)]
        metrics = request.metrics
        metrics.num_steps = self.tree.num_passes
        metrics.num_generation_tokens = sum(len(output.token_ids) for output in request.outputs)
        metrics.generation_time = self.tree.seconds
        request.result().search = self.tree


def output_of(found: Found, index: int) -> CompletionOutput:
    """A text as an output of its request; one that has not ended was ended by the search."""
    branch, told = found.branch, found.branch.told()
    text = told.text if branch.request.params.detokenize else ""
    return CompletionOutput(
        index, text, branch.tokens(), branch.logprob, None, told.finish_reason or "abort", told.stop_reason,
        score=found.score,
    )  # fmt: skip


def run_searches(
    engine: Engine, turns: Turns, requests: Sequence[Request], searches: Sequence[Search], *, budget: SearchBudget,
    models: Models, advance: Advance | None = None,
) -> None:  # fmt: skip
    """Search for every request's outputs, which it then has; the searches of all prompts share their passes, as many
    at once as the engine decodes requests, and as have room for their prompts.

    Args:
        engine: whose model, tokenizer and end tokens count. turns: of the model, taken for each pass.
        searches: one for each request. models: opens models beside the engine's. advance: told how far they are.
    Raises:
        ConfigError, PromptError: a request that cannot be decoded, before anything runs.
        PacelineError: a search that this model, or one beside it, is not fit for, likewise.
    """
    for request in requests:
        engine.check(request)
        need(not request.prediction, "prediction", "be left out with search, which drafts nothing", request.prediction)
        need(request.drafts == ALL_DRAFTS, "speculative_config", "be left out of a prompt with search", request.drafts)
    if not engine.parts.runner.capabilities.truncate:
        raise CapabilityError(
            f"search needs a model that {ABILITIES['truncate']}; {engine.parts.runner.info.name} is not one as it runs "
            "here; decode without search"
        )
    for search in searches:
        search.tokenizer, search.runner, search.models = engine.scheduler.tokenizer, engine.parts.runner, models
        search.prepare()
    config = engine.scheduler.config
    forest = Forest(engine.parts.runner, config.max_num_batched_tokens, share_prompts=config.enable_prefix_caching)
    waiting, running = deque(zip(requests, searches, strict=True)), list[_Running]()
    try:
        while waiting or running:
            with turns.turn():
                for pair in _admitted(forest, waiting, config.max_num_seqs - len(running), alone=not running):
                    running.append(_begun(engine, *pair, budget))
                _step(forest, [run for run in running if not run.ended])
            running = [run for run in running if not run.ended]
            if advance is not None:
                tell(advance, requests)
    finally:
        with turns.turn():
            forest.close()


def _admitted(forest: Forest, waiting: deque[Pair], most: int, *, alone: bool) -> list[Pair]:
    """Those that begin now, taken from `waiting`: at most so many, whose prompts fit, or one where it is alone."""
    admitted, room = list[Pair](), forest.room()
    while waiting and len(admitted) < most:
        if room is not None:
            room -= forest.blocks(len(waiting[0][0].prompt_ids))
            if room < 0 and not (alone and not admitted):
                break
        admitted.append(waiting.popleft())
    return admitted


def _begun(engine: Engine, request: Request, search: Search, budget: SearchBudget) -> _Running:
    rules, scheduler = request.rules, engine.scheduler
    assert rules is not None

    params = request.params
    read = params if params.detokenize else replace(params, detokenize=True)  # functions judge texts, wanted or not

    def checker(text: bool) -> StopChecker:
        return StopChecker(
            read if text else params, scheduler.eos_ids, scheduler.tokenizer if text else None, request.prompt_ids,
            max_new_tokens=request.max_tokens, at_once=True,
        )  # fmt: skip

    request.metrics.num_prompt_tokens = len(request.prompt_ids)
    return _Running(search, Branch.of_prompt(Origin(request, rules, checker)), budget)


def _step(forest: Forest, running: Sequence[_Running]) -> None:
    """One pass for all; where memory is short, the searches that ask for most end with an error."""
    going = list(running)
    while going:
        try:
            kept = [branch for run in going for branch in run.search.kept]
            rows, errors = forest.rows([branch for run in going for branch in run.asked], kept)
            break
        except PacelineError as error:
            widest = max(going, key=lambda run: len(run.asked))
            widest.fail(error)
            forest.close(widest.request.id)
            going.remove(widest)
    start = 0
    for run in going:
        at = slice(start, start + len(run.asked))
        start = at.stop
        run.send(BranchRows(rows.logits[at], rows.logprobs[at]), errors)
        if run.ended:
            forest.close(run.request.id)
