"""Grammars in GBNF mean characters, and in Lark's notation any way to cut a text into terminals: held against a plain
reading of the rules, and against Lark's own `dynamic_complete` lexer.
"""

from __future__ import annotations

import random
import sys
from functools import cache

import numpy as np
import pytest
import torch
from lark import Lark, UnexpectedInput

from paceline.checkpoints import Tokenizer
from paceline.config import StructuredOutputsParams
from paceline.errors import ConfigError
from paceline.grammar import Constraint, constraint, library_text
from paceline.llm import BUNDLED

WORDS = Tokenizer.load(BUNDLED / "target")
SIZE, END = 6144, WORDS.eos_id or 0

SUMS = 'root ::= (sum "=" ws num "\\n")+\nsum ::= num ("+" num)*\nnum ::= [0-9]+ ws\nws ::= [ \\t\\n]*'
CALCULATION = """
root ::= (expr "=" ws term "\\n")+
expr ::= term ([-+*/] term)*
term ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num ::= [0-9]+ ws
ws ::= [ \\t\\n]*
"""
JSON = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""

LANGUAGES: dict[str, tuple[str, list[str], list[str]]] = {
    "a line break that blanks could take": (SUMS, ["1+2=3\n", "1 \n+2=\n3\n\n4=5\n"], ["1+2=3", "1+=3\n", "+1=1\n"]),
    "the same within recursion": (CALCULATION, ["a=b\n", "(a1 +2)*c\n=\n 3 \n\nx=y\n"], ["a=b", "(a=b\n", "a b=c\n"]),
    "words beside a blank": ('root ::= word " " word\nword ::= [a-z ]+', ["ab cd", "a  b"], ["ab", "ab ", "ab c1"]),
    "letters, then a word": ('root ::= [a-z]+ "end"', ["abendxend", "endend"], ["end", "abendx"]),
    "brackets that their content may have": (
        'root ::= "<" root ">" | [a-z>]*',
        ["<<ab>>", "<ab>>>", ">"],
        ["<<a>", "<"],
    ),
    "one letter begins like another": ('root ::= [à-ÿ]+ "Ä" root | "."', ["éèÄ.", "éÄàÄ."], ["é.", "éÄÄ."]),
    "a word ends where two rules do": (
        'root ::= "c" | [ab] | [a-c] [a-c]* ("x" root+) root+',
        ["bxcaa", "bxca", "abcxaa"],
        ["bxa", "bca"],
    ),
    "json": (JSON, ['{"a": [1, -2.5e3, "x\\u00e9\\n"],\n  "b": {}}', "{}"], ['{"a": }', '{"a" 1}', "[]", '{"a\n":1}']),
    "text between brackets": (
        'root ::= (t | "(" root ")")*\nt ::= [^()]+',
        ["ab(c d(e)f)g()", "", "é"],
        [")", "(", "a(b"],
    ),
    "escapes": (
        r'root ::= "\x41\u00e9\U0001F642" [\x61-\x63\[\]\-\\\n] "\t\"\r"',
        ['Aé🙂b\t"\r', 'Aé🙂]\t"\r', 'Aé🙂-\t"\r', 'Aé🙂\\\t"\r', 'Aé🙂\n\t"\r'],
        ['Aé🙂d\t"\r', 'Aé🙂n\t"\r', 'Ae🙂b\t"\r'],
    ),
    "sets": ("root ::= [^a-z] [a-] [.] .", ["A-.\n", "éa.é"], ["b-.x", "A-xx", "Ab.x"]),
    "repetition": (
        'root ::= ("ab" ","){2,3} [0-9]{2} "x"{0,2} "y"{2,} opt\nopt ::= "z" |',
        ["ab,ab,12yy", "ab,ab,ab,12xxyyyz"],
        ["ab,12yy", "ab,ab,12xxxyy", "ab,ab,12y", "ab,ab,12yyzz"],
    ),
    "a rule that begins with itself": ('root ::= root "+" [0-9] | [0-9]', ["1", "1+2+3"], ["1+", "+1"]),
    "comments, dashes, other line ends": (
        '# start\r\nroot ::= my-rule "!" # end\r\nmy-rule ::= "a"\r\n  | "b"\r\n',
        ["a!", "b!"],
        ["ab!", "a"],
    ),
    "a branch that never ends": ('root ::= "a" | "b" x\nx ::= "c" x', ["a"], ["b", "bc"]),
    "Lark: a terminal that begins another": (
        'start: STEM SUFFIX\nSTEM: "list" | "listen"\nSUFFIX: "ed"',
        ["listed", "listened"],
        ["listen", "list ed"],
    ),
    "Lark: a word and what may be one": (
        'start: "begin" NAME ("(" start ")")?\nNAME: /[a-z]+/\n%ignore " "',
        ["begin x", "beginner", " begin begin ( beginx) "],
        ["begin", "begi nx", "begin x ( x )"],
    ),
}


@cache
def made(grammar: str) -> Constraint:
    return constraint(StructuredOutputsParams(grammar=grammar), WORDS, SIZE, [END])


def follows(rule: Constraint, text: str) -> bool:
    """Whether a text is one of the language, in its usual tokens."""
    path = [*WORDS.encode(text, add_special_tokens=False), END]
    return rule.allowed(path) == len(path)


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_grammar_has_its_texts_and_no_others(name: str) -> None:
    grammar, inside, outside = LANGUAGES[name]
    assert [text for text in inside if not follows(made(grammar), text)] == []
    assert [text for text in outside if follows(made(grammar), text)] == []


@pytest.mark.parametrize("length", [1, 2])
def test_a_text_may_be_cut_into_tokens_in_any_way(length: int) -> None:
    rule, text = made(CALCULATION), "(a1 +22)*c\n=\n 3 \n"
    pieces = [text[at : at + length] for at in range(0, len(text), length)]
    path = [token for piece in pieces for token in WORDS.encode(piece, add_special_tokens=False)]
    assert rule.allowed([*path, END]) == len(path) + 1


def test_a_lexer_that_takes_the_longest_match_would_forbid_them() -> None:
    """The control: the library's own reading, which a grammar may ask for."""
    grammar = LANGUAGES["Lark: a terminal that begins another"][0]
    assert follows(made(grammar), "listed")
    assert not follows(made("%llguidance {}\n" + grammar), "listed")
    assert follows(made("%llguidance {}\n" + grammar), "listened")


def test_blanks_are_no_trap() -> None:
    rule = made(SUMS).fork()
    rule.advance(WORDS.encode("1+2=3 \n\n", add_special_tokens=False))
    row = torch.zeros(1, SIZE)
    rule.apply(row, [()], [])
    assert row[0, END] == 0
    assert row[0, WORDS.encode("7", add_special_tokens=False)[0]] == 0
    assert row[0, WORDS.encode("a", add_special_tokens=False)[0]] < 0


@pytest.mark.parametrize(
    ("grammar", "signs", "seeds"),
    [
        ('start: A B start | C\nA: "a"+\nB: "a" "b"?\nC: "b" | "ab"', "ab", ["b", "ab", "aab", "aaabab", "aabaab"]),
        (
            'start: (W | "(" start ")")+\nW: /[a-c]+ ?/\nX: " "\n%ignore X',
            "(ab )",
            ["a", "(a b)c", " a (b(c ) )", "ab ab"],
        ),
        ('start: "x" start "y" | K V*\nK: "x"+ "y"\nV: "y" | "yx"', "xy", ["xy", "xxyy", "xxyyxy", "xxxyyyxyy"]),
    ],
    ids=["runs", "words", "ends"],
)
def test_lark_s_grammars_have_the_texts_of_its_complete_lexer(grammar: str, signs: str, seeds: list[str]) -> None:
    lark, rng = Lark(grammar, parser="earley", lexer="dynamic_complete"), random.Random(3)
    texts = set(seeds)
    while len(texts) < 50:
        text = rng.choice(sorted(texts))
        at = rng.randrange(len(text))
        texts.add(text[:at] + rng.choice(["", rng.choice(signs), text[at] * 2]) + text[at + 1 :] or "x")
    answers = [(follows(made(grammar), text), parses(lark, text), text) for text in sorted(texts)]
    assert [one for one in answers if one[0] != one[1]] == []
    assert 8 < sum(truth for _, truth, _ in answers) < 48


def parses(lark: Lark, text: str) -> bool:
    try:
        lark.parse(text)
    except UnexpectedInput:
        return False
    return True


# ------------------------------------------------------------------------------------------------ random grammars

Rule = list[list[str]]
"""Alternatives of names of rules and of literals, which are quoted."""


def random_rules(seed: int) -> dict[str, Rule]:
    rng = np.random.default_rng(seed)
    names = ["root", "x", "y"]
    symbols = ["x", "y", '"a"', '"b"', '"ab"', '"é"', '"è"', '"ba"']
    return {
        name: [
            [symbols[i] for i in rng.integers(0, len(symbols), rng.integers(0 if name == "y" else 1, 4))]
            for _ in range(3)
        ]
        for name in names
    }


def derives(rules: dict[str, Rule], text: str) -> bool:
    """By the definition: what each rule writes from each point, until nothing is added."""
    ends: dict[tuple[str, int], set[int]] = {(name, at): set() for name in rules for at in range(len(text) + 1)}

    def behind(symbol: str, at: int) -> set[int]:
        if symbol in rules:
            return ends[symbol, at]
        return {at + len(symbol) - 2} if text.startswith(symbol[1:-1], at) else set()

    more = True
    while more:
        more = False
        for (name, at), known in ends.items():
            for body in rules[name]:
                places = {at}
                for symbol in body:
                    places = {end for place in places for end in behind(symbol, place)}
                more |= not places <= known
                known.update(places)
    return len(text) in ends["root", 0]


def ends_somewhere(rules: dict[str, Rule]) -> bool:
    """Whether the root has any text."""
    fine = set[str]()
    for _ in rules:
        fine |= {name for name, rule in rules.items() if any(set(body) & rules.keys() <= fine for body in rule)}
    return "root" in fine


def test_random_grammars_have_the_texts_that_their_rules_write() -> None:
    rng, answers = random.Random(5), list[bool]()
    for seed in range(40):
        rules = random_rules(seed)
        text = "\n".join(f"{name} ::= {' | '.join(' '.join(body) for body in rule)}" for name, rule in rules.items())
        if not ends_somewhere(rules):
            with pytest.raises(ConfigError, match="never comes to an end"):
                made(text)
            continue
        rule = made(text)
        for _ in range(25):
            written = "".join(rng.choice("aabbéè") for _ in range(rng.randrange(7)))
            answers.append(derives(rules, written))
            assert follows(rule, written) == answers[-1], (text, written)
    assert 30 < sum(answers) < len(answers) - 30


# ------------------------------------------------------------------------------------------------ messages

WRONG: dict[str, tuple[str, str]] = {
    "no root": ('other ::= "a"', "has no rule root"),
    "undefined": ("root ::= missing", "uses missing without defining it"),
    "twice": ('root ::= "a"\nroot ::= "b"', "defines root twice"),
    "bracket": ('root ::= ("a"', "not valid in line 1"),
    "quote": ('root ::= "a"\n  | "b', "not valid in line 2 at '\"b'"),
    "escape": (r'root ::= "\d"', r"unknown escape \\d"),
    "half an emoji": (r'root ::= "\ud83d"', "spells character d83d"),
    "range": ("root ::= [z-a]", "ends before it begins"),
    "empty set": ("root ::= []", "empty set"),
    "count": ('root ::= "a"{3,2}', "the lower bound first"),
    "special token": ("root ::= <think> [a-z]", "names the token <think>"),
    "no text": ('root ::= "a" root', "rule 'root' never comes to an end"),
    "exponential": (
        "\n".join(['root ::= a0 | "(" root ")"', *(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(30)), 'a30 ::= "xy"']),
        "write it shorter",
    ),
    "Lark: a lookahead": ("start: WORD\nWORD: /a(?=b)/", "terminal WORD of the grammar.*lookaround"),
    "Lark: not defined": ("start: missing", "missing"),
    "the library's own": ("start: %json {}", r"begin it with %llguidance \{\} for that of llguidance"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_grammar_is_one_line_that_says_why(name: str) -> None:
    grammar, why = WRONG[name]
    with pytest.raises(ConfigError, match=f"^structured_outputs grammar cannot be used: .*({why})") as caught:
        constraint(StructuredOutputsParams(grammar=grammar), WORDS, SIZE, [END])
    assert "\n" not in str(caught.value)


def test_regular_parts_become_one_lexeme_each() -> None:
    """What costs time in the library is how many there are of them for a text."""
    lexemes = [line for line in library_text(JSON).splitlines() if line.startswith("T")]
    assert len(lexemes) <= 12
    assert any("x{22}" in line and ")*" in line for line in lexemes), "strings are not cut into characters"
    assert library_text(SUMS).count("\nT") == 1


def test_what_is_nested_too_deeply_is_called_so() -> None:
    for grammar in ("root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "start: " + "(" * 3000 + '"a"' + ")" * 3000):
        with pytest.raises(
            ConfigError, match=r"^the grammar is nested too deeply; give parts of it names of their own$"
        ):
            library_text(grammar)


def calls(grammar: str) -> int:
    """How many functions of Python are called to translate a grammar."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        library_text(grammar)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("forwards", [True, False])
def test_work_grows_with_a_chain_of_rules_and_not_with_its_square(forwards: bool) -> None:
    def chain(length: int) -> str:
        rules = [f'r{i} ::= "x" r{i + 1}' for i in range(length)]
        rules += ["root ::= r0", f'r{length} ::= "y" root "z" | "e"']
        return "\n".join(rules if forwards else rules[::-1])

    assert follows(made(chain(30)), "x" * 30 + "y" + "x" * 30 + "ez")
    assert calls(chain(200)) < 3 * calls(chain(100))
