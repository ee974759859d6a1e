"""Sample-and-rank: several texts are sampled, and a scorer says which is the best.

By default the scorer is the model itself: the text that it finds likeliest, at temperature 1 and without any rule, is
taken, all of them scored in one pass. Sources: Towards a Human-like Open-Domain Chatbot (arXiv:2001.09977); Uni-Encoder
(arXiv:2106.01263), of ranking all in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.search.base import Search, Steps, continued, need_draws
from paceline.search.branch import Branch, Found
from paceline.search.scoring import GivenScorer, NamedScorer, candidate_logprobs, prompt_of
from paceline.utils import integer

if TYPE_CHECKING:
    from paceline.config import SamplingParams


class SampleAndRank(Search):
    """Samples texts and ranks them; equal ones count once.

    Args:
        num_samples: texts.
        scorer: a callable that takes a list of texts (behind the prompt) and gives a number for each, the higher the
            better; "module:function"; or {"model": FOLDER} (or a hub id): another language model (mean
            log-probability), or a reward model or cross-encoder (sequence classification; "label": N where it has
            several outputs; "one_pass": true for a Uni-Encoder). By default the model itself ranks by the mean
            log-probability.
    Raises:
        ConfigError: a value outside its range.
    """

    name = "sample_and_rank"

    def __init__(self, num_samples: int = 16, scorer: GivenScorer | None = None) -> None:
        super().__init__()
        integer("num_samples", num_samples, 1, 1024)
        self.samples = self.branches = num_samples
        self.named = None if scorer is None else NamedScorer("scorer", scorer)

    @classmethod
    def check(cls, params: SamplingParams) -> None:
        need_draws(cls.name, params)

    def prepare(self) -> None:
        if self.named is not None:
            self.named.open(self.models)

    def steps(self, root: Branch) -> Steps[None]:
        def note(samples: list[Branch]) -> None:
            self.alive = samples

        self.kept = [root]
        samples = yield from continued([root] * self.samples, range(self.samples), alive=note)
        different = list({tuple(text.tokens()): text for text in reversed(samples)}.values())
        scores = self._likelihoods(root, different) if self.named is None else self._judged(root, different)
        self.alive, self.kept = [], []
        self.found = [Found(text, score) for text, score in zip(different, scores, strict=True)]

    def _likelihoods(self, root: Branch, texts: Sequence[Branch]) -> list[float]:
        tokens = [text.tokens() for text in texts]
        rows = candidate_logprobs(
            self.runner, root.request.prompt_ids, tokens, cache=root.cache if root.has_cache else None
        )
        self.own_rows += sum(map(len, tokens))
        self.own_passes += 1
        return [float(row.mean()) for row in rows]

    def _judged(self, root: Branch, texts: Sequence[Branch]) -> list[float]:
        assert self.named is not None
        prompt = prompt_of(root, self.tokenizer)
        return self.named.scores(self.models, prompt, [text.written() for text in texts])
