"""The emptiness test against brute force over all fillings, an incremental parser, and CYK."""

import random
from functools import lru_cache
from itertools import product

import pytest
from lark import Lark, Token, UnexpectedInput

from paceline.errors import ConfigError, UnsatisfiableError
from paceline.grammar import CLOSED, DEAD, UNFIT, Cfg, Fillings, Grammar, Lexicon, parse_ebnf, parse_regex
from paceline.grammar.expression import EMPTY, Ref, alternatives, literal, sequence

BRACKETS = Grammar({"s": alternatives(EMPTY, sequence(literal("("), Ref("s"), literal(")"), Ref("s")))}, "s")
MIXED = Grammar(
    {
        "s": alternatives(
            EMPTY,
            sequence(Ref("s"), literal("("), Ref("s"), literal(")")),
            sequence(literal("["), Ref("s"), literal("]"), Ref("s")),
        )
    },
    "s",
)
END = "<end>"
Canvas = list[str | None]


def balanced(text: str) -> bool:
    stack: list[str] = []
    for sign in text:
        if sign in "([":
            stack.append(sign)
        elif not stack or stack.pop() + sign not in ("()", "[]"):
            return False
    return not stack


def fillings(grammar: Grammar, vocabulary: list[str], canvas: Canvas, closes: bool = True) -> Fillings:
    lexicon = Lexicon.of(Cfg.of(grammar), [None if text == END else text for text in vocabulary])
    found = Fillings(lexicon, len(canvas), closes=closes)
    for slot, text in enumerate(canvas):
        if text is not None:
            kind = CLOSED if text == END else int(lexicon.row_of[vocabulary.index(text)])
            found.put(slot, UNFIT if kind == DEAD else kind)
    return found


def matches(canvas: Canvas, full: tuple[str, ...]) -> bool:
    return all(want is None or want == got for want, got in zip(canvas, full, strict=True))


@lru_cache
def valid(vocabulary: tuple[str, ...], length: int) -> list[tuple[str, ...]]:
    """Every full canvas whose text is balanced, with nothing but ends after an end."""
    found = []
    for full in product(vocabulary, repeat=length):
        stop = full.index(END) if END in full else length
        if set(full[stop:]) <= {END} and balanced("".join(full[:stop])):
            found.append(full)
    return found


def canvases(vocabulary: tuple[str, ...], lengths: range, number: int) -> list[Canvas]:
    """Random ones, half of them cut out of valid canvases."""
    rng, found = random.Random(1), []
    for i in range(number):
        length = rng.choice(lengths)
        full = [rng.choice(vocabulary) for _ in range(length)]
        if i % 2:
            full = list(rng.choice(valid(vocabulary, length)))
            full[rng.randrange(length)] = rng.choice(vocabulary)
        gaps = rng.random()
        found.append([None if rng.random() < gaps else text for text in full])
    return found


PLAIN = ("(", ")", END)
MERGED = ("(", "))", ")", "()", "([", "]", ")(", END)


def mistakes(grammar: Grammar, vocabulary: tuple[str, ...], lengths: range, number: int, closes: bool = True) -> int:
    wrong = 0
    for canvas in canvases(vocabulary, lengths, number):
        truth = any(matches(canvas, full) for full in valid(vocabulary, len(canvas)))
        wrong += fillings(grammar, list(vocabulary), canvas, closes).possible != truth
    return wrong


@pytest.mark.parametrize(
    ("grammar", "vocabulary", "lengths"),
    [(BRACKETS, PLAIN, range(1, 9)), (MIXED, MERGED, range(1, 5))],
    ids=["plain", "merged"],
)
def test_brackets_agree_with_all_fillings(grammar: Grammar, vocabulary: tuple[str, ...], lengths: range) -> None:
    assert mistakes(grammar, vocabulary, lengths, 250) == 0


def test_the_comparison_sees_a_wrong_variant() -> None:
    assert mistakes(BRACKETS, PLAIN, range(1, 9), 250, closes=False) > 0
    assert mistakes(BRACKETS, MERGED, range(1, 5), 250) > 0  # knows no square brackets


@pytest.mark.parametrize(("grammar", "vocabulary"), [(BRACKETS, PLAIN), (MIXED, MERGED)], ids=["plain", "merged"])
def test_examples_are_texts_of_the_grammar_and_the_shortest(grammar: Grammar, vocabulary: tuple[str, ...]) -> None:
    seen = 0
    for canvas in canvases(vocabulary, range(1, 5), 250):
        found = fillings(grammar, list(vocabulary), canvas)
        if found.possible:
            chosen = [None if token is None else vocabulary[token] for token in found.example()]
            full = tuple(text or picked or END for text, picked in zip(canvas, chosen, strict=True))
            same = [other for other in valid(vocabulary, len(canvas)) if matches(canvas, other)]
            assert full in same
            assert full.count(END) == max(other.count(END) for other in same)
            seen += 1
    assert seen > 50


SUMS = """
start: start "+" product | product
product: product "*" factor | factor
factor: "a" | "b" | "(" start ")"
"""
SIGNS = list("ab+*()")


def viable(parser: Lark, text: str) -> bool:
    """Whether an incremental parser can go on."""
    state = parser.parse_interactive("")
    names = {"+": "PLUS", "*": "STAR", "(": "LPAR", ")": "RPAR", "a": "A", "b": "B"}
    try:
        for sign in text:
            state.feed_token(Token(names[sign], sign))
    except UnexpectedInput:
        return False
    return True


def test_one_gap_at_the_end_is_incremental_parsing() -> None:
    parser, grammar, rng = Lark(SUMS, parser="lalr"), parse_ebnf(SUMS), random.Random(2)
    answers = []
    for _ in range(200):
        prefix = "".join(rng.choice(SIGNS) for _ in range(rng.randrange(1, 5)))
        canvas: Canvas = [*prefix, *[None] * 9]
        answers.append(viable(parser, prefix))
        assert fillings(grammar, [*SIGNS, END], canvas).possible == answers[-1], prefix
    assert 20 < sum(answers) < 180


CNF = {"S": ["AB", "AX"], "X": ["SB"], "A": ["a"], "B": ["b"]}  # a^n b^n


def cyk(text: str) -> bool:
    size = len(text)
    table = {(i, 1): {name for name, bodies in CNF.items() if text[i] in bodies} for i in range(size)}
    for span in range(2, size + 1):
        for i in range(size - span + 1):
            pairs = {b + c for k in range(1, span) for b in table[i, k] for c in table[i + k, span - k]}
            table[i, span] = {name for name, bodies in CNF.items() if pairs & set(bodies)}
    return bool(size) and "S" in table[0, size]


def test_without_gaps_it_is_membership() -> None:
    grammar = Grammar({"s": alternatives(literal("ab"), sequence(literal("a"), Ref("s"), literal("b")))}, "s")
    for size in range(1, 9):
        for full in product("ab", repeat=size):
            assert fillings(grammar, ["a", "b"], list(full), closes=False).possible == cyk("".join(full))


def test_all_texts_are_never_empty() -> None:
    grammar = Grammar({"s": parse_regex("(?s:.)*")}, "s")
    for canvas in canvases(MERGED, range(1, 6), 100):
        stop = canvas.index(END) if END in canvas else len(canvas)
        assert fillings(grammar, list(MERGED), canvas).possible == (set(canvas[stop:]) <= {END, None})


def test_a_gap_that_is_too_short_or_too_long_is_empty() -> None:
    """What sets the test apart from one with gaps of any length."""
    word = Grammar({"s": literal("abc")}, "s")
    assert not fillings(word, ["a", "b", "c"], ["a", None], closes=False).possible
    assert fillings(word, ["a", "b", "c", "bc"], ["a", None], closes=False).possible
    assert not fillings(word, ["a", "b", "c"], ["a", None, None, "c"], closes=False).possible


def test_terminals_within_and_around_others_are_all_cuts() -> None:
    """Keyword and name: the same text both ways."""
    grammar = parse_ebnf('start: "if" NAME | NAME "=" NAME | "(" start ")"\nNAME: /[a-z]+/\n')
    tokens = ["i", "f", "if", "ifx=", "x", "=if", "(", ")"]
    for full, truth in [
        (["ifx=", "x"], True),
        (["if", "x"], True),
        (["i", "f"], False),
        (["if", "=if"], True),
        (["(", "ifx=", "i", ")"], True),
        (["=if", "x"], False),
    ]:
        assert fillings(grammar, tokens, list(full), closes=False).possible == truth, full


def test_a_language_without_texts_is_rejected() -> None:
    with pytest.raises(UnsatisfiableError, match="never comes to an end"):
        Cfg.of(Grammar({"s": sequence(literal("a"), Ref("s"))}, "s"))


def test_a_canvas_beyond_memory_is_one_clear_line() -> None:
    with pytest.raises(ConfigError, match="GiB; shorten the canvas"):
        fillings(MIXED, list(MERGED), [None] * 20000)
