"""A text on its way: a prompt, and the tokens that a search has put behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.sampling import KeyedDraws, draw_seed

if TYPE_CHECKING:
    import torch

    from paceline.engine import Request, StopChecker
    from paceline.models import SequenceCache
    from paceline.sampling import Rules


class Branch:
    """One text of a search.

    Attributes:
        request: whose prompt it goes on from.
        parent: the branch that it goes on from by its last token; None for the prompt alone.
        token: that last token; of the prompt alone, the prompt's.
        length: tokens behind the prompt.
        logprob: sum of the log-probabilities of these tokens, as the request's parameters shape them.
        stops: where the text ends by the request's parameters (end tokens, stop strings, limits).
        cache: of the runner, of all tokens but the last or, once it was scored, of all; None where it has none now.
        number: of the branch in its `SearchTree`; -1 where it is not in it.
        mixture: tokens and their weights, of whose embeddings the last input is the sum; None where it is the token.
    """

    __slots__ = ("cache", "length", "logprob", "mixture", "number", "parent", "request", "rules", "stops", "token")

    def __init__(
        self, request: Request, rules: Rules, stops: StopChecker, *, parent: Branch | None = None,
        token: int | None = None, logprob: float = 0.0,
    ) -> None:  # fmt: skip
        self.request, self.rules, self.stops, self.parent, self.logprob = request, rules, stops, parent, logprob
        self.token = request.prompt_ids[-1] if token is None else token
        self.length: int = 0 if parent is None else parent.length + 1
        self.cache: SequenceCache | None = None
        self.number = -1
        self.mixture: Mapping[int, float] | None = None

    def child(self, token: int, logprob: float) -> Branch:
        """The text one token longer.

        Args:
            logprob: of the token.
        """
        rules, stops = self.rules.fork(), self.stops.fork()
        rules.advance((token,))
        stops.push_one(token)
        return Branch(self.request, rules, stops, parent=self, token=token, logprob=self.logprob + logprob)

    def mixed(self, mixture: Mapping[int, float]) -> Branch:
        """An input longer, a mixture of tokens. It is no text, and neither ends nor is found, but may be asked for.

        Then one behind it must be asked for in every step: keys and values of mixtures are not computed anew.
        """
        heaviest = max(mixture, key=mixture.__getitem__)
        made = Branch(self.request, self.rules, self.stops, parent=self, token=heaviest, logprob=self.logprob)
        made.mixture = mixture
        return made

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
        one: Branch | None = self
        while one is not None:
            yield one
            one = one.parent

    def tokens(self) -> list[int]:
        """Behind the prompt."""
        return [one.token for one in self.ancestors() if one.parent is not None][::-1]

    def text(self) -> list[int]:
        """Prompt and tokens."""
        return [*self.request.prompt_ids, *self.tokens()]

    def written(self) -> str:
        """The text behind the prompt, cut at a stop string."""
        stops = self.stops
        if not stops.finished:
            stops = stops.fork()
            stops.cut_off()
        return stops.text

    def draw(self, logprobs: torch.Tensor, index: int) -> int:
        """The next token for output number `index` of the request, from log-probabilities (v,): the likeliest at
        temperature 0, above it the one that decoding this output would draw here.
        """
        if self.request.params.greedy:
            return int(logprobs.argmax())
        return KeyedDraws(draw_seed(self.request.seed, index), self.size).gumbel(0, logprobs)


@dataclass(frozen=True, slots=True)
class Rows:
    """What may follow some branches.

    Attributes:
        logits: (b, v) float32 of the model.
        logprobs: (b, v) float32 log-probabilities, as the request's parameters shape them.
    """

    logits: torch.Tensor
    logprobs: torch.Tensor


@dataclass(frozen=True, slots=True)
class Found:
    """A text that a search has found.

    Attributes:
        score: by which it was chosen; what it means is the method's.
    """

    branch: Branch
    score: float
