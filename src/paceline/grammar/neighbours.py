"""What may stand beside each other in the rules of a grammar.

A place is where a lexeme stands in a rule; sets of places are bits. The stack of rules is not followed: what may come
after the end of a rule is what may come after it anywhere, so that more is found than there is, and nothing is missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_

from paceline.grammar.expression import Alt, Expr, Ref, Repeat, Seq, Star, parts_of

Facts = tuple[bool, int, int]
"""Whether an expression may be empty, the places that it may begin with, and those that it may end with."""


class Neighbours:
    """What may stand beside each place of a lexeme; sets of places are bits.

    Attributes:
        after: of each place, those that may come next.
    """

    def __init__(self, rules: Mapping[str, Expr], places: Sequence[str], start: str) -> None:
        self.places = {name: 1 << place for place, name in enumerate(places)}
        self.rules: dict[str, Facts] = dict.fromkeys(rules, (False, 0, 0))
        order, before = list(rules), None
        while before != self.rules:  # in either direction: rules use those behind them, or those before
            before, order = dict(self.rules), order[::-1]
            for name in order:
                self.rules[name] = self._facts(rules[name])
        self.after, self.begin = [0] * len(places), self.rules[start][1]
        for expr in rules.values():
            for part in parts_of(expr):
                self._note(part)

    def beside(self, meeting: Sequence[int]) -> list[int]:
        """Of each place, those that may begin at the same point of a text.

        Args:
            meeting: of each place, those of which a text can be the lexeme too, so that it leads behind both.
        """
        beside, done = [0] * len(self.after), [0] * len(self.after)
        for place in bits(self.begin):
            beside[place] = self.begin
        queue = list(bits(self.begin))
        for place in queue:
            more = beside[place] & meeting[place] & ~done[place]
            done[place] |= more
            behind = any_of(self.after[other] for other in bits(more))
            for other in bits(self.after[place]):
                if behind & ~beside[other]:
                    beside[other] |= behind
                    queue.append(other)
        return beside

    def _facts(self, expr: Expr) -> Facts:
        match expr:
            case Ref(name):
                return (False, self.places[name], self.places[name]) if name in self.places else self.rules[name]
            case Seq(parts):
                facts = [self._facts(part) for part in parts]
                first = any_of(fact[1] for fact in _until_full(facts))
                last = any_of(fact[2] for fact in _until_full(facts[::-1]))
                return all(fact[0] for fact in facts), first, last
            case Alt(parts):
                facts = [self._facts(part) for part in parts]
                first, last = (any_of(int(fact[side]) for fact in facts) for side in (1, 2))
                return any(fact[0] for fact in facts), first, last
            case Star(inner):
                return True, *self._facts(inner)[1:]
            case Repeat(inner, low, _):
                empty, first, last = self._facts(inner)
                return low == 0 or empty, first, last
        raise AssertionError("characters are lexemes")

    def _note(self, expr: Expr) -> None:
        """What stands beside each other in an expression."""
        if isinstance(expr, Star | Repeat):
            _, first, last = self._facts(expr.inner)
            self._join(last, first)
        before = 0
        for part in expr.parts if isinstance(expr, Seq) else ():
            empty, first, last = self._facts(part)
            self._join(before, first)
            before = last | before if empty else last

    def _join(self, last: int, first: int) -> None:
        for place in bits(last):
            self.after[place] |= first


def bits(mask: int) -> Iterator[int]:
    """List the members of a set that is kept as bits."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def any_of(masks: Iterable[int]) -> int:
    """Unite sets that are kept as bits."""
    return reduce(or_, masks, 0)


def _until_full(facts: Iterable[Facts]) -> Iterable[Facts]:
    """Up to the first that cannot be empty."""
    for fact in facts:
        yield fact
        if not fact[0]:
            return
