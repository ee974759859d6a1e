"""Guesses of tables while nothing else is drafted: which of them are scored, and what is learned from them.

In: trees that tables propose for a single sequence, and what became of them. Out: trees to score; when to guess next (`burst`). Not
here: who guesses, whether anything is drafted besides (`controllers.auto`).

A guess that is not worth a row is not scored, but its first token is held against the one that comes: that it would have been right
says as much about the text, and costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from paceline.controllers.burst import Burst
from paceline.controllers.gate import DISTURBED
from paceline.controllers.pick import cut
from paceline.tree.token_tree import EMPTY_TREE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.controllers.acceptance import Acceptance, Own
    from paceline.controllers.base import StepTimes
    from paceline.controllers.curve import Line
    from paceline.tree.token_tree import TokenTree
    from paceline.tree.types import Verdict

MARGIN: Final = 1.05
"""Drafting must beat the guesses by so much: what they would bring meanwhile does not show."""

NEAR: Final = 24
"""A guess after at most so many plain steps needs no plan."""

USUAL, GROW, MORE = 8, 2, 4
"""Tokens of a guess, at most; where one of so many held as a whole, the next may be so many times as long. None is asked for more
than so many times what was worth a row of the last one, and some more."""

SPARE, LEAST = 0.25, 2
"""Share of a plain step that the tokens of a guess may take to be found; tokens that are asked for whatever they take."""

FIRST, TAUGHT = 64, 8
"""Guesses that all teach what to expect of them, and of further ones each how-manieth."""


class Guesses:
    """One sequence at a time.

    Attributes:
        burst: their rhythm. tables: who guesses, by index. plain: seconds of a step without. depth: tokens of the next guess,
            at most. learning: seconds that the outcome of the last one took.
    """

    __slots__ = ("_came", "_held", "_made", "_paused", "burst", "depth", "learning", "plain", "tables")

    def __init__(self) -> None:
        self.tables: Sequence[int] = ()
        self.burst, self.plain, self.depth, self.learning = Burst(), 1.0, USUAL, 0.0
        self._made = self._paused = 0
        self._held, self._came = EMPTY_TREE, False  # the first token of a guess that is not scored; that of the last guess came

    @property
    def gain(self) -> float:
        """What drafting must bring for each token of plain steps to be better than they are with guesses."""
        return MARGIN * self.burst.gain if self.tables else 1.0

    def most(self, line: Line) -> int:
        """Tokens to ask a table for, fewer of one whose every token takes time.

        Args:
            line: what it takes.
        """
        spared = SPARE * self.plain
        return self.depth if self.depth * line.per_level <= spared else max(int(spared / line.per_level), LEAST)

    def begin(self, key: int) -> Burst:
        """The rhythm for this sequence; of a new one nothing is known."""
        self._came = self._came and key == self.burst.key
        return self.burst.of(key)

    def goes_on(self, key: int, spare: int) -> bool:
        """Whether the next guess for this sequence is near enough to need no plan.

        Args:
            spare: steps in which nobody drafts.
        """
        wait = self.burst.wait
        return wait <= NEAR and spare >= wait + 2 and key == self.burst.key

    def pause(self) -> int:
        """Plain steps up to the next guess; they are taken as gone by."""
        self._paused = self.burst.pause(self.burst.wait)
        return self._paused

    def end_pause(self, left: int) -> int:
        """Count plain steps between two guesses, but for the last `left`, which did not go by; returns how many did."""
        steps, self._paused = self._paused - left, 0
        self.burst.count(steps, steps, steps)
        self.burst.give_back(left)
        return steps

    @property
    def paused(self) -> bool:
        """Whether steps of a pause have not been counted yet."""
        return self._paused > 0

    def select(self, tree: TokenTree, worth: TokenTree) -> TokenTree:
        """What to score of a guess of which `worth` is worth its rows: the first token at least if that of the last guess came, for
        text that has become foreseeable must show."""
        self._held = EMPTY_TREE
        if not len(worth) and len(tree):
            first = cut(tree, range(1), len(tree))
            if self._came:
                return first
            self._held = first
        return worth

    def learn(self, tree: TokenTree, verdict: Verdict, times: StepTimes, known: tuple[Acceptance, Own]) -> tuple[int, float]:
        """What a guess brought says when to ask again; its tokens, and its seconds."""
        path, tokens = verdict.path, 1 + len(verdict.path)
        seconds = times.score + times.verify + sum(times.draft) + times.other + self.learning
        whole = USUAL <= len(tree) == len(path)
        self.depth = GROW * USUAL if whole else min(GROW * len(tree) + MORE, USUAL)
        units = min(seconds / self.plain, 1.0 + len(tree) + DISTURBED)
        if len(self._held):
            tree, path = self._held, (0,) if verdict.next_token == self._held.tokens.item(0) else ()
        self._came = bool(path)
        self.burst.after(tokens - units if tokens > 1 else min(tokens - units, 0.0), true=self._came)
        self._made += 1
        if len(tree) and (self._made < FIRST or not self._made % TAUGHT):
            known[0].observe(known[1], tree, path)
        self.burst.count(tokens, units)
        return tokens, seconds
