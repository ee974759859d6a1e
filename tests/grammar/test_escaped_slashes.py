r"""`\/` in a string of JSON is `/`: what a schema says holds of its value, in whatever tokens it is written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from toy_models import pairing

from paceline import LLM, CompletionOutput, SamplingParams
from paceline.checkpoints import token_bytes
from paceline.config import StructuredOutputsParams
from paceline.grammar import Constraint, constraint

SIGNS = [chr(code) for code in range(32, 127)] + ["\n", "é"]
JOINED = [
    r"\/", r"\\", r"\\/", "\\\\\\", '"\\', r'"\/', r"\"", "a\\", r"a\/b", "a/", "/b", '"/', "</", "</f", r"\/\/",
    "/\\", r"/\/", r"\n", r"n\/", r"\/\"", r"\"/", "\\/\\", r'"\/"', r"\/,", '":"\\/',
]  # fmt: skip
"""Tokens of several signs, backslashes in all places."""

WORDS = pairing(SIGNS + JOINED, [("/", "b"), ("a", "/"), ("<", "/"), ("</", "f"), ('"', "/")])
TEXTS = [(text or b"").decode() for text in token_bytes(WORDS)]
END, SIZE, MOST = 0, len(TEXTS), 60

FREE = {"type": "string"}
PATHS = {"type": "string", "pattern": "^(/[ab]*)+$"}
PAIR = {
    "type": "object",
    "properties": {"a/b": {"const": "/"}},
    "required": ["a/b"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<f>", "schema": {"enum": ["a/b", 1]}, "end": "</f>"}], "triggers": ["<f"]}
NATIVE = r"""%llguidance {}
start: "<f>" value "</f>" | "s" CODE | "p" %json {"type": "string"} PATH
value: %json {"enum": ["a/b", {"/": "%json {}"}]}
CODE: /"([^"\\]|\\[nrt"])*"/
PATH: /[ab\\\/]+/
"""


@cache
def _made(given: str) -> Constraint:
    return constraint(StructuredOutputsParams(**json.loads(given)), WORDS, SIZE, [END])


def made(**given: Any) -> Constraint:
    return _made(json.dumps(given)).fork()


def splittings(text: str) -> Iterator[list[int]]:
    if not text:
        yield []
    for token, begin in enumerate(TEXTS):
        if begin and text.startswith(begin):
            yield from ([token, *rest] for rest in splittings(text[len(begin) :]))


def at_random(text: str, rng: np.random.Generator) -> list[int]:
    found = []
    while text:
        fitting = [token for token, begin in enumerate(TEXTS) if begin and text.startswith(begin)]
        found.append(fitting[rng.integers(len(fitting))])
        text = text[len(TEXTS[found[-1]]) :]
    return found


def mask(rule: Constraint, path: Sequence[int] = ()) -> set[int]:
    row = torch.zeros(1, SIZE + 3)
    rule.apply(row, [path], [])
    return set((row[0] > -math.inf).nonzero().flatten().tolist())


def follows(rule: Constraint, path: Sequence[int]) -> bool:
    """Asked of the whole, and token by token."""
    whole, state = rule.allowed([*path, END]) == len(path) + 1, rule.fork()
    for token in [*path, END]:
        if state.allowed([token]) == 0:
            assert not whole, path
            return False
        state.advance([token])
    assert whole, path
    return True


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "any string": (
        {"json": FREE},
        [r'"a\/b"', r'"\/"', r'"\\/"', r'"\\\/"', r'"\\\\/\/"', r'"\/\/a"', r'"\"/\""', r'"\n\/"', r'"\u0041\/é"'],
        [r'"\a"', r'"\\\a"', r"\/", r'\/"a"', r'"a"\/', '"\\/\n"', r'"\/', r'"\ud83d\/"'],
    ),
    "a list of values": (
        {"json": {"enum": ["a/b"]}},
        [r'"a\/b"', '"a/b"'],
        [r'"a\/c"', r'"a\\/b"', r'"a\b"', r'"\a/b"', r'"a\/\/b"', r'"a/\/b"', r'"a\\\/b"'],
    ),
    "a constant within others": (
        {"json": {"const": {"a/b": ["/", {"//": 1}]}}},
        [r'{"a\/b":["\/",{"\/\/":1}]}', r'{"a/b":["\/",{"//":1}]}'],
        [r'{"a\/b":["\/"\/,{"\/\/":1}]}', r'{"a\/b":["\/",{"\/":1}]}', r'{"a\/b":\/["\/",{"\/\/":1}]}'],
    ),
    "a pattern": (
        {"json": PATHS},
        [r'"\/a\/"', r'"\/"', r'"\/\/b/"', r'"/a\/b"'],
        [r'"a\/"', r'"\\/"', r'"/\n"', '"/\\', r'"\/c"'],
    ),
    "three characters": (
        {"json": {"type": "string", "minLength": 3, "maxLength": 3}},
        [r'"a\/b"', r'"\/\/\/"', r'"\\/\/"', r'"\n//"'],
        [r'"a\/"', r'"\/\/\/\/"', r'"\/\\//"', r'"a\/b\/"'],
    ),
    "the name of a property": (
        {"json": PAIR},
        [r'{"a\/b":"\/"}', r'{"a\/b": "/"}'],
        [r'{"a\\/b":"/"}', r'{"a\/b\/":"/"}', r'{"a\/b"\/:"/"}'],
    ),
    "any JSON": (
        {"json_object": True},
        [r'{"\/":{"a\/b":[1,"\/"]}}'],
        [r'{"\/":\/}', r'{"\/":tr\/ue}', r'{\/"a":1}'],
    ),
    "a structural tag": (
        {"structural_tag": TAG},
        [r'\/<f>"a\/b"</f>y\/', r'"\/ <\/f>', r"<\/f>1", r"<f>1</f>\/", '<f>1</f>\\', '"<f>1</f>\\/'],
        [r'<f>"a\/b"<\/f>', r'<f>"a\/c"</f>', r"<f>1<\/f>", r'"<f>1<\/f>', r'<f>\/"a\/b"</f>'],
    ),
    "the library's notation": (
        {"grammar": NATIVE},
        [r'<f>"a\/b"</f>', r'<f>{"\/":"%json {}"}</f>', r's"\n/"', r'p"\/"\\/', r'p"\/"a\/'],
        [r'<f>"a\/b"<\/f>', r'<f>{"\/":"%json {}"}<\/f>', r's"\n\/"', r's"\/"', r'<f>"a\/c"</f>'],
    ),
    "a regular expression": ({"regex": r'"[a/]+"'}, ['"a/"'], [r'"a\/"', r'"\/"']),
    "a choice": ({"choice": ['"/"', r'"\/\/"']}, ['"/"', r'"\/\/"'], [r'"\/"', '"//"']),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_escape_means_a_slash_in_whatever_tokens_it_is_written(case: str) -> None:
    given, fine, wrong = CASES[case]
    rng = np.random.default_rng(0)
    for text in [*fine, *wrong]:
        paths = list(splittings(text)) if len(text) < 11 else [at_random(text, rng) for _ in range(MOST)]
        chosen = rng.permutation(len(paths))[:MOST].tolist()
        for path in (paths[one] for one in chosen):
            assert follows(made(**given), path) is (text in fine), [TEXTS[token] for token in path]


def written(rule: Constraint, most: int, text: str = "") -> set[str]:
    """Whole texts of up to `most` signs that masks lead to."""
    found = {text} if END in mask(rule) else set()
    for token in mask(rule) - {END}:
        if len(text + TEXTS[token]) <= most:
            there = rule.fork()
            there.advance([token])
            found |= written(there, most, text + TEXTS[token])
    return found


LANGUAGES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "values": ({"json": {"enum": ["a/b", "//", "b"]}}, ["a/b", "//", "b"]),
    "one value": ({"json": {"const": "a/b"}}, ["a/b"]),
    "a pattern": ({"json": {"type": "string", "pattern": "^(a|/b?){1,2}$"}},
                  ["a", "/", "/b", "aa", "a/", "a/b", "/a", "//", "//b", "/ba", "/b/", "/b/b"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LANGUAGES)
def test_masks_lead_to_every_way_to_write_a_value_and_to_no_other_text(name: str) -> None:
    given, values = LANGUAGES[name]
    expected = set()
    for value in values:
        ways = [""]
        for sign in value:
            ways = [way + one for way in ways for one in ((sign, r"\/") if sign == "/" else (sign,))]
        expected |= {f'"{way}"' for way in ways}
    assert written(made(**given), 20) == expected


STRINGS: list[Any] = [FREE, PATHS, {"type": "string", "maxLength": 3}, {"enum": ["a/b", "/", '"/n']}, True]


@pytest.mark.parametrize("number", range(len(STRINGS)))
def test_random_texts_follow_where_json_reads_a_value_of_the_schema(number: int) -> None:
    """Signs of which many texts are JSON; escapes beside that of a slash are left to strings of any kind."""
    schema, rng, counts = STRINGS[number], np.random.default_rng(number), [0, 0]
    signs = ["/", r"\/", r"\/", "a", "b", r"\\", "\\"] + ([r"\n", r"\""] if schema in (FREE, True) else [])
    for _ in range(250):
        body = "".join(signs[one] for one in rng.integers(len(signs), size=rng.integers(1, 6)))
        text = f'"{body}"' if rng.random() < 0.95 else body
        if schema == STRINGS[3] and rng.random() < 0.5:
            text = json.dumps(schema["enum"][rng.integers(3)]).replace("/", ("/", r"\/")[rng.integers(2)])
        truth = valid(schema, text)
        path = at_random(text, rng)
        assert follows(made(json=schema), path) is truth, [TEXTS[token] for token in path]
        counts[truth] += 1
    assert min(counts) > 20


def valid(schema: Any, text: str) -> bool:
    try:
        return bool(Draft202012Validator(schema).is_valid(json.loads(text)))
    except ValueError:
        return False


@pytest.mark.parametrize("number", range(2))
def test_the_mask_is_what_may_be_taken_at_every_node_of_a_path(number: int) -> None:
    """Where nothing is certain, so that all ways to cut the text are in the mask."""
    schema, text = ((FREE, r'"a\/\\/\\\/\"/b"'), (PATHS, r'"\/a/\/b\/\/"'))[number]
    rng, held = np.random.default_rng(3), 0
    for _ in range(4):
        path, rule = at_random(text, rng), made(json=schema)
        for count in range(1, len(path)):
            expected = {token for token in range(SIZE) if rule.allowed([*path[:count], token]) > count}
            assert mask(rule, path[:count]) == expected, [TEXTS[token] for token in path[:count]]
            there = made(json=schema)
            there.advance(path[:count])
            assert mask(there) == expected
            held += TEXTS[path[count - 1]].endswith("\\")
    assert held > 3


def ids(*texts: str) -> list[int]:
    return [TEXTS.index(text) for text in texts]


def test_states_go_back_and_part_in_the_middle_of_the_escape() -> None:
    rule = made(json={"enum": ["a/b", "a/c"]})
    rule.advance(ids('"', "a"))
    before = mask(rule)
    assert before >= set(ids("\\", r"\/", "/"))
    rule.advance(ids("\\"))
    assert mask(rule) == set(ids("/", "/b"))
    twin = rule.fork()
    twin.advance(ids("/"))
    rule.rewind(ids("\\"))
    assert mask(rule) == before
    assert mask(twin) == set(ids("b", "c"))
    twin.advance(ids("c", '"'))
    twin.rewind(ids("\\", "/", "c", '"'))
    assert mask(twin) == before
    rule.advance(ids("\\", "/b", '"'))
    rule.rewind(ids("/b", '"'))
    assert mask(rule) == set(ids("/", "/b"))
    assert follows(rule, ids("/", "c", '"'))
    assert not follows(rule, ids("b", '"'))


def test_a_slash_is_likely_and_behind_its_backslash_certain() -> None:
    rule = made(json={"const": "a/b"})
    rule.advance(ids('"', "a"))
    (token, chance), *_ = rule.forced(1)
    assert TEXTS[token] == "/b"
    assert chance < 1
    rule.advance(ids("\\"))
    assert rule.forced(9) == [(one, 1.0) for one in [token, *ids('"'), END]]
    rule.advance(ids("/"))
    assert rule.forced(9) == [(one, 1.0) for one in [*ids("b", '"'), END]]
    plain = made(json={"const": "a-b"})
    plain.advance(ids('"', "a"))
    assert plain.forced(1) == [(*ids("-"), 1.0)]


def test_numbers_end_behind_names_with_the_escape() -> None:
    rule, begin = made(json={"type": "object", "properties": {"a/b": {"type": "integer"}}}), r'{"a\/b":'
    path = ids(*begin, *(60 * "7"))
    assert rule.allowed(path) == len(begin) + 40
    assert follows(rule, ids(*begin, *(40 * "7"), "}"))


def test_a_schema_that_chooses_its_escapes_keeps_its_choice() -> None:
    chosen = {"type": "string", "x-guidance": {"json_allowed_escapes": 'n"'}}
    assert follows(made(json=chosen), ids('"', "\\", "n", "/", '"'))
    assert not follows(made(json=chosen), ids('"', "\\", "/", '"'))
    assert not follows(made(json=chosen), ids('"', r"\/", '"'))


def test_tokens_that_are_none_are_never_allowed() -> None:
    rule = constraint(StructuredOutputsParams(json=FREE), WORDS, SIZE + 5, [END])
    for token in (*range(SIZE, SIZE + 5), SIZE + 5, SIZE + 30):
        assert rule.fork().allowed([*ids('"', "\\"), token]) == 2
        assert rule.fork().allowed([token]) == 0
    row = torch.zeros(1, SIZE + 5)
    rule.apply(row, [ids('"', "\\")], [])
    assert (row[0, SIZE:] == -math.inf).all()
    assert row[0, ids("/")[0]] == 0


def test_every_method_writes_the_escape_where_the_model_prefers_it() -> None:
    llm = LLM(dtype="float32", profile=False)
    backslash = token_bytes(llm.tokenizer).index(b"\\")
    schema = {
        "type": "object",
        "properties": {"a/b": {"enum": ["x/y", "x/z"]}},
        "required": ["a/b"],
        "additionalProperties": False,
    }
    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "structured_outputs": {"json": schema}}

    def written_by(method: Any, bias: float) -> CompletionOutput:
        params = SamplingParams(**given, logit_bias={backslash: bias})
        return llm.with_speculative_config(method).generate("A record:", params)[0].outputs[0]

    found = [written_by(method, 100.0) for method in (None, "grammar", "ngram", ["grammar", "suffix"], "draft_model")]
    assert {one.finish_reason for one in found} == {"stop"}
    assert len({one.text for one in found}) == 1
    assert found[0].text.count(r"\/") == 2
    assert Draft202012Validator(schema).is_valid(json.loads(found[0].text))
    assert json.loads(written_by(None, -100.0).text).keys() == {"a/b"}
    assert "\\" not in written_by(None, -100.0).text
