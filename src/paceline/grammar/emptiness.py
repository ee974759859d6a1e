"""Whether a canvas can still become a text of a grammar, and one text that it can become.

In: a `Lexicon`, what each slot holds. Out: `Fillings`: is there any, and an example. Not here: which tokens are tried
(`paceline.diffusion.grammar_check`).

The question is put exactly, slot by slot: is there a token for every masked slot such that the tokens together write a
text of the grammar? A slot holds one token, so a gap of k slots is k tokens, no more and no less; a token that ends the
text closes it, and only such tokens may follow. Emptiness of the intersection with gaps of any length, as in
Constrained Decoding of Diffusion LLMs with Context-Free Grammars (arXiv:2508.10111), would accept canvases whose gaps
are too short to be completed. Here a canvas that passes can be completed as it is; if it passes after every token
written, the last one completes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from paceline.errors import ConfigError
from paceline.grammar.automaton import DEAD
from paceline.grammar.chart import MASKED, Desk, Tables, fill
from paceline.grammar.lexing import Lexicon

CLOSED: Final = -2
"""What a slot holds that a token which ends the text stands at."""
UNFIT: Final = -3
"""What a slot holds whose token fits nowhere."""
MOST_BYTES: Final = 2**31

Place = tuple[int, int]
"""A slot and a place in it, see `chart`: 0 is its left edge."""


class Fillings:
    """All texts of a grammar that a canvas can become.

    Args:
        length: slots.
        closes: a text may end before the last slot, with tokens that end a text in the rest.
    Raises:
        ConfigError: a canvas too long for the grammar and the vocabulary.
    """

    def __init__(self, lexicon: Lexicon, length: int, *, closes: bool) -> None:
        self.lexicon, self.length, self.closes = lexicon, length, closes
        self.held = np.full(length, MASKED, np.int32)
        self.width = lexicon.joins + 1
        size = (length * self.width + 1) ** 2 // 8 * lexicon.cfg.size
        if size > MOST_BYTES:
            rule = f"a table of {size / 2**30:.1f} GiB; shorten the canvas or simplify the grammar"
            raise ConfigError(f"a canvas of {length} slots would need {rule}")
        self.desk = Desk.of(Tables.of(lexicon), length, lexicon.cfg.size)
        self.kinds, self.chart = self.desk.kinds, self.desk.chart
        self.stale = length

    def put(self, slot: int, kind: int) -> None:
        """What a slot holds: the kind of its token, `MASKED`, `CLOSED` or `UNFIT`."""
        self.held[slot] = kind
        shown = kind if kind >= 0 else MASKED
        if shown != self.kinds[slot]:
            self.kinds[slot] = shown
            self.stale = max(self.stale, slot + 1)

    @property
    def possible(self) -> bool:
        """Whether there is any text."""
        return self.end is not None

    @property
    def end(self) -> int | None:
        """Slots of the shortest text, or None."""
        ends = self._ends()
        if not ends:
            return None
        if self.lexicon.cfg.nullable and ends.start == 0:
            return 0
        if self.stale:
            fill(self.desk, 0, 1 if self.lexicon.cfg.lone else self.stale)
            self.stale = 0
        return next((end for end in ends if self._has(self.lexicon.cfg.start, (0, 0), (end, 0))), None)

    def _ends(self) -> range:
        """Slots at whose left edge the text may end, as far as tokens that end it say."""
        closed = np.flatnonzero(self.held == CLOSED)
        stop = int(closed[0]) if closed.size else self.length
        written = np.flatnonzero(self.held[:stop] != MASKED)
        if (self.held == UNFIT).any() or (self.held[stop:] >= 0).any():
            return range(0)
        low = int(written[-1]) + 1 if written.size else 0
        return range(low if self.closes else stop, stop + 1)

    def _has(self, symbol: int, start: Place, end: Place) -> bool:
        bit = end[0] * self.width + end[1]
        return bool(
            self.chart[start[0] * self.width + start[1], symbol, bit >> 6] >> np.uint64(bit & 63) & np.uint64(1)
        )

    def example(self) -> list[int | None]:
        """The shortest text, as a token for every slot that is masked; None at slots that hold one and after its end.

        There must be one (`possible`).
        """
        end = self.end
        assert end is not None, "no text at all"
        tokens: list[int | None] = [None] * self.length
        if end:
            for terminal, start, stop in self._derivation(self.lexicon.cfg.start, (0, 0), (end, 0)):
                self._spell(terminal, start, stop, tokens)
        return tokens

    def _derivation(self, symbol: int, start: Place, end: Place) -> list[tuple[int, Place, Place]]:
        """Terminals with their places, from left to right."""
        found, stack = [], [(symbol, start, end)]
        while stack:
            symbol, start, end = stack.pop()
            terminal, split = self._explain(symbol, start, end)
            if split is None:
                found.append((terminal, start, end))
            else:
                left, middle, right = split
                stack += [(right, middle, end), (left, start, middle)]
        return found

    def _explain(self, symbol: int, start: Place, end: Place) -> tuple[int, tuple[int, Place, int] | None]:
        """A terminal, or two symbols and where they meet, that make up a symbol between two places."""
        cfg = self.lexicon.cfg
        alike = [symbol]
        for found in alike:
            if found < len(cfg.terminals):
                return found, None
            for _, left, right in cfg.pairs[cfg.pairs[:, 0] == found].tolist():
                for middle in self._places(left, start, end):
                    if self._has(right, middle, end):
                        return found, (left, middle, right)
            units = cfg.units[cfg.units[:, 0] == found, 1].tolist()
            alike += [unit for unit in units if unit not in alike and self._has(unit, start, end)]
        raise AssertionError("a bit without a reason")

    def _places(self, symbol: int, start: Place, end: Place) -> Iterator[Place]:
        """Where a symbol that begins at `start` may end, up to `end`."""
        width = self.width
        row = self.chart[start[0] * width + start[1], symbol]
        bits = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        return ((int(bit) // width, int(bit) % width) for bit in bits if bit <= end[0] * width + end[1])

    def _spell(self, terminal: int, start: Place, end: Place, tokens: list[int | None]) -> None:
        """Choose tokens at the masked slots of a terminal; that of a slot it begins within is chosen already."""
        slot = start[0] + (start[1] > 0)
        if start[1] and end[1] and start[0] == end[0]:
            return
        begin = (
            int(self.lexicon.join_steps[self._join(start), terminal])
            if start[1]
            else int(self.lexicon.starts[terminal])
        )
        levels: list[dict[int, tuple[int, int]]] = [{begin: (DEAD, DEAD)}]
        for at in range(slot, end[0]):
            following: dict[int, tuple[int, int]] = {}
            for state in levels[-1]:
                for target, witness in self._steps(at, state):
                    following.setdefault(target, (state, witness))
            levels.append(following)
        state = self._last(levels[-1], end, tokens)
        for at in range(end[0] - 1, slot - 1, -1):
            state, witness = levels[at - slot + 1][state]
            self._choose(tokens, at, witness)

    def _last(self, states: dict[int, tuple[int, int]], end: Place, tokens: list[int | None]) -> int:
        """A state in which the terminal ends at `end`, and the token of a slot that it ends within."""
        if not end[1]:
            return next(state for state in states if self.lexicon.accepts[state])
        for state in states:
            for join, witness in self._cuts(end[0], state):
                if join == self._join(end):
                    self._choose(tokens, end[0], witness)
                    return state
        raise AssertionError("a bit without a reason")

    def _join(self, place: Place) -> int:
        return self.width - 1 - place[1]

    def _choose(self, tokens: list[int | None], slot: int, witness: int) -> None:
        if self.kinds[slot] == MASKED:
            tokens[slot] = witness

    def _steps(self, slot: int, state: int) -> list[tuple[int, int]]:
        """Next states and witnesses."""
        kind = int(self.kinds[slot])
        if kind == MASKED:
            return self.lexicon.any_steps.at(state)
        target = int(self.lexicon.steps[kind, state])
        return [] if target == DEAD else [(target, DEAD)]

    def _cuts(self, slot: int, state: int) -> list[tuple[int, int]]:
        """Joins and witnesses."""
        kind = int(self.kinds[slot])
        if kind == MASKED:
            return self.lexicon.any_ends.at(state)
        return [(join, DEAD) for found, join in self.lexicon.ends.at(kind) if found == state]
