"""What DEL keeps of one sequence: how it drafts now, when it looks at all exits again, how many rounds went by.

In: a context. Out: counts. Not here: what is decided from them (`dynamic_exit`).
"""

from __future__ import annotations

from paceline.drafters.base import Context
from paceline.drafters.exit_choice import ExitRecord
from paceline.drafters.self_draft import SelfState, Way
from paceline.tree.token_tree import TokenTree


class DelState(SelfState):
    """One sequence.

    Attributes:
        record: what is known of the exits on this text. exit: index of the one in use. way: how it is used. rests: only for looks,
            since drafting costs more than it brings, or, where it `waits`, until rounds without a draft are timed.
        rounds: so far. look: the round in which all exits are looked at next. gap: rounds from there to the one after; both go on
            from text to text of a tenant.
        deepest: levels that it was allowed to draft so far, at most.
        length: of the text when it was last asked for a draft. sleeps: it need not be asked in the rounds after that.
        own: the chain proposed last. heard: chains from this exit that were scored since the last choice, and how many of their
            tokens stood.
    """

    __slots__ = ("deepest", "exit", "gap", "heard", "length", "look", "own", "record", "rests", "rounds", "sleeps", "waits", "way")

    def __init__(self, context: Context, record: ExitRecord, way: Way, look: int, gap: int) -> None:
        super().__init__(context)
        self.record, self.exit, self.way = record, 0, way
        self.rests = self.waits = self.sleeps = False
        self.length, self.deepest = len(context.tokens), 0
        self.rounds, self.look, self.gap = 0, look, gap
        self.own: TokenTree | None = None
        self.heard: list[tuple[TokenTree, int]] = []

    def wake(self) -> int:
        """Count the rounds for which it was not asked, a token each; returns how many they were."""
        length = len(self.context.tokens)
        slept = length - self.length - 1 if self.sleeps else 0
        self.rounds, self.length, self.sleeps = self.rounds + slept, length, False
        return slept
