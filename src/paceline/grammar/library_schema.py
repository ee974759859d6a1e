r"""JSON schemas as the library behind `structured_outputs` understands them rightly.

It reads regular expressions as Rust does. Those of JSON Schema are ECMA-262's, in whose sets `[`, `&&`, `--` and `~~`
are plain characters, a hyphen beside `\w` is one too, and whose `.` leaves out all four ends of lines.

And it looks at keys as they are spelled: where an object declares some keys and leaves others free, `{"\u0061": ...}`
would pass for a free key, though it is "a". So what is free is written as a pattern of all other keys, in which
characters stand for themselves. It stays as it is where schemas are joined (`allOf`, or rules beside `$ref`, `anyOf`
and `oneOf`), since the library does not join such patterns, beside patterns of the schema's own, and where the pattern
would be very large.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final
from urllib.parse import unquote

from paceline.utils import need

VALUES: Final = frozenset(("const", "default", "enum", "example", "examples"))
"""Keys whose values are JSON, and no schemas."""

NAMED: Final = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
"""Keys whose values hold schemas by name."""

ALTERNATIVES: Final = frozenset(("$ref", "anyOf", "oneOf"))

DESCRIBING: Final = frozenset((
    "$anchor", "$comment", "$defs", "$id", "$schema", "definitions", "deprecated", "description", "discriminator",
    "id", "readOnly", "title", "writeOnly", "x-guidance", *VALUES - {"const", "enum"},
))  # fmt: skip
"""Keys that say nothing of what is allowed."""

LONGEST_NAME, LONGEST_NAMES = 60, 5000
"""Characters of one declared key, and of all those of an object, of which a pattern is made."""

LINE: Final = r"[^\n\r\u{2028}\u{2029}]"
SETS: Final = frozenset("dDwWsSpP")
"""Letters behind a backslash that stand for sets of characters."""


def library_schema(schema: Any) -> Any:
    """A copy of a schema in which patterns and free keys are written for the library."""
    return _copy(schema, free_keys=not _joins(schema))


def with_references(schema: Any, *, strict: bool) -> Any:
    """A copy of a schema whose references are to what is there: those that leave out the sign of the document (`#`)
    get it. Where `strict` is false, others that are to nothing hold of any value.

    Raises:
        ConfigError: a reference of a strict schema is to nothing.
    """
    return schema if _has_names(schema) else _referring(schema, schema, strict=strict)


def _has_names(node: Any) -> bool:
    """Whether parts of a schema have names of their own, which references may be to."""
    if isinstance(node, list):
        return any(_has_names(item) for item in node)
    return isinstance(node, Mapping) and (
        any(isinstance(node.get(key), str) for key in ("$id", "id", "$anchor", "$dynamicAnchor"))
        or any(_has_names(value) for value in node.values())
    )


def _referring(node: Any, root: Any, *, strict: bool, named: bool = False) -> Any:
    if isinstance(node, list):
        return [_referring(item, root, strict=strict) for item in node]
    if not isinstance(node, Mapping):
        return node
    referring = {}
    for key, value in node.items():
        if named or key not in VALUES:
            referring[key] = _referring(value, root, strict=strict, named=not named and key in NAMED)
        else:
            referring[key] = value
    target = None if named else referring.get("$ref")
    if isinstance(target, str) and target.startswith(("#/", "/")) and not _is_there(root, target):
        if _is_there(root, f"#{target}"):
            referring["$ref"] = f"#{target}"
        else:
            need(not strict, "structured_outputs json", "refer to what is there", target)
            del referring["$ref"]
    return referring


def _is_there(root: Any, target: str) -> bool:
    """Whether a reference is to a part of the schema."""
    if not target.startswith("#/"):
        return False
    place = root
    for part in unquote(target[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and key.isdecimal() and int(key) < len(place):
            place = place[int(key)]
        elif isinstance(place, Mapping) and key in place:
            place = place[key]
        else:
            return False
    return True


def _copy(node: Any, *, free_keys: bool, named: bool = False) -> Any:
    """Of a part of a schema; `named` says that its keys are names."""
    if isinstance(node, list):
        return [_copy(item, free_keys=free_keys) for item in node]
    if not isinstance(node, Mapping):
        return node
    copy = {}
    for key, value in node.items():
        if not named and key == "pattern" and isinstance(value, str):
            copy[key] = rust_pattern(value)
        elif not named and key in VALUES:
            copy[key] = value
        else:
            copy[key] = _copy(value, free_keys=free_keys, named=not named and key in NAMED)
    if not named and isinstance(patterns := copy.get("patternProperties"), dict):
        copy["patternProperties"] = {rust_pattern(key): value for key, value in patterns.items()}
    return _with_free_keys(copy) if free_keys and not named else copy


def _joins(node: Any, named: bool = False) -> bool:
    """Whether several schemas hold for one value somewhere, or what holds for free keys is named elsewhere."""
    if isinstance(node, list):
        return any(_joins(item) for item in node)
    if not isinstance(node, Mapping):
        return False
    if not named and ("allOf" in node or (ALTERNATIVES & node.keys() and len(node.keys() - DESCRIBING) > 1)):
        return True
    if not named and "additionalProperties" in str(node.get("$ref")):
        return True
    inside = ((key, value) for key, value in node.items() if named or key not in VALUES)
    return any(_joins(value, named=not named and key in NAMED) for key, value in inside)


def _with_free_keys(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that says in a pattern which keys are free beside those that it names."""
    declared, required = schema.get("properties", {}), schema.get("required", [])
    free = schema.get("additionalProperties", True)
    if not (isinstance(declared, dict) and isinstance(required, list) and free is not False):
        return schema  # closed, or wrong, which the library says
    names = [*declared, *required]
    if "patternProperties" in schema or not names or not all(isinstance(name, str) for name in names):
        return schema
    if max(map(len, names)) > LONGEST_NAME or sum(map(len, names)) > LONGEST_NAMES:
        return schema
    values = {} if free is True else free
    properties = {name: declared.get(name, values) for name in names}
    patterns = {other_texts(properties): values}
    return {**schema, "properties": properties, "patternProperties": patterns, "additionalProperties": False}


def other_texts(texts: Collection[str]) -> str:
    """A pattern of all texts but some, 15 characters of it for each of theirs."""
    return f"(?s)^{_others(texts)}$"


def _others(texts: Collection[str]) -> str:
    following: dict[str, list[str]] = {}
    for text in texts:
        if text:
            following.setdefault(text[0], []).append(text[1:])
    more = f"[^{_signs(following)}].*" if following else ".+"
    parts = [more, *(_signs(sign) + _others(rest) for sign, rest in following.items())]
    return f"(?:{'|'.join(parts)}){'' if '' in texts else '?'}"


def _signs(text: Iterable[str]) -> str:
    return "".join(sign if sign.isalnum() else rf"\u{{{ord(sign):x}}}" for sign in text)


def rust_pattern(pattern: str) -> str:
    """A regular expression of ECMA-262 in Rust's notation; what is wrong in it is left for the library to reject.

    Raises:
        ConfigError: a set begins with its own end, which ECMA-262 reads unlike everybody else.
    """
    parts, at = list[str](), 0
    while at < len(pattern):
        if pattern[at] == "[":
            end = _end_of_set(pattern, at)
            parts.append(_set(pattern[at + 1 : end]) if end < len(pattern) else pattern[at:])
            at = end + 1
        elif pattern[at] == "\\":
            parts.append(pattern[at : at + 2])
            at += 2
        else:
            parts.append(LINE if pattern[at] == "." else pattern[at])
            at += 1
    return "".join(parts)


def _end_of_set(pattern: str, begin: int) -> int:
    """Where the bracket that opens at `begin` closes; the pattern's end where it does not."""
    at = begin + (2 if pattern[begin + 1 : begin + 2] == "^" else 1)
    sure = pattern[at : at + 1] != "]"
    need(sure, "a set in a pattern of structured_outputs json", r"begin with another sign than ], or with \]", pattern)
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at


def _set(inside: str) -> str:
    """A set, brackets added."""
    sign = "^" if inside.startswith("^") else ""
    signs, parts = _elements(inside[len(sign) :]), []
    while signs:
        if len(signs) > 2 and signs[1] == "-" and not (_is_set(signs[0]) or _is_set(signs[2])):
            parts.append(f"{_plain(signs[0])}-{_plain(signs[2])}")
            del signs[:3]
        else:
            parts.append(_plain(signs.pop(0)))
    return f"[{sign}{''.join(parts)}]"


def _elements(inside: str) -> list[str]:
    r"""The characters of a set, with `\x41`, `\u0041`, `\u{41}` and `\p{..}` in one piece."""
    elements, at = list[str](), 0
    while at < len(inside):
        size = 1
        if inside[at] == "\\":
            letter = inside[at + 1 : at + 2]
            braced = inside.find("}", at) + 1 - at if inside[at + 2 : at + 3] == "{" and letter in "upPx" else 0
            size = max(2, braced or {"x": 4, "u": 6}.get(letter, 2))
        elements.append(inside[at : at + size])
        at += size
    return elements


def _is_set(element: str) -> bool:
    return element[0] == "\\" and element[1:2] in SETS


def _plain(element: str) -> str:
    r"""One character as it stands in a set of Rust's; `\b` is a backspace there."""
    if element == r"\b":
        return r"\x08"
    return "\\" + element if element in "[&~-^" else element
