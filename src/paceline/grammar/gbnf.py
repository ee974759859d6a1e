"""Grammars in GBNF, llama.cpp's EBNF, as expression trees.

A terminal is a character: a literal is its characters one after the other, and a text belongs to the language if any
way through the rules writes it. A rule may also go on in the next line before `|`. What llama.cpp refuses to compile
because of how it parses (left recursion) is fine here; references to a model's special tokens are rejected.

Source: grammars/README.md of llama.cpp.
"""

from __future__ import annotations

import re
from typing import Final, NoReturn

from paceline.errors import ConfigError
from paceline.grammar.expression import (
    EMPTY,
    LAST,
    Chars,
    Expr,
    Grammar,
    Ref,
    alternatives,
    joined,
    literal,
    other_characters,
    references,
    repeat,
    sequence,
)

DEFINITION: Final = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
PIECE: Final = re.compile(
    r"""(?P<blank>\s+|\#[^\r\n]*)
    |(?P<define>[\w-]+\s*::=)
    |(?P<name>[A-Za-z0-9_-]+)
    |"(?P<text>(?:[^"\\]|\\.)*)"
    |\[(?P<set>(?:[^\]\\]|\\.)*)\]
    |\{\s*(?P<times>[0-9]+\s*(?:,\s*[0-9]*\s*)?)\}
    |(?P<sign>[|()*+?.])
    |(?P<token>!?<[^<>\s]+>)""",
    re.VERBOSE | re.DOTALL,
)
SIGN: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
ESCAPED: Final = {"n": "\n", "r": "\r", "t": "\t"} | {sign: sign for sign in '"\\[]-'}
TIMES: Final = {"*": (0, None), "+": (1, None), "?": (0, 1)}
MOST_REPEATED: Final = 100_000
ROOT: Final = "root"


def is_gbnf(text: str) -> bool:
    """Whether a text defines rules as GBNF does."""
    return DEFINITION.search(text) is not None


def parse_gbnf(text: str) -> Grammar:
    """The rules of a grammar; `root` is that of whole texts.

    Raises:
        ConfigError: no valid grammar, a rule that is not defined or defined twice, or none called root.
    """
    return _Reader(text).grammar()


def _characters(text: str, spelled: str) -> list[tuple[str, bool]]:
    """Characters that a literal or a set spells, and whether they are escaped."""
    characters = []
    for x, u, long, escaped, plain in SIGN.findall(text):
        if escaped and escaped not in ESCAPED:
            raise ConfigError(
                rf"the grammar has an unknown escape \{escaped} in {spelled[:60]}; known are \n \t \r \\ \" \[ \] \- "
                r"\xNN \uNNNN \UNNNNNNNN"
            )
        if code := x or u or long:
            number = int(code, 16)
            if number > LAST or 0xD800 <= number <= 0xDFFF:
                raise ConfigError(f"the grammar spells character {code} in {spelled[:60]}; Unicode has none of it")
            characters.append((chr(number), True))
        else:
            characters.append((ESCAPED[escaped], True) if escaped else (plain, False))
    return characters


def _set(text: str) -> Expr:
    """One character of a set such as `^a-z\\n`."""
    spelled = f"[{text}]"
    negated = text.startswith("^")
    signs = _characters(text[negated:], spelled)
    if not signs and not negated:
        raise ConfigError("the grammar has an empty set [], which no character matches; leave it out")
    ranges, at = [], 0
    while at < len(signs):
        low = high = ord(signs[at][0])
        if at + 2 < len(signs) and signs[at + 1] == ("-", False):
            high, at = ord(signs[at + 2][0]), at + 2
        if low > high:
            raise ConfigError(f"the grammar has a range that ends before it begins in {spelled[:60]}; turn it round")
        ranges.append((low, high))
        at += 1
    whole = joined(ranges)
    return Chars(other_characters(whole) if negated else whole)


class _Reader:
    """Reads rules by recursive descent over pieces of the text."""

    def __init__(self, text: str) -> None:
        self.pieces: list[tuple[str, str, int]] = []  # kind, content, where
        self.rules: dict[str, Expr] = {}
        self.text, self.at, place = text, 0, 0
        while place < len(text):
            match = PIECE.match(text, place)
            if match is None:
                self._fail(place)
            kind = str(match.lastgroup)
            if kind == "token":
                raise ConfigError(
                    f"the grammar names the token {match[0]}, which is no text; write the characters that it stands for"
                )
            if kind != "blank":
                self.pieces.append((kind, match[kind], place))
            place = match.end()
        self.pieces.append(("end", "", place))

    def grammar(self) -> Grammar:
        """All rules; a literal is one too, whose name no rule that is written has."""
        rules = self.rules
        while self._kind() != "end":
            kind, content, place = self._next()
            if kind != "define":
                self._fail(place)
            name = content.removesuffix("::=").strip()
            if name in rules:
                raise ConfigError(f"the grammar defines {name} twice; join both with |")
            rules[name] = self._choice()
        if ROOT not in rules:
            raise ConfigError("the grammar has no rule root; call the rule of whole texts so")
        if missing := sorted(set().union(*map(references, rules.values())) - rules.keys()):
            raise ConfigError(f"the grammar uses {missing[0]} without defining it; add {missing[0]} ::= ...")
        return Grammar(rules, ROOT)

    def _kind(self) -> str:
        kind, content, _ = self.pieces[self.at]
        return content if kind == "sign" else kind

    def _next(self) -> tuple[str, str, int]:
        self.at += 1
        return self.pieces[self.at - 1]

    def _choice(self) -> Expr:
        choices = [self._series()]
        while self._kind() == "|":
            self._next()
            choices.append(self._series())
        return alternatives(*choices)

    def _series(self) -> Expr:
        series: list[Expr] = []
        while self._kind() in ("name", "text", "set", "(", "."):
            item = self._item(*self._next())
            while self._kind() in (*TIMES, "times"):
                item = self._repeated(item, *self._next())
            series.append(item)
        if self._kind() not in ("|", ")", "define", "end"):
            self._fail(self.pieces[self.at][2])
        return sequence(*series) if series else EMPTY

    def _item(self, kind: str, content: str, place: int) -> Expr:
        match kind:
            case "name":
                return Ref(content)
            case "text":
                signs = "".join(sign for sign, _ in _characters(content, f'"{content}"'))
                if len(signs) < 2:
                    return literal(signs)
                self.rules[f'"{signs}"'] = literal(signs)
                return Ref(f'"{signs}"')
            case "set":
                return _set(content)
        if content == ".":
            return Chars(((0, LAST),))
        inner = self._choice()
        if self._kind() != ")":
            self._fail(place)
        self._next()
        return inner

    def _repeated(self, item: Expr, kind: str, content: str, _: int) -> Expr:
        if kind == "sign":
            return repeat(item, *TIMES[content])
        low, comma, high = (part.strip() for part in content.partition(","))
        least = int(low)
        most = least if not comma else int(high) if high else None
        if max(least, most or 0) > MOST_REPEATED or (most is not None and most < least):
            rule = f"be up to {MOST_REPEATED} times, the lower bound first"
            raise ConfigError(f"the grammar's repetition must {rule}, got {{{content}}}")
        return repeat(item, least, most)

    def _fail(self, place: int) -> NoReturn:
        line = self.text.count("\n", 0, place) + 1
        rest = self.text[place : place + 30].split("\n")[0].rstrip() or "the end"
        raise ConfigError(f"the grammar is not valid in line {line} at {rest!r}; write it in GBNF or Lark's notation")
