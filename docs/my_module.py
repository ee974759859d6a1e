"""A drafter that copies what followed the latest earlier occurrence of the last token."""

from dataclasses import dataclass

from paceline.drafters import Context, Drafter
from paceline.errors import ConfigError
from paceline.tree import EMPTY_TREE, TokenTree


@dataclass
class State:
    """State of one sequence: its text, to which the engine appends."""

    context: Context


class EchoDrafter(Drafter):
    """Drafts a copy of what followed the latest earlier occurrence of the last token.

    Args:
        reach: how many tokens back it looks.
    """

    name = "echo"
    catches_up = True  # it reads the text anew in each step

    def __init__(self, args, *, reach=1000):
        if reach < 1:
            raise ConfigError(f"reach must be 1 or more, got {reach}")
        self.index, self.reach = args.index, reach

    def begin(self, contexts):
        return [State(context) for context in contexts]

    def propose(self, states, budgets, so_far):
        pairs = zip(states, budgets, strict=True)
        return [self.draft(state.context.tokens, budget) for state, budget in pairs]

    def draft(self, tokens, budget):
        most, last = min(budget.nodes, budget.depth), len(tokens) - 1
        for place in range(last - 1, max(-1, last - 1 - self.reach), -1):
            if tokens[place] == tokens[last] and most > 0:
                copy = tokens[place + 1 : place + 1 + most]
                return TokenTree.chain(copy, source=self.index)
        return EMPTY_TREE

    def fork(self, state, context):
        return State(context)
