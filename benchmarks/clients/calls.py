"""What the Python programs of this folder share. Each is run in an environment that holds its client alone, without
Paceline: functions that are marked as calls are run in turn, and each tells in a line of JSON what came of it.

A call returns what it got: "text", "call", "parsed", or "error" where the client had to raise one. It raises where
something does not hold.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

ADDRESS = os.environ["CLIENTS_ADDRESS"]
"""Of the server, without a path."""

MODEL = os.environ["CLIENTS_MODEL"]
KEY = "none"
SECONDS = 120
"""That a request may take."""

TOKENS = 300
"""That an answer may have."""

OPENAI: Any = {"base_url": f"{ADDRESS}/v1", "api_key": KEY, "max_retries": 0, "timeout": SECONDS}
"""Of OpenAI's clients."""

MESSAGE = 600
"""Characters that are kept of what went wrong."""

Json = dict[str, Any]
CALLS: dict[str, Callable[[], Any]] = {}


class GetWeather(BaseModel):
    """Get the weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: str
    unit: Literal["celsius", "fahrenheit"]


class GetTime(BaseModel):
    """Get the time of day in a city."""

    model_config = ConfigDict(extra="forbid")
    city: str


class Guest(BaseModel):
    """Somebody who travels."""

    model_config = ConfigDict(extra="forbid")
    name: str
    age: int


class Trip(BaseModel):
    """A journey."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "London", "Rome"]
    days: int
    packed: bool
    guest: Guest


FUNCTIONS: dict[str, type[BaseModel]] = {"get_weather": GetWeather, "get_time": GetTime}
HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
PLAN: list[Any] = [{"role": "user", "content": "Plan a trip to Paris for John, who is 30. Answer in JSON."}]
RESULT = "18 degrees, sunny"
CITIES = ("London", "Rome", "Berlin")
"""Asked about, and called for, in earlier turns: behind them a small model calls by itself."""


def asked(city: str) -> dict[str, Any]:
    """A question that a call answers."""
    return {"role": "user", "content": f"What is the weather in {city}, in celsius?"}


def turn(city: str) -> list[Any]:
    """A question, the call and its result."""
    function = {"name": "get_weather", "arguments": json.dumps({"city": city, "unit": "celsius"})}
    call = {"id": f"call_{city}", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
    return [asked(city), {"role": "assistant", "content": "", "tool_calls": [call]}, result]


ASK: list[Any] = [asked("Paris")]
AGAIN: list[Any] = [*(message for city in CITIES for message in turn(city)), asked("Paris")]
HELLO_TEXT, ASK_TEXT, PLAN_TEXT = (messages[0]["content"] for messages in (HELLO, ASK, PLAN))


def get_weather(city: str, unit: str) -> str:
    """Get the weather of a city."""
    return f"{city}: {RESULT}, {unit}"


def call(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Marks a function, which may be asynchronous, as a call of this name."""

    def marked(function: Callable[[], Any]) -> Callable[[], Any]:
        CALLS[name] = function
        return function

    return marked


def run() -> None:
    """All calls in turn, one line of JSON for each."""
    with asyncio.Runner() as loop:
        for name, function in CALLS.items():
            try:
                found = function()
                result = loop.run(found) if inspect.iscoroutine(found) else found
                line = {"call": name, "result": result, "ok": True, "detail": ""}
            except Exception as error:
                detail = f"{place(error)}{type(error).__name__}: {error}"[:MESSAGE]
                line = {"call": name, "result": "failed", "ok": False, "detail": detail}
            print(json.dumps(line), flush=True)


def place(error: Exception) -> str:
    """The line of the program that raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == sys.argv[0]]
    return f"line {lines[0]}: " if lines else ""


def expect(holds: Any, what: object) -> None:
    """Raise where something does not hold, and say what came instead."""
    if not holds:
        raise AssertionError(str(what))


def functions(*, strict: bool | None = None, names: Iterable[str] = FUNCTIONS) -> list[Any]:
    """The functions as tools of a chat."""
    found = []
    for name in names:
        kind = FUNCTIONS[name]
        function: Json = {"name": name, "description": kind.__doc__, "parameters": kind.model_json_schema()}
        found.append({"type": "function", "function": function | ({} if strict is None else {"strict": strict})})
    return found


def flat_functions(*, strict: bool | None = None, names: Iterable[str] = FUNCTIONS) -> list[Any]:
    """The same as tools of a response."""
    return [{"type": "function", **one["function"]} for one in functions(strict=strict, names=names)]


def validated(name: str, arguments: str | Json, *, fits: bool = True) -> BaseModel | None:
    """The arguments of a call, checked.

    Args:
        fits: they must fit the function's schema; else they must be an object of JSON.
    """
    expect(name in FUNCTIONS, f"a call of {name!r}")
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    expect(isinstance(given, dict), f"arguments are {arguments!r}")
    return FUNCTIONS[name].model_validate(given) if fits else None


def text(found: Any) -> str:
    """A text, which must not be empty."""
    expect(isinstance(found, str) and found.strip(), f"no text but {found!r}")
    return "text"


def named(found: Any, field: str) -> str:
    """An error's text, which must name the field."""
    expect(field in str(found), f"{field} is not named: {found}")
    return "error"
