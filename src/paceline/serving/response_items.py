"""Items of `/v1/responses`: what an input may hold, complete as it is stored and told, and as messages of a chat."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from paceline.serving.api_errors import ApiError
from paceline.serving.protocol import CacheBreakpoint, CacheMark, Parsed, Strict, checked
from paceline.serving.sealed import unsealed

Json = dict[str, Any]

SUMMARY: Final = "Summary of our conversation so far:"
"""A compaction begins so where the model reads it."""

Status = Literal["in_progress", "completed", "incomplete"]


class Caller(Strict):
    """Says who makes a call: the model itself."""

    type: Literal["direct"]


class ResponsesTextPart(Strict):
    """Is a part of a message: text, or a refusal."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str = ""
    refusal: str = ""
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Parsed = None
    cache_control: CacheMark = None
    prompt_cache_breakpoint: Annotated[CacheBreakpoint | None, Field(exclude=True)] = None


class Item(Strict):
    """Has what all items may have."""

    type: str = "message"
    id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    status: Status | None = None


class MessageItem(Item):
    """Holds what somebody said."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    phase: Annotated[Literal["commentary", "final_answer"] | None, Field(exclude=True)] = None


class CallItem(Item):
    """Holds a call that the model made."""

    call_id: str
    name: str
    arguments: str
    parsed_arguments: Parsed = None
    caller: Annotated[Caller | None, Field(exclude=True)] = None
    namespace: None = None
    async_: Annotated[Literal[False] | None, Field(alias="async", exclude=True)] = None


class CallOutputItem(Item):
    """Holds what a call gave."""

    call_id: str
    output: str | list[dict[str, Any]]
    name: Annotated[str | None, Field(exclude=True)] = None
    caller: Annotated[Caller | None, Field(exclude=True)] = None
    namespace: None = None


class ReasoningItem(Item):
    """Holds what the model thought."""

    summary: list[dict[str, Any]] = Field(default_factory=list)
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


class CompactionItem(Item):
    """Holds the summary of what was said before."""

    encrypted_content: str
    created_by: Annotated[str | None, Field(exclude=True)] = None


ITEMS: Final[Mapping[str, tuple[type[Item], str]]] = {
    "message": (MessageItem, "msg"),
    "function_call": (CallItem, "fc"),
    "function_call_output": (CallOutputItem, "fco"),
    "reasoning": (ReasoningItem, "rs"),
    "compaction": (CompactionItem, "cmp"),
}
"""Kinds of items, and how their ids begin."""


def new_id(kind: str) -> str:
    """Return an id of 128 random bits."""
    return f"{kind}_{secrets.token_hex(16)}"


def known(part: Json, types: Iterable[str], at: str) -> None:
    """Check the type of what is at this place of a request.

    Raises:
        ApiError: it is none of `types`.
    """
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in types:
        raise ApiError(f"{at}.type must be {' or '.join(types)}, got {kind!r}", param=f"{at}.type")


def items_of(content: str | Sequence[Json]) -> list[Json]:
    """Return the items of an input, complete with ids and states.

    Raises:
        ApiError: one that is of no known kind, or wrong.
    """
    raw_items = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return [_item({"type": "message"} | raw, f"input.{number}") for number, raw in enumerate(raw_items)]


def _item(raw: Json, at: str) -> Json:
    """Check an item, and complete it with an id, a state and its parts."""
    known(raw, ITEMS, at)
    model, prefix = ITEMS[raw["type"]]
    item = checked(model, raw, *at.split("."))
    complete = {"id": new_id(prefix), "status": "completed"} | item.model_dump(exclude_none=True)
    if isinstance(item, MessageItem):
        spoken = item.role == "assistant"
        complete["content"] = _parts(item.content, "output_text" if spoken else "input_text", f"{at}.content")
    elif isinstance(item, CallOutputItem) and not isinstance(item.output, str):
        complete["output"] = _parts(item.output, "input_text", f"{at}.output")
    elif isinstance(item, ReasoningItem) and item.encrypted_content and not (item.content or item.summary):
        text = unsealed(item.encrypted_content, f"{at}.encrypted_content")
        complete["content"] = [{"type": "reasoning_text", "text": text}]
    elif isinstance(item, CompactionItem):
        unsealed(item.encrypted_content, f"{at}.encrypted_content")
    return complete


def _parts(content: str | list[Json], kind: str, at: str) -> list[Json]:
    """Return a content as parts of one kind, with refusals as they are."""
    more: Json = {"annotations": []} if kind == "output_text" else {}
    if isinstance(content, str):
        return [{"type": kind, "text": content, **more}]
    parts: list[Json] = []
    for number, raw in enumerate(content):
        known(raw, ("input_text", "output_text", "text", "refusal"), f"{at}.{number}")
        part = checked(ResponsesTextPart, raw, *at.split("."), str(number))
        if part.type == "refusal":
            parts.append({"type": "refusal", "refusal": part.refusal})
        else:
            parts.append({"type": kind, "text": part.text, **more})
    return parts


def messages_of(items: Iterable[Json]) -> list[Json]:
    """Return items as messages of a chat; thoughts, text and calls that follow each other are one turn of the model."""
    messages: list[Json] = []
    turn: Json = {}
    for item in items:
        kind = item["type"]
        if kind == "function_call" and item["status"] == "incomplete":
            continue
        if kind == "compaction":
            turn = {}
            text = unsealed(item["encrypted_content"], "input")
            messages.append({"role": "assistant", "content": f"{SUMMARY}\n{text}"})
            continue
        if kind in ("message", "function_call_output") and item.get("role") != "assistant":
            turn = {}
            messages.append(_said(item))
            continue
        if not turn or (turn.keys() & {"content", "tool_calls"} and kind != "function_call"):
            turn = {"role": "assistant"}
            messages.append(turn)
        if kind == "reasoning":
            turn["reasoning_content"] = turn.get("reasoning_content", "") + "\n".join(
                str(part.get("text") or "") for part in item.get("content") or item["summary"]
            )
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
        else:
            turn["content"] = _content(item["content"])
    return [
        {"content": ""} | message if message.keys() == {"role", "reasoning_content"} else message
        for message in messages
    ]


def _said(item: Json) -> Json:
    if item["type"] == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": _content(item["output"])}
    return {"role": item["role"], "content": _content(item["content"])}


def _content(content: str | Sequence[Json]) -> str | list[Json]:
    if isinstance(content, str):
        return content
    texts = [part["refusal"] if part["type"] == "refusal" else part["text"] for part in content]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
