"""Bodies are read as JSON and nothing else, with an error that says where they are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from paceline.serving.protocol import ApiError

MAX_DEPTH: Final = 128
"""Lists and objects within each other."""

CONSTANT: Final = object()
"""Stands for NaN and Infinity, until the field is found that they are in."""


def read_json(body: bytes) -> Any:
    """The value that a body holds; of keys that come twice, the last counts.

    Raises:
        ApiError: it is not UTF-8, not JSON (NaN and Infinity are not), holds a number of too many digits, or nests
            too deeply.
    """
    constants = list[str]()

    def note(name: str) -> object:
        constants.append(name)
        return CONSTANT

    try:
        found = json.loads(body.decode("utf-8-sig"), parse_constant=note)
    except UnicodeDecodeError as error:
        raise _invalid(f"is not UTF-8: byte 0x{body[error.start]:02x} at position {error.start}") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:  # of Python's limit
        raise _invalid("holds a number of too many digits") from None
    if _deeper(found, MAX_DEPTH):
        raise _too_deep()
    if constants:
        fields = found.items() if isinstance(found, dict) else ()
        param = next((name for name, value in fields if _holds_constant(value)), None)
        raise ApiError(f"{param or 'the body'} holds {constants[0]}, which is no number of JSON's", param=param)
    return found


def _invalid(why: str) -> ApiError:
    return ApiError(f"the body {why}", code="invalid_json")


def _holds_constant(value: Any) -> bool:
    left = [value]
    while left:
        one = left.pop()
        if one is CONSTANT:
            return True
        if isinstance(one, dict | list):
            left += one.values() if isinstance(one, dict) else one
    return False


def _too_deep() -> ApiError:
    return _invalid(f"must nest at most {MAX_DEPTH} lists and objects within each other")


def _deeper(value: Any, most: int) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        if not level:
            return False
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
    return bool(level)


class JsonRoute(APIRoute):
    """A route whose body is read by `read_json` before anything else looks at it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def answer(http: Request) -> Response:
            body = await http.body()
            if not body:
                raise _invalid("is missing")
            return await handle(_Read(http, read_json(body)))

        return answer


class _Read(Request):
    """A request whose JSON is known."""

    def __init__(self, http: Request, value: Any) -> None:
        super().__init__(http.scope, http.receive)
        self._body, self._value = b"null", value  # not empty: what it stands for has been read

    async def json(self) -> Any:
        return self._value
