"""How a drafter goes on for a sequence without planning: a budget, and what a node's confidence must be for its row to pay.

In: a planned step of a Planner. Out: courses. Not here: the steps that follow them (`controllers.cruise`), any estimate.

A plan judges a node by its calibrated chance. Here the product of the confidences along its path stands for it: what calibration
made of it in planned steps is kept as one factor a level, and the price of a level becomes a least product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from paceline.controllers.acceptance import DEPTH_BUCKET
from paceline.controllers.pick import fixed_shape, path_products
from paceline.controllers.prices import row_seconds
from paceline.tree.chain_columns import lone_source
from paceline.tree.types import Budget

if TYPE_CHECKING:
    from paceline.controllers.planner import Planner
    from paceline.controllers.voice import Drafting
    from paceline.tree.token_tree import TokenTree


_RATE = 0.2


class Course(NamedTuple):
    """How one drafter goes on for one sequence.

    Attributes:
        budget: as long as the sequence is far from its end.
        least: per depth - 1, the product of confidences from which on a node is worth its row; empty where the drafter says the
            same of every token, so that the budget alone tells how deep it goes.
        near: a lower and a higher budget for such a drafter, for a step now and then: what other numbers of rows cost is seen
            only where they come up.
    """

    budget: Budget
    least: list[float]
    near: tuple[Budget, ...] = ()

    def count(self, confidence: Sequence[float]) -> int:
        """How many nodes of a chain are worth their rows."""
        raw, count = 1.0, 0
        for sure, least in zip(confidence, self.least, strict=False):
            raw *= sure
            if raw < least:
                break
            count += 1
        return count

    def nodes(self, tree: TokenTree) -> list[int]:
        """The nodes of a tree with branches that are worth their rows."""
        least, kept = self.least, []
        rows = zip(path_products(tree), tree.parents.tolist(), tree.depths.tolist(), strict=True)
        for node, (raw, parent, depth) in enumerate(rows):
            floor = least[min(max(depth, 2), len(least)) - 1] if node else 0.0  # siblings of the first pay as the next level does
            if raw >= floor and (parent < 0 or parent in kept):
                kept.append(node)
        return kept


class Courses:
    """Makes courses from plans.

    Args:
        drafters: how many there are.
    """

    def __init__(self, drafters: int) -> None:
        self._scales = [0.0] * drafters  # per drafter, log of the calibrated chance of a node over its confidence
        self._said: list[set[float]] = [set() for _ in range(drafters)]  # confidences that a drafter has told, two at least

    def note(self, planner: Planner, index: int) -> None:
        """What calibration makes of the confidences of the planned step's tree."""
        tree, one = planner.drafts[0][index], planner.batch[index]
        source = lone_source(tree)
        if source < 0:
            self._note_tree(planner, tree, one)
            return
        confidence = tree.confidence.tolist()
        if len(self._said[source]) < 2:
            self._said[source].update(confidence)
        raw, reach, levels = 1.0, planner.acceptance.reach(one.own, tree)[-1], len(confidence)
        for sure in confidence:
            raw *= sure
        if raw > 0.0 < reach:
            self._scales[source] += _RATE * ((log(reach) - log(raw)) / levels - self._scales[source])

    def _note_tree(self, planner: Planner, tree: TokenTree, one: Drafting) -> None:
        """The same of a tree with branches by one drafter, all of its nodes counting alike."""
        sources = set(tree.sources.tolist())
        if len(sources) != 1 or fixed_shape(tree):
            return
        (source,), depths = sources, tree.depths.tolist()
        pairs = zip(path_products(tree), planner.acceptance.reach(one.own, tree), depths, strict=True)
        found = [(log(reach) - log(raw)) / depth for raw, reach, depth in pairs if raw > 0.0 < reach]
        if found:
            self._scales[source] += _RATE * (fmean(found) - self._scales[source])

    def course(self, planner: Planner, index: int, drafter: int) -> Course:
        """What follows from the plan for one drafter of one sequence."""
        one, size, line, rate = planner.batch[index], len(planner.batch), planner.now.lines[drafter], planner.now.rate
        best, voice = one.depths[drafter], one.voices[drafter]
        if voice is None or voice.raw == 1.0:  # it does not ask while it drafts
            if len(self._said[drafter]) == 1:
                return Course(Budget(best, best), [], _near(best, min(planner.max_depth, planner.max_nodes)))
            depth = max(best, len(planner.drafts[1][index])) + 2
        else:
            depth = 2 * best + 2
        depth = min(depth, planner.max_depth)
        levels, factor = planner.acceptance.levels(one.own, drafter), exp(self._scales[drafter])
        row = row_seconds(0, size, planner.now.table)
        price = rate * (line.per_level / size + row)
        least, floors, scale = [0.0], [0.0, 0.0], factor
        for level in range(2, depth + 1):
            floors.append(price / (levels[DEPTH_BUCKET[level]] * scale))
            scale *= factor
            least.append(rate * row / scale)
        proposed, chosen = planner.drafts[0][index], planner.drafts[1][index]
        nodes = depth if proposed.is_chain else max(chosen.sources.tolist().count(drafter), 1)
        return Course(Budget(min(nodes, planner.max_nodes), depth, _from(floors)), least)


def _near(depth: int, most: int) -> tuple[Budget, ...]:
    """A third less deep, and a third deeper."""
    apart = max(depth // 3, 1)
    return tuple(Budget(one, one) for one in (depth - apart, min(depth + apart, most)) if one > 0)


def alike(one: Course | None, other: Course | None) -> bool:
    """Whether two courses draft about as deep."""
    if one is None or other is None:
        return one is other
    return abs(one.budget.depth - other.budget.depth) <= 1


def _from(floors: Sequence[float]) -> Callable[[int, float, object], bool]:
    """Go on to a level while the product of the confidences before it is above that level's floor."""

    def go_on(depth: int, confidence: float, features: object) -> bool:
        return confidence > floors[depth]

    return go_on
