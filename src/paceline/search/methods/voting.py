"""Several sampled texts vote for their answer: self-consistency, and voting among the most complex ones.

Sources: Self-Consistency Improves Chain of Thought Reasoning in Language Models (arXiv:2203.11171); Complexity-Based
Prompting for Multi-Step Reasoning (arXiv:2210.00720).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.search.base import Search, Steps, continued, mean_logprob, need_draws
from paceline.search.branch import Branch, Found
from paceline.search.named import named, numbers
from paceline.utils import integer

if TYPE_CHECKING:
    from paceline.config import SamplingParams

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> str | None:
    """The last number of a text, without its commas and zeros behind the point; None where there is none."""
    figures = NUMBER.findall(text)
    if not figures:
        return None
    plain: str = figures[-1].replace(",", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def steps_of(text: str) -> int:
    """Steps of a reasoning: its lines, or where it has one line, its sentences."""
    lines = sum(1 for line in text.splitlines() if line.strip())
    return lines if lines > 1 else len(re.findall(r"[.!?](?:\s|$)", text))


class SelfConsistency(Search):
    """Samples several texts; the answer that most of them end in wins.

    A text is found for every answer, the likeliest of those that end in it, and its score is the share of votes. Texts
    without an answer do not vote. Of answers with as many votes, the one that was sampled first comes first.

    Args:
        num_samples: texts.
        answer: gives the answer of a text, or None: a callable, or "module:function"; by default the last number.
    Raises:
        ConfigError: a value outside its range.
    """

    name = "self_consistency"

    def __init__(self, num_samples: int = 16, answer: Callable[[str], Any] | str | None = None) -> None:
        super().__init__()
        integer("num_samples", num_samples, 1, 1024)
        self.branches = num_samples
        self.samples, self.answer = num_samples, named("answer", answer, last_number)

    @classmethod
    def check(cls, params: SamplingParams) -> None:
        need_draws(cls.name, params)

    def steps(self, root: Branch) -> Steps[None]:
        def note(samples: list[Branch]) -> None:
            self.alive = samples

        samples = yield from continued([root] * self.samples, range(self.samples), alive=note)
        self.alive = []
        self.found = self.voted(samples)

    def voted(self, texts: Sequence[Branch]) -> list[Found]:
        """The likeliest text for every answer."""
        votes: dict[Any, list[Branch]] = {}
        for text in self.voters(texts):
            if (answer := self.answer(text.written())) is not None:
                votes.setdefault(answer, []).append(text)
        total = sum(map(len, votes.values()))
        if not total:
            return [Found(max(texts, key=mean_logprob), 0.0)]
        return [Found(max(those, key=mean_logprob), len(those) / total) for those in votes.values()]

    def voters(self, texts: Sequence[Branch]) -> Sequence[Branch]:
        """Those that vote."""
        return texts


class ComplexityVoting(SelfConsistency):
    """Self-consistency among the texts with the most steps of reasoning.

    Args:
        num_samples: texts. keep: so many of them, those with the most steps, vote.
        complexity: number of steps of a text, a callable or "module:function"; by default its lines, or the sentences
            of a single line.
        answer: as in `SelfConsistency`.
    Raises:
        ConfigError: a value outside its range.
    """

    name = "complexity_voting"

    def __init__(
        self,
        num_samples: int = 16,
        keep: int | None = None,
        complexity: Callable[[str], float] | str | None = None,
        answer: Callable[[str], Any] | str | None = None,
    ) -> None:
        super().__init__(num_samples, answer)
        self.keep = max(1, round(0.7 * num_samples)) if keep is None else keep
        integer("keep", self.keep, 1, num_samples)
        self.complexity = named("complexity", complexity, steps_of)

    def voters(self, texts: Sequence[Branch]) -> Sequence[Branch]:
        parsed = [text for text in texts if self.answer(text.written()) is not None]
        counts = numbers("complexity", [self.complexity(text.written()) for text in parsed], len(parsed))
        order = sorted(range(len(parsed)), key=lambda i: -counts[i])
        return [parsed[i] for i in order[: self.keep]]
