"""Superposed Decoding: several drafts from the passes of one.

Every pass reads one input, the mean of the embeddings of the drafts' last tokens, weighted by how good the drafts are
so far, and leaves one entry of keys and values, which all drafts share. N-grams of other texts tell the drafts apart
again: each token that the model finds likely is weighed by how well it goes on with each draft. Source: Superposed
Decoding: Multiple Generations from a Single Autoregressive Inference Pass (arXiv:2405.18400).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from paceline.errors import CapabilityError, ConfigError
from paceline.models import has_ability
from paceline.registry import ABILITIES
from paceline.search.base import Search, Steps
from paceline.search.branch import Branch, Found
from paceline.search.forest import raise_failure, shaped
from paceline.utils import integer, need, number

ORDER_WEIGHTS: Final = (0.01, 0.04, 0.15, 0.18, 0.12)
"""Published, of n-grams of two tokens to six."""

Extension = tuple[float, int, int]
"""A score, the draft, and the token that it is extended by."""


class NGrams:
    """How often tokens follow others.

    Args:
        texts: token ids. longest: most tokens of a context.
    """

    def __init__(self, texts: Iterable[Sequence[int]], longest: int) -> None:
        self._counts: dict[tuple[int, ...], Counter[int]] = {}
        for text in texts:
            for place in range(1, len(text)):
                for size in range(1, min(longest, place) + 1):
                    self._counts.setdefault(tuple(text[place - size : place]), Counter())[text[place]] += 1
        self._totals = {context: counts.total() for context, counts in self._counts.items()}

    def chances(self, text: Sequence[int], tokens: Sequence[int], weights: Sequence[float]) -> list[float]:
        """Of each token to follow the text: the sum of weight times share over contexts of one token, two, ...

        A context that was never seen adds nothing.
        """
        sums = [0.0] * len(tokens)
        for size, weight in enumerate(weights[: len(text)], 1):
            context = tuple(text[len(text) - size :])
            if (counts := self._counts.get(context)) is None:
                continue
            for i, token in enumerate(tokens):
                sums[i] += weight * counts[token] / self._totals[context]
        return sums


_TABLES: Final = WeakKeyDictionary[Any, dict[tuple[str, int], NGrams]]()
"""By tokenizer: those of files."""


class Superposed(Search):
    """Short drafts side by side from one pass a step.

    Nothing is drawn. A draft's score is the mean of what it gained with each token: (1 - `alpha`) log p of the model
    among the `top_tokens`, at `mix_temperature`, plus `alpha` log p of the n-grams.

    Args:
        num_drafts: of a prompt. top_tokens: the model's likeliest that count, 3 for each draft by default.
        mix_temperature: of the model's distribution, on top of the request's. alpha: weight of the n-grams; 0 does
            without. order_weights: of contexts of one token, two, ...
        penalty: nats that a draft loses where no n-gram goes on with it.
        texts: file of texts like those to be written, one a line, whose n-grams count; by default the prompt's own.
    Raises:
        ConfigError: a value outside its range, or no such file.
        CapabilityError: a model that takes no embeddings as input.
    """

    name = "superposed"
    drops_dead_ends = keeps_beginnings = True

    def __init__(
        self,
        num_drafts: int = 3,
        *,
        top_tokens: int | None = None,
        mix_temperature: float = 0.06,
        alpha: float = 0.54,
        order_weights: Sequence[float] = ORDER_WEIGHTS,
        penalty: float = 200.0,
        texts: str | None = None,
    ) -> None:
        super().__init__()
        integer("num_drafts", num_drafts, 1, 64)
        top = 3 * num_drafts if top_tokens is None else top_tokens
        integer("top_tokens", top, num_drafts, 1024)
        number("mix_temperature", mix_temperature, 0.0, 100.0, "be above 0", open_low=True)
        number("penalty", penalty, 0.0, 1e6, "be 0 or more")
        number("alpha", alpha, 0.0, 1.0, "be in 0..1")
        need(texts is None or isinstance(texts, str | Path), "texts", "be a file of texts", texts)
        self.branches = num_drafts
        self.drafts, self.top, self.temperature = num_drafts, top, mix_temperature
        self.alpha, self.weights, self.penalty, self.texts = alpha, _weights(order_weights), penalty, texts
        self.totals: dict[Branch, float] = {}
        self._table: NGrams | None = None

    def prepare(self) -> None:
        for ability in ("head", "input_embeddings", "layer_subsets"):
            if not has_ability(self.runner, ability):
                raise CapabilityError(
                    f"search method {self.name!r} needs a model that {ABILITIES[ability]}; {self.runner.info.name} is "
                    "not one as it runs here; choose another method"
                )
        if self.texts is not None and self.alpha:
            self._table = self._of_file(Path(self.texts))

    def _of_file(self, path: Path) -> NGrams:
        known, key = _TABLES.setdefault(self.tokenizer, {}), (str(path.resolve()), len(self.weights))
        if key not in known:
            try:
                lines = path.read_text(encoding="utf-8").splitlines()
            except (OSError, ValueError) as error:
                raise ConfigError(f"texts: cannot read {path}: {error}; give a file of texts in UTF-8") from error
            known[key] = NGrams((self.tokenizer.encode(line) for line in lines if line.strip()), len(self.weights))
        return known[key]

    def steps(self, root: Branch) -> Steps[None]:
        if self._table is None:
            self._table = NGrams([root.request.prompt_ids], len(self.weights))
        drafts, asked, self.totals = [root], root, {root: 0.0}
        while len(self.found) < self.drafts:
            rows = yield [asked]
            logprobs, errors = shaped(drafts, rows.logits.expand(len(drafts), -1))
            raise_failure(errors)
            drafts = self._extended(drafts, logprobs)
            if not drafts:
                if errors and not self.found:
                    raise next(iter(errors.values()))
                break
            self.alive = drafts
            asked = asked.mixed(self._mixture(drafts))
        self.alive = []

    def score(self, branch: Branch) -> float:
        """Mean of what it gained; minus the logarithm of its perplexity."""
        return self.totals[branch] / max(1, branch.length)

    def _extended(self, drafts: Sequence[Branch], logprobs: torch.Tensor) -> list[Branch]:
        """The best drafts that do not end; of the best, those that do are found."""
        grown: list[Branch] = []
        totals: dict[Branch, float] = {}
        for place, (total, i, token) in enumerate(self.extensions(drafts, logprobs)):
            if len(grown) == self.drafts:
                break
            draft = drafts[i].child(token, float(logprobs[i, token]))
            totals[draft] = self.totals[draft] = total
            if not draft.ended:
                grown.append(draft)
            elif place < self.drafts:
                self.found.append(Found(draft, self.score(draft)))
        self.totals = {draft: totals[draft] for draft in grown}
        return grown

    def extensions(self, drafts: Sequence[Branch], logprobs: torch.Tensor) -> list[Extension]:
        """All that the drafts may be extended by, best first; of equal ones the lower token, as in greedy decoding.

        Args:
            logprobs: (k, v) of what may follow each of them.
        """
        extensions: list[Extension] = []
        for i, (draft, row) in enumerate(zip(drafts, logprobs, strict=True)):
            kept = (row / self.temperature).log_softmax(-1).topk(min(self.top, len(row)))
            tokens = kept.indices.tolist()
            model = kept.values.log_softmax(-1)
            gained = self._gained(draft, tokens, model).tolist()
            extensions += [(self.totals[draft] + gain, i, token) for gain, token in zip(gained, tokens, strict=True)]
        return sorted(
            (extension for extension in extensions if extension[0] > -inf),
            key=lambda extension: (-extension[0], *extension[1:]),
        )

    def _gained(self, draft: Branch, tokens: Sequence[int], model: torch.Tensor) -> torch.Tensor:
        """(n,) of each token, from the model's log-probabilities (n,)."""
        if not self.alpha:
            return model
        assert self._table is not None
        end = draft.text()[-len(self.weights) :]
        chances = torch.tensor(self._table.chances(end, tokens, self.weights))
        mixed = (1 - self.alpha) * model + self.alpha * chances.log()
        return mixed if bool((mixed > -inf).any()) else (1 - self.alpha) * model - self.penalty

    def _mixture(self, drafts: Sequence[Branch]) -> dict[int, float]:
        """The share of each last token."""
        shares = torch.tensor([self.totals[draft] for draft in drafts], dtype=torch.float64).softmax(0).tolist()
        mixture: dict[int, float] = {}
        for draft, share in zip(drafts, shares, strict=True):
            mixture[draft.token] = mixture.get(draft.token, 0.0) + share
        return mixture


def _weights(weights: Any) -> tuple[float, ...]:
    listed = isinstance(weights, Sequence) and not isinstance(weights, str) and 1 <= len(weights) <= 8
    need(listed, "order_weights", "be a list of one to eight numbers of 0 or more", weights)
    for weight in weights:
        number("order_weights", weight, 0.0, 1e6, "be a list of one to eight numbers in 0..1000000")
    return tuple(map(float, weights))
