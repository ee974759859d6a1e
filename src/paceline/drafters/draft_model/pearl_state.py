"""What PEARL knows of one sequence: the draft model's cache and all that was drafted behind the text and not judged
yet.

In: a text that grows, trees that were scored, verdicts. Out: the chain to score next, and what still stands of the
draft. Not here: when to draft, running models (`pearl`).

The draft goes on behind the chain that is being scored, so that it outlives a verdict: where the whole chain stands and
the token after it is the one that was drafted there, the rest is a draft behind the new text, drawn from the same
distributions as if it had been made then. Otherwise it is dropped, whatever it holds, and the cache goes back to the
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from paceline.drafters.common.chains import chain_tree
from paceline.drafters.common.draft_chain import GoOn
from paceline.drafters.common.draft_state import DraftState
from paceline.tree import Budget, TokenTree, always_go_on

if TYPE_CHECKING:
    import torch

    from paceline.drafters.base import Context
    from paceline.models import Runner, SequenceCache
    from paceline.tree import Verdict


class Drafted(NamedTuple):
    """A token, its chance, and the (v,) row that it was drawn from, None where it was taken as the likeliest."""

    token: int
    chance: float
    row: torch.Tensor | None


class PearlState(DraftState):
    """A `DraftState` whose draft may be longer than what was proposed.

    Where something is drafted, the cache holds the text and all drafted tokens but the last.

    Attributes:
        drafted: tokens behind the text that nobody has judged.
        rooted: length of the text behind which they stand.
        window: tokens that shall be drafted behind the chain of this step; 0 where none was asked for.
        go_on: the controller's voice in it.
    """

    __slots__ = ("drafted", "go_on", "rooted", "window")

    def __init__(self, context: Context, cache: SequenceCache, base: int = 0) -> None:
        super().__init__(context, cache, base)
        self.drafted: list[Drafted] = []
        self.rooted, self.window = len(context.tokens), 0
        self.go_on: GoOn = always_go_on

    @property
    def pending(self) -> list[int]:
        """What must be fed to get logits behind all that is drafted."""
        return [self.drafted[-1].token] if self.drafted else super().pending

    def ask(self, window: int, budget: Budget) -> None:
        """A step of so many tokens more."""
        self.window, self.go_on = window, budget.go_on

    def tree(self, nodes: int, source: int) -> TokenTree:
        """The first drafted tokens as a chain."""
        some = self.drafted[:nodes]
        return chain_tree([one.token for one in some], [one.chance for one in some], source, [one.row for one in some])

    def is_front(self, tree: TokenTree) -> bool:
        """Whether a tree is the beginning of what is drafted, and nothing else."""
        tokens = tree.tokens.tolist()
        fits = len(tokens) <= len(self.drafted) and all(
            one.token == token for one, token in zip(self.drafted, tokens, strict=False)
        )
        return fits and tree.is_chain and not tree.kinds.any()

    def tidy(self, runner: Runner) -> None:
        """Bring the cache to what is drafted, after work that may have broken off or a text that went its own way."""
        if self.rooted != len(self.context.tokens):
            self.drop(runner)
        elif not self.drafted:
            self.settle(runner)
        else:
            self._hold()
            if self.cache.length > (length := self.base + len(self.ahead)):
                runner.truncate(self.cache, length)

    def add(self, found: Sequence[Drafted]) -> None:
        """So much was drafted behind the rest; the cache holds all of it but the last."""
        self.drafted += found
        self._hold()

    def _hold(self) -> None:
        self.base, self.ahead = self.rooted, [one.token for one in self.drafted[:-1]]

    def follow(self, tree: TokenTree, verdict: Verdict, runner: Runner) -> None:
        """Keep what stands behind the new text, which the context holds already. The window is over."""
        self.window, used = 0, len(tree) + 1
        whole = self.is_front(tree) and len(verdict.path) == len(tree) and len(self.drafted) >= used
        if not whole or self.context.tokens[self.rooted :] != [one.token for one in self.drafted[:used]]:
            self.drop(runner)
            return
        self.drafted, self.rooted = self.drafted[used:], len(self.context.tokens)
        if self.drafted:
            self._hold()
        else:
            self.settle(runner)

    def drop(self, runner: Runner) -> None:
        """Forget the draft; the cache keeps what the text confirms."""
        self.drafted, self.rooted = [], len(self.context.tokens)
        self.settle(runner)
