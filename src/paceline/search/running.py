"""One search on its way: it is sent the rows that it asks for, until it has found its texts or spent its budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from time import perf_counter

from paceline.engine import CompletionOutput, Engine, Request, StopChecker, StreamChunk, Transcript
from paceline.errors import PacelineError
from paceline.search.base import BudgetSpentError, Search, Steps
from paceline.search.branch import Branch, BranchRows, Found, Origin
from paceline.search.forest import DeadEndError, Errors
from paceline.search.results import SearchTree
from paceline.utils import described

logger = logging.getLogger("paceline.search")


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """What a search may spend on a prompt; it then ends with what it has.

    Attributes:
        tokens: rows that are computed for it; None is the method's own limit. seconds: of wall time since it began.
    """

    tokens: int | None = None
    seconds: float | None = None


@dataclass(slots=True, kw_only=True)
class SearchRequest(Request):
    """A request whose outputs a search finds."""

    search: Search
    budget: SearchBudget = field(default_factory=SearchBudget)


class RunningSearch:
    """One search on its way.

    Args:
        request: checked; its rules are there.
    Attributes:
        root: the prompt alone.
        asked: branches whose rows it waits for, each once.
        chunks: what its readers have not got yet.
    """

    def __init__(self, engine: Engine, request: SearchRequest) -> None:
        self.request, self.search, self.tree = request, request.search, SearchTree(request.search.name)
        self._engine = engine
        self.asked: Sequence[Branch] = ()
        self.chunks: list[StreamChunk] = []
        self.root = Branch.of_prompt(self._origin())
        self.steps: Steps[list[Found]] = self.search.run(self.root)
        self.ended = False
        self._places: list[int] = []  # of what it asked for, in `asked`
        self._transcript: Transcript | None = None  # of what all outputs begin with, where that is told
        tokens = request.budget.tokens
        self._most = self.search.most_rows(request) if tokens is None else tokens
        self._dead_end: PacelineError | None = None  # the first one that the search has dropped
        self.start = request.metrics.scheduled_time = perf_counter()
        request.outputs[:] = [CompletionOutput(0)]

    def _origin(self) -> Origin:
        request, scheduler = self.request, self._engine.scheduler
        rules, params = request.rules, request.params
        assert rules is not None
        read = params if params.detokenize else replace(params, detokenize=True)  # functions judge texts, wanted or not

        def checker(text: bool) -> StopChecker:
            return StopChecker(
                read if text else params, scheduler.eos_ids, scheduler.tokenizer if text else None, request.prompt_ids,
                max_new_tokens=request.max_tokens, at_once=True,
            )  # fmt: skip

        return Origin(request, rules, checker)

    def begin(self) -> None:
        """The prompt is in its cache: let the search ask for its first rows."""
        request, scheduler = self.request, self._engine.scheduler
        request.metrics.first_step_time = perf_counter()

        def first() -> Sequence[Branch]:
            if request.streamed and self.search.keeps_beginnings:
                self._transcript = Transcript(
                    request.params, request.prompt_ids, scheduler.tokenizer, scheduler.eos_ids, request.max_tokens
                )
            return next(self.steps)

        self._take(first)

    def send(self, rows: BranchRows, errors: Errors) -> None:
        """Hand it what it asked for, or end it where that is no distribution."""
        self.tree.num_tokens += len(self.asked)
        self.tree.num_passes += bool(self.asked)
        spent = self._spent()
        fatal = self._fatal(errors)
        if fatal is not None:
            self._take(lambda: self.steps.throw(fatal))
        elif spent:
            self.tree.budget_spent = True
            self._take(lambda: self.steps.throw(BudgetSpentError()))
        else:
            whole = len(self._places) == len(self.asked)
            mine = rows if whole else rows.at(self._places)
            self._take(lambda: self.steps.send(mine))

    def fail(self, why: str) -> None:
        """End it with an error; what it has found is lost."""
        self._close()
        self._end([], why)

    def abort(self) -> None:
        """End it as it is, without texts but for what was told."""
        self._close()
        self.ended, self.asked = True, ()
        self.request.outputs[0].finish_reason = "abort"
        self._chunk(0, (), (), ended=True)

    def _close(self) -> None:
        try:
            self.steps.close()
        except Exception as error:  # of a method's own, in what it does at its end
            logger.warning("search method %r failed at its end (%s)", self.search.name, described(error))

    def _fatal(self, errors: Errors) -> PacelineError | None:
        """The first error that ends the search; where it drops dead ends, the first of those is only noted."""
        for error in [errors[branch] for branch in self.asked if branch in errors]:
            if not (self.search.drops_dead_ends and isinstance(error, DeadEndError)):
                return error
            self._dead_end = self._dead_end or error
        return None

    def _spent(self) -> bool:
        seconds = self.request.budget.seconds
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
            self._tell()
        except StopIteration as end:
            self._end(end.value)
        except PacelineError as error:
            self._end([], str(error))
        except Exception as error:  # of a function that a user gave, or a method of his own
            logger.debug("the error of the search", exc_info=error)
            self._end([], f"search method {self.search.name!r} failed ({described(error)})")

    def _tell(self) -> None:
        """Tell what all outputs begin with, as far as it is new."""
        if self._transcript is None:
            return
        output = self.request.outputs[0]
        told = len(output.token_ids)
        beginning = common_beginning([*self.search.alive, *(text.branch for text in self.search.found)], told)
        if beginning is None or beginning.ended:
            return
        tokens = [branch.token for branch in islice(beginning.ancestors(), beginning.length - told)][::-1]
        segments, _ = self._transcript.push(tokens, [None] * len(tokens))
        output.token_ids += tokens
        output.text += "".join(text for text, _ in segments)
        self._chunk(0, segments, tokens)

    def _end(self, found: Sequence[Found], error: str | None = None) -> None:
        self.ended, self.asked = True, ()
        request, self.tree.seconds = self.request, perf_counter() - self.start
        self.tree.num_tokens += self.search.own_rows
        self.tree.num_passes += self.search.own_passes
        self.tree.retrieval = self.search.retrieval
        best = found[: request.params.n]
        self.tree.outputs = [self.tree.note(text.branch) for text in best]
        self.tree.scores = [text.score for text in best]
        told = request.outputs[0]
        outputs = [output_of(text, index) for index, text in enumerate(best)]
        if outputs and outputs[0].token_ids[: len(told.token_ids)] != told.token_ids:
            outputs, error = [], f"search method {self.search.name!r} has told another text than it has found"
        if not outputs:
            why = error or self._nothing()
            outputs = [CompletionOutput(0, told.text, told.token_ids, finish_reason="error", error=why)]
        request.outputs[:] = outputs
        metrics = request.metrics
        metrics.num_steps = self.tree.num_passes
        metrics.num_generation_tokens = sum(len(output.token_ids) for output in outputs)
        metrics.num_departures = self.search.second_tokens
        metrics.generation_time = self.tree.seconds
        request.result().search = self.tree
        for output in outputs:
            self._last_chunk(output, told)

    def _nothing(self) -> str:
        """Why there is no text."""
        if self.tree.budget_spent:
            return "the search has found nothing, and its budget is spent; raise budget_tokens or budget_seconds"
        return "the search has found nothing" if self._dead_end is None else str(self._dead_end)

    def _last_chunk(self, output: CompletionOutput, told: CompletionOutput) -> None:
        """What of an output was not told yet."""
        before = told if output.index == 0 else CompletionOutput(0)
        rest = output.text[len(before.text) :]
        self._chunk(
            output.index, ((rest, None),) if rest else (), output.token_ids[len(before.token_ids) :], ended=True
        )

    def _chunk(
        self, index: int, segments: Sequence[tuple[str, str | None]], tokens: Sequence[int], *, ended: bool = False
    ) -> None:
        request = self.request
        if not request.streamed:
            return
        metrics = request.metrics
        if tokens and metrics.time_to_first_token is None:
            metrics.time_to_first_token = perf_counter() - metrics.arrival_time
        reason = request.outputs[index].finish_reason if ended else None
        self.chunks.append(StreamChunk(index, tuple(segments), tuple(tokens), reason, request.result()))


def output_of(found: Found, index: int) -> CompletionOutput:
    """A text as an output of its request; one that has not ended was ended by the search."""
    branch, told = found.branch, found.branch.told()
    text = told.text if branch.request.params.detokenize else ""
    return CompletionOutput(
        index, text, branch.tokens(), branch.logprob, None, told.finish_reason or "abort", told.stop_reason,
        score=found.score,
    )  # fmt: skip


def common_beginning(branches: Sequence[Branch], longer_than: int) -> Branch | None:
    """What all these texts of one prompt go on from, themselves included.

    Args:
        longer_than: tokens; None is returned where it is no longer, and where there are no texts.
    """
    least = min((branch.length for branch in branches), default=0)
    if least <= longer_than:
        return None
    level = {next(islice(branch.ancestors(), branch.length - least, None)) for branch in branches}
    while len(level) > 1:
        if least - 1 <= longer_than:
            return None
        least, level = least - 1, {branch.parent for branch in level if branch.parent is not None}
    (beginning,) = level
    return beginning
