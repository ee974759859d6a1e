"""PG-TD: Monte-Carlo tree search over tokens, in which finished programs are tried.

In every rollout the search walks down its tree by what came of each token so far and by how likely the model finds it,
adds a token, and lets the model finish the text greedily, or by sampling. The reward of the finished text counts for
every token on the way. What the model has said once is not asked again: the likeliest tokens at every place that a text
went through, and where the greedy continuation of a text ends. Of texts with the same reward the one found first is the
best, as in the authors' code; the first rollout's is the text of greedy decoding. Source: Planning with Large Language
Models for Code Generation (arXiv:2303.05510).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import exp, log, sqrt
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.search.base import Search, Steps
from paceline.search.branch import Branch, Found
from paceline.search.named import Scorer, named, rewards
from paceline.search.sandbox import Sandbox
from paceline.utils import integer, need, number, strings

if TYPE_CHECKING:
    import torch

Tests = list[str] | tuple[str, ...] | Callable[[str], Sequence[str]] | str


@dataclass(slots=True, eq=False)
class _Edge:
    """A token that may follow a place of the tree, of which `prior` is the chance among those that may.

    Attributes:
        best: highest reward seen behind it. visits: rollouts that went through it.
    """

    token: int
    logprob: float
    prior: float
    best: float = 0.0
    visits: int = 0


@dataclass(slots=True, eq=False)
class _VisitedText:
    """A text that some rollout went through.

    Attributes:
        after: the places behind it, by token. top: the likeliest tokens with their log-probabilities, once known and
            remembered. ending: where its greedy continuation ends, once known. reward: of the ended text, once known.
        visits: of rollouts, and one; 0 where it is not in the tree. edges: of the tree, likeliest first.
    """

    branch: Branch
    after: dict[int, _VisitedText] = field(default_factory=dict)
    top: list[tuple[int, float]] | None = None
    ending: _VisitedText | None = None
    reward: float | None = None
    visits: int = 0
    edges: list[_Edge] = field(default_factory=list)

    def next(self, token: int, logprob: float) -> _VisitedText:
        if token not in self.after:
            self.after[token] = _VisitedText(self.branch.child(token, logprob))
        return self.after[token]


class PgTd(Search):
    """Tree search by the reward of finished texts: a function, or the share of tests that the program passes.

    Programs run in a sandbox (`paceline.search.run_tests`), where the machine permits one. At temperature 0 rollouts
    end greedily, above it by sampling. The search ends early once as many texts as are wanted have reward 1.

    Args:
        reward: of ended texts (behind the prompt), numbers in 0..1, one each: a callable that takes a list, or
            "module:function".
        tests: in its place, sources of tests as `assert f(1) == 2`; or what gives them for a prompt's text, a callable
            or "module:function".
        program: what is tested, from a prompt's text and the text behind it, a callable or "module:function"; by
            default the first block of code that the text marks with ```, else prompt and text.
        rollouts: at most. branching: likeliest tokens that may follow a text.
        exploration: of likely tokens against rewarded ones (the paper's c). exploration_base: how soon that grows with
            the visits of a text (c_base).
        sequence_cache: reuse greedy continuations. top_k_cache: reuse the likeliest tokens at a place. Neither changes
            what is found.
        test_seconds: of wall time, for one test. unsafe_execution: run programs without a sandbox, with resource limits
            alone.
    Raises:
        ConfigError: a value outside its range, not one of reward and tests, tests on a machine without a sandbox.
    """

    name = "pg_td"
    programs = frozenset({"tests"})
    withheld = frozenset({"test_seconds", "unsafe_execution"})

    def __init__(
        self,
        reward: Scorer | str | None = None,
        tests: Tests | None = None,
        *,
        program: Callable[[str, str], str] | str | None = None,
        rollouts: int = 16,
        branching: int = 3,
        exploration: float = 4.0,
        exploration_base: float = 10.0,
        sequence_cache: bool = True,
        top_k_cache: bool = True,
        test_seconds: float = 5.0,
        unsafe_execution: bool = False,
    ) -> None:
        super().__init__()
        integer("rollouts", rollouts, 1, 100_000)
        integer("branching", branching, 1, 1024)
        number("exploration", exploration, 0.0, 1e6, "be 0 or more")
        number("exploration_base", exploration_base, 0.0, 1e9, "be above 0", open_low=True)
        if (reward is None) == (tests is None):
            raise ConfigError("search method 'pg_td' needs a reward or tests, one of the two")
        self.reward = None if reward is None else named("reward", reward)
        self.tests: Sequence[str] | Callable[[str], Sequence[str]]
        if tests is None or isinstance(tests, list | tuple):
            self.tests = _checked(tests) if tests is not None else ()
        else:
            function = not isinstance(tests, str) or re.fullmatch(r"[\w.]+:[\w.]+", tests)
            need(bool(function), "tests", 'be a list of tests, a function, or its name as "module:function"', tests)
            self.tests = named("tests", tests)
        self.program = named("program", program, program_of)
        if tests is not None:
            number("test_seconds", test_seconds, 0.0, 3600.0, "be above 0 and at most 3600", open_low=True)
        self.box = None if tests is None else Sandbox(test_seconds, unsafe_execution=unsafe_execution)
        self.rollouts, self.branching = rollouts, branching
        self.exploration, self.base = exploration, exploration_base
        self.sequence_cache, self.top_k_cache = sequence_cache, top_k_cache
        self._said: set[str | tuple[int, ...]] = set()  # what was found
        self.tried: list[Branch] = []  # of each rollout the text that it added to the tree, or came to the end of

    def steps(self, root: Branch) -> Steps[None]:
        judge, start = self._judge(root), _VisitedText(root)
        yield from self._expanded(start)
        for rollout in range(self.rollouts):
            path, place = self._selected(start)
            self.tried.append(place.branch)
            if not place.visits:
                yield from self._expanded(place)
            end = yield from self._completed(place, rollout)
            reward = self._rewarded(end, judge)
            place.visits += 1
            for above, edge in path:
                above.visits += 1
                edge.visits += 1
                edge.best = max(edge.best, reward)
            if sum(text.score >= 1.0 for text in self.found) >= root.request.params.n:
                break
        self.alive = self.kept = []

    def score(self, branch: Branch) -> float:
        """A text that has not ended has no reward."""
        del branch
        return 0.0

    def _selected(self, start: _VisitedText) -> tuple[list[tuple[_VisitedText, _Edge]], _VisitedText]:
        """Down the tree to the first place that is not in it, or has ended; the edges taken."""
        path, place = [], start
        while place.edges:
            edge = max(place.edges, key=partial(self._promise, place))
            path.append((place, edge))
            place = place.next(edge.token, edge.logprob)
        return path, place

    def _promise(self, place: _VisitedText, edge: _Edge) -> float:
        weight = log((place.visits + self.base + 1) / self.base) + self.exploration
        return edge.best + weight * edge.prior * sqrt(log(place.visits)) / (1 + edge.visits)

    def _expanded(self, place: _VisitedText) -> Steps[None]:
        """Put a place into the tree."""
        place.visits = 1
        if place.branch.ended:
            return
        self.kept.append(place.branch)
        top = yield from self._top(place)
        total = sum(exp(value) for _, value in top)
        place.edges = [_Edge(token, value, exp(value) / total) for token, value in top]

    def _top(self, place: _VisitedText) -> Steps[list[tuple[int, float]]]:
        """The likeliest tokens, likeliest first."""
        if place.top is not None:
            return place.top
        return self._noted(place, (yield from self._row(place)))

    def _row(self, place: _VisitedText) -> Steps[torch.Tensor]:
        """Log-probabilities (v,) of what may follow."""
        self.alive = [] if self.found else [place.branch]
        rows = yield [place.branch]
        return rows.logprobs[0]

    def _noted(self, place: _VisitedText, logprobs: torch.Tensor) -> list[tuple[int, float]]:
        top = logprobs.topk(min(self.branching, int(logprobs.isfinite().sum())))
        likeliest = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        if self.top_k_cache:
            place.top = likeliest
        return likeliest

    def _completed(self, place: _VisitedText, rollout: int) -> Steps[_VisitedText]:
        """Where the text ends, continued by the model."""
        passed, greedy = [place], place.branch.request.params.greedy
        while not place.branch.ended:
            if place.ending is not None:
                place = place.ending
                break
            if greedy:
                token, logprob = (yield from self._top(place))[0]
            else:
                logprobs = yield from self._row(place)
                self._noted(place, logprobs)
                token = place.branch.draw(logprobs, rollout)
                logprob = float(logprobs[token])
            place = place.next(token, logprob)
            passed.append(place)
        for earlier in passed if greedy and self.sequence_cache else ():
            earlier.ending = place
        return place

    def _rewarded(self, end: _VisitedText, judge: Callable[[str], float]) -> float:
        """Its reward; a text that is new is among those found."""
        if end.reward is None:
            end.reward = judge(end.branch.written())
            if (said := end.branch.said()) not in self._said:
                self._said.add(said)
                self.found = sorted([*self.found, Found(end.branch, end.reward)], key=lambda text: -text.score)
            self.alive = []
        return end.reward

    def _judge(self, root: Branch) -> Callable[[str], float]:
        """What gives the reward of a text."""
        request, box = root.request, self.box
        prompt = request.prompt if request.prompt is not None else self.tokenizer.decode(request.prompt_ids, False)
        if box is None:
            return self._by_reward
        tests = _checked(self.tests(prompt) if callable(self.tests) else self.tests)
        return lambda text: self.aside(lambda: box.judge([self.program(prompt, text)], tests)[0].share)

    def _by_reward(self, text: str) -> float:
        assert self.reward is not None
        return rewards(self.reward, [text])[0]


def _checked(tests: object) -> tuple[str, ...]:
    sources = strings("tests", tests)
    need(bool(sources), "tests", "be one or more", tests)
    return sources


def program_of(prompt: str, text: str) -> str:
    """The first block of code that a text marks with ```, else prompt and text together."""
    block = re.search(r"```[^\n]*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    return block[1] if block else prompt + text
