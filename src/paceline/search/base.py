"""What a search method is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from paceline.search.branch import Branch, BranchRows, Found
from paceline.search.results import RetrievalReport
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.checkpoints import Tokenizer
    from paceline.config import SamplingParams
    from paceline.drafters import Models
    from paceline.engine import Request, Turns
    from paceline.models import Runner

T = TypeVar("T")

Steps = Generator[Sequence[Branch], BranchRows, T]
"""Yields the branches whose rows are wanted, none of which has ended, and is sent a row for each; returns a T. A branch
that is named several times is computed once. An empty list gives others a turn and computes nothing.

The caches of branches that are not asked for are freed, but for those in `Search.kept`.
"""


class BudgetSpentError(Exception):
    """Thrown into a search that has used up its tokens or seconds."""


class Search(ABC):
    """One search, of one prompt.

    Attributes:
        name: of the method. one_text: whether it makes a single text, so that `n` must be 1.
        drops_dead_ends: whether it goes on with other branches where a row is -inf throughout, because the request's
            rules allow no token there; else that ends it with an error, as a rule that fails always does.
        keeps_beginnings: whether every text to come goes on from one in `alive`, or is one in `found`, wherever rows
            are asked for; so what these begin with is told before the end (`LLM.stream`).
        keeps_spellings: whether a text that was found in several spellings (other tokens) comes back in each of them;
            else in the best one alone.
        words: options whose texts are words of the method's own. programs: options that hold programs, which run in a
            sandbox. withheld: options that change what the machine must bear. Clients of a server may give numbers,
            words and, where it is allowed, programs (`SearchConfig.of_client`); other texts may name functions, models
            or files. needs_code: it cannot do without a function or another model, so that clients cannot have it.
        branches: texts that go on side by side at most.
        alive: branches that go on; with `found`, what there is where the budget ends early.
        found: texts so far.
        kept: branches that will be asked for later, whose caches stay meanwhile where memory allows.
        taps: layers whose states it wants beside the rows.
        turns: of the model, in which the search runs. tokenizer: of the model, there when it begins.
        runner: the model, which `steps` may run passes of its own with; it gives back the caches that it opens. models:
            opens others.
    retrieval: what retrieving took, of a method that does.
    own_rows, own_passes: of such passes, for the budget and the report.
    second_tokens: tokens of the text that another model wrote, and this one has not judged.
    """

    name: ClassVar[str]
    one_text: ClassVar[bool] = False
    drops_dead_ends: ClassVar[bool] = False
    keeps_beginnings: ClassVar[bool] = False
    keeps_spellings: ClassVar[bool] = False
    words: ClassVar[frozenset[str]] = frozenset()
    programs: ClassVar[frozenset[str]] = frozenset()
    withheld: ClassVar[frozenset[str]] = frozenset()
    needs_code: ClassVar[bool] = False
    turns: Turns | None = None
    retrieval: RetrievalReport | None = None
    tokenizer: Tokenizer
    runner: Runner
    models: Models

    def __init__(self) -> None:
        self.kept: list[Branch] = []
        self.alive: list[Branch] = []
        self.found: list[Found] = []
        self.own_rows = self.own_passes = self.second_tokens = 0
        self.branches, self.taps = 1, list[int]()

    @classmethod
    def check(cls, params: SamplingParams) -> None:
        """Reject parameters that the method cannot honour: here none.

        Raises:
            ConfigError: naming the parameter.
        """
        del params

    def prepare(self) -> None:  # noqa: B027  # most need nothing
        """Open what it needs beside the model, and reject a model that it cannot search with, before anything runs.

        Raises:
            PacelineError: one line for the caller of `generate`.
        """

    def most_rows(self, request: Request) -> int | None:
        """That it computes where no `budget_tokens` is given; None for a search that ends by itself."""
        del request
        return None

    @abstractmethod
    def steps(self, root: Branch) -> Steps[None]:
        """Search from a prompt; what was found is in `found`."""

    def run(self, root: Branch) -> Steps[list[Found]]:
        """What the search finds, best first; where its budget ends, what it has by then."""
        try:
            yield from self.steps(root)
        except BudgetSpentError:
            self.found += [Found(branch, self.score(branch)) for branch in self.alive if branch.length]
        ranked = sorted(self.found, key=lambda text: -text.score)
        return ranked if self.keeps_spellings else different_texts(ranked, root.request.params.n)

    def aside(self, work: Callable[[], T]) -> T:
        """Do `work`, which takes long and uses nothing of the model, while other requests go on."""
        return work() if self.turns is None else self.turns.aside(work)

    def score(self, branch: Branch) -> float:
        """Of a text that has not ended, in the same measure as those of `found`: by default the mean log-probability of
        its tokens.
        """
        return mean_logprob(branch)


def need_draws(method: str, params: SamplingParams) -> None:
    """Reject parameters at which all samples are the same.

    Raises:
        ConfigError: temperature 0.
    """
    need(not params.greedy, "temperature", f"be above 0 with search method {method!r}, which samples", 0)


def mean_logprob(branch: Branch) -> float:
    """Of its tokens, as the request's parameters shape them; 0 without any."""
    return branch.logprob / max(1, branch.length)


def different_texts(found: Sequence[Found], most: int) -> list[Found]:
    """The first `most` of them that differ in their texts."""
    by_spelling: dict[str | tuple[int, ...], Found] = {}
    for text in found:
        if len(by_spelling) == most:
            break
        by_spelling.setdefault(text.branch.said(), text)
    return list(by_spelling.values())


def continued(
    branches: Sequence[Branch], indices: Sequence[int], *, until: Callable[[Branch], bool] = lambda _: False,
    alive: Callable[[list[Branch]], None] = lambda _: None,
) -> Steps[list[Branch]]:  # fmt: skip
    """Sample each branch on, side by side, until it ends or `until` is true of it.

    Args:
        indices: of the outputs whose randomness each follows.
        alive: told the branches after every token.
    Returns:
        The branches that they became.
    """
    texts = list(branches)
    going = [i for i, text in enumerate(texts) if not text.ended]
    while going:
        rows = yield [texts[i] for i in going]
        for row, i in enumerate(going):
            token = texts[i].draw(rows.logprobs[row], indices[i])
            texts[i] = texts[i].child(token, float(rows.logprobs[row, token]))
        alive(texts)
        going = [i for i in going if not (texts[i].ended or until(texts[i]))]
    return texts
