"""Bodies of requests: bounded in how many things they hold, and read beside the event loop where they are large.

Python's lock is held while a C library reads or checks a text, whatever the thread. What bounds that time is not the
length of a body, which long texts may fill, but the number of things in it; so they are counted before, in pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from paceline.serving.api_errors import ApiError
from paceline.serving.json_bodies import PIECE, read_json
from paceline.serving.places import OWNER, Places

LARGE: Final = 2**16
"""Bytes of a body from which on it is read beside the event loop; less holds few things."""

MAX_ITEMS: Final = 2**18
"""A body may hold so many items of all lists, and fields of all objects; a number with a point counts twice, since it
takes longer."""

MAX_FIELDS: Final = 2**16 + 2**10
"""A body may hold so many fields of all objects, each of which takes longer."""

MAX_NESTED: Final = 2**14
"""A body may hold so many lists and objects."""

READERS: Final = 2
"""So many large bodies are read at once."""

QUOTE, SLASH, COMMA, COLON, POINT, OPENS = ord('"'), ord("\\"), ord(","), ord(":"), ord("."), (ord("["), ord("{"))

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class BodyRoute(APIRoute):
    """A route that reads its body by `read_body` before anything else looks at it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def answer(http: Request) -> Response:
            OWNER.set(http.scope["owner"])
            return await handle(_Read(http, await read_body(http, http.app.state.readers)))

        return answer


class _Read(Request):
    """A request whose JSON has been read already."""

    def __init__(self, http: Request, value: Any) -> None:
        super().__init__(http.scope, http.receive)
        self._body, self._value = b"null", value  # not empty: what it stands for has been read

    async def json(self) -> Any:
        return self._value


async def read_body(http: Request, readers: Places) -> Any:
    """Read the JSON of a request, beside the event loop where it is large.

    Args:
        readers: places for those that read a large one.
    Raises:
        ApiError: it is none, or holds too much.
    """
    try:
        body = await http.body()
    except ClientDisconnect:
        raise ApiError("the body did not arrive") from None
    if len(body) <= LARGE:
        return read_json(body)
    async with readers.place():
        await asyncio.to_thread(check_items, body)
        return await asyncio.to_thread(read_json, body)


def check_items(body: bytes) -> None:
    """Reject a body that holds too many things, long before they are made.

    Raises:
        ApiError: it does.
    """
    items, fields, nested = count_items(body)
    for what, count, most in (
        ("lists and objects", nested, MAX_NESTED),
        ("fields of objects", fields, MAX_FIELDS),
        ("items and fields", items, MAX_ITEMS),
    ):
        if count > most:
            raise ApiError(f"the body must hold at most {most} {what} in all, got {count}", code="too_many_items")


def count_items(body: bytes) -> tuple[int, int, int]:
    """Count at most how many items of lists and fields of objects there are in a text of JSON (numbers with a point
    twice), how many of them are fields, and how many lists and objects there are.
    """
    separators, fields, nested, inside, escape = 0, 0, 0, 0, False
    for start in range(0, len(body), PIECE):
        piece = np.frombuffer(b"\\" * escape + body[start : start + PIECE], np.uint8)
        quotes = piece == QUOTE
        escaped, escape = _escaped(piece)
        quotes[escaped] = False
        texts = (np.add.accumulate(quotes, dtype=np.uint8) + np.uint8(inside)) & 1  # 1 from quote to quote
        inside, outside = int(texts[-1]), texts == 0
        separators += int(np.count_nonzero(((piece == COMMA) | (piece == POINT)) & outside))
        fields += int(np.count_nonzero((piece == COLON) & outside))
        nested += sum(int(np.count_nonzero((piece == bracket) & outside)) for bracket in OPENS)
    return separators + nested, fields, nested


def _escaped(piece: Bytes) -> tuple[np.ndarray[Any, np.dtype[np.intp]], bool]:
    """Find the places behind a backslash that is not behind one itself, and tell whether the next piece begins with
    one.
    """
    slashes = np.flatnonzero(piece == SLASH)
    if not len(slashes):
        return slashes, False
    numbers = np.arange(len(slashes))
    begins = np.diff(slashes, prepend=-2) != 1
    run = np.maximum.accumulate(np.where(begins, numbers, 0))
    places = slashes[(numbers - run) % 2 == 0] + 1
    last = bool(len(places)) and int(places[-1]) == len(piece)
    return (places[:-1] if last else places), last
