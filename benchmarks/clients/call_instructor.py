"""Instructor: answers as pydantic models, in each of its modes for OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import instructor
import openai
from calls import MODEL, OPENAI, PLAN, TOKENS, GetTime, GetWeather, Trip, call, expect, run
from instructor import Mode
from instructor.core import InstructorRetryException

CHAT: Any = {"model": MODEL, "temperature": 0, "frequency_penalty": 1, "max_tokens": TOKENS, "max_retries": 0}
"""Without the penalty a small model would call for ever."""


def client(mode: Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(**OPENAI), mode=mode)


def made(mode: Mode, **more: Any) -> str:
    found = client(mode).chat.completions.create(**CHAT | more, messages=PLAN, response_model=Trip)
    expect(isinstance(found, Trip), found)
    return "parsed"


@call("structured output (TOOLS)")
def tools() -> str:
    return made(Mode.TOOLS)


@call("structured output (TOOLS_STRICT)")
def tools_strict() -> str:
    return made(Mode.TOOLS_STRICT)


@call("structured output (JSON_SCHEMA)")
def json_schema() -> str:
    return made(Mode.JSON_SCHEMA)


@call("structured output (RESPONSES_TOOLS)")
def responses_tools() -> str:
    given: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": TOKENS, "max_retries": 0}
    found = client(Mode.RESPONSES_TOOLS).responses.create(**given, input=PLAN, response_model=Trip)
    expect(isinstance(found, Trip), found)
    return "parsed"


@call("tools, parallel (PARALLEL_TOOLS)")
def parallel() -> str:
    messages: Any = [{"role": "user", "content": "What are the weather and the time in Paris?"}]
    kind: Any = Iterable[GetWeather | GetTime]
    try:
        found = list(
            client(Mode.PARALLEL_TOOLS).chat.completions.create(**CHAT, messages=messages, response_model=kind)
        )
    except InstructorRetryException as error:
        expect("No tool calls" in str(error), error)
        return "text"
    expect(found and all(isinstance(one, GetWeather | GetTime) for one in found), found)
    return "call"


@call("structured output, streamed (create_partial, TOOLS)")
def partial() -> str:
    found = list(client(Mode.TOOLS).chat.completions.create_partial(**CHAT, messages=PLAN, response_model=Trip))
    expect(found and Trip.model_validate(found[-1].model_dump()), found[-1:])
    return "parsed"


@call("structured output, streamed (create_partial, JSON_SCHEMA)")
def partial_schema() -> str:
    found = list(client(Mode.JSON_SCHEMA).chat.completions.create_partial(**CHAT, messages=PLAN, response_model=Trip))
    expect(found and Trip.model_validate(found[-1].model_dump()), found[-1:])
    return "parsed"


@call("structured output with the answer (create_with_completion)")
def with_completion() -> str:
    found, raw = client(Mode.TOOLS).chat.completions.create_with_completion(**CHAT, messages=PLAN, response_model=Trip)
    expect(isinstance(found, Trip) and raw.usage.completion_tokens > 0, raw)
    return "parsed"


@call("error names the field")
def wrong() -> str:
    try:
        made(Mode.TOOLS, extra_body={"colour": 1})
    except Exception as error:  # Instructor wraps the client's own
        expect("colour" in str(error) and "400" in str(error), error)
        return "error"
    return str(expect(False, "colour was accepted"))


if __name__ == "__main__":
    run()
