"""What clients may send: OpenAI's fields, and vLLM's beside them; `fields` has what else they send. A field that is in
neither, or that cannot be honoured, is rejected with its name. Nothing is ignored in silence but what says nothing
about the answer (`user`, `metadata`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

from annotated_types import MaxLen
from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from paceline.serving.api_errors import ApiError
from paceline.serving.field_errors import UNSUPPORTED, Path, explained, path_of
from paceline.serving.field_notes import NOTES
from paceline.serving.fields import CHAT, COMPLETIONS, FieldError, settle

SAMPLING: Final = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "canvas",
    "think",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "truncate_prompt_tokens",
    "prompt_logprobs",
)
"""These fields are sampling parameters of the same name."""

MAX_MESSAGES: Final = 8192
MAX_TEXTS: Final = 1024
"""So many texts may `stop` hold, and `bad_words`."""

MAX_BIASES: Final = 2**16
"""So many tokens may `logit_bias` hold."""

MAX_ERRORS: Final = 64
"""Of a body that are told apart: a text for each of a million would take minutes and gigabytes."""


class _Quick(FailFast):
    """Makes a list of which only the first wrong item is told: millions of them would be an error each. It may be part
    of a union.
    """

    __hash__ = object.__hash__


QUICK: Final = _Quick()
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], QUICK]
Texts = Annotated[list[str], MaxLen(MAX_TEXTS), QUICK]
NUMBER: Final = {"type": "integer", "minimum": 1}
PIECE: Final = {"anyOf": [{"type": "string"}, NUMBER, {"type": "array", "items": {"type": "integer", "minimum": 0}}]}
Pieces = Annotated[Any, WithJsonSchema({"type": "array", "items": PIECE})]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Thoughts = Annotated[Any, WithJsonSchema({"anyOf": [NUMBER, {"type": "object"}]})]
"""Fields that `SamplingParams` checks, whose messages know better what was meant than those of a union."""


class Strict(BaseModel):
    """Takes no unknown fields, and no texts for numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class Body(Strict):
    """A whole request, from which fields that ask for nothing are taken first (`fields`). What it consists of has no
    validators in Python, each of which would hold up the event loop.

    Attributes:
        api: whose fields it may hold beside its own.
    """

    api: ClassVar[str] = ""

    @model_validator(mode="wrap")
    @classmethod
    def _few_errors(cls, body: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return validate(body)
        except ValidationError as error:
            if error.error_count() > MAX_ERRORS:
                raise PydanticCustomError("too_many_errors", f"more than {MAX_ERRORS} things in it are wrong") from None
            raise

    @model_validator(mode="wrap")
    @classmethod
    def _settled(cls, body: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(body, dict):
            return validate(body)
        try:
            settle(cls.api, body, cls.model_fields.keys())
        except FieldError as error:
            raise ApiError(str(error), param=error.param, code=error.code) from None
        return _pruned(validate, body, ())


class CacheControl(Strict):
    """Says where a prefix ends that may be cached, in Anthropic's words; all prefixes are cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class CacheBreakpoint(Strict):
    """Says the same in OpenAI's words."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


CacheMark = Annotated[CacheControl | None, Field(exclude=True)]
Unread = Annotated[dict[str, Any] | None, Field(exclude=True)]
Parsed = Annotated[Any, Field(exclude=True)]
"""What says nothing to the model, and is not shown to its template: marks, and what clients add to an answer that they
send back (its text or arguments, parsed).
"""


class StreamOptions(Strict):
    """Says what a stream tells beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_segments: bool = False
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Strict):
    """Is the schema of a `response_format` of type json_schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """Says what the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Prediction(Strict):
    """Says what the answer is expected to be."""

    type: Literal["content"] = "content"
    content: str | Annotated[list[dict[str, Any]], QUICK]


class Sampled(Body):
    """Has the fields that chats and completions share.

    Number fields take whole numbers for floats; ranges are those of `SamplingParams`, which checks them.
    """

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], MaxLen(MAX_BIASES)] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    canvas: Pieces | None = None
    think: Thoughts | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    speculative_config: str | Annotated[list[str], QUICK] | dict[str, Any] | None = None
    search: str | dict[str, Any] | None = None
    return_token_ids: bool | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that were given."""
        return {name: value for name, value in self if name in SAMPLING and value is not None}


Prompts = str | Annotated[list[str], QUICK] | TokenIds | Annotated[list[TokenIds], QUICK]


class CompletionRequest(Sampled):
    """Is the body of `/v1/completions`."""

    api: ClassVar[str] = COMPLETIONS
    prompt: Prompts
    echo: bool = False
    logprobs: int | None = None
    prediction: Prediction | str | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool = True


class ChatTextPart(Strict):
    """Is a part of a content: text, or a refusal."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    cache_control: CacheMark = None
    prompt_cache_breakpoint: Annotated[CacheBreakpoint | None, Field(exclude=True)] = None


class FunctionCall(Strict):
    """Says which function is called, with which arguments as JSON."""

    name: str
    arguments: str
    parsed_arguments: Parsed = None


class ToolCall(Strict):
    """Is a call that the model made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Strict):
    """One message of a conversation; contents are texts or parts of them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ChatTextPart], QUICK] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], QUICK] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    prefix: Annotated[Literal[False] | None, Field(exclude=True)] = None
    partial: Annotated[Literal[False] | None, Field(exclude=True)] = None
    id: Annotated[str | None, Field(exclude=True)] = None
    annotations: Annotated[list[Any] | None, Field(exclude=True)] = None
    provider_specific_fields: Unread = None
    parsed: Parsed = None
    cache_control: CacheMark = None


FunctionName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]


class Function(Strict):
    """Describes a function that may be called."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheMark = None
    defer_loading: Annotated[Literal[False] | None, Field(exclude=True)] = None


class Tool(Strict):
    """Wraps a function of the client's, as OpenAI's tools do."""

    type: Literal["function"]
    function: Function
    cache_control: CacheMark = None
    defer_loading: Annotated[Literal[False] | None, Field(exclude=True)] = None


class NamedFunction(Strict):
    """Names a function."""

    name: str


class NamedTool(Strict):
    """Names the function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ThinkingSwitch(Strict):
    """Says whether the model thinks."""

    type: Literal["enabled", "disabled"]


class ChatRequest(Sampled):
    """Is the body of `/v1/chat/completions`."""

    api: ClassVar[str] = CHAT
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), QUICK]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128), QUICK] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | str | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingSwitch | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Body):
    """Is the body of `/tokenize`: a prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES), QUICK] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=128), QUICK] | None = None
    return_token_strs: bool = False


DecodingRequest = CompletionRequest | ChatRequest
"""These requests are answered with what the model decodes."""

TemplateRequest = ChatRequest | TokenizeRequest
"""These requests may hold a conversation, which a template renders."""


class DetokenizeRequest(Body):
    """Is the body of `/detokenize`."""

    model: str | None = None
    tokens: TokenIds


Model = TypeVar("Model", bound=BaseModel)


def checked(kind: type[Model], value: Any, *at: str) -> Model:
    """Read a part of a request as one of these.

    Args:
        at: the way to it.
    Raises:
        ApiError: it is none; the error names the field that is wrong.
    """
    try:
        return _pruned(kind.model_validate, value, at)
    except ValidationError as error:
        if error.error_count() > MAX_ERRORS:
            param = ".".join(at)
            raise ApiError(f"{param}: more than {MAX_ERRORS} things in it are wrong", param=param) from None
        body = value
        for part in reversed(at):
            body = {part: body}
        raise invalid_field(
            [{**detail, "loc": ("body", *at, *detail["loc"])} for detail in error.errors()], body
        ) from None


def invalid_field(errors: Sequence[Any], body: Any) -> ApiError:
    """Return the error that tells most of what is wrong with a body.

    Args:
        errors: of pydantic.
    """
    message, param, code = explained(errors, body)
    return ApiError(message, param=param, code=code)


def _pruned(validate: Callable[[Any], Model], value: Any, at: Sequence[str]) -> Model:
    """Return what is made of a value, without the fields inside it that cannot be honoured, where those are ignored."""
    notes = NOTES.get()
    if notes is None or not notes.lenient:
        return validate(value)
    for _ in range(MAX_ERRORS):
        try:
            return validate(value)
        except ValidationError as error:
            few = error.errors() if error.error_count() <= MAX_ERRORS else []
            unsupported = [
                {**detail, "loc": ("body", *detail["loc"])} for detail in few if detail["type"] in UNSUPPORTED
            ]
            if not unsupported:
                raise
        for path in filter(None, [path_of(detail, value) for detail in unsupported]):
            _cut_out(value, path)
            notes.ignore(".".join(part for part in (*at, *path) if isinstance(part, str) and not part.isdecimal()))
    return validate(value)


def _cut_out(value: Any, path: Path) -> None:
    """Take out the key at the end of a path, and of all its like in lists on the way."""
    first, *rest = path
    if isinstance(value, list):
        for item in value:
            _cut_out(item, tuple(rest))
    elif isinstance(value, dict) and first in value:
        if rest:
            _cut_out(value[first], tuple(rest))
        else:
            del value[first]
