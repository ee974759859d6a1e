"""Requests to `/v1/responses` are checked here, and become chats.

What a hosted service does beside decoding (tools of its own, files, images, conversations) is
rejected with the field's name; nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, PrivateAttr

from paceline.serving.api_errors import ApiError
from paceline.serving.fields import RESPONSES
from paceline.serving.protocol import Body, CacheMark, ChatRequest, Effort, FunctionName, Strict, checked
from paceline.serving.response_items import items_of, known, messages_of
from paceline.serving.runs import Json
from paceline.serving.translation import chat_request

CHAT_NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""The names that fields of a chat have in this API."""

SAME: Final = (
    *("model", "temperature", "top_p", "presence_penalty", "frequency_penalty", "parallel_tool_calls", "user"),
    *("prompt_cache_key", "safety_identifier", "top_k", "min_p", "repetition_penalty", "logit_bias"),
    *("seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "cache_salt", "chat_template_kwargs", "prediction"),
    *("structured_outputs", "speculative_config", "canvas", "think", "priority"),
)
"""These fields go to the chat as they are."""

LOGPROBS: Final = "message.output_text.logprobs"
SEALED: Final = "reasoning.encrypted_content"
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
]
"""What a response may hold beside its text. Beside log probabilities and thoughts to carry along it is of tools and
images that are not here.
"""


def response_usage(chat: Json, thoughts: int) -> Json:
    """Return counts of tokens in the words of this API.

    Args:
        chat: as chats have them.
        thoughts: tokens of thoughts that were read off the text.
    """
    apart = chat["completion_tokens_details"]["reasoning_tokens"]
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": chat["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": max(thoughts, apart)},
        "total_tokens": chat["total_tokens"],
        "speculative": chat["speculative"],
    }


class NamedChoice(Strict):
    """Names the function that must be called."""

    type: Literal["function"]
    name: FunctionName


class ResponsesFunctionTool(Strict):
    """Describes a function of the client's that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheMark = None
    defer_loading: Annotated[Literal[False] | None, Field(exclude=True)] = None
    allowed_callers: Annotated[list[Literal["direct"]] | None, Field(exclude=True)] = None
    output_schema: Annotated[None, Field(exclude=True)] = None
    async_: Annotated[Literal[False] | None, Field(alias="async", exclude=True)] = None


class TextFormat(Strict):
    """Says what the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponsesTextConfig(Strict):
    """Says how the text is to be."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    """Says how much the model thinks."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class Obfuscation(Strict):
    """Says that events are not padded, which they never are."""

    include_obfuscation: Literal[False] | None = None


class ResponseRequest(Body):
    """Is the body of `/v1/responses`; the fields of `SAME` are checked by the chat."""

    api: ClassVar[str] = RESPONSES
    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    _functions: list[Json] | None = PrivateAttr(None)
    text: ResponsesTextConfig | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[Included] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    stream_options: Obfuscation | None = None
    truncation: Literal["disabled", "auto"] | None = None
    reasoning: Reasoning | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    seed: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    cache_salt: Any = None
    chat_template_kwargs: Any = None
    prediction: Any = None
    structured_outputs: Any = None
    speculative_config: Any = None
    canvas: Any = None
    think: Any = None
    priority: Any = None

    @property
    def stored(self) -> bool:
        return self.store is not False

    @property
    def seals(self) -> bool:
        """Tells whether thoughts are told once more, as clients carry them along."""
        return SEALED in (self.include or ())

    def check_background(self) -> None:
        """Reject what cannot go on without its client.

        Raises:
            ApiError: a stream, or a response that is not kept.
        """
        for wrong, why in (
            (bool(self.stream), "background cannot be used with stream; ask for the response with GET"),
            (not self.stored, "background needs store: true"),
        ):
            if self.background and wrong:
                raise ApiError(why, param="background")

    def asked(self, earlier: list[Json]) -> tuple[list[Json], ChatRequest]:
        """Return the items that this is made from, and the chat that it asks for.

        Args:
            earlier: items of earlier turns.
        Raises:
            ApiError: a field that cannot be honoured.
        """
        items = earlier + items_of(self.input or [])
        return items, self._chat(items)

    def shown(self) -> Json:
        """Return the fields as a response shows them, with defaults for those that were left out."""
        choice, reasoning = self.tool_choice, self.reasoning
        text = (self.text or ResponsesTextConfig()).model_dump(by_alias=True, exclude_none=True)
        return {
            "instructions": self.instructions,
            "previous_response_id": self.previous_response_id,
            "tools": self.functions(),
            "tool_choice": choice.model_dump() if isinstance(choice, NamedChoice) else choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": {"format": {"type": "text"}} | text,
            "truncation": self.truncation or "disabled",
            "top_logprobs": self.top_logprobs or 0,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "reasoning": None if reasoning is None else {"effort": reasoning.effort, "summary": reasoning.summary},
            "store": self.stored,
            "metadata": self.metadata or {},
            "user": self.user,
            "safety_identifier": self.safety_identifier,
            "prompt_cache_key": self.prompt_cache_key,
        }

    def functions(self) -> list[Json]:
        """Return the tools, checked once: there may be megabytes of them, and an answer shows them several times."""
        if self._functions is None:
            for number, tool in enumerate(self.tools or ()):
                known(tool, ("function",), f"tools.{number}")
            tools = [
                checked(ResponsesFunctionTool, tool, "tools", str(number))
                for number, tool in enumerate(self.tools or ())
            ]
            self._functions = [tool.model_dump() for tool in tools]
        return self._functions

    def _chat(self, items: Sequence[Json]) -> ChatRequest:
        """Return the chat that these items and the other fields ask for."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        tools = [
            {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}}
            for tool in self.functions()
        ]
        choice = self.tool_choice
        logprobs = LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        return chat_request(
            {name: value for name, value in self if name in SAME}
            | {
                "messages": system + messages_of(items),
                "tools": tools or None,
                "tool_choice": {"type": "function", "function": {"name": choice.name}}
                if isinstance(choice, NamedChoice)
                else choice,
                "max_completion_tokens": self.max_output_tokens,
                "response_format": self._format(),
                "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
                "logprobs": logprobs or None,
                "top_logprobs": self.top_logprobs if logprobs else None,
            },
            CHAT_NAMES,
        )

    def _format(self) -> Json | None:
        wanted = self.text.format if self.text is not None else None
        if wanted is None:
            return None
        if wanted.type != "json_schema":
            return {"type": wanted.type}
        return {"type": wanted.type, "json_schema": wanted.model_dump(by_alias=True, exclude={"type"})}
