"""Requests of OpenAI's API become jobs: prompts that are rendered and encoded, with their sampling parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

from paceline.checkpoints import ChatTemplate, Rendered, TokenBytes
from paceline.config import ALL_DRAFTS, DraftChoice, SamplingParams, ServerConfig, ThinkParams
from paceline.engine import ReadPrompt, read_prediction, read_tenant
from paceline.errors import PacelineError, PromptError
from paceline.llm import LLM
from paceline.search import SearchConfig
from paceline.serving.api_errors import ApiError
from paceline.serving.chat import (
    FORMATS,
    SWITCHES,
    Constraints,
    Marks,
    Reader,
    ThoughtSteering,
    ToolFormat,
    format_of,
    marks_of,
    reasoning_of,
)
from paceline.serving.field_notes import NOTES
from paceline.serving.keys import NO_LIMITS, limits_by_owner
from paceline.serving.limits import tenant_of
from paceline.serving.places import Places
from paceline.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    DecodingRequest,
    Message,
    Prediction,
    Prompts,
    TemplateRequest,
    TokenizeRequest,
)
from paceline.serving.request_errors import check_variables, named, names_in, rejected_field
from paceline.serving.searches import search_of
from paceline.serving.token_texts import token_bytes_of
from paceline.serving.workers import Workers

BESIDE: Final = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
"""Templates read these variables, which have fields of their own in requests."""

RENDER_SECONDS: Final = 10.0
"""A conversation may take so many seconds of a processor in its template."""

NO_FORMAT: Final = (
    "how this model writes calls of tools cannot be told from its chat template; leave tools out, or start the server "
    f"with --tool-call-parser, one of {', '.join(FORMATS)}"
)

LONG: Final = 2**18
"""So many characters take a noticeable time to encode."""

MOST_TOKENS: Final = 2**18
"""Tokens of a text, where the context holds fewer: what reads on keeps others waiting, and cannot be decoded."""

ENCODERS: Final = 4
"""So many other texts are encoded at once."""

OF_PROMPTS: Final = ("echo", "truncate_prompt_tokens", "prompt_logprobs")
"""Fields about a prompt that the answer goes on from, which a source is not."""

MAX_LOGPROBS: Final = 20
"""So many are told of a token: those of a whole vocabulary fill the memory with a short request."""

Json = dict[str, Any]


@dataclass(slots=True)
class PromptJob:
    """Holds one prompt of a request, ready to be decoded.

    Attributes:
        shown: its text, for `echo`.
        hidden: the single token that is decoded is not shown (`max_tokens` 0).
        search: that finds its outputs, of so many branches; None decodes token by token.
    """

    prompt: ReadPrompt
    params: SamplingParams
    shown: str = ""
    hidden: bool = False
    search: SearchConfig | None = None
    branches: int = 1

    @property
    def prompt_tokens(self) -> int:
        """Counts what is read, an encoder's tokens included."""
        return len(self.prompt.tokens) + len(self.prompt.inputs.encoder_tokens)

    @property
    def rows(self) -> int:
        """Counts what it takes of a pass: its outputs, or the branches of its search."""
        return max(self.params.n, self.branches)


class JobFactory:
    """Turns requests into prompts and sampling parameters, as jobs.

    Args:
        llm: whose tokenizer, template and defaults are used.
        chat_template: replaces the checkpoint's.
    Attributes:
        workers: render conversations.
        most_tokens: of a text.
        template_text: the chat template; None where there is none.
    """

    def __init__(self, llm: LLM, config: ServerConfig, chat_template: str | None) -> None:
        self.workers, self._one_long, self._others = Workers(), Places(1), Places(ENCODERS)
        self._llm, self._config, self._template, self._limits = llm, config, chat_template, limits_by_owner(config)
        self._name = (config.served_model_name or [llm.folder.name])[0]
        self.template_text = text = chat_template or llm.tokenizer.chat_template
        self.most_tokens = max(MOST_TOKENS, llm.backend.info.max_context)
        self._tool_format = FORMATS.get(config.tool_call_parser or format_of(text) or "")
        self._reasoning = reasoning_of(text)
        tokenizer = llm.tokenizer
        marks, thinks = Marks.of(tokenizer, llm.defaults.eos_ids), self._reasoning.sign in (text or "")
        self._constraints = Constraints(config, self._tool_format, self._reasoning, marks, thinks=thinks)
        self._special = {tokenizer.token_text(index): index for index in tokenizer.special_ids}

    @cached_property
    def _steering(self) -> ThoughtSteering:
        template = self._chat_template
        return ThoughtSteering(template.text, template.variables)

    @property
    def _chat_template(self) -> ChatTemplate:
        if self.template_text is None:
            raise ApiError(f"{self._name} has no chat template; {self._instead}", param="messages")
        return self._llm.tokenizer.template(self._template)

    @property
    def _instead(self) -> str:
        """Tells what to send to a model that takes no conversations."""
        source = self._llm.source
        if source is None:
            return "give a prompt to /v1/completions, or start the server with --chat-template"
        if source.reads == "encoder_tokens":
            return "/v1/completions takes the source that its encoder reads as the prompt"
        if source.reads == "input_features":
            return "it transcribes audio at /v1/audio/transcriptions"
        return f"it reads {source.reads}, which no request of this server holds; use it in Python"

    @property
    def token_bytes(self) -> TokenBytes:
        """Tells what the tokens of the model's vocabulary stand for."""
        return token_bytes_of(self._llm.tokenizer)

    def completion(self, request: CompletionRequest, owner: str) -> list[PromptJob]:
        """Return a job for each prompt.

        Raises:
            ApiError: a field that cannot be honoured.
        """
        self._check_source()
        prompts = _prompts(request.prompt)
        if not 0 < len(prompts) <= self._config.max_prompts:
            raise ApiError(f"prompt must hold 1 to {self._config.max_prompts} prompts", param="prompt")
        if request.stream and request.echo:
            raise ApiError("echo true cannot be used with stream", param="echo")
        if request.stream and request.max_tokens == 0:
            raise ApiError("max_tokens 0 cannot be used with stream", param="max_tokens")
        more: Json = {"logprobs": request.logprobs}
        if request.echo and request.logprobs is not None:
            more["prompt_logprobs"] = request.logprobs
        hidden = request.max_tokens == 0
        usual = min(16, self.most_new(owner) or 16)
        params = self._params(request, owner, 1 if hidden else request.max_tokens or usual, more)
        search, branches = search_of(request, params, self._config)
        self._check_prediction(request.prediction)
        both = [self._encoded(prompt, request) for prompt in prompts]
        read = self._read(request, owner, [tokens for tokens, _ in both])
        return [
            PromptJob(prompt, params, shown, hidden, search, branches)
            for prompt, (_, shown) in zip(read, both, strict=True)
        ]

    def _check_source(self) -> None:
        """Reject prompts where the model's encoder reads something else, or its texts begin with nobody knows what.

        Raises:
            ApiError: it is so.
        """
        source = self._llm.source
        if source is not None and source.reads != "encoder_tokens":
            raise ApiError(f"{self._name} reads no text; {self._instead}", param="prompt")
        if source is not None and not source.start:
            why = "does not say what its texts begin with (decoder_start_token_id), which no request can; serve another"
            raise ApiError(f"{self._name} {why}", param="model")

    def _encoded(self, prompt: str | list[int], request: CompletionRequest) -> tuple[list[int], str]:
        """Return the token ids of a prompt, and its text as far as that is shown."""
        tokenizer = self._llm.tokenizer
        if isinstance(prompt, str):
            return tokenizer.encode(prompt, request.add_special_tokens, most=self.most_tokens), prompt
        return prompt, tokenizer.decode(prompt, False) if request.echo else ""

    async def chat(self, request: ChatRequest, owner: str) -> list[PromptJob]:
        """Return the one job of a conversation, in a list.

        Raises:
            ApiError: a field that cannot be honoured.
        """
        if self._llm.source is not None:
            raise ApiError(f"{self._name} takes no conversations; {self._instead}", param="messages")
        if request.top_logprobs is not None and not request.logprobs:
            raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
        if None not in (request.max_tokens, request.max_completion_tokens):
            raise ApiError("give max_completion_tokens or max_tokens, not both", param="max_tokens")
        text, tokens = await self.conversation(request)
        if self._calls(request) and self._tool_format is None:
            raise ApiError(NO_FORMAT, param="tools")
        most = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        more: Json = {"logprobs": (request.top_logprobs or 0) if request.logprobs else None}
        if marks := self._marks(request):  # what reads the answer has to see them
            more["skip_special_tokens"] = [index for text, index in self._special.items() if text not in marks]

        def made() -> PromptJob:
            params = self._params(request, owner, most, more, text)
            self._check_prediction(request.prediction)
            (prompt,) = self._read(request, owner, [tokens])
            search, branches = search_of(request, params, self._config)
            return PromptJob(prompt, params, text, search=search, branches=branches)

        return [await asyncio.to_thread(made)]

    async def conversation(self, request: TemplateRequest) -> tuple[str, list[int]]:
        """Return the text of a conversation (of a chat or tokenize request) and its token ids.

        Raises:
            ApiError: there is no template, it takes too long or rejects something.
            PromptError: the text cannot be encoded.
        """
        rendered, tokenizer = await self.rendered(request), self._llm.tokenizer
        async with self.turn(rendered.text):
            if self._config.allow_special_tokens:
                tokens = await asyncio.to_thread(tokenizer.encode, rendered.text, False, most=self.most_tokens)
            else:
                tokens = await asyncio.to_thread(tokenizer.encode_rendered, rendered, most=self.most_tokens)
        return rendered.text, tokens

    def turn(self, prompt: Prompts | list[str | list[int]]) -> AbstractAsyncContextManager[None]:
        """Wait for a turn to encode: long texts go one after the other, since each takes seconds and gigabytes, and
        others go on. Keys take turns.
        """
        texts = [prompt] if isinstance(prompt, str) else [text for text in prompt if isinstance(text, str)]
        return (self._one_long if sum(map(len, texts)) > LONG else self._others).place()

    async def get_ready(self) -> None:
        """Start what renders conversations, and read the vocabulary, so that the first one need not wait for it."""
        await asyncio.to_thread(self.token_bytes.__getitem__, 0)
        with suppress(ApiError, PacelineError):
            await self.conversation(TokenizeRequest(messages=[Message(role="user", content="Hello")]))

    async def rendered(self, request: TemplateRequest) -> Rendered:
        """Return the text of a conversation, and what of it the template wrote."""
        template = self._chat_template
        messages = await asyncio.to_thread(lambda: [_message(message) for message in request.messages or ()])
        if not self._reasoning.begin:
            messages = [_with_thinking(message) for message in messages]
        more = self._variables(request)
        for name in BESIDE & more.keys():
            raise ApiError(
                f"chat_template_kwargs must not hold {name}, a field of its own", param="chat_template_kwargs"
            )
        if request.tools and not (isinstance(request, ChatRequest) and request.tool_choice == "none"):
            more["tools"] = [tool.model_dump(exclude_none=True) for tool in request.tools]
        more |= {
            "add_generation_prompt": request.add_generation_prompt,
            "continue_final_message": request.continue_final_message,
        }
        asked = {"template": asdict(template) | {"name": "the chat template"}, "messages": messages, "more": more}
        answer = await self.workers.ask(asked, RENDER_SECONDS)
        if answer is None:
            why = (
                f"the chat template takes more than {RENDER_SECONDS:.0f} seconds for these messages, or too much memory"
            )
            raise ApiError(why, param="messages", code="template_timeout")
        if error := answer.pop("error"):
            raise ApiError(error, param=rejected_field(error, request))
        return Rendered(**answer)

    def _variables(self, request: TemplateRequest) -> Json:
        """Return the variables that the template is given for the request's fields."""
        variables: Json = dict(request.chat_template_kwargs or {})
        check_variables(variables, self._chat_template.variables, request)
        more = self._switched(request) if isinstance(request, ChatRequest) else {}
        return more | (self._steering.renamed(variables) if variables.keys() & set(SWITCHES) else variables)

    def _switched(self, request: ChatRequest) -> Json:
        """Return those of them for the fields that say whether, and how much, the model thinks."""
        more: Json = {}
        if (switch := request.enable_thinking) is not None:
            more |= _or_ignored("enable_thinking", lambda: self._steering.switched(switch, "enable_thinking"))
        if (thinking := request.thinking) is not None:
            more |= _or_ignored("thinking", lambda: self._steering.switched(thinking.type == "enabled", "thinking"))
        if (effort := request.reasoning_effort) is not None:
            more |= _or_ignored("reasoning_effort", lambda: self._steering.effort(effort))
        return more

    def _calls(self, request: ChatRequest) -> bool:
        """Tell whether functions may be called."""
        return bool(request.tools) and request.tool_choice != "none"

    def _form(self, request: ChatRequest) -> ToolFormat | None:
        return self._tool_format if self._calls(request) else None

    def _marks(self, request: ChatRequest) -> frozenset[str]:
        """Return the special tokens that are marks of the formats, where the client is to see none."""
        if request.skip_special_tokens is False:
            return frozenset()
        return marks_of(self._form(request), self._reasoning) & self._special.keys()

    def _thinking(self, request: DecodingRequest, prompt: str) -> bool:
        """Tell whether an answer begins inside thoughts."""
        return request.think is None and self._reasoning.is_open(prompt, _continued(request))

    def reader(self, request: ChatRequest, prompt: str) -> Reader:
        """Return what splits the text of an answer into thoughts, content and calls."""
        form, reasoning = self._form(request), self._reasoning
        return Reader(
            form,
            thinking=self._thinking(request, prompt),
            functions={tool.function.name: tool.function.parameters or {} for tool in request.tools or ()},
            reasoning=reasoning,
            most=1 if request.parallel_tool_calls is False else None,
            hidden=self._marks(request),
            prompt=prompt,
        )

    def thinking(self, wanted: bool, budget: int | None = None) -> Json:
        """Return the variables that make the template ask for thoughts, or for none.

        Args:
            budget: tokens that they may have; None leaves it to the model.
        Raises:
            ApiError: the template cannot ask for that.
        """
        if budget is not None:
            name = "thinking.budget_tokens"
            return _or_ignored(name, lambda: self._steering.budgeted(budget, name))
        return _or_ignored("thinking", lambda: self._steering.switched(wanted, "thinking"))

    def _check_prediction(self, prediction: Prediction | str | None) -> None:
        if prediction is not None:
            self._short("prediction", [prediction] if isinstance(prediction, str) else _texts(prediction))

    def _read(self, request: DecodingRequest, owner: str, prompts: Sequence[list[int]]) -> list[ReadPrompt]:
        """Return prompts with what the request says of them all.

        Raises:
            ConfigError, PromptError: something wrong about it.
        """
        chosen = "speculative_config" in request.model_fields_set  # null is plain decoding
        drafts = DraftChoice.parse(request.speculative_config) if chosen else ALL_DRAFTS
        asked = request.prediction
        expected = asked.model_dump() if isinstance(asked, Prediction) else asked
        try:
            prediction = read_prediction(expected, self._llm.tokenizer.encode)
        except PromptError as error:
            why = str(error) if str(error).startswith("prediction") else f"prediction: {error}"
            raise ApiError(why, param="prediction") from None
        tenant = read_tenant(tenant_of(owner, request.cache_salt, request.prompt_cache_key))
        if self._llm.source is None:
            return [ReadPrompt(None, tokens, prediction, tenant, drafts) for tokens in prompts]
        for name in OF_PROMPTS:
            if (value := getattr(request, name, None)) is not None and value is not False:
                raise ApiError(f"{name} cannot be used with an encoder-decoder model; leave it out", param=name)
        reading = partial(self._llm.source.read, encode=self._llm.tokenizer.encode)
        if not all(prompts):
            raise ApiError("prompt is empty; give a prompt, which is the source", param="prompt")
        sources = [reading({"encoder_prompt": tokens}) for tokens in prompts]
        return [replace(read, prediction=prediction, tenant=tenant, drafts=drafts) for read in sources]

    def _short(self, name: str, texts: Sequence[str]) -> None:
        """Reject texts that are too long to be encoded without a turn.

        Raises:
            ApiError: they are, together.
        """
        if (length := sum(map(len, texts))) > LONG:
            raise ApiError(f"{name} must be at most {LONG} characters long, got {length}", param=name)

    def most_new(self, owner: str) -> int | None:
        """Return how many new tokens an output may have, by the server's limit and the key's; None for any number."""
        limits = (self._config.max_request_tokens, self._limits.get(owner, NO_LIMITS).max_tokens)
        return min((limit for limit in limits if limit is not None), default=None)

    def _params(
        self, request: DecodingRequest, owner: str, max_tokens: int | None, more: Json, prompt: str = ""
    ) -> SamplingParams:
        """Return the sampling parameters of a request, within the limits of the server and of its owner."""
        most_new = self.most_new(owner)
        fields = {**request.sampling(), **{name: value for name, value in more.items() if value is not None}}
        for name, value, most in (
            ("n", fields.get("n"), self._config.max_n),
            ("max_tokens", max_tokens, most_new),
        ):
            if value is not None and most is not None and value > most:
                why = f"{name} must be at most {most}, got {value}"
                raise ApiError(why, param=name).renamed(names_in(request))
        for name in ("logprobs", "prompt_logprobs"):
            if not 0 <= fields.get(name, 0) <= MAX_LOGPROBS:
                param = "top_logprobs" if name in more and isinstance(request, ChatRequest) else name
                raise ApiError(f"{param} must be 0 to {MAX_LOGPROBS}, got {fields[name]}", param=param)
        self._short("bad_words", request.bad_words or ())
        try:
            bound = self._constraints.of(request, prompt, opened=self._thinking(request, prompt))
            params = self._llm.default_sampling_params(
                **fields,
                max_tokens=max_tokens if max_tokens is not None else most_new,
                **({} if bound is None else {"structured_outputs": bound}),
            )
        except PacelineError as error:
            raise named(error, request) from None
        think = ThinkParams.parse(params.think)
        if think is not None and most_new is not None and think.max_tokens > most_new:
            raise ApiError(f"think max_tokens must be at most {most_new}, got {think.max_tokens}", param="think")
        return params


def _or_ignored(name: str, ask: Callable[[], Json]) -> Json:
    """Return what a field asks of the template; nothing, where fields that cannot be honoured are ignored.

    Raises:
        ApiError: the template cannot do it.
    """
    notes = NOTES.get()
    try:
        return ask()
    except ApiError:
        if notes is None or not notes.lenient:
            raise
        notes.ignore(name)
        return {}


def _with_thinking(message: Json) -> Json:
    """Move thoughts to where gpt-oss's template reads them: before calls, and not beside content."""
    thoughts = message.get("reasoning_content")
    return (
        {**message, "thinking": thoughts}
        if thoughts and message.get("tool_calls") and not message.get("content")
        else message
    )


def _continued(request: DecodingRequest) -> str:
    """Return the text that an answer goes on with; "" is none."""
    if not isinstance(request, ChatRequest) or not request.continue_final_message:
        return ""
    last = request.messages[-1].content
    return last if isinstance(last, str) else "".join(part.text or "" for part in last or ())


def _texts(prediction: Prediction) -> list[str]:
    if isinstance(prediction.content, str):
        return [prediction.content]
    return [text for part in prediction.content if isinstance(text := part.get("text"), str)]


def _prompts(prompt: Prompts) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    tokens = [part for part in prompt if isinstance(part, int)]
    return [tokens] if tokens else [part for part in prompt if not isinstance(part, int)]


def _message(message: Message) -> Json:
    """Return a message as chat templates read it."""
    rendered: Json = message.model_dump(exclude_none=True)
    if rendered["role"] == "developer":
        rendered["role"] = "system"
    for part in rendered["content"] if isinstance(rendered.get("content"), list) else ():
        if part["type"] == "refusal":
            part["type"], part["text"] = "text", part.pop("refusal", "")
    for call in rendered.get("tool_calls", ()):
        call.pop("index", None)
    return rendered
