"""Texts of a schema's grammar parse and validate; what cannot be expressed is refused by name."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from paceline.errors import ConfigError, UnsatisfiableError
from paceline.grammar import DEAD, MASKED, UNFIT, Cfg, Fillings, Lexicon, parse_json_schema, read_json_schema
from paceline.grammar.automaton import Alphabet, Dfa
from paceline.grammar.json_schema import integers

PERSON = {
    "type": "object",
    "title": "described only",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", 'é"', None, 3]}, "minItems": 1, "maxItems": 2},
        "more": {"anyOf": [{"type": "null"}, {"type": ["boolean", "number"]}, {"$ref": "#/$defs/code"}]},
    },
    "required": ["age", "more"],
    "$defs": {"code": {"type": "string", "pattern": "^[A-C]{2}[0-9]?$"}},
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["v", "kids"],
            "additionalProperties": False,
        }
    },
}
PAIR = {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": {"a": [1]}}], "items": False}
MAP = {"type": "object", "additionalProperties": {"type": "integer", "maximum": -5}}
SIGNS = [
    *'{}[]:," \\-.0123456789abcdefnrtuslxyikvAB',
    "é",
    '"name"',
    '": ',
    '":',
    "true",
    "false",
    "null",
    '"age',
    '"more":',
    "🎉",
    "\n",
]


def samples(schema: Any, length: int, number: int) -> list[str]:
    """Texts written slot by slot with a random token that can be completed."""
    lexicon, rng, found = Lexicon.of(Cfg.of(parse_json_schema(schema)), SIGNS), np.random.default_rng(0), []
    for _ in range(number):
        canvas = Fillings(lexicon, length, closes=True)
        assert canvas.possible
        tokens = [-1] * length
        for slot in rng.permutation(length)[: length // 2].tolist():
            for token in rng.permutation(len(SIGNS)).tolist():
                kind = int(lexicon.row_of[token])
                canvas.put(slot, UNFIT if kind == DEAD else kind)
                if canvas.possible:
                    tokens[slot] = token
                    break
                canvas.put(slot, MASKED)
        full = [chosen if token < 0 else token for token, chosen in zip(tokens, canvas.example(), strict=True)]
        found.append("".join(SIGNS[token] for token in full if token is not None and token >= 0))
    return found


@pytest.mark.parametrize(
    ("schema", "length"),
    [(PERSON, 40), (TREE, 30), (PAIR, 16), (MAP, 16), (True, 14), ({"type": "string"}, 8)],
    ids=["person", "tree", "pair", "map", "any", "string"],
)
def test_texts_parse_and_validate(schema: Any, length: int) -> None:
    texts = samples(schema, length, 6)
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    assert len(set(texts)) > 1


def test_validation_sees_texts_of_another_schema() -> None:
    texts = samples({"type": "object", "additionalProperties": {"type": "integer"}}, 16, 6)
    assert not any(jsonschema.Draft202012Validator(PERSON).is_valid(json.loads(text)) for text in texts)


def accepted(schema: Any, text: str) -> bool:
    vocabulary = sorted(set(text))
    lexicon = Lexicon.of(Cfg.of(parse_json_schema(schema)), vocabulary)
    found = Fillings(lexicon, len(text), closes=False)
    for slot, sign in enumerate(text):
        kind = int(lexicon.row_of[vocabulary.index(sign)])
        found.put(slot, UNFIT if kind == DEAD else kind)
    return found.possible


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ('{"age": 7, "more": null}', True),
        ('{"name":"abc","age":119,"tags":["a","é\\""],"more":"AB1"}', True),
        ('{"age":0,"tags":[null, 3],"more":-1.5e-3}', True),
        ('{"name":"\\u00e9\\n","age":1,"more":true}', True),
        ('{"name":"\\ud83d\\ude00\\/","age":1,"more":true}', True),
        ('{"age":0,"more":' + 21 * "7" + "." + 22 * "3" + "}", True),
        ('{"age":0,"more":' + 22 * "7" + "}", False),
        ('{"age":0,"more":0.' + 23 * "3" + "}", False),
        ('{"age":0,  "more":null}', False),
        ('{"age":120,"more":null}', False),
        ('{"age":7}', False),
        ('{"age":7,"more":"AD"}', False),
        ('{"age":7,"tags":[],"more":null}', False),
        ('{"name":"","age":7,"more":null}', False),
        ('{"name":"\\ud800","age":7,"more":null}', False),
        ('{"age":07,"more":null}', False),
        ('{"age":7,"more":null,}', False),
    ],
)
def test_membership_of_written_examples(text: str, truth: bool) -> None:
    assert accepted(PERSON, text) == truth


@pytest.mark.parametrize(
    ("pattern", "fine", "wrong"),
    [(r"^\d$", "7", "٣a"), (r"^\w$", "a_7", "é-"), (r"^\W$", "é-", "a"), (r"^[^\d]$", "٣a", "7")],
)
def test_digits_and_words_of_patterns_are_ascii(pattern: str, fine: str, wrong: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert [accepted(schema, f'"{sign}"') for sign in fine] == [True] * len(fine)
    assert [accepted(schema, f'"{sign}"') for sign in wrong] == [False] * len(wrong)
    assert not accepted({"type": "string", "pattern": r"^\S$"}, '"\u3000"'), "spaces are those of Unicode"


def test_integers_without_bounds_end() -> None:
    for schema, size in (({"type": "integer"}, 21), ({"type": "integer", "minimum": 10**30}, 31)):
        assert accepted(schema, size * "7")
        assert accepted(schema, (size + 1) * "7") == (size > 30)
        assert not accepted(schema, 33 * "7")


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0), (3, 3), (-7, 12), (95, 1203), (-120, -9), (None, 15), (-15, None), (8, None), (None, -8)]
)
def test_integers_between_bounds(low: int | None, high: int | None) -> None:
    bounds = {"minimum": low, "maximum": high}
    expr = integers({word: bound for word, bound in bounds.items() if bound is not None})
    alphabet = Alphabet.of([((45, 45),), *(((code, code),) for code in range(48, 58))])
    dfa = Dfa.of(expr, alphabet)
    for value in range(-1500, 1500):
        state = dfa.run(alphabet.encode(str(value)))
        inside = (low is None or value >= low) and (high is None or value <= high)
        assert (state != DEAD and bool(dfa.accepts[state])) == inside, value


def test_a_schema_may_be_text_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(PERSON))
    assert (
        read_json_schema(json.dumps(PERSON))
        == read_json_schema(tmp_path / "one.json")
        == read_json_schema(str(tmp_path / "one.json"))
        == PERSON
    )
    with pytest.raises(ConfigError, match="cannot be read"):
        read_json_schema("{")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "text"}, "not valid at type"),
        ({"type": "integer", "multipleOf": 3}, "uses 'multipleOf'"),
        ({"type": "number", "minimum": 3}, "uses 'minimum'"),
        ({"oneOf": [True]}, "uses 'oneOf'"),
        ({"$ref": "#/$defs/none"}, "refers to '#/\\$defs/none'"),
        ({"$ref": "http://example.org/x"}, "only references within"),
        ({"$ref": "#", "type": "object"}, "beside"),
        ({"type": "object", "required": ["x"]}, "without declaring it"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "beside a length"),
        ({"type": "string", "pattern": "(?=a)"}, "a lookaround"),
        ({"const": float("inf")}, "lists the value inf, which holds a number that JSON cannot write"),
        ({"enum": [1, {"a": [float("-inf")]}]}, r"lists the value \{'a': \[-inf\]\}, which"),
        ({"const": float("nan")}, "lists the value nan, which"),
        ({"type": "integer", "maximum": float("inf")}, "maximum must be a finite number, got inf"),
    ],
)
def test_what_is_not_supported_is_one_clear_line(schema: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_json_schema(schema)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "array", "minItems": 3, "maxItems": 2},
        {"type": "string", "enum": [1, 2]},
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": False, "minItems": 1},
    ],
    ids=str,
)
def test_schemas_without_values_are_rejected(schema: Any) -> None:
    with pytest.raises(UnsatisfiableError):
        Cfg.of(parse_json_schema(schema))
