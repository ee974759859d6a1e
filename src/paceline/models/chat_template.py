"""Chat templates: a list of messages as the one text that a checkpoint was trained on.

In:  the template of a checkpoint (Jinja) and messages. Out: a prompt text, special tokens written out, so it must be encoded with
`add_special_tokens=False`. Not here: finding the template (`models.tokenizer`), token ids.

Templates are data from strangers: they run in Jinja's immutable sandbox and see plain JSON values only. The environment (whitespace
control, loop controls, `raise_exception`, `strftime_now`, `tojson`, `{% generation %}`) is the one that the Hugging Face
documentation of chat templates describes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from paceline.errors import CheckpointError, PromptError

if TYPE_CHECKING:
    import jinja2


def render(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The text of a conversation.

    Args:
        messages: dicts with "role" and "content" (and whatever else the template reads); keys that hold None are left out.
        variables: `add_generation_prompt`, special tokens, and other names the template may use.
    Raises:
        PromptError: no messages, not a list of dicts, or messages that the template refuses.
        CheckpointError: the template itself is broken.
    """
    import jinja2

    if (
        isinstance(messages, str)
        or not isinstance(messages, Sequence)
        or not all(isinstance(message, Mapping) for message in messages)
    ):
        raise PromptError(f"messages must be a list of dicts with 'role' and 'content', got {type(messages).__name__}")
    if not messages:
        raise PromptError("messages must hold at least one message, got none")
    chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
    names = {key: _plain(value) for key, value in {"tools": None, "documents": None, **variables, "messages": chat}.items()}
    try:
        text = _compile(template).render(names)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"the chat template cannot be read: {error.message} (line {error.lineno})") from error
    except (jinja2.TemplateError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise PromptError(f"the chat template refused the messages: {' '.join(str(error).split())}") from error
    return text


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
    import jinja2

    raise jinja2.TemplateError(str(message))


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
        """`{% generation %} ... {% endgeneration %}` marks what an assistant wrote, for training; here it is its body."""

        tags = {"generation"}  # noqa: RUF012 (the attribute's name and mutable type are Jinja's)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    return environment.from_string(template)
