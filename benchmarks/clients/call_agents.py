"""OpenAI's agents: by way of responses, which is their default, and of chats."""

from __future__ import annotations

from typing import Any

import openai
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from calls import ASK_TEXT, HELLO_TEXT, MODEL, OPENAI, PLAN_TEXT, TOKENS, Trip, call, expect, get_weather, run, text

set_tracing_disabled(True)
client = openai.AsyncOpenAI(**OPENAI)
KINDS: dict[str, Any] = {"response": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}
BRIEF = "Answer in one sentence."
WEATHER = function_tool(get_weather)


def agent(kind: str, settings: dict[str, Any] | None = None, **more: Any) -> Agent[Any]:
    given: Any = {"temperature": 0, "max_tokens": TOKENS, "include_usage": True} | (settings or {})
    model = KINDS[kind](model=MODEL, openai_client=client)
    return Agent(
        name="assistant",
        instructions=BRIEF,
        model=model,
        model_settings=ModelSettings(**given),
        **more,
    )


def kinds(found: Any) -> list[str]:
    return [item.type for item in found.new_items]


async def plain(kind: str) -> str:
    found = await Runner.run(agent(kind), HELLO_TEXT)
    expect(found.context_wrapper.usage.output_tokens > 0, found.context_wrapper.usage)
    return text(found.final_output)


async def streamed(kind: str) -> str:
    found, said = Runner.run_streamed(agent(kind), HELLO_TEXT), ""
    async for event in found.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            said += event.data.delta
    expect(said == found.final_output, f"{said!r} is not {found.final_output!r}")
    expect(found.context_wrapper.usage.output_tokens > 0, found.context_wrapper.usage)
    return text(said)


async def auto(kind: str) -> str:
    """`function_tool` makes strict tools."""
    found = await Runner.run(agent(kind, tools=[WEATHER]), ASK_TEXT, max_turns=20)
    text(found.final_output)
    return "call" if "tool_call_item" in kinds(found) else "text"


async def loop(kind: str) -> str:
    """A call that is asked for, its result, and the answer."""
    settings = {"tool_choice": "required", "parallel_tool_calls": False}
    found = await Runner.run(agent(kind, settings, tools=[WEATHER]), ASK_TEXT, max_turns=20)
    expect({"tool_call_item", "tool_call_output_item"} <= set(kinds(found)), found.new_items)
    text(found.final_output)
    return "call"


async def streamed_loop(kind: str) -> str:
    settings = {"tool_choice": "get_weather", "parallel_tool_calls": False}
    found = Runner.run_streamed(agent(kind, settings, tools=[WEATHER]), ASK_TEXT, max_turns=20)
    names = [event.name async for event in found.stream_events() if event.type == "run_item_stream_event"]
    expect({"tool_called", "tool_output", "message_output_created"} <= set(names), names)
    text(found.final_output)
    return "call"


async def parsed(kind: str) -> str:
    found = await Runner.run(agent(kind, output_type=Trip), PLAN_TEXT)
    expect(isinstance(found.final_output, Trip), found)
    return "parsed"


async def parsed_with_tools(kind: str) -> str:
    found = await Runner.run(agent(kind, tools=[WEATHER], output_type=Trip), PLAN_TEXT, max_turns=20)
    expect(isinstance(found.final_output, Trip), found)
    return "call" if "tool_call_item" in kinds(found) else "parsed"


async def parsed_after_call(kind: str) -> str:
    settings = {"tool_choice": "required", "parallel_tool_calls": False}
    built = agent(kind, settings, tools=[WEATHER], output_type=Trip)
    try:
        found = await Runner.run(built, PLAN_TEXT, max_turns=4)
    except MaxTurnsExceeded:  # the model may call for ever
        return "call"
    expect("tool_call_item" in kinds(found) and isinstance(found.final_output, Trip), found.new_items)
    return "parsed"


async def handed_off(kind: str) -> str:
    other, settings = agent(kind), {"tool_choice": "required", "parallel_tool_calls": False}
    found = await Runner.run(agent(kind, settings, handoffs=[handoff(other)]), HELLO_TEXT, max_turns=20)
    expect(found.last_agent is other, found.new_items)
    text(found.final_output)
    return "call"


async def wrong(kind: str) -> str:
    try:
        await Runner.run(agent(kind, {"extra_body": {"colour": 1}}), HELLO_TEXT)
    except openai.BadRequestError as error:
        expect(error.param == "colour", f"param is {error.param!r}: {error}")
        return "error"
    return str(expect(False, "colour was accepted"))


RUNS = {
    "run": plain,
    "run, streamed, with usage": streamed,
    "tools, strict, auto (function_tool)": auto,
    "tool loop, required": loop,
    "tool loop, named, streamed": streamed_loop,
    "structured output (output_type)": parsed,
    "tools with structured output": parsed_with_tools,
    "tools with structured output, required": parsed_after_call,
    "handoff": handed_off,
    "error names the field": wrong,
}

if __name__ == "__main__":
    for kind in KINDS:
        for name, function in RUNS.items():
            call(f"{kind}, {name}")(lambda function=function, kind=kind: function(kind))
    run()
