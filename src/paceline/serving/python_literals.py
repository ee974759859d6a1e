"""Calls as Python writes them, with JSON's `true`, `false` and `null` beside Python's own words."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, Final

from paceline.serving.growing_text import GrowingText, Steps

CALL_HEAD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,255}")
SIGNS: Final = re.compile(r"[()\[\]{}\"'\\]")
WORDS: Final = {"true": True, "false": False, "null": None}

Signed = int | float


def call_end(text: GrowingText) -> Steps[str]:
    """Read up to the parenthesis that closes a call, and behind it; returns what is before.

    Raises:
        EndedError: there is none.
    """
    depth, quote, length = 1, "", 0
    while depth:
        sign = SIGNS.search(text.text, text.at + length)
        if sign is None or (not text.last and _unclear(text.text, sign.start(), quote)):
            length = (len(text.text) if sign is None else sign.start()) - text.at
            yield from text.more()
            continue
        found = sign[0]
        if found in "\"'" and quote in ("", found, 3 * found):
            found = 3 * found if quote != found and text.text.startswith(3 * found, sign.start()) else found
            quote = found if not quote else "" if quote == found else quote
        elif not quote:
            depth += {"(": 1, "[": 1, "{": 1, "\\": 0}.get(found, -1)
        length = sign.start() - text.at + len(found) + (found == "\\")
    inner = text.text[text.at : text.at + length - 1]
    text.at += length
    return inner


def _unclear(text: str, place: int, quote: str) -> bool:
    """Whether what comes next decides what this sign is: one that it quotes, or three quotes in a row."""
    rest = text[place : place + 3]
    if rest[0] == "\\":
        return len(rest) == 1
    return len(rest) < 3 and rest == len(rest) * rest[0] and rest[0] in "\"'" and quote in ("", 3 * rest[0])


def keywords(written: str) -> dict[str, Any]:
    """The arguments of a call, as what stands between its parentheses has them.

    Raises:
        ValueError: anything but names with literals.
    """
    call = _parsed(f"f({written}\n)")
    if not isinstance(call, ast.Call) or call.args or any(one.arg is None for one in call.keywords):
        raise ValueError("no keywords")
    return {str(one.arg): _value(one.value) for one in call.keywords}


def literal(written: str) -> Any:
    """The value of a literal.

    Raises:
        ValueError: it is none that JSON could hold.
    """
    return _value(_parsed(written.strip()))


def _parsed(written: str) -> ast.expr:
    try:
        return ast.parse(written, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def _value(node: ast.expr) -> Any:
    try:
        found = _plain(node)
        json.dumps(found, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return found


def _plain(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in WORDS:
        return WORDS[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return _signed(node)
    if isinstance(node, ast.List | ast.Tuple):
        return [_plain(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _plain(value) for key, value in zip(node.keys, node.values, strict=True)}
    raise ValueError("no literal")


def _signed(node: ast.UnaryOp) -> Signed:
    number = _plain(node.operand)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError("no number")
    return -number if isinstance(node.op, ast.USub) else number


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key that is no text")
