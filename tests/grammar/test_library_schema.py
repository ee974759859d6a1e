"""Schemas mean what JSON Schema says: patterns are ECMA-262's, and a key is what it reads, however it is spelled."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest

from paceline.checkpoints import Tokenizer
from paceline.config import StructuredOutputsParams
from paceline.errors import ConfigError
from paceline.grammar import Constraint, constraint, rust_pattern
from paceline.grammar.library_schema import other_texts
from paceline.llm import BUNDLED

WORDS = Tokenizer.load(BUNDLED / "target")
SIZE, END = 6144, WORDS.eos_id or 0


@cache
def made(schema: str) -> Constraint:
    return constraint(StructuredOutputsParams(json=json.loads(schema)), WORDS, SIZE, [END])


def follows(schema: Any, text: str) -> bool:
    path = [*WORDS.encode(text, add_special_tokens=False), END]
    return made(json.dumps(schema)).allowed(path) == len(path)


SIZES = {"type": "integer"}
PERSON = {"type": "object", "properties": {"a": SIZES, "größe": SIZES}, "required": ["a"]}
TREE = {"$defs": {"t": PERSON | {"properties": {"a": SIZES, "kid": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"}
OBJECTS: list[tuple[Any, list[str], list[str]]] = [
    (
        PERSON,
        ['{"a":1,"größe":2,"x":[1,{"y":null}]}', '{"a":1,"größen":"x"}', '{"a":1,"grö":0,"":0}', r'{"a":1,"\n\"é":0}'],
        ['{"a":1,"größe":"x"}', r'{"a":1,"gr\u00f6\u00dfe":"x"}', r'{"a":1,"\u0061":"x"}', '{"größe":1}'],
    ),
    (
        PERSON | {"additionalProperties": {"type": "string"}, "required": ["a", "b"]},
        ['{"a":1,"b":"x"}', '{"a":1,"b":"x","c":"y"}'],
        ['{"a":1,"b":2}', '{"a":1,"b":"x","c":2}', r'{"a":1,"b":"x","\u0062":"y"}', '{"a":1,"c":"x"}'],
    ),
    (TREE, ['{"a":1,"kid":{"a":2,"kids":"x"}}'], [r'{"a":1,"k\u0069d":"x"}', r'{"a":1,"kid":{"a":2,"k\u0069d":"x"}}']),
    (
        {"allOf": [PERSON, {"properties": {"b": {"type": "string"}}, "required": ["b"]}]},
        ['{"a":1,"b":"x"}', '{"a":1,"b":"x","c":0}'],
        ['{"a":1}', '{"a":1,"b":2}'],
    ),
    (
        {"oneOf": [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab"]},
        ['{"k":"a"}', '{"k":"b","more":1}'],
        ['{"k":"c"}', r'{"k":"a","\u006b":"c"}'],
    ),
    (PERSON | {"additionalProperties": False}, ['{"a":1,"größe":2}'], ['{"a":1,"b":2}', r'{"a":1,"\u0062":2}']),
    ({"type": "object", "additionalProperties": SIZES}, [r'{"\u00e9":1,"a":2}', "{}"], [r'{"\u00e9":"x"}']),
    (
        {
            "type": "object",
            "properties": {
                "pattern": SIZES,
                "enum": {"type": "string", "pattern": "^[a~~b]$"},
                "const": {"const": {"pattern": "."}},
            },
            "required": ["pattern", "enum", "const"],
        },
        ['{"pattern":1,"enum":"~","const":{"pattern":"."}}'],
        ['{"pattern":".","enum":"~","const":{"pattern":"."}}', '{"pattern":1,"enum":"c","const":{"pattern":"."}}'],
    ),
]


@pytest.mark.parametrize(("schema", "fine", "wrong"), OBJECTS)
def test_a_free_key_is_none_of_those_that_are_declared(schema: Any, fine: list[str], wrong: list[str]) -> None:
    for text in fine:
        assert follows(schema, text), text
        assert isinstance(json.loads(text), dict)
    for text in wrong:
        assert not follows(schema, text), text


PATTERNS: list[tuple[str, str, str]] = [
    ("^[^a&&b]$", "c~", "ab&"),
    ("^[a~~b]$", "ab~", "c"),
    ("^[+--]$", "+,-", ".a"),
    ("^[a-z--]$", "abz-", "A+"),
    ("^[[a]$", "[a", "]b"),
    (r"^[\w-.]$", "a_9-.", "é,"),
    (r"^[\d&&\]\\-]$", "7&]\\-", "a"),
    (r"^[\x41\u0042\b]$", "AB\b", "Cb"),
    ("^.$", "xé ", "\n\r\u2028\u2029"),
    (r"^[.]\.$", "", "ab"),
]


@pytest.mark.parametrize(("pattern", "fine", "wrong"), PATTERNS)
def test_patterns_are_those_of_ecma_262(pattern: str, fine: str, wrong: str) -> None:
    schema, keys = {"type": "string", "pattern": pattern}, {"type": "object", "patternProperties": {pattern: SIZES}}
    for sign in fine:
        assert follows(schema, json.dumps(sign, ensure_ascii=False)), sign
    for sign in wrong:
        assert not follows(schema, json.dumps(sign, ensure_ascii=False)), sign
        value = json.dumps({sign: 1}, ensure_ascii=False)
        assert not follows(keys | {"additionalProperties": False}, value), sign


def test_everyday_patterns_keep_their_meaning() -> None:
    mail = {"type": "string", "pattern": r"^[\w-\.]+@([\w-]+\.)+[\w-]{2,4}$"}
    assert follows(mail, '"a.b-c@d-e.org"')
    assert not follows(mail, '"a b@d.org"')
    assert not follows(mail, '"a@borg"')
    for same in (r"^\d{3}-[A-Z]+$", r"^(a|b)*$", r"\S", r"^[^\s\"]+$", "^[a-zA-Z0-9_-]{1,64}$", r"a\.b\[0\]"):
        assert rust_pattern(same) == same or re.sub(r"\\-", "-", rust_pattern(same)) == same


@pytest.mark.parametrize("pattern", ["^[]a]$", "^[^]$"])
def test_a_set_that_dialects_read_differently_is_refused(pattern: str) -> None:
    with pytest.raises(
        ConfigError, match=r"a set in a pattern of structured_outputs json must begin with another sign"
    ):
        follows({"type": "string", "pattern": pattern}, '"a"')


@pytest.mark.parametrize("texts", [{""}, {"a\n", "é"}, {"name", "nam", "x", "names"}, {"größe", "größer"}])
def test_all_other_texts(texts: set[str]) -> None:
    """The pattern's notation of characters is Rust's; Python's differs in that alone."""
    pattern = re.compile(re.sub(r"\\u\{([0-9a-f]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", other_texts(texts)))
    near = {text[:size] + more for text in texts for size in range(len(text) + 1) for more in ("", "a", "\n", "ex")}
    for text in near | texts:
        assert (pattern.fullmatch(text) is None) is (text in texts), text


def test_references_are_found_or_hold_of_anything() -> None:
    def object_of(target: str) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"a": {"$ref": target}, "$ref": {"type": "string"}},
            "$defs": {"n": SIZES},
        }

    for target in ("#/$defs/n", "/$defs/n", "#/%24defs/n"):
        assert follows(object_of(target), '{"a":1,"$ref":"x"}')
        assert not follows(object_of(target), '{"a":"x"}')
        assert not follows(object_of(target), '{"a":1,"$ref":1}')
    for target in ("#/$defs/m", "/$defs/m"):
        with pytest.raises(ConfigError, match=f"refer to what is there, got '{re.escape(target)}'"):
            follows(object_of(target), "{}")
        lenient = constraint(StructuredOutputsParams(json=object_of(target), strict=False), WORDS, SIZE, [END])
        path = [*WORDS.encode('{"a":"x"}', add_special_tokens=False), END]
        assert lenient.allowed(path) == len(path)


def test_large_objects_compile_as_before() -> None:
    for names in ([f"p{i}" for i in range(1500)], ["a" * 300], [f"{i:04}{i:056}" for i in range(80)]):
        schema = {"type": "object", "properties": dict.fromkeys(names, SIZES), "required": names[:1]}
        assert follows(schema, json.dumps({names[0]: 1, "other": "x"}))
        assert not follows(schema, json.dumps({names[0]: "x"}))
