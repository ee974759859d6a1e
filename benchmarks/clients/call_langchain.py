"""LangChain: `ChatOpenAI` by way of chats and of responses, and agents of it."""

from __future__ import annotations

from typing import Any

import openai
from calls import (
    ADDRESS,
    AGAIN,
    KEY,
    MODEL,
    RESULT,
    SECONDS,
    TOKENS,
    Trip,
    call,
    expect,
    functions,
    run,
    text,
    validated,
)
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

HELLO, ASK = "Say hello.", "What is the weather in Paris, in celsius?"
PLAN = "Plan a trip to Paris for John, who is 30. Answer in JSON."


def chat(**more: Any) -> ChatOpenAI:
    given: Any = {"temperature": 0, "max_tokens": TOKENS, "max_retries": 0, "timeout": SECONDS} | more
    return ChatOpenAI(base_url=f"{ADDRESS}/v1", api_key=KEY, model=MODEL, **given)


llm, responses = chat(), chat(use_responses_api=True)
one_by_one = chat(model_kwargs={"parallel_tool_calls": False})


@tool
def get_weather(city: str, unit: str) -> str:
    """Get the weather of a city."""
    return f"{city}: {RESULT}, {unit}"


def called(message: Any, *, fits: bool = True) -> str:
    expect(message.tool_calls and not message.invalid_tool_calls, f"no call but {message}")
    for one in message.tool_calls:
        validated(one["name"], one["args"], fits=fits)
    return "call"


def called_or_said(message: Any, *, fits: bool = False) -> str:
    if message.tool_calls or message.invalid_tool_calls:
        return called(message, fits=fits)
    return text(message.text)


def whole(stream: Any) -> Any:
    """All chunks of a stream as one message."""
    found = None
    for chunk in stream:
        found = chunk if found is None else found + chunk
    expect(found is not None and found.usage_metadata, f"no usage: {found}")
    return found


@call("chat")
def invoke() -> str:
    return text(llm.invoke(HELLO).text)


@call("chat, streamed, with usage")
def stream() -> str:
    return text(whole(chat(stream_usage=True).stream(HELLO)).text)


@call("tools, auto")
def auto() -> str:
    return called_or_said(llm.bind_tools(functions()).invoke(AGAIN))


@call("tools, any")
def required() -> str:
    return called(llm.bind_tools(functions(), tool_choice="any").invoke(ASK))


@call("tools, named")
def by_name() -> str:
    message = llm.bind_tools(functions(), tool_choice="get_weather").invoke(ASK)
    expect([one["name"] for one in message.tool_calls] == ["get_weather"], message)
    return called(message)


@call("tools, strict, auto")
def strict_auto() -> str:
    return called_or_said(llm.bind_tools(functions(), strict=True).invoke(AGAIN), fits=True)


@call("tools, strict, any, one at a time")
def strict_required() -> str:
    given: Any = {"strict": True, "tool_choice": "any", "parallel_tool_calls": False}
    message = llm.bind_tools(functions(), **given).invoke(ASK)
    expect(len(message.tool_calls) == 1, message)
    return called(message)


@call("tools, streamed, auto")
def stream_auto() -> str:
    return called_or_said(whole(chat(stream_usage=True).bind_tools(functions()).stream(AGAIN)))


@call("tools, streamed, any")
def stream_required() -> str:
    return called(whole(chat(stream_usage=True).bind_tools(functions(), tool_choice="any").stream(ASK)))


@call("tool loop")
def loop() -> str:
    given: Any = {"tool_choice": "get_weather", "parallel_tool_calls": False}
    first = llm.bind_tools([get_weather], **given).invoke(ASK)
    expect(len(first.tool_calls) == 1, first)
    result = get_weather.invoke(first.tool_calls[0])
    expect(isinstance(result, ToolMessage), result)
    last = llm.bind_tools([get_weather]).invoke([HumanMessage(ASK), first, result])
    return called_or_said(last)


@call("agent (create_agent)")
def agent() -> str:
    found = create_agent(llm, [get_weather], system_prompt="Be brief.").invoke(
        {"messages": [HumanMessage(ASK)]}, {"recursion_limit": 50}
    )
    return text(found["messages"][-1].text)


@call("agent with structured output (ToolStrategy)")
def agent_tool() -> str:
    found = create_agent(one_by_one, [], response_format=ToolStrategy(Trip)).invoke({"messages": [HumanMessage(PLAN)]})
    expect(isinstance(found["structured_response"], Trip), found)
    return "parsed"


@call("agent with structured output and tools (ProviderStrategy)")
def agent_provider() -> str:
    built = create_agent(one_by_one, [get_weather], response_format=ProviderStrategy(Trip))
    found = built.invoke({"messages": [HumanMessage(PLAN)]}, {"recursion_limit": 50})
    expect(isinstance(found["structured_response"], Trip), found)
    return "parsed"


def structured(method: str, **more: Any) -> str:
    found = llm.with_structured_output(Trip, method=method, **more).invoke(PLAN)
    expect(isinstance(found, Trip), found)
    return "parsed"


@call("structured output (json_schema)")
def json_schema() -> str:
    return structured("json_schema")


@call("structured output (json_schema, strict)")
def json_schema_strict() -> str:
    return structured("json_schema", strict=True)


@call("structured output (function_calling)")
def function_calling() -> str:
    return structured("function_calling")


@call("structured output (function_calling, strict)")
def function_calling_strict() -> str:
    return structured("function_calling", strict=True)


@call("structured output (json_mode)")
def json_mode() -> str:
    found = llm.with_structured_output(Trip, method="json_mode", include_raw=True).invoke(PLAN)
    return text(found["raw"].text)


@call("structured output, streamed (json_schema)")
def structured_stream() -> str:
    found = list(llm.with_structured_output(Trip, method="json_schema").stream(PLAN))
    expect(found and isinstance(found[-1], Trip), found[-1:])
    return "parsed"


@call("tools with structured output (bind_tools, response_format)")
def both() -> str:
    message = llm.bind_tools(functions(strict=True), response_format=Trip, strict=True).invoke(ASK)
    if message.tool_calls:
        return called(message)
    expect(isinstance(message.additional_kwargs.get("parsed"), Trip), message)
    return "parsed"


@call("response")
def response() -> str:
    return text(responses.invoke(HELLO).text)


@call("response, streamed")
def response_stream() -> str:
    return text(whole(responses.stream(HELLO)).text)


@call("response, tools, any, strict")
def response_required() -> str:
    return called(responses.bind_tools(functions(), tool_choice="any", strict=True).invoke(ASK))


@call("response, tool loop")
def response_loop() -> str:
    first = responses.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False).invoke(ASK)
    expect(len(first.tool_calls) == 1, first)
    result = get_weather.invoke(first.tool_calls[0])
    return called_or_said(responses.bind_tools([get_weather]).invoke([HumanMessage(ASK), first, result]))


@call("response, structured output")
def response_structured() -> str:
    found = responses.with_structured_output(Trip).invoke(PLAN)
    expect(isinstance(found, Trip), found)
    return "parsed"


@call("error names the field")
def wrong() -> str:
    try:
        chat(extra_body={"colour": 1}).invoke(HELLO)
    except openai.BadRequestError as error:
        expect(error.param == "colour", f"param is {error.param!r}: {error}")
        return "error"
    return str(expect(False, "colour was accepted"))


if __name__ == "__main__":
    run()
