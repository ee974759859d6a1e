"""Anthropic's `/v1/messages` and its counting of tokens: content blocks in and out, by way of a chat.

Server tools, images, documents and budgets of thought are rejected with the field's name; nothing is fetched.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from paceline.errors import PacelineError
from paceline.serving.api_errors import MESSAGES, ApiError
from paceline.serving.fields import MESSAGES as FIELDS
from paceline.serving.jobs import JobFactory
from paceline.serving.protocol import Body, CacheControl, ChatRequest, FunctionName, Strict, checked
from paceline.serving.request_errors import named
from paceline.serving.runs import Json, RequestRun, json_response
from paceline.serving.translation import ChatHandler, ChatPiece, Translation, chat_request

CHAT_NAMES: Final = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""The names that fields of a chat have in this API."""

UNSIGNED: Final = "unsigned"
"""Signature of thoughts, which are taken back as they are."""


class AnthropicBlock(Strict):
    """Has what all blocks of a content may have."""

    type: str
    cache_control: CacheControl | None = None


class TextBlock(AnthropicBlock):
    """Holds text."""

    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(AnthropicBlock):
    """Holds what the model thought, as it was told."""

    thinking: str
    signature: str = ""


class ToolUseBlock(AnthropicBlock):
    """Holds a call that the model made."""

    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    toolset_name: None = None


class ToolResultBlock(AnthropicBlock):
    """Holds what a call gave."""

    tool_use_id: str
    content: str | list[dict[str, Any]] = ""
    is_error: bool = False
    toolset_name: None = None


BLOCKS: Final[dict[str, dict[str, type[AnthropicBlock]]]] = {
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
    "system": {"text": TextBlock},
}
"""The kinds of blocks that each role may say."""


class AnthropicTurn(Strict):
    """Is a message of one side, as text or as blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]
    clear_at: Literal["never"] | None = None


class AnthropicFunctionTool(Strict):
    """Describes a function of the client's that the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    eager_input_streaming: bool | None = None
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolChoice(Strict):
    """Says whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Strict):
    """Says whether the model thinks, and how many tokens at most."""

    type: Literal["adaptive", "enabled", "disabled"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    display: Literal["summarized"] | None = None
    block_binding: Annotated[dict[str, Any], Field(max_length=0)] | None = None


class JsonFormat(Strict):
    """Says which JSON schema the text must satisfy."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """Says how the text is to be, and how much the model thinks for it."""

    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high"] | None = None


class Metadata(Strict):
    """Says whose request it is; nothing depends on it."""

    user_id: str | None = None


class CountRequest(Body):
    """Is the body of `/v1/messages/count_tokens`: all that a prompt is made from."""

    api: ClassVar[str] = FIELDS
    model: str
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    def chat(self, factory: JobFactory) -> ChatRequest:
        """Return the chat that this asks for.

        Raises:
            ApiError: a field that cannot be honoured.
        """
        turns = [checked(AnthropicTurn, turn, "messages", str(number)) for number, turn in enumerate(self.messages)]
        said = _messages("system", self.system, "system") if self.system is not None else []
        for number, turn in enumerate(turns):
            said += _messages(turn.role, turn.content, f"messages.{number}.content")
        fields: Json = {"model": self.model, "messages": said} | self._tools() | self._more()
        if self.thinking is not None:
            fields["chat_template_kwargs"] = factory.thinking(
                self.thinking.type != "disabled", self.thinking.budget_tokens
            )
        if said[-1]["role"] == "assistant":  # the answer goes on where this ends
            if "tool_calls" in said[-1]:
                raise ApiError("messages: a message of calls must be followed by their results", param="messages")
            fields["continue_final_message"] = True
        return chat_request(fields, CHAT_NAMES)

    def _more(self) -> Json:
        """Return further fields of the chat."""
        if self.output_config is None:
            return {}
        fields: Json = {"reasoning_effort": self.output_config.effort}
        if (wanted := self.output_config.format) is not None:
            schema = {"name": "output", "schema": wanted.schema_, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    def _tools(self) -> Json:
        """Return the fields of the chat about tools."""
        tools, choice = [], self.tool_choice
        for number, raw in enumerate(self.tools or ()):
            if raw.get("type") not in (None, "custom"):
                why = f"tools.{number}.type must be custom, got {raw['type']!r}; this server runs no tools"
                raise ApiError(why, param=f"tools.{number}.type")
            tool = checked(AnthropicFunctionTool, raw, "tools", str(number))
            function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
            tools.append({"type": "function", "function": function | {"strict": tool.strict}})
        fields: Json = {"tools": tools or None}
        if choice is not None:
            if (choice.type == "tool") != (choice.name is not None):
                raise ApiError("tool_choice.name goes with type tool", param="tool_choice.name")
            names: Json = {"any": "required", "tool": {"type": "function", "function": {"name": choice.name}}}
            fields["tool_choice"] = names.get(choice.type, choice.type)
            fields["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
        return fields


class MessagesRequest(CountRequest):
    """Is the body of `/v1/messages`: a prompt, and how its answer is decoded."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None

    def _more(self) -> Json:
        return super()._more() | {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
        }


def _messages(role: str, content: str | Sequence[Json], at: str) -> list[Json]:
    """Return a message as those of a chat: results of calls are messages of their own."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not content:
        raise ApiError(f"{at} must hold a block", param=at)
    messages: list[Json] = []
    turn: Json = {}
    for number, raw in enumerate(content):
        block = _block(raw, BLOCKS[role], f"{at}.{number}")
        if isinstance(block, ToolResultBlock):
            turn = {}
            messages.append(_result(block, f"{at}.{number}.content"))
            continue
        if not turn:
            turn = {"role": role, "content": []}
            messages.append(turn)
        _grow(turn, block)
    for message in messages:
        if isinstance(parts := message["content"], list) and len(parts) < 2:
            message["content"] = parts[0]["text"] if parts else ""
    return messages


def _grow(turn: Json, block: AnthropicBlock) -> None:
    """Add a block to a chat's message."""
    if isinstance(block, TextBlock):
        turn["content"].append({"type": "text", "text": block.text})
    elif isinstance(block, ThinkingBlock):
        turn["reasoning_content"] = turn.get("reasoning_content", "") + block.thinking
    elif isinstance(block, ToolUseBlock):
        function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
        turn.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})


def _block(raw: Json, kinds: dict[str, type[AnthropicBlock]], at: str) -> AnthropicBlock:
    kind = raw.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise ApiError(f"{at}.type must be {' or '.join(kinds)}, got {kind!r}", param=f"{at}.type")
    return checked(kinds[kind], raw, *at.split("."))


def _result(block: ToolResultBlock, at: str) -> Json:
    text = block.content
    if not isinstance(text, str):
        parts = [_block(raw, BLOCKS["system"], f"{at}.{number}") for number, raw in enumerate(text)]
        text = "\n".join(part.text for part in parts if isinstance(part, TextBlock))
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": f"Error: {text}" if block.is_error else text}


class MessageTranslation(Translation):
    """Tells a chat as a message of Anthropic's."""

    def __init__(self, run: RequestRun, request: MessagesRequest) -> None:
        super().__init__(run, stream=bool(request.stream))
        self._most, self._id = request.max_tokens, f"msg_{secrets.token_hex(16)}"
        self._content: list[Json] = []
        self._text: list[str] = []

    def body(self) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.run.reply.answer.model,
            "content": list(self._content),
            **self._why(),
            "usage": self._usage() | {"service_tier": "standard"},
        }

    def _why(self) -> Json:
        """Return why it ended."""
        names = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn", None: None}
        reason = names.get(self.reason, "end_turn")
        if self.reason == "stop" and self.stopped_by is not None:
            reason = "stop_sequence"
        elif self.reason == "length" and self.tokens < self._most:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": self.stopped_by if reason == "stop_sequence" else None}

    def _usage(self) -> Json:
        """Return the counts of tokens, in Anthropic's words; what the cache had does not count as input."""
        prompt = self.run.reply.jobs[0].prompt_tokens
        cached = self.run.usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.tokens,
            "output_tokens_details": {"thinking_tokens": self.thoughts},
        }

    def _at(self, kind: str, **more: Any) -> Json:
        """Return an event of the last block."""
        return {"type": f"content_block_{kind}", "index": len(self._content) - 1, **more}

    def begin(self) -> list[Json]:
        return [{"type": "message_start", "message": self.body()}]

    def open(self, piece: ChatPiece) -> list[Json]:
        block: Json = {"type": piece.block, str(piece.block): ""}
        if piece.block == "thinking":
            block["signature"] = ""
        elif piece.block != "text":
            block = {"type": "tool_use", "id": piece.call[0], "name": piece.call[1], "input": {}}
        self._content.append(block)
        self._text = []
        return [self._at("start", content_block=dict(block))]

    def add(self, piece: ChatPiece) -> list[Json]:
        self._text.append(piece.text)
        kind, name = {"thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}.get(
            str(piece.block), ("input_json_delta", "partial_json")
        )
        return [self._at("delta", delta={"type": kind, name: piece.text})]

    def shut(self) -> Iterator[Json]:
        block, text = self._content[-1], "".join(self._text)
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = UNSIGNED
            yield self._at("delta", delta={"type": "signature_delta", "signature": UNSIGNED})
        yield self._at("stop")

    async def end(self) -> list[Json]:
        return [{"type": "message_delta", "delta": self._why(), "usage": self._usage()}, {"type": "message_stop"}]

    async def fail(self, error: ApiError) -> Iterable[Json]:
        return [error.body(MESSAGES)]


def _input(text: str) -> Json:
    """Read the arguments of a call; none where they are no object, or were cut off."""
    try:
        arguments = json.loads(text)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


class MessageRoutes:
    """Handles the routes of Anthropic's API."""

    def __init__(self, chat: ChatHandler, factory: JobFactory) -> None:
        self._chat, self._factory = chat, factory

    def add(self, app: FastAPI) -> None:
        """Bind the handlers to their paths."""
        app.add_api_route(MESSAGES, self.create, methods=["POST"], response_model=None)
        app.add_api_route(f"{MESSAGES}/count_tokens", self.count, methods=["POST"], response_model=None)

    async def create(self, request: MessagesRequest, http: Request) -> Response:
        """Answer a message."""
        chat = await asyncio.to_thread(request.chat, self._factory)
        try:
            return await self._chat(chat, http, lambda run: MessageTranslation(run, request))
        except ApiError as error:
            raise error.renamed(CHAT_NAMES) from None

    async def count(self, request: CountRequest, http: Request) -> Response:
        """Answer with the number of tokens of a prompt."""
        chat = await asyncio.to_thread(request.chat, self._factory)
        try:
            (job,) = await self._factory.chat(chat, http.scope["owner"])
        except ApiError as error:
            raise error.renamed(CHAT_NAMES) from None
        except PacelineError as error:
            raise named(error, chat).renamed(CHAT_NAMES) from None
        return json_response({"input_tokens": job.prompt_tokens})
