"""The oracle among drafting-length policies: it knows how much of every draft will be accepted, and asks for just that.

It is no policy for users: it works only on prompts
whose continuation is recorded, at temperature 0, with one drafter whose guesses depend on the text alone (a draft model
at temperature 0, n-grams of the text, the acceptance dial).

`LengthRecorder` decodes without drafts while the drafter proposes as much as it may at every position; what was
generated then tells how many of each proposal's tokens were right. `OracleLength` asks for these numbers. It drafts
nothing in vain and takes the fewest steps that this drafter allows. It weighs no costs: where a draft costs more than
it brings, plain decoding may be faster.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.controllers import Controller, Plan, Signal
from paceline.tree import EMPTY_TREE, Budget, TokenTree

Lengths = dict[int, int]
"""Length of the text -> tokens of the next draft that will be accepted."""


class LengthRecorder(Controller):
    """A controller that lets the drafter propose everywhere and scores nothing.

    Args:
        most: tokens of a proposal.
    """

    name = "length recorder"

    def __init__(self, most: int = 64) -> None:
        self.most = most
        self._signals: Sequence[Signal] = ()
        self._proposals: dict[int, dict[int, list[int]]] = {}

    def lengths(self, total: int, tokens: Sequence[int]) -> Lengths:
        """Forget the one sequence that has run, and say how much of its proposals was right.

        Args:
            total: tokens of its text at the end, the prompt's included.
            tokens: those that were generated.
        Raises:
            ValueError: none or several sequences have run since the last call.
        """
        (proposals,) = self._proposals.values()
        self._proposals = {}
        start, found = total - len(tokens), {}
        for length, proposal in proposals.items():
            true = tokens[length - start :]
            found[length] = next(
                (i for i, (a, b) in enumerate(zip(proposal, true, strict=False)) if a != b), len(proposal)
            )
        return found

    def plan(self, signals: Sequence[Signal]) -> Plan:
        """All that the sequences may still grow by."""
        self._signals = signals
        for signal in signals:
            self._proposals.setdefault(signal.key, {})
        return Plan([[Budget(self.most, self.most)]] * len(signals))

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Note the proposals; none is scored."""
        for signal, tree in zip(self._signals, trees, strict=True):
            self._proposals.setdefault(signal.key, {})[signal.length] = tree.tokens.tolist()
        return [EMPTY_TREE] * len(trees)


class OracleLength(Controller):
    """A controller that asks for as many tokens as will be accepted.

    Attributes:
        told: what is known of the sequences to come, in the order in which they will start.
    """

    name = "oracle length"

    def __init__(self) -> None:
        self.told: list[Lengths] = []
        self._known: dict[int, Lengths] = {}

    def plan(self, signals: Sequence[Signal]) -> Plan:
        """The recorded numbers; a new sequence takes the next record that was told, or none."""
        budgets = []
        for signal in signals:
            if signal.key not in self._known:
                self._known[signal.key] = self.told.pop(0) if self.told else {}
            number = self._known[signal.key].get(signal.length, 0)
            budgets.append([Budget(number, number)] if number > 0 else [])
        return Plan(budgets)

    def forget(self, key: int) -> None:
        """The sequence has ended."""
        self._known.pop(key, None)
