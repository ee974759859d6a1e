"""The controller's word on one sequence while it is drafted for, and what is kept of the sequence.

In: the calibration and a price per level. Out: go on, or stop. Not here: how the price is found (`controllers.auto`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.controllers.acceptance import DEPTH_BUCKET, RIVAL, Acceptance, Own
from paceline.controllers.pick import levels_by_source
from paceline.controllers.watch import Mode, Watch

if TYPE_CHECKING:
    from paceline.tree.token_tree import TokenTree


class Voice:
    """The controller's word while a drafter drafts: go on while the next level is worth its time (`Budget.go_on`).

    It reads only confidences of tokens already drawn, never of the level that it decides about.
    """

    __slots__ = ("acceptance", "bucket", "chance", "levels", "own", "price", "raw", "reach", "source", "stopped")

    def __init__(self, acceptance: Acceptance, own: Own, source: int, price: float, rival: bool) -> None:
        self.acceptance, self.own, self.source, self.price = acceptance, own, source, price
        self.bucket = RIVAL if rival else 1
        self.raw = self.reach = 1.0
        self.levels, self.stopped = 1, 0  # levels allowed; the one that was not, with its chance
        self.chance = 1.0

    def __call__(self, depth: int, confidence: float, features: object) -> bool:
        last = min(confidence / self.raw, 1.0) if self.raw > 0 else 0.0
        self.raw = confidence
        self.reach *= self.acceptance.node(self.own, self.source, self.bucket, last)
        self.bucket = DEPTH_BUCKET[depth]
        chance = self.reach * self.acceptance.level(self.own, self.source, self.bucket)
        if chance <= self.price:
            self.stopped, self.chance = depth, chance
            return False
        self.levels = depth
        return True


class Drafting:
    """What is kept of one sequence across steps, and of the step under way.

    Attributes:
        own: how its acceptance differs from the estimate over all.
        watches: the guard of each drafter.
        modes, voices: of each drafter in this step.
        rivals: whether an earlier drafter had proposed already.
        remaining: tokens it may still grow by.
        tried: levels that are scored in this step only to learn.
        depths: of each drafter, the depth that was found best when it was last thought about.
        nodes: of each drafter, how many were chosen of the last tree with branches that was planned and had some of it.
        worths: of each drafter beside nothing else, what it was found worth: when, for which depth, and how much.
    """

    __slots__ = ("depths", "greedy", "modes", "nodes", "own", "remaining", "rivals", "tried", "voices", "watches", "worths")

    def __init__(self, greedy: bool, watches: list[Watch]) -> None:
        self.greedy, self.watches = greedy, watches
        self.own = Own(len(watches))
        self.depths, self.nodes = [1] * len(watches), [1] * len(watches)
        self.worths: list[tuple[tuple[int, int, int], int, float] | None] = [None] * len(watches)
        self.clear(0)

    def clear(self, remaining: int) -> None:
        self.remaining, self.tried = remaining, 0
        self.modes = [Mode.SKIP] * len(self.watches)
        self.voices: list[Voice | None] = [None] * len(self.watches)
        self.rivals = [False] * len(self.watches)

    def note(self, tree: TokenTree, yields: list[float], levels: list[int | None]) -> None:
        """Which drafter proposed how many levels: its time belongs to those, cut or not.

        Args:
            yields: per drafter, how often it proposes when asked. levels: most levels of this step so far; both are brought up to
                date.
        """
        deepest = levels_by_source(tree)
        for drafter, mode in enumerate(self.modes):
            if mode is Mode.SKIP:
                continue
            found, voice = deepest.get(drafter, 0), self.voices[drafter]
            yields[drafter] += 0.05 * ((found > 0 or self.rivals[drafter]) - yields[drafter])
            if voice is not None and (found or voice.levels > 1):
                found = max(found, voice.levels)
            if found or not self.rivals[drafter]:
                levels[drafter] = max(levels[drafter] or 0, found)

    def note_kept(self, tree: TokenTree) -> None:
        """How many nodes of each drafter were chosen."""
        for source, count in Counter(tree.sources.tolist()).items():
            self.nodes[source] = count

    def look_now(self) -> None:
        """Whoever sleeps is tried as soon as a step allows it."""
        for watch in self.watches:
            watch.look_now()

    def forced(self, tree: TokenTree) -> Sequence[int]:
        """Nodes that are scored whatever they seem worth, to learn."""
        if not self.tried:
            return ()
        return [node for node, depth in enumerate(tree.depths.tolist()) if depth <= self.tried]


def note_all(batch: Sequence[Drafting], trees: Sequence[TokenTree], yields: list[float], levels: list[int | None]) -> None:
    """`Drafting.note` for all sequences of a step."""
    for sequence, tree in zip(batch, trees, strict=True):
        sequence.note(tree, yields, levels)
