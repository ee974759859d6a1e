"""kNN-LM: the tokens that came next where the model was in a similar state are mixed into its distribution.

For each token, of the k nearest states in a store of tokens (`paceline retrieval build --kind knn`),

    p = w p_knn + (1 - w) p_model,    p_knn(t) = sum over neighbours with token t of softmax(-distance / temperature),

with squared distances. The request's rules and temperature shape the mixture. Which neighbours there are is guessed
from a local cache, of those found so far and the entries that follow them in their texts; a guess is right where the
token is the one that the true neighbours give with the same noise, whatever the neighbours are.

Sources: Generalization through Memorization: Nearest Neighbor Language Models (arXiv:1911.00172), with w = 0.25;
RaLMSpec (arXiv:2401.14021) for guessing, which takes in 10 entries behind each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import CapabilityError, ConfigError, NumericsError
from paceline.registry import ABILITIES
from paceline.retrieval import MOST_CHANCE, Hits, TokenStore
from paceline.search.base import Steps
from paceline.search.branch import Branch
from paceline.search.forest import shaped
from paceline.search.retrieving import OS3, Guess, Retrieving
from paceline.utils import integer, need, number


@dataclass(slots=True, kw_only=True)
class Mixed(Guess[Branch]):
    """A token with guessed neighbours.

    Attributes:
        logits_v: (v,) of the model.
    """

    logits_v: torch.Tensor


class KnnLm(Retrieving[Branch]):
    """Mixes the tokens behind the nearest states of a store into the model's distribution, at every token; the
    neighbours are guessed from a local cache and checked several tokens at a time. The text is that of asking the store
    every time.

    Args:
        index: folder of a store of tokens (`paceline retrieval build --kind knn`), or the store itself.
        neighbours: k. weight: w, in 0..1. distance_temperature: of the softmax over distances.
        following: entries behind a neighbour that join the local cache with it.
        speculate: guess the neighbours; False asks the store for every token.
        stride: tokens that are checked at once, or "os3", which finds the number that brings the most per second.
        most_chance: most that it takes the chance of a right guess for, in 0..1 without 1.
        asynchronous: go on guessing while the store is asked.
    Raises:
        ConfigError: a value outside its range, no such store, or one of another model.
        CapabilityError: a model that does not show its states.
    """

    name = "knn_lm"

    def __init__(
        self,
        index: Any = None,
        *,
        neighbours: int = 16,
        weight: float = 0.25,
        distance_temperature: float = 1.0,
        following: int = 10,
        speculate: bool = True,
        stride: int | str = OS3,
        asynchronous: bool = False,
        most_chance: float = MOST_CHANCE,
    ) -> None:
        integer("neighbours", neighbours, 1, 4096)
        super().__init__(
            index, speculate=speculate, stride=stride, asynchronous=asynchronous, prefetch=neighbours,
            most_chance=most_chance,
        )  # fmt: skip
        number("weight", weight, 0.0, 1.0, "be in 0..1")
        number("distance_temperature", distance_temperature, 0.0, 1e9, "be above 0", open_low=True)
        integer("following", following, 0, 4096)
        self.weight, self.temperature, self.following = weight, distance_temperature, following

    def prepare(self) -> None:
        super().prepare()
        store = self.index
        if not isinstance(store, TokenStore):
            raise ConfigError(f"index: method {self.name!r} needs a store of tokens (--kind knn), got {store.kind!r}")
        own = self.tokenizer.fingerprint()
        need(store.model == own, "index", "be made with the model's own tokenizer", store.model)
        info = self.runner.info
        need(
            store.vectors.dimension == info.hidden_size and 0 <= store.layer <= info.num_layers,
            "index", f"hold states of {info.hidden_size} numbers behind one of {info.num_layers} layers",
            (store.vectors.dimension, store.layer),
        )  # fmt: skip
        if not self.runner.capabilities.taps:
            raise CapabilityError(
                f"search method {self.name!r} needs a model that {ABILITIES['taps']}; {info.name} is not one as it "
                "runs here"
            )
        self.store, self.taps = store, [store.layer]

    @property
    def wanted(self) -> int:
        return self.prefetch

    def beginning(self, root: Branch) -> Steps[Branch]:
        yield from ()
        return root

    def plain_step(self, text: Branch) -> Steps[Branch]:
        rows = yield [text]
        return self._next(text, rows.logits[0], self.search(rows.taps[self.store.layer][0].numpy()))

    def guess(self, text: Branch) -> Steps[Guess[Branch]]:
        try:
            rows = yield [text]
        except NumericsError as error:
            return Guess(text, text, None, error)
        query = rows.taps[self.store.layer][0].numpy()
        guess = Mixed(text, text, query, logits_v=rows.logits[0])
        try:
            guess.after = self._next(text, guess.logits_v, self.cache.search(query, self.prefetch))
        except NumericsError as error:
            guess.error = error
        return guess

    def agrees(self, guess: Guess[Branch], found: Hits) -> bool:
        assert isinstance(guess, Mixed)
        token = self._next(guess.before, guess.logits_v, found).token
        return guess.error is None and token == guess.after.token

    def corrected(self, guess: Guess[Branch], found: Hits) -> Steps[Branch]:
        assert isinstance(guess, Mixed)
        yield from ()
        return self._next(guess.before, guess.logits_v, found)

    def branch_of(self, text: Branch) -> Branch:
        return text

    def keep(self, text: Branch, trail: Sequence[Guess[Branch]]) -> None:
        self.kept = [text, *(guess.before for guess in trail)]

    def neighbours(self, ids: Iterable[int]) -> Iterable[int]:
        last = self.store.size - 1
        return dict.fromkeys(min(one + more, last) for one in ids for more in range(1 + self.following))

    def _next(self, text: Branch, logits_v: torch.Tensor, found: Hits) -> Branch:
        """The text with the next token.

        Raises:
            NumericsError: the mixture is no distribution under the request's rules.
        """
        logprobs, errors = shaped([text], self.mixed(logits_v, found)[None])
        if text in errors:
            raise errors[text]
        token = text.draw(logprobs[0], 0)
        return text.child(token, float(logprobs[0, token]))

    def mixed(self, logits_v: torch.Tensor, found: Hits) -> torch.Tensor:
        """(v,) log-probabilities of the mixture; the model's logits where there are no neighbours or no weight."""
        if not found.ids or not self.weight:
            return logits_v
        shares = (torch.tensor(found.scores) / self.temperature).softmax(0)
        tokens = torch.from_numpy(self.store.tokens[list(found.ids)].astype("int64"))
        near_v = torch.zeros_like(logits_v).index_add_(0, tokens, shares)
        return (self.weight * near_v + (1.0 - self.weight) * logits_v.softmax(-1)).log()
