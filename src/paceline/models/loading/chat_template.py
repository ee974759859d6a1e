"""Chat templates: a list of messages as the one text that a checkpoint was trained on.

Special tokens are written out in the prompt text, so it must be encoded with `add_special_tokens=False`.

Templates are data from strangers: they run in Jinja's immutable sandbox and see plain JSON values only. The environment
(whitespace control, loop controls, `raise_exception`, `strftime_now`, `tojson`, `{% generation %}`) is the one that the
Hugging Face documentation of chat templates describes.

A message has a role and a content. Content is missing only where an assistant's message holds calls or thoughts
instead. A list of text parts goes to the template as it is; a template that cannot take it (it fails, or prints the
list as Python would) gets the parts' texts joined by newlines, as in vLLM. Parts of other types are rejected: nothing
here reads images or sounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from paceline.config import SamplingParams
from paceline.errors import CheckpointError, ConfigError, PromptError
from paceline.utils import reject_unknown, shortened

if TYPE_CHECKING:
    import jinja2

INSTEAD: Final = ("tool_calls", "function_call", "reasoning_content", "reasoning", "refusal")
"""What an assistant's message may hold in place of content."""

Chat = list[dict[str, Any]]


class RefusalError(Exception):
    """What `raise_exception` in a template raises."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template and what it may use beside the messages.

    Attributes:
        text: in Jinja's language.
        name: for messages.
        tokens: special tokens by the names that templates have for them, such as bos_token.
    """

    text: str
    name: str
    tokens: Mapping[str, str]

    @property
    def variables(self) -> frozenset[str]:
        """The names that it reads and does not set itself.

        Raises:
            CheckpointError: it is broken.
        """
        return variables_of(self.text, name=self.name)

    def apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool | None = None,
        *,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation; see `Tokenizer.apply_chat_template`."""
        if continue_final_message and add_generation_prompt:
            raise ConfigError("continue_final_message and add_generation_prompt exclude each other; give one of them")
        if given := {key: value for key, value in kwargs.items() if value is not None}:
            self._refuse_unread(given)
        answer = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        variables = {**self.tokens, "add_generation_prompt": answer, **given}
        make = render_open if continue_final_message else render
        return make(self.text, messages, variables, name=self.name)

    def _refuse_unread(self, given: Mapping[str, Any]) -> None:
        known = self.variables
        for key in given:
            if key in SamplingParams.__dataclass_fields__ and key not in known:
                raise ConfigError(
                    f"{key!r} is a sampling parameter, and not a name that {self.name} uses; give "
                    f"SamplingParams({key}=...)"
                )
        reject_unknown(self.name, given, sorted({"add_generation_prompt", *known} - {"messages"}))


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    name: str = "the chat template",
) -> str:
    """The text of a conversation.

    Args:
        messages: dicts with "role" and "content" (and whatever else the template reads); keys that hold None are left
            out. Content is a text or a list of `{"type": "text", "text": ...}`.
        variables: `add_generation_prompt`, special tokens, and other names the template may use.
        name: of the template, for messages.
    Raises:
        PromptError: no messages, not a list of dicts, a message without role or content, or messages that the template
        rejects or fails on.
        CheckpointError: the template itself cannot be read.
    """
    if (
        isinstance(messages, str)
        or not isinstance(messages, Sequence)
        or not all(isinstance(message, Mapping) for message in messages)
    ):
        raise PromptError(f"messages must be a list of dicts with 'role' and 'content', got {type(messages).__name__}")
    if not messages:
        raise PromptError("messages must hold at least one message, got none")
    chat: Chat = [
        {str(key): _plain(value) for key, value in message.items() if value is not None} for message in messages
    ]
    for index, message in enumerate(chat):
        _check(index, message)
    names = {key: _plain(value) for key, value in {"tools": None, "documents": None, **variables}.items()}
    if not any(isinstance(message.get("content"), list) for message in chat):
        return _whole(_rendered(template, chat, names, name), chat)
    try:
        return _whole(_rendered(template, chat, names, name), chat)
    except PromptError:
        flat = [{**m, "content": _joined(m["content"])} if isinstance(m.get("content"), list) else m for m in chat]
        return _whole(_rendered(template, flat, names, name), flat)


END: Final = "<end of the message that is continued> "
"""Stands behind the last message while it is rendered; its own space shows whether a template strips contents."""


def render_open(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, name: str
) -> str:
    """The text of a conversation up to the end of its last message's content, without what closes the message.

    Raises:
        PromptError: see `render`; the last content is no text, or the template does not print it.
    """
    last = messages[-1] if isinstance(messages, Sequence) and messages else {}
    content = last.get("content") if isinstance(last, Mapping) else None
    if not isinstance(content, str):
        raise PromptError("continue_final_message needs a text as content of the last message")
    text = render(template, [*messages[:-1], {**last, "content": content + END}], variables, name=name)
    at = text.rfind(END.strip())
    if at < 0:
        raise PromptError(f"continue_final_message: {name} does not print the content of the last message")
    return text[:at] if text[at : at + len(END)] == END else text[:at].rstrip()


def _check(index: int, message: Mapping[str, Any]) -> None:
    """Reject a message without a role, or with a content that no text model takes."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise PromptError(
            f"message {index} must have a text under 'role', got {shortened(role)}; give 'user', 'assistant', 'system'"
        )
    if content is None:
        if role != "assistant" or not any(message.get(key) for key in INSTEAD):
            raise PromptError(f"message {index} (role {role!r}) has no content; give it a text under 'content'")
        return
    if not isinstance(content, str | list | dict):
        raise PromptError(
            f"content of message {index} must be a text or a list of text parts, got {shortened(content)}"
        )
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            raise PromptError(
                f"content of message {index} may hold parts {{'type': 'text', 'text': ...}} only, got "
                f"{shortened(part)}; this model reads text"
            )


def _joined(parts: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts)


def _whole(text: str, chat: Chat) -> str:
    """The rendered text, unless a content that is no text was printed as Python would print it, or a part of a list is
    missing.
    """
    for index, message in enumerate(chat):
        content = message.get("content", "")
        missing = isinstance(content, list) and any(part["text"].strip() not in text for part in content)
        if missing or (content and not isinstance(content, str) and str(content) in text):
            raise PromptError(
                f"the chat template cannot take the content of message {index}, a {type(content).__name__}; give a text"
            )
    return text


def _rendered(template: str, chat: Chat, names: Mapping[str, Any], name: str) -> str:
    compiled = _compiled(template, name)
    try:
        return compiled.render({**names, "messages": chat})
    except RefusalError as error:
        raise PromptError(f"{name} rejected the messages: {shortened_line(error)}") from error
    except Exception as error:  # a template may raise whatever Python does
        what = f"{type(error).__name__}: {shortened_line(error)}".removesuffix(": ")
        raise PromptError(
            f"{name} failed on these messages ({what}); change the messages, repair the template, or use generate "
            f"with a prompt"
        ) from error


def _compiled(template: str, name: str) -> jinja2.Template:
    import jinja2

    try:
        return _compile(template)
    except Exception as error:  # Jinja's own, and those of Python's compiler behind it
        line = f" at line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise CheckpointError(
            f"{name} cannot be read ({shortened_line(error)}{line}); repair it or download it again, or use generate "
            "with a plain prompt"
        ) from error


def shortened_line(error: Exception, most: int = 200) -> str:
    """The text of an error of a template, on one line."""
    text = " ".join(str(getattr(error, "message", None) or error).split()).rstrip(".")
    return text if len(text) <= most else f"{text[: most - 3]}..."


def variables_of(template: str, *, name: str = "the chat template") -> frozenset[str]:
    """The names that a template reads and does not set itself.

    Raises:
        CheckpointError: it is broken.
    """
    from jinja2 import meta

    environment = _compiled(template, name).environment
    return frozenset(meta.find_undeclared_variables(environment.parse(template)))


def _plain(value: Any) -> Any:
    """The value rebuilt of plain JSON types, so that a template meets no methods of ours or the user's."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise PromptError(f"chat messages may hold texts, numbers, lists and dicts, got {type(value).__name__}")


def _raise_exception(message: object) -> None:
    raise RefusalError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %} ... {% endgeneration %}` marks what an assistant wrote, for training; here it is its
        body.
        """

        tags = {"generation"}  # noqa: RUF012 (the attribute's name and mutable type are Jinja's)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    return environment.from_string(template)
