"""Requests of OpenAI's API as prompts and sampling parameters."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from paceline.config import SamplingParams, ServerConfig, ThinkParams
from paceline.errors import PacelineError, PromptError
from paceline.llm import LLM
from paceline.models.loading import Rendered, TokenBytes
from paceline.serving.limits import tenant_of
from paceline.serving.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Message,
    NamedTool,
    Prediction,
    ResponseFormat,
    Sampled,
    TokenizeRequest,
)
from paceline.serving.token_texts import token_bytes_of
from paceline.serving.tool_formats import FORMATS, format_of
from paceline.serving.tool_grammar import calls_grammar
from paceline.serving.tool_reading import THINK, Reader
from paceline.serving.workers import Workers

FIELD, QUOTED = re.compile(r"^([a-z_]+)\b"), re.compile(r"'([a-z_]+)'")

BESIDE: Final = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
"""What templates read that has fields of its own."""

RENDER_SECONDS: Final = 10.0
"""That a conversation may take in its template."""

SWITCH: Final = "enable_thinking"
"""The variable by which chat templates switch thoughts on and off."""

LONG: Final = 2**18
"""Characters that take a noticeable time to encode."""

MAX_LOGPROBS: Final = 20
"""Of a token: those of a whole vocabulary fill the memory with a short request."""

Json = dict[str, Any]


@dataclass(slots=True)
class Job:
    """One prompt of a request.

    Attributes:
        prompt: as `AsyncLLM` takes it.
        shown: its text, for `echo`.
        hidden: the single token that is decoded is not shown (`max_tokens` 0).
    """

    prompt: Json
    params: SamplingParams
    shown: str = ""
    hidden: bool = False


def named(error: PacelineError, request: Sampled) -> ApiError:
    """The same error for a client, with the field that its text begins with, or quotes first."""
    words = (found[1] for form in (FIELD, QUOTED) if (found := form.search(str(error))) is not None)
    param = next((word for word in words if word in type(request).model_fields), None)
    return ApiError(str(error), param=constrained_by(request) if param == "structured_outputs" else param)


def constrained_by(request: Any) -> str:
    """The field that a request's constraint is from."""
    if request.structured_outputs is not None:
        return "structured_outputs"
    return "response_format" if request.response_format is not None else "tools"


def lenient_schema(request: Any) -> Any:
    """The JSON schema that the finished text is checked against, since it was not enforced to the letter; or None."""
    bound = request.structured_outputs or {}
    wanted: ResponseFormat | None = request.response_format
    if wanted is not None and wanted.json_schema is not None:
        bound = {"json": wanted.json_schema.schema_, "strict": wanted.json_schema.strict}
    return None if bound.get("strict") else bound.get("json")


class JobFactory:
    """Makes jobs of requests.

    Args:
        llm: whose tokenizer, template and defaults are used.
        chat_template: replaces the checkpoint's.
    Attributes:
        workers: render conversations.
    """

    def __init__(self, llm: LLM, config: ServerConfig, chat_template: str | None) -> None:
        self.workers, self._one_long = Workers(), asyncio.Lock()
        self._llm, self._config, self._template = llm, config, chat_template
        self._tool_format = config.tool_call_parser or format_of(chat_template or llm.tokenizer.chat_template)

    @property
    def token_bytes(self) -> TokenBytes:
        """What the tokens of the model's vocabulary stand for."""
        return token_bytes_of(self._llm.tokenizer)

    def completion(self, request: CompletionRequest, owner: str) -> list[Job]:
        """A job for each prompt.

        Raises:
            ApiError: a field that cannot be honoured.
        """
        prompts = _prompts(request.prompt)
        if not 0 < len(prompts) <= self._config.max_prompts:
            raise ApiError(f"prompt must hold 1 to {self._config.max_prompts} prompts", param="prompt")
        for name, given in (("echo", request.echo), ("max_tokens", request.max_tokens == 0)):
            if given and request.stream:
                raise ApiError(f"{name} {getattr(request, name)} cannot be used with stream", param=name)
        more: Json = {"logprobs": request.logprobs}
        if request.echo and request.logprobs is not None:
            more["prompt_logprobs"] = request.logprobs
        hidden = request.max_tokens == 0
        params = self._params(request, request.max_tokens or (1 if hidden else 16), more)
        own = self._own(request, request.prediction, owner)
        return [self._job(prompt, params, own, request, hidden) for prompt in prompts]

    def _job(
        self, prompt: str | list[int], params: SamplingParams, own: Json, request: CompletionRequest, hidden: bool
    ) -> Job:
        tokens = (
            self._llm.tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens)
            if isinstance(prompt, str)
            else prompt
        )
        shown = prompt if isinstance(prompt, str) or not request.echo else self._llm.tokenizer.decode(prompt, False)
        return Job({"prompt_token_ids": tokens, **own}, params, shown if isinstance(shown, str) else "", hidden)

    async def chat(self, request: ChatRequest, owner: str) -> list[Job]:
        """The one job of a conversation.

        Raises:
            ApiError: a field that cannot be honoured.
        """
        if request.top_logprobs is not None and not request.logprobs:
            raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
        if None not in (request.max_tokens, request.max_completion_tokens):
            raise ApiError("give max_completion_tokens or max_tokens, not both", param="max_tokens")
        text, tokens = await self.conversation(request)
        most = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        more: Json = {"logprobs": (request.top_logprobs or 0) if request.logprobs else None}
        params = self._params(request, most, more)
        return [Job({"prompt_token_ids": tokens, **self._own(request, request.prediction, owner)}, params, text)]

    async def conversation(self, request: Any) -> tuple[str, list[int]]:
        """The text of a conversation (of a chat or tokenize request) and its token ids.

        Raises:
            ApiError: it takes too long.
            ConfigError, PromptError: there is no template, or it rejects something.
        """
        rendered, tokenizer = await self.rendered(request), self._llm.tokenizer
        async with self.turn(rendered.text):
            if self._config.allow_special_tokens:
                tokens = await asyncio.to_thread(tokenizer.encode, rendered.text, add_special_tokens=False)
            else:
                tokens = await asyncio.to_thread(tokenizer.encode_rendered, rendered)
        return rendered.text, tokens

    def turn(self, prompt: Any) -> AbstractAsyncContextManager[Any]:
        """Long texts are encoded one after the other, since each takes seconds and gigabytes; others go on."""
        texts = [prompt] if isinstance(prompt, str) else [one for one in prompt if isinstance(one, str)]
        return self._one_long if sum(map(len, texts)) > LONG else nullcontext()

    async def get_ready(self) -> None:
        """Start what renders conversations, and read the vocabulary, so that the first one need not wait for it."""
        await asyncio.to_thread(self.token_bytes.__getitem__, 0)
        with suppress(ApiError, PacelineError):
            await self.conversation(TokenizeRequest(messages=[Message(role="user", content="Hello")]))

    async def rendered(self, request: Any) -> Rendered:
        """The text of a conversation, and what of it the template wrote."""
        template = self._llm.tokenizer.template(self._template)
        messages = await asyncio.to_thread(lambda: [_message(one) for one in request.messages])
        more: Json = dict(request.chat_template_kwargs or {})
        for name in BESIDE & more.keys():
            raise ApiError(
                f"chat_template_kwargs must not hold {name}, a field of its own", param="chat_template_kwargs"
            )
        if request.tools and getattr(request, "tool_choice", None) != "none":
            more["tools"] = [tool.model_dump(exclude_none=True) for tool in request.tools]
        more |= {
            "add_generation_prompt": request.add_generation_prompt,
            "continue_final_message": request.continue_final_message,
        }
        asked = {"template": asdict(template) | {"name": "the chat template"}, "messages": messages, "more": more}
        found = await self.workers.ask(asked, RENDER_SECONDS)
        if found is None:
            why = (
                f"the chat template takes more than {RENDER_SECONDS:.0f} seconds for these messages, or too much memory"
            )
            raise ApiError(why, param="messages", code="template_timeout")
        if error := found.pop("error"):
            raise PromptError(error)
        return Rendered(**found)

    def reader(self, request: ChatRequest, prompt: str) -> Reader:
        """What splits the text of an answer."""
        calls = bool(request.tools) and request.tool_choice != "none"
        thinking = request.think is None and prompt.rstrip().endswith(THINK)
        most = 1 if request.parallel_tool_calls is False else None
        return Reader(FORMATS[self._tool_format] if calls else None, thinking=thinking, most=most)

    def thinking(self, wanted: bool) -> Json | None:
        """What makes the template ask for thoughts, or for none; None where it has no such switch.

        Raises:
            ApiError: no thoughts are wanted, and it asks for them in any case.
        """
        template = self._template or self._llm.tokenizer.chat_template or ""
        if SWITCH in template:
            return {SWITCH: wanted}
        if not wanted and THINK in template:
            raise ApiError("thinking cannot be switched off by this model's chat template", param="thinking")
        return None

    def _required_calls(self, request: Any) -> str | None:
        """The grammar of calls that a request insists on."""
        choice, tools = getattr(request, "tool_choice", None), getattr(request, "tools", None) or []
        if choice == "required" or isinstance(choice, NamedTool):
            if not tools:
                raise ApiError("tool_choice needs tools", param="tool_choice")
            only = choice.function.name if isinstance(choice, NamedTool) else None
            parallel = request.parallel_tool_calls is not False
            strict = self._config.strict_schemas
            try:
                return calls_grammar(tools, self._tool_format, only=only, parallel=parallel, strict=strict)
            except (AttributeError, TypeError, ValueError, RecursionError):
                raise ApiError("the parameters of a function are no JSON schema that is known", param="tools") from None
        if choice != "none" and any(tool.function.strict for tool in tools):
            why = (
                "a function's strict: true is enforced where tool_choice is required or names a function; leave it out"
            )
            raise ApiError(why, param="tools")
        return None

    def _own(self, request: Sampled, prediction: Prediction | str | None, owner: str) -> Json:
        own: Json = {}
        if prediction is not None:
            self._short("prediction", [prediction] if isinstance(prediction, str) else _texts(prediction))
            own["prediction"] = prediction if isinstance(prediction, str) else prediction.model_dump()
        if (salt := tenant_of(owner, request.cache_salt, request.prompt_cache_key)) is not None:
            own["cache_salt"] = salt
        if "speculative_config" in request.model_fields_set:  # null is plain decoding
            own["speculative_config"] = request.speculative_config
        return own

    def _short(self, name: str, texts: Sequence[str]) -> None:
        """Texts that are encoded without a turn may not be long.

        Raises:
            ApiError: they are, together.
        """
        if (length := sum(map(len, texts))) > LONG:
            raise ApiError(f"{name} must be at most {LONG} characters long, got {length}", param=name)

    def _params(self, request: Sampled, max_tokens: int | None, more: Json) -> SamplingParams:
        given = {**request.sampling(), **{name: value for name, value in more.items() if value is not None}}
        for name, value, most in (
            ("n", given.get("n"), self._config.max_n),
            ("max_tokens", max_tokens, self._config.max_request_tokens),
        ):
            if value is not None and most is not None and value > most:
                raise ApiError(f"{name} must be at most {most}, got {value}", param=name)
        for name in ("logprobs", "prompt_logprobs"):
            if not 0 <= given.get(name, 0) <= MAX_LOGPROBS:
                param = "top_logprobs" if name in more and isinstance(request, ChatRequest) else name
                raise ApiError(f"{param} must be 0 to {MAX_LOGPROBS}, got {given[name]}", param=param)
        self._short("bad_words", request.bad_words or ())
        try:
            bound = self._constraint(request)
            params = self._llm.default_sampling_params(
                **given,
                max_tokens=max_tokens if max_tokens is not None else self._config.max_request_tokens,
                **({} if bound is None else {"structured_outputs": bound}),
            )
        except PacelineError as error:
            raise named(error, request) from None
        most, think = self._config.max_request_tokens, ThinkParams.parse(params.think)
        if think is not None and most is not None and think.max_tokens > most:
            raise ApiError(f"think max_tokens must be at most {most}, got {think.max_tokens}", param="think")
        return params

    def _constraint(self, request: Any) -> Json | None:
        """`structured_outputs` of whatever asks for it."""
        found = [request.structured_outputs] if request.structured_outputs is not None else []
        wanted: ResponseFormat | None = request.response_format
        if wanted is not None and wanted.type == "json_object":
            found.append({"json_object": True})
        if wanted is not None and wanted.type == "json_schema":
            inner = wanted.json_schema
            if inner is None or inner.schema_ is None:
                raise ApiError("response_format of type json_schema needs json_schema.schema", param="response_format")
            found.append({"json": inner.schema_} | ({} if inner.strict is None else {"strict": inner.strict}))
        if (calls := self._required_calls(request)) is not None:
            found.append({"grammar": calls})
        if len(found) > 1:
            raise ApiError(
                "give one of response_format, structured_outputs and a required tool_choice", param="response_format"
            )
        if found and "json" in found[0] and "strict" not in found[0]:
            found[0] = {**found[0], "strict": self._config.strict_schemas}
        return found[0] if found else None


def _texts(prediction: Prediction) -> list[str]:
    if isinstance(prediction.content, str):
        return [prediction.content]
    return [text for part in prediction.content if isinstance(text := part.get("text"), str)]


def _prompts(given: Any) -> list[Any]:
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    return list(given)


def _message(message: Any) -> Json:
    """As chat templates read it."""
    found: Json = message.model_dump(exclude_none=True)
    if found["role"] == "developer":
        found["role"] = "system"
    for part in found["content"] if isinstance(found.get("content"), list) else ():
        if part["type"] == "refusal":
            part["type"], part["text"] = "text", part.pop("refusal", "")
    for call in found.get("tool_calls", ()):
        call.pop("index", None)
    return found
