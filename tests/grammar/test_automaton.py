"""Regular expressions against Python's own matcher; automata are minimal and refuse what is not regular."""

import random
import re

import pytest

from paceline.errors import ConfigError
from paceline.grammar import DEAD, parse_regex
from paceline.grammar.automaton import Alphabet, Dfa
from paceline.grammar.expression import Chars, other_characters, parts_of


def automaton(pattern: str) -> tuple[Alphabet, Dfa]:
    expr = parse_regex(pattern)
    alphabet = Alphabet.of(found.ranges for found in parts_of(expr) if isinstance(found, Chars))
    return alphabet, Dfa.of(expr, alphabet)


def accepts(alphabet: Alphabet, dfa: Dfa, text: str) -> bool:
    state = dfa.run(alphabet.encode(text))
    return state != DEAD and bool(dfa.accepts[state])


def texts(number: int, signs: str = "abcAé1- \n") -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choice(signs) for _ in range(rng.randrange(7))) for _ in range(number)]


def disagreements(pattern: str, truth: str) -> int:
    alphabet, dfa = automaton(pattern)
    return sum(accepts(alphabet, dfa, text) != bool(re.fullmatch(truth, text)) for text in texts(1500))


PATTERNS = [
    "a*b|c{2,4}",
    "(ab|a)*c?",
    "[^a-c]+b",
    r"\d{1,2}-\w*",
    "(?i:ab)c*",
    "(a|b)*a(a|b){2}",
    ".*",
    "(?s:.)*",
    "",
    "^a+?$",
    r"\W\s?",
    "(?i)[a-b1]+É?",
    "a{0,3}b{2}",
    "(?:)*",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regex_matches_what_python_matches(pattern: str) -> None:
    assert disagreements(pattern, pattern) == 0


def test_the_comparison_sees_another_language() -> None:
    assert disagreements("a*b?", "a*b") > 0


def test_the_empty_text_can_be_taken_out() -> None:
    alphabet, dfa = automaton("(ab)*")
    rest = dfa.without_empty()
    assert accepts(alphabet, dfa, "")
    assert not accepts(alphabet, rest, "")
    assert all(
        accepts(alphabet, rest, text) == (text != "" and accepts(alphabet, dfa, text))
        for text in ("", "ab", "abab", "aba")
    )


def test_automata_are_minimal_and_live() -> None:
    assert automaton("(a|b)*a(a|b){3}")[1].accepts.size == 16
    assert automaton("ab|cb|db")[1].accepts.size == 3
    assert automaton("a|b[^\x00-\U0010ffff]")[1].accepts.size == 2
    assert automaton("[^\x00-\U0010ffff]")[1].accepts.size == 0


def test_complements_of_ranges() -> None:
    assert other_characters(()) == ((0, 0x10FFFF),)
    assert other_characters(((0, 5), (7, 0x10FFFF))) == ((6, 6),)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "not valid"),
        ("[]", "not valid"),
        ("a(?=b)", "a lookaround"),
        (r"(a)\1", "a backreference"),
        ("a^b", "an anchor or boundary inside"),
        (r"a\b", "an anchor or boundary inside"),
        ("a++", "possessive repetition"),
        ("(?>a)b", "an atomic group"),
        ("(((a{0,99}){0,99}){0,99})", "more than 20000 states"),
    ],
)
def test_what_is_not_regular_is_one_clear_line(pattern: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        automaton(pattern)
    assert "\n" not in str(caught.value)
