"""Rules of one grammar in llguidance's notation, and marks of a chat in them: as texts, or as tokens of their own.

A mark that the tokenizer has as a token must come as that token, which is what models are trained to write. Special
tokens have no text, so that `<[id]>` is the only way to speak of them; free text holds them as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from paceline.checkpoints import Tokenizer
from paceline.grammar import BLANKS, bounded_json, spelled

SHARED: Final = (r"ANY: /(?s:.*)/", f"BLANK: /{BLANKS}/")
"""Terminals that all rules may use."""

NEWLINE: Final = r'"\n"?'
ANY_BLANKS: Final = r"[ \t\r\n]*"
"""White space in what is free text until it is clear that it is a call, as a regular expression."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Says how a tokenizer writes marks: as tokens of their own, or as text.

    Attributes:
        ids: of tokens that are not made of others, by what they read.
        special: ids of those without a text.
        ends: ids that end an output.
    """

    ids: Mapping[str, int]
    special: frozenset[int]
    ends: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, ends: Iterable[int]) -> Marks:
        """Look up the marks of a tokenizer, and the end tokens of its model."""
        names, added = tokenizer.tokens(), tokenizer.added_ids | tokenizer.special_ids
        return cls({names[token]: token for token in added if token in names}, tokenizer.special_ids, frozenset(ends))


AS_TEXT: Final = Marks({}, frozenset(), frozenset())
"""Every mark is a text like others."""


class GrammarRules:
    """Collects the rules of one grammar, and writes marks in them as the tokenizer does.

    Args:
        meaning: marks that free text does not hold where they are special tokens.
    """

    def __init__(self, marks: Marks, meaning: Iterable[str]) -> None:
        self._marks, self._lines, self._numbers = marks, list[str](), count()
        known = {marks.ids[mark] for mark in meaning if mark in marks.ids}
        others = _ranges(marks.special - marks.ends - known)
        self._others = f"<[{others}]>" if others else ""

    def written(self, start: str) -> str:
        """Return the whole grammar, which begins with the rule `start`."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._lines, *SHARED, ""])

    def name(self) -> str:
        """Return a new name, of a rule that is still to be made."""
        return f"r{next(self._numbers)}"

    def rule(self, body: str, *, lazy: bool = False, name: str = "") -> str:
        """Add a rule and return its name; a lazy one, of a terminal, is over where that first matches."""
        name = name or self.name()
        self._lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Add a terminal and return its name."""
        name = f"T{next(self._numbers)}"
        self._lines.append(f"{name}: {body}")
        return name

    def add(self, lines: str) -> None:
        """Add rules that have names of their own."""
        self._lines.append(lines.strip())

    def json(self, schema: Any, *, strict: bool) -> str:
        """Add a rule for JSON that satisfies a schema, and return its name."""
        return self.rule(f"%json {json.dumps(bounded_json(schema, strict=strict))}")

    def mark(self, text: str) -> str:
        """Return what stands for a mark that must come; an end token comes by itself."""
        token = self._marks.ids.get(text)
        if token is None:
            return literal(text)
        return "" if token in self._marks.ends else f"<[{token}]>"

    def silent(self, mark: str) -> bool:
        """Tell whether a mark is a special token, so that no text is one."""
        return self._marks.ids.get(mark) in self._marks.special

    @property
    def free(self) -> str:
        """Stands for any text, also none, with the special tokens that mean nothing."""
        return f"(ANY {self._others})* ANY" if self._others else "ANY"

    def until(self, mark: str) -> str:
        """Return what stands for any text up to the first mark, which belongs to it."""
        if self.silent(mark):
            return f"{self.free} {self.mark(mark)}"
        first = f"(ANY {self._others})* " if self._others else ""
        return first + self.rule(self.terminal(f"ANY {literal(mark)}"), lazy=True)

    def text_until(self, mark: str, *patterns: str) -> str:
        """Return what stands for a text up to the first mark, which belongs to it.

        Args:
            patterns: that the text satisfies; none is any text.
        """
        texts = patterns or (r"(?s:.*)",)
        if self.silent(mark):
            terminal = self.terminal(" & ".join(f"/{text}/" for text in texts))
            return f"{terminal} {self.mark(mark)}"
        end = spelled(mark)
        whole = [f"/(?:{text}){end}/" for text in texts]
        first = [rf"~/(?s:.*){end}(?s:.+)/"] if patterns else []
        return self.rule(self.terminal(" & ".join([*whole, *first])), lazy=True)


def literal(text: str) -> str:
    """Return what stands for a text as it is."""
    return json.dumps(text, ensure_ascii=False)


def one_of(choices: Iterable[str]) -> str:
    """Return what stands for any of these."""
    return f"({' | '.join(choices)})"


def _ranges(ids: Iterable[int]) -> str:
    """Write numbers as ranges, such as `1-3,7`."""
    ranges: list[list[int]] = []
    for number in sorted(ids):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{low}-{high}" if low < high else str(low) for low, high in ranges)
