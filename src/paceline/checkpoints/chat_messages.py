"""Conversations in the forms that chat templates read.

A message has a role and a content. Content is missing only where an assistant's message holds calls or thoughts
instead; there it is None for templates that ask for that, and left out for others, which would print it.

Templates differ in what they can take, so a conversation is given in one form after the other until a template neither
fails nor prints a value as Python would: a list of text parts as it is, then its texts joined by newlines; the
arguments of calls as objects, then as JSON texts; in the end a content that is missing as None, left out, and as an
empty text. Arguments that are no JSON stay texts; for a template that reads only objects they are one with that text in
it. Parts of other types are rejected: nothing here reads images or sounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from paceline.errors import PromptError
from paceline.utils import shortened

INSTEAD: Final = ("tool_calls", "function_call", "reasoning_content", "reasoning", "refusal")
"""What an assistant's message may hold in place of content."""

UNREAD: Final = "arguments"
"""Name of arguments that are no JSON, where they must be an object."""

Chat = list[dict[str, Any]]


def conversation(messages: Sequence[Mapping[str, Any]], *, null: bool) -> Chat:
    """The messages in plain JSON types, without what is None or a list of no calls.

    Args:
        null: an assistant's content that is missing is None; else it is left out.
    Raises:
        PromptError: no messages, not a list of dicts, or a message without role or content.
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
        {str(key): plain(value) for key, value in message.items() if value is not None} for message in messages
    ]
    for index, message in enumerate(chat):
        if message.get("tool_calls") == []:
            del message["tool_calls"]
        _check(index, message)
        if null and "content" not in message:
            message["content"] = None
    return chat


def plain(value: Any) -> Any:
    """The value rebuilt of plain JSON types, so that a template meets no methods of the user's."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise PromptError(f"chat messages may hold texts, numbers, lists and dicts, got {type(value).__name__}")


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


def forms(chat: Chat) -> Iterator[Chat]:
    """The conversation in each form that a template may want, the usual ones first."""
    calls = [arguments for message in chat for arguments in _arguments(message)]
    ways = [_as_object, *((_as_text,) if calls else ())]
    if any(not isinstance(_as_object(arguments), dict) for arguments in calls):
        ways.append(_as_object_only)
    lists = any(isinstance(message.get("content"), list) for message in chat)
    for way in ways:
        messages = [_with_arguments(message, way) for message in chat]
        yield messages
        if lists:
            yield [
                {**message, "content": _joined(message["content"])} if "content" in message else message
                for message in messages
            ]
    if any(message.get("content") is None for message in chat):
        for missing in MISSING:
            yield [_with_arguments(_with_content(message, missing), _as_object) for message in chat]


MISSING: Final[Sequence[Mapping[str, str | None]]] = ({"content": None}, {}, {"content": ""})
"""What messages without content have in its place, one form after the other."""


def _with_content(message: dict[str, Any], missing: Mapping[str, str | None]) -> dict[str, Any]:
    if message.get("content") is not None:
        return message
    return {**{key: value for key, value in message.items() if key != "content"}, **missing}


def _arguments(message: Mapping[str, Any]) -> list[Any]:
    return [function["arguments"] for function in _functions(message)]


def _functions(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The called functions of a message that have arguments."""
    calls = message.get("tool_calls")
    listed = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    inner = [call["function"] if isinstance(call.get("function"), dict) else call for call in listed]
    return [function for function in inner if function.get("arguments") is not None]


def _with_arguments(message: dict[str, Any], way: Callable[[Any], Any]) -> dict[str, Any]:
    if not _functions(message):
        return message
    copied = {**message, "tool_calls": [_copied(call) for call in message["tool_calls"]]}
    for function in _functions(copied):
        function["arguments"] = way(function["arguments"])
    return copied


def _copied(call: Any) -> Any:
    """A call, and the function in it, that may be changed."""
    if not isinstance(call, dict):
        return call
    return {key: dict(value) if isinstance(value, dict) else value for key, value in call.items()}


def _as_object(arguments: Any) -> Any:
    """Arguments as what their JSON holds; a text that is no JSON as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return {} if value is None else value


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_object_only(arguments: Any) -> dict[str, Any]:
    value = _as_object(arguments)
    return value if isinstance(value, dict) else {UNREAD: value}


def _joined(content: Any) -> Any:
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content


def check_printed(text: str, chat: Chat) -> None:
    """Look whether a template could take what it was given.

    Raises:
        PromptError: the text has a value in it as Python would print it, or lacks a part of a content.
    """
    pythonic = "{'" in text or "['" in text
    for index, message in enumerate(chat):
        content = message.get("content") or ""
        missing = isinstance(content, list) and any(part["text"].strip() not in text for part in content)
        if missing or (not isinstance(content, str) and str(content) in text):
            raise PromptError(
                f"the chat template cannot take the content of message {index}, a {type(content).__name__}; give a text"
            )
        if pythonic and any(_is_printed(arguments, text, chat) for arguments in _arguments(message)):
            raise PromptError(f"the chat template cannot take the arguments of a call in message {index}")


def _is_printed(arguments: Any, text: str, chat: Chat) -> bool:
    """Whether arguments are in a text as Python prints them, more often than contents have that."""
    printed = str(arguments)
    if isinstance(arguments, str) or printed not in text or printed == json.dumps(arguments, ensure_ascii=False):
        return False
    contents = (message.get("content") for message in chat)
    return text.count(printed) > sum(content.count(printed) for content in contents if isinstance(content, str))
