"""Grammars in Lark's notation against Lark's own parser."""

import random
from functools import lru_cache
from pathlib import Path

import pytest
from lark import Lark, UnexpectedInput

from paceline.errors import ConfigError, UnsatisfiableError
from paceline.grammar import UNFIT, Cfg, Fillings, Lexicon, parse_ebnf, read_ebnf

LISTS = """
start: list | call
list: "[" [item ("," item)*] "]"
item: NUMBER | list | call
call: NAME "(" item ~ 1..2 ")"
NAME: "f"i /[a-b]*/
NUMBER: /-?[0-9]{1,2}/
%import common.WS_INLINE
%ignore WS_INLINE
"""
TREE = """
start: start start | "(" start? ")" | WORD "."
WORD: /[a-c]+/
"""
TEXTS = """
%import common.ESCAPED_STRING
start: "x" ESCAPED_STRING+ | "(" start ")"
"""


@lru_cache
def normal(grammar: str) -> Cfg:
    return Cfg.of(parse_ebnf(grammar))


def accepted(grammar: str, text: str) -> bool:
    vocabulary = sorted(set(text))
    lexicon = Lexicon.of(normal(grammar), vocabulary)
    found = Fillings(lexicon, len(text), closes=False)
    for slot, sign in enumerate(text):
        kind = int(lexicon.row_of[vocabulary.index(sign)])
        found.put(slot, kind if kind >= 0 else UNFIT)
    return found.possible


def parses(lark: Lark, text: str) -> bool:
    try:
        lark.parse(text)
    except UnexpectedInput:
        return False
    return True


def texts(signs: str, seeds: list[str], number: int) -> list[str]:
    """Texts of a language, some of them with a sign changed, left out or doubled."""
    rng, found = random.Random(3), list(seeds)
    for _ in range(number):
        text = rng.choice(seeds)
        at = rng.randrange(len(text))
        found.append(text[:at] + rng.choice(["", rng.choice(signs), text[at] * 2]) + text[at + 1 :])
    return found


@pytest.mark.parametrize(
    ("grammar", "signs", "seeds"),
    [
        (LISTS, "[](),f b-1", ["[]", "[1,-22]", "f([1])", " Fa ( 3 [ ] )", "[f(1),[[2]]]", "fab(1 2)"]),
        (TREE, "().ab", ["()", "a.", "(ab.)()", "((c.a.))b."]),
    ],
    ids=["lists", "tree"],
)
def test_membership_is_lark_s(grammar: str, signs: str, seeds: list[str]) -> None:
    lark = Lark(grammar, parser="earley", lexer="dynamic_complete")
    answers = [(accepted(grammar, text), parses(lark, text), text) for text in texts(signs, seeds, 60)]
    assert [found for found in answers if found[0] != found[1]] == []
    assert 10 < sum(truth for _, truth, _ in answers) < 60


def test_the_comparison_sees_another_grammar() -> None:
    lark = Lark(LISTS, parser="earley", lexer="dynamic_complete")
    assert any(accepted(LISTS.replace("1..2", "1..1"), text) != parses(lark, text) for text in ["f(1)", "fab(1 2)"])


def test_escaped_strings_of_lark_s_library() -> None:
    assert accepted(TEXTS, r'(x"a\"b""")')
    assert not accepted(TEXTS, r'(x"a\")')


def test_rules_and_lists_that_recur_at_one_end_are_regular() -> None:
    regular = Cfg.of(parse_ebnf('start: item | start "," item\nitem: "a"+ | "b" tail\ntail: "c" tail | "d"'))
    assert regular.lone
    assert len(regular.terminals) == 1
    assert not Cfg.of(parse_ebnf(TREE)).lone


def test_a_grammar_may_stand_in_a_file_with_imports(tmp_path: Path) -> None:
    (tmp_path / "parts.lark").write_text("WORD: /[a-c]+/\n")
    (tmp_path / "whole.lark").write_text('%import .parts.WORD\nstart: WORD | "(" start ")"\n')
    text, folder = read_ebnf(tmp_path / "whole.lark")
    assert Cfg.of(parse_ebnf(text, "start", folder)).size > 1
    assert read_ebnf(str(tmp_path / "whole.lark")) == (text, folder)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("start: missing", "not valid: Rule 'missing' used but not defined"),
        ('start: "a', "not valid: Unexpected input"),
        ('begin: "a"', "not valid"),
        ("start: /(/", "not valid"),
        ("start: /a(?=b)/", "terminal .* a lookaround"),
        ("%declare X\nstart: X", "without saying what it matches"),
        ("no_such_file.lark", "cannot be read"),
    ],
)
def test_wrong_grammars_are_one_clear_line(grammar: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_ebnf(*read_ebnf(grammar)[:1])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "grammar", ["start: start", 'start: "a" start', 'start: "(" start ")" | other\nother: "b" other "c"']
)
def test_grammars_without_texts_are_rejected(grammar: str) -> None:
    with pytest.raises(UnsatisfiableError, match="allows no text at all"):
        Cfg.of(parse_ebnf(grammar))
