"""JSON does not go on for ever: blanks between its parts and the digits of numbers are bounded by default."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from paceline.checkpoints import Tokenizer, token_bytes
from paceline.config import StructuredOutputsParams
from paceline.grammar import Constraint, constraint
from paceline.grammar.numbers import Numbers
from paceline.llm import BUNDLED

WORDS = Tokenizer.load(BUNDLED / "target")
SIZE, END = 6144, WORDS.eos_id or 0

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "sizes": {"type": "array", "items": {"type": "number"}},
        "more": {"type": "object", "properties": {"fine": {"type": "boolean"}}, "required": ["fine"]},
    },
    "required": ["name", "sizes", "more"],
}
PARTS = ["{", '"name"', ":", '"Ann"', ",", '"sizes"', ":", "[", "1", ",", "2.5", "]", ",", '"more"', ":"]
PARTS += ["{", '"fine"', ":", "true", "}", "}"]
"""A record, cut where blanks may stand."""

RUNS = (" ", "\n", "\t", "\r\n", "\n ", " \n", "\n\t")
TAG = {"structures": [{"begin": "<call>", "schema": RECORD, "end": "</call>"}], "triggers": ["<call>"]}
KINDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a schema": ({"json": RECORD}, "", ""),
    "any JSON": ({"json": True}, "", ""),
    "an object": ({"json_object": True}, "", ""),
    "a structural tag": ({"structural_tag": TAG}, "so <call>", "</call> and"),
    "what is ignored": ({"json": {**RECORD, "not": {"const": 1}}, "strict": False}, "", ""),
}


@cache
def _made(given: str) -> Constraint:
    return constraint(StructuredOutputsParams(**json.loads(given)), WORDS, SIZE, [END])


def made(**given: Any) -> Constraint:
    return _made(json.dumps(given))


def ids(text: str) -> list[int]:
    return WORDS.encode(text, add_special_tokens=False)


def taken(rule: Constraint, text: str) -> str:
    """As much of a text as the rule allows."""
    path = ids(text)
    return WORDS.decode(path[: rule.allowed(path)])


def follows(rule: Constraint, text: str) -> bool:
    path = [*ids(text), END]
    return rule.allowed(path) == len(path)


@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_blanks_are_refused_wherever_blanks_may_stand(kind: str) -> None:
    given, begin, end = KINDS[kind]
    rule = made(**given)
    for at in range(1, len(PARTS)):
        before, behind = begin + "".join(PARTS[:at]), "".join(PARTS[at:]) + end
        assert taken(rule, f"{before} {behind}") == f"{before} {behind}"
        for run in RUNS:
            blanks = (200 * run)[:200]
            found = taken(rule, before + blanks + behind)
            assert found.startswith(before)
            assert len(found) - len(before) <= 34, (before, run)


def test_a_pattern_of_one_s_own_decides() -> None:
    text = "".join(PARTS[:1]) + 200 * " " + "".join(PARTS[1:])
    assert not follows(made(json=RECORD), text)
    assert follows(made(json=RECORD, whitespace_pattern="[ ]{0,300}"), text)
    assert follows(made(json={**RECORD, "x-guidance": {"whitespace_pattern": "[ ]*"}}), text)
    assert not follows(made(json=RECORD, whitespace_pattern="( |\n {0,8})?"), text)
    assert not follows(made(json=RECORD, disable_any_whitespace=True), "".join(PARTS))
    assert follows(made(json=RECORD, disable_any_whitespace=True), json.dumps(json.loads("".join(PARTS))))


def nested(depth: int) -> Any:
    return [1, {"a": nested(depth - 2), "b": []}] if depth > 0 else "x"


@pytest.mark.parametrize("indent", [None, 2, 4, "\t"])
@pytest.mark.parametrize("kind", ["a schema", "any JSON"])
def test_usual_layouts_are_allowed(kind: str, indent: Any) -> None:
    rule = made(**KINDS[kind][0])
    value = json.loads("".join(PARTS)) if kind == "a schema" else nested(8)
    for separators in ((",", ":"), (", " if indent is None else ",", ": ")):
        text = json.dumps(value, indent=indent, separators=separators)
        assert taken(rule, text) == text
        assert taken(rule, text.replace("\n", "\r\n")) == text.replace("\n", "\r\n")
    assert taken(made(json=RECORD, whitespace_pattern=" ?"), "{\n") == "{"


# ------------------------------------------------------------------------------------------------ numbers

DIGITS = 200 * "7"
NUMBERS: dict[str, tuple[Any, list[str]]] = {
    "an integer": ({"type": "integer"}, [DIGITS, "-" + DIGITS]),
    "a number": ({"type": "number"}, [DIGITS, "0." + DIGITS, "1e" + DIGITS, f"{DIGITS}.{DIGITS}", "1.5E-" + DIGITS]),
    "from below": ({"type": "integer", "minimum": 3}, [DIGITS]),
    "from above": ({"type": "integer", "maximum": -3}, ["-" + DIGITS]),
    "between": ({"type": "number", "minimum": 0, "maximum": 9}, ["7." + DIGITS]),
    "in lists": ({"type": "array", "items": {"type": "number"}}, [f"[1, 2, {DIGITS}"]),
    "anything": (True, [DIGITS, f'{{"a": [{DIGITS}']),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_end(name: str) -> None:
    schema, texts = NUMBERS[name]
    rule = made(json=schema)
    for text in texts:
        found = taken(rule, text)
        number = found.split(" ")[-1].split("[")[-1]
        assert 30 < len(number) <= 44, text  # no more than was begun behind a sign that needs a digit
        end = text[: len(text) - len(text.lstrip('[{"a: '))].count("[") * "]" + text.count("{") * "}"
        assert follows(rule, found + end), found + end


@pytest.mark.parametrize("layout", [repr, str, "{:.0f}".format, "{:.17e}".format, "{:+.3e}".format])
def test_doubles_and_integers_of_64_bits_can_be_written(layout: Any) -> None:
    rule = made(json={"type": "number"})
    rng = np.random.default_rng(1)
    doubles = [*rng.standard_normal(10), *10.0 ** rng.uniform(-300, 300, 10), math.pi, 5e-324, sys.float_info.max]
    for value in [*map(float, doubles), -(2**63), 2**64 - 1, 0, 123456789012345678901]:
        text = layout(value).removeprefix("+")
        assert len(text) > 40 or follows(rule, text), text
    assert follows(rule, "-0.000001234567890123456789")
    assert follows(made(json={"type": "integer"}), str(-(2**127)))


@pytest.mark.parametrize(
    ("bounds", "begin"),
    [({"exclusiveMinimum": 0}, "0."), ({"exclusiveMaximum": 0}, "-0."), ({"minimum": 1e-60, "maximum": 1}, "0.")],
    ids=["above", "below", "least"],
)
def test_zeros_end_where_a_schema_wants_another_digit(bounds: dict[str, float], begin: str) -> None:
    rule = made(json={"type": "number", **bounds})
    written = taken(rule, begin + "0" * 200)
    assert 30 < len(written) <= 40
    assert follows(rule, written + "7")
    assert follows(rule, begin + "001")
    assert not follows(rule, written), "which would be 0"


def test_what_is_no_number_is_not_cut() -> None:
    assert taken(made(json={"type": "string"}), f'"{DIGITS}"') == f'"{DIGITS}"'
    assert taken(made(json={"type": "string", "minLength": 500}), f'"{DIGITS}') == f'"{DIGITS}'
    assert taken(made(json={"type": "string", "pattern": "^[0-9]{90,300}$"}), f'"{DIGITS}"') == f'"{DIGITS}"'
    assert taken(made(structural_tag=TAG), f"in free text {DIGITS} stands") == f"in free text {DIGITS} stands"
    assert taken(made(regex="[0-9]+"), DIGITS) == DIGITS


def test_masks_along_paths_are_those_of_a_state_that_went_there() -> None:
    rule, text = made(json={"type": "array", "items": {"type": "integer"}}), "[12, " + 45 * "7"
    path = ids(text)
    for count in range(len(path) - 12, len(path) + 1):
        there = made(json={"type": "array", "items": {"type": "integer"}}).fork()
        there.advance(path[:count])
        rows = torch.zeros(2, SIZE)
        rule.apply(rows[:1], [path[:count]], [])
        there.apply(rows[1:], [()], [])
        if rule.allowed(path[:count]) == count:
            assert torch.equal(rows[0], rows[1])
    short, long = torch.zeros(1, SIZE), torch.zeros(1, SIZE)
    begun = path[: rule.allowed(path)]
    rule.apply(short, [begun[:-1]], [])
    rule.apply(long, [begun], [])
    seven, comma = ids("7")[0], ids("[1,")[-1]
    assert (short[0, begun[-1]], long[0, comma]) == (0, 0)
    assert long[0, seven] == -math.inf
    twin = rule.fork()
    twin.advance(begun)
    assert twin.allowed([seven]) == 0
    twin.rewind(begun[-3:])
    assert twin.allowed(begun[-3:]) == 3


def test_rows_of_numbers_may_be_wider_or_narrower_than_the_vocabulary() -> None:
    numbers = Numbers([b"1", b",", b"a", None, b"23", b'"'])
    allowed = np.ones(9, np.bool_)
    allowed[[2, 5]] = False
    assert numbers.cut(allowed, 38).tolist() == allowed.tolist()
    assert np.flatnonzero(numbers.cut(allowed, 39)).tolist() == [0, 1, 3, 6, 7, 8]
    assert np.flatnonzero(numbers.cut(allowed[:3], 40)).tolist() == [1]
    assert numbers.cut(np.asarray([True, False]), 40).tolist() == [True, False], "nothing else is allowed"


# ------------------------------------------------------------------------------------------------ strings, padded ids


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "string", "maxLength": 3}, True])
def test_strings_hold_json_s_escapes(schema: Any) -> None:
    rule = made(json=schema)
    for text in (r'"\u00e9"', r'"\u00E9A"', r'"\ud83d\ude00x"', r'"\"\\\b"', r'"\f\n\r"', '"é🙂"', r'"\t"'):
        assert follows(rule, text), text
        json.loads(text)
    for text in (r'"\ud83d"', r'"\ude00"', r'"\x41"', '"a\nb"'):
        assert not follows(rule, text), text


@pytest.mark.parametrize("rows", [SIZE, SIZE + 1, SIZE + 31, SIZE + 32, SIZE + 64, 2 * SIZE])
def test_padded_ids_are_forbidden_and_the_others_are_as_ever(rows: int) -> None:
    given = StructuredOutputsParams(regex="[a-z]{3} [0-9]{2};")
    wide, usual = constraint(given, WORDS, rows, [END]), constraint(given, WORDS, SIZE, [END])
    for text in ("", "ab", "abc ", "abc 12;"):
        found, expected = torch.zeros(1, rows), torch.zeros(1, SIZE)
        wide.apply(found, [ids(text)], [])
        usual.apply(expected, [ids(text)], [])
        assert torch.equal(found[:, :SIZE], expected)
        assert (found[:, SIZE:] == -math.inf).all()
        assert (found == 0).any()


def test_the_vocabulary_has_what_these_tests_ask_for() -> None:
    written: Sequence[bytes | None] = token_bytes(WORDS)
    assert max(len(text) for text in written if text and not text.strip(b" ")) > 1, "tokens of several blanks"
    assert len(written) == SIZE
