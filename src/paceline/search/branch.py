"""A text on its way: a prompt, and the tokens that a search has put behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.sampling import KeyedDraws, draw_seed

if TYPE_CHECKING:
    import torch

    from paceline.engine import Request, StopChecker
    from paceline.models import SequenceCache
    from paceline.sampling import Rules


@dataclass(frozen=True, slots=True)
class Origin:
    """What all branches of a prompt go on from.

    Attributes:
        rules: of the request, before the first token.
        checker: makes what says where a text ends; with True it also makes the text.
    """

    request: Request
    rules: Rules
    checker: Callable[[bool], StopChecker]


class Branch:
    """One text of a search.

    Args:
        stops: where the text ends by the request's parameters (end tokens, stop strings, limits).
        parent: the branch that it goes on from by its last token; None for the prompt alone.
        token: that last token; of the prompt alone, the prompt's.
        logprob: sum of the log-probabilities of its tokens, as the request's parameters shape them.
    Attributes:
        length: tokens behind the prompt.
        number: of the branch in its `SearchTree`; -1 where it is not in it.
        mixture: tokens and their weights, of whose embeddings the last input is the sum; None where it is the token.
    """

    __slots__ = ("_cache", "_rules", "length", "logprob", "mixture", "number", "origin", "parent", "stops", "token")

    def __init__(
        self, origin: Origin, stops: StopChecker, token: int, *, parent: Branch | None = None, logprob: float = 0.0
    ) -> None:
        self.origin, self.stops, self.token, self.parent, self.logprob = origin, stops, token, parent, logprob
        self.length: int = 0 if parent is None else parent.length + 1
        self._cache: SequenceCache | None = None
        self.number = -1
        self.mixture: Mapping[int, float] | None = None
        self._rules: Rules | None = None

    @classmethod
    def of_prompt(cls, origin: Origin) -> Branch:
        """The prompt alone; text is looked for only where a stop string may be in it."""
        return cls(origin, origin.checker(bool(origin.request.params.stop)), origin.request.prompt_ids[-1])

    @property
    def has_cache(self) -> bool:
        """Whether it has one now; it is given up where nobody wants it, or memory runs short."""
        return self._cache is not None

    @property
    def cache(self) -> SequenceCache:
        """Of the runner, of all tokens but the last or, once it was scored, of all.

        Raises:
            RuntimeError: it has none now.
        """
        if self._cache is None:
            raise RuntimeError(f"a branch of {self.length} tokens has no cache; it was not asked for, or was let go")
        return self._cache

    @cache.setter
    def cache(self, cache: SequenceCache) -> None:
        self._cache = cache

    def give_up_cache(self) -> SequenceCache:
        """The cache, which somebody else takes or releases."""
        cache, self._cache = self.cache, None
        return cache

    @property
    def request(self) -> Request:
        """Whose prompt it goes on from."""
        return self.origin.request

    @property
    def rules(self) -> Rules:
        """What shapes its next token, from those of the nearest ancestor that has them; kept until `forget_rules`."""
        if self._rules is None:
            behind, rules = list[int](), self.origin.rules
            for ancestor in self.ancestors():
                if ancestor._rules is not None:
                    rules = ancestor._rules
                    break
                if ancestor.parent is not None and ancestor.mixture is None:
                    behind.append(ancestor.token)
            self._rules = rules.fork()
            self._rules.advance(behind[::-1])
        return self._rules

    def forget_rules(self) -> None:
        """Their state, which is as long as the text, is made again where it is asked for."""
        self._rules = None

    def child(self, token: int, logprob: float) -> Branch:
        """The text one token longer.

        Args:
            logprob: of the token.
        """
        stops = self.stops.fork()
        stops.push_one(token)
        return Branch(self.origin, stops, token, parent=self, logprob=self.logprob + logprob)

    def mixed(self, mixture: Mapping[int, float]) -> Branch:
        """An input longer, a mixture of tokens. It is no text, and neither ends nor is found, but may be asked for.

        Then one behind it must be asked for in every step: keys and values of mixtures are not computed anew.
        """
        heaviest = max(mixture, key=mixture.__getitem__)
        child = Branch(self.origin, self.stops, heaviest, parent=self, logprob=self.logprob)
        child.mixture = mixture
        return child

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        return self.stops.finished

    @property
    def size(self) -> int:
        """Tokens of prompt and text."""
        return len(self.request.prompt_ids) + self.length

    def ancestors(self) -> Iterator[Branch]:
        """Itself, then what it goes on from, up to the prompt alone."""
        branch: Branch | None = self
        while branch is not None:
            yield branch
            branch = branch.parent

    def tokens(self) -> list[int]:
        """Behind the prompt."""
        return [branch.token for branch in self.ancestors() if branch.parent is not None][::-1]

    def text(self) -> list[int]:
        """Prompt and tokens."""
        return [*self.request.prompt_ids, *self.tokens()]

    def told(self) -> StopChecker:
        """Its text behind the prompt, cut at a stop string, and why it ended; where it has not, it is cut off."""
        checker = self.origin.checker(True)
        checker.push(self.tokens())
        if not checker.finished:
            checker.cut_off()
        return checker

    def written(self) -> str:
        """The text of `told`."""
        return self.told().text

    def said(self) -> str | tuple[int, ...]:
        """What tells it from other texts: its text, whatever its tokens; they, where it has none."""
        return self.written() or tuple(self.tokens())

    def draw(self, logprobs: torch.Tensor, index: int) -> int:
        """The next token for output number `index` of the request, from log-probabilities (v,): the likeliest at
        temperature 0, above it the one that decoding this output would draw here.
        """
        if self.request.params.greedy:
            return int(logprobs.argmax())
        return KeyedDraws(draw_seed(self.request.seed, index), self.size).gumbel(0, logprobs)


@dataclass(frozen=True, slots=True)
class BranchRows:
    """What may follow some branches.

    Attributes:
        logits: (b, v) float32 of the model.
        logprobs: (b, v) float32 log-probabilities, as the request's parameters shape them.
        taps: layer -> (b, hidden) float32 states behind it, of the layers in `Search.taps`, as `Scores.taps` counts
            them.
    """

    logits: torch.Tensor
    logprobs: torch.Tensor
    taps: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def at(self, places: slice | Sequence[int]) -> BranchRows:
        """Those of some of the branches."""
        taps = {layer: states[places] for layer, states in self.taps.items()}
        return BranchRows(self.logits[places], self.logprobs[places], taps)


@dataclass(frozen=True, slots=True)
class Found:
    """A text that a search has found.

    Attributes:
        score: by which it was chosen; what it means is the method's.
    """

    branch: Branch
    score: float
