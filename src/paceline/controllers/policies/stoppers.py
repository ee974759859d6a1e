"""What the policies share that stop a drafter while it drafts, by what it says of its own tokens.

In: a rule that follows one path of tokens. Out: voices for drafters that ask before each token, and the same cut, made
afterwards, for those that propose everything at once (tables). Not here: any policy (one file each).

The token that crosses a policy's threshold is part of the draft; nothing is drafted after it. So whether a token is
drafted depends on the tokens before it alone, and drawn trials keep their distribution: a drafter that asks has stopped
by itself, and trees with drawn trials stay whole in `select`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from paceline.controllers.auto.choice import cut, fixed_shape
from paceline.controllers.policies.lengths import Course, LengthController, M
from paceline.controllers.words import count
from paceline.tree import Budget

if TYPE_CHECKING:
    from paceline.tree import TokenTree


class Token(NamedTuple):
    """A drafted token as its drafter sees it.

    Attributes:
        depth: from 1 on.
        confidence: chance of this token after the ones before it; reach: of the path up to and with it.
        features: what the drafter passed beside it; a mapping of numbers, or None.
    """

    depth: int
    confidence: float
    reach: float
    features: object


Follow = Callable[[float, Token], tuple[float, bool]]


class Voice:
    """The policy's word while one drafter drafts for one sequence.

    Attributes:
        features: what the drafter passed, by depth - 1.
        stopped: level that was not drafted, or 0.
    """

    __slots__ = ("_carried", "_follow", "_reach", "features", "stopped")

    def __init__(self, follow: Follow) -> None:
        self._follow = follow
        self._carried = self._reach = 1.0
        self.features: list[object] = []
        self.stopped = 0

    def __call__(self, depth: int, confidence: float, features: object) -> bool:
        """Whether level `depth` is drafted, after a path with this chance as its drafter sees it."""
        last = min(confidence / self._reach, 1.0) if self._reach > 0.0 else 0.0
        self._reach = confidence
        self.features.append(features)
        self._carried, more = self._follow(self._carried, Token(depth - 1, last, confidence, features))
        if not more:
            self.stopped = depth
        return more


class StopController(LengthController[M]):
    """Base of the policies that stop by confidence."""

    @abstractmethod
    def _follow(self, memory: M, carried: float, token: Token) -> tuple[float, bool]:
        """What to carry on, and whether a token may follow this one; `carried` is what came of the token before, 1 at
        the root.
        """

    def _grant(self, course: Course[M], drafter: int, nodes: int, depth: int) -> Budget:
        voice = course.voices[drafter] = Voice(partial(self._follow, course.memory))
        return Budget(nodes, depth, voice)

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Trees of points without the nodes below one that crossed the threshold; those with drawn trials or probes
        whole.
        """
        chosen = []
        for course, tree in zip(self._batch, trees, strict=True):
            kept = tree if not len(tree) or fixed_shape(tree) else cut(tree, self._kept(course, tree))
            chosen.append(self._within(course, kept))
            course.sizes = len(tree), len(chosen[-1])
        return chosen

    def _kept(self, course: Course[M], tree: TokenTree) -> list[int]:
        """The nodes whose path never stopped before them, in their order."""
        carried, kept = {-1: 1.0}, []
        for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tokens_of(course, tree), strict=True)):
            if parent in carried:
                value, more = self._follow(course.memory, carried[parent], token)
                kept.append(node)
                if more:
                    carried[node] = value
                elif len(kept) == node + 1 and tree.is_chain:
                    break
        return kept

    def _result(self, course: Course[M]) -> str:
        """What came of it."""
        proposed, scored = course.sizes
        if not proposed:
            return " Nothing was found to propose."
        if scored < proposed:
            return f" Of {proposed} proposed nodes, {scored} {'is' if scored == 1 else 'are'} scored."
        stopped = max((voice.stopped for voice in course.voices.values()), default=0)
        return f" It was stopped before level {stopped}." if stopped else ""


class ThresholdController(StopController[None]):
    """Base of the policies whose rule is one number: nothing is drafted after a token whose confidence is below it.

    Args:
        levels: most levels of a draft.
        threshold: least confidence of a token that another one may follow.
        num_speculative_tokens, disable_by_batch_size: of `LengthController`.
    """

    def __init__(
        self, levels: int, threshold: float, num_speculative_tokens: int | None, disable_by_batch_size: int | None
    ) -> None:
        super().__init__(num_speculative_tokens, disable_by_batch_size)
        self.levels, self.threshold = levels, threshold

    def _remember(self, greedy: bool) -> None:
        return None

    def _length(self, memory: None) -> int:
        return self.levels

    def _follow(self, memory: None, carried: float, token: Token) -> tuple[float, bool]:
        return carried, token.confidence >= self.threshold

    def _why(self, course: Course[None]) -> str:
        return (
            f"Up to {count(course.length, 'level')}, none after a token whose confidence is below {self.threshold:g}."
        )

    def _policy(self) -> str:
        return f"up to {self.levels} levels, none after a token below a confidence of {self.threshold:g}"


def tokens_of(course: Course[M], tree: TokenTree) -> Iterator[Token]:
    """The nodes of a tree with what their drafters said of them, one after the other."""
    reached: list[float] = []
    columns = zip(
        tree.parents.tolist(), tree.depths.tolist(), tree.sources.tolist(), tree.confidence.tolist(), strict=True
    )
    for parent, depth, source, confidence in columns:
        voice = course.voices.get(source)
        features = voice.features[depth - 1] if voice is not None and depth <= len(voice.features) else None
        reached.append(confidence if parent < 0 else confidence * reached[parent])
        yield Token(depth, confidence, reached[-1], features)
