"""Which texts are learned, which choose the best state, and which test it.

Weights are made of the first, and when to stop and which state to keep of the second. Figures are of the third, which
neither has seen. A text's side follows from its prompt's id alone, a digest, and from how many texts there are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.training.answers import TrainingText
from paceline.training.batches import Document, documents_of
from paceline.utils import ENOUGH, need, no_interval

logger = logging.getLogger("paceline")

LEAST: Final = 3
"""Texts: one to learn, one to choose by, one to test on."""

EIGHTH: Final = 8
"""Of few texts so large a part is tested on, and as many choose, until there are `ENOUGH`."""

NO_INTERVAL: Final = no_interval()


@dataclass(frozen=True, slots=True)
class Size:
    """Counts the texts of a part, and their tokens.

    Attributes:
        texts: documents. tokens: of them, those that are learned or judged.
    """

    texts: int
    tokens: int

    @classmethod
    def of(cls, documents: Iterable[Document]) -> Size:
        sizes = [len(document.tokens) - document.first for document in documents]
        return cls(len(sizes), sum(sizes))


@dataclass(frozen=True, slots=True)
class TextSplit:
    """Documents: to learn, to choose the best state by, and to test it on."""

    training: list[Document]
    validation: list[Document]
    test: list[Document]

    def sizes(self) -> dict[str, Size]:
        """Count each part, by its name."""
        return {name: Size.of(getattr(self, name)) for name in ("training", "validation", "test")}


def split(answers: Sequence[TrainingText], share: float, length: int) -> TextSplit:
    """Documents of at most `length` tokens. Those apart are the greedy ones that come first by id.

    Args:
        share: of all, of each of the two parts that are not learned.
    Raises:
        ConfigError: too few texts for the three parts, or too few greedy ones.
    """
    usable = [answer for answer in answers if documents_of([answer], length)]
    greedy = sorted((answer for answer in usable if answer.temperature == 0.0), key=lambda answer: answer.id)
    rule = f"hold {LEAST} texts or more with something to learn within {length} tokens"
    need(len(usable) >= LEAST, "data", rule, len(usable))
    need(len(greedy) > 1, "sampled_share", "leave two answers or more greedy, to judge by", len(greedy))
    size = min(apart(len(usable), share), len(greedy) // 2)
    if size < ENOUGH:
        logger.warning(
            "of %d texts %d are learned, %d choose the best state and %d test it: %s; give %d texts or more",
            len(usable), len(usable) - 2 * size, size, size, NO_INTERVAL, EIGHTH * ENOUGH,
        )  # fmt: skip
    test, validation = greedy[:size], greedy[size : 2 * size]
    names = {answer.id for answer in (*test, *validation)}
    training = [answer for answer in usable if answer.id not in names]
    return TextSplit(*(documents_of(part, length) for part in (training, validation, test)))


def apart(count: int, share: float) -> int:
    """How many of so many texts test, and how many choose; 0 where there are too few."""
    return min(max(1, round(share * count), min(ENOUGH, count // EIGHTH)), max(0, count - 1) // 2)
