"""Chat templates: a list of messages as the one text that a checkpoint was trained on.

Special tokens are written out in the prompt text, so it must be encoded with `add_special_tokens=False`. Texts of the
messages may hold the same characters; which characters are whose is found out by rendering the conversation a second
time with texts that remember it (`tracked_text`), and `Tokenizer.encode_rendered` reads them apart.

Templates are data from strangers: they run in Jinja's immutable sandbox and see plain JSON values only. The environment
(whitespace control, loop controls, `raise_exception`, `strftime_now`, `tojson`, `{% generation %}`) is the one that the
Hugging Face documentation of chat templates describes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from paceline.checkpoints.chat_messages import Chat, check_printed, conversation, forms, plain
from paceline.checkpoints.tracked_text import blanked, joined, replaced, restored, tracked
from paceline.config import SamplingParams
from paceline.errors import CheckpointError, ConfigError, PromptError
from paceline.utils import reject_unknown

if TYPE_CHECKING:
    import jinja2

SAFE_ROLE: Final = re.compile(r"[\w .-]{1,64}")
"""Templates make special tokens of roles (`<|user|>`), so a role counts as the template's own unless it has marks."""


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
        return self._printed(messages, add_generation_prompt, continue_final_message, kwargs).text

    def apply_tracked(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool | None = None,
        *,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> Rendered:
        """The same text, and what of it the template wrote."""
        return self._printed(messages, add_generation_prompt, continue_final_message, kwargs).rendered()

    def _printed(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool | None,
        continue_final_message: bool,
        kwargs: Mapping[str, Any],
    ) -> Printed:
        if continue_final_message and add_generation_prompt:
            raise ConfigError("continue_final_message and add_generation_prompt exclude each other; give one of them")
        if extra := {key: value for key, value in kwargs.items() if value is not None}:
            self._refuse_unread(extra)
        answer = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        built_in = {**self.tokens, "add_generation_prompt": answer}
        return _printed(self, messages, built_in, extra, continued=continue_final_message)

    def _refuse_unread(self, extra: Mapping[str, Any]) -> None:
        known = self.variables
        for key in extra:
            if key in SamplingParams.__dataclass_fields__ and key not in known:
                raise ConfigError(
                    f"{key!r} is a sampling parameter, and not a name that {self.name} uses; give "
                    f"SamplingParams({key}=...)"
                )
        reject_unknown(self.name, extra, sorted({"add_generation_prompt", *known} - {"messages"}))


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a conversation and whose it is.

    Attributes:
        text: all of it.
        written: what the template wrote, at its place, with `tracked_text.BLANK` for every character that messages,
            tools and other arguments brought.
        exact: `written` is that of this very text. Else the template took another way where it was watched, since it
            does to texts what cannot be followed, and `written` is what it wrote then.
    """

    text: str
    written: str
    exact: bool


@dataclass(frozen=True, slots=True)
class Printed:
    """A conversation that was rendered, and from what.

    Attributes:
        chat: the messages in the form that the template takes.
        built_in, extra: names for the template, the former from the checkpoint.
        end: what stands behind the last message where that is continued; else "".
    """

    text: str
    template: ChatTemplate
    chat: Chat
    built_in: Mapping[str, Any]
    extra: Mapping[str, Any]
    end: str

    def rendered(self) -> Rendered:
        """With what the template wrote: rendered again, watched."""
        chat = [{key: _watched(key, value) for key, value in message.items()} for message in self.chat]
        names = {**self.built_in, **{key: tracked(value) for key, value in self.extra.items()}}
        try:
            whole = str.__str__(_rendered(self.template.text, chat, names, self.template.name))
        except PromptError:
            return Rendered(self.text, "", exact=False)
        text = _up_to(whole, replaced(self.end))
        exact = text is not None and restored(text) in (self.text, restored(self.text))
        return Rendered(self.text, blanked(text or ""), exact=exact)


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
            out, but for contents that the template asks to be None. Content is a text or a list of
            `{"type": "text", "text": ...}`; arguments of calls are objects or JSON texts, whatever the template takes.
        variables: `add_generation_prompt`, special tokens, and other names the template may use.
        name: of the template, for messages.
    Raises:
        PromptError: no messages, not a list of dicts, a message without role or content, or messages that the template
        rejects or fails on.
        CheckpointError: the template itself cannot be read.
    """
    return _printed(ChatTemplate(template, name, {}), messages, variables, {}, continued=False).text


END: Final = "<end of the message that is continued> "
"""Stands behind the last message while it is rendered; its own space shows whether a template strips contents."""


def _printed(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    built_in: Mapping[str, Any],
    extra: Mapping[str, Any],
    *,
    continued: bool,
) -> Printed:
    """A conversation, rendered; with `continued` up to the end of its last message's content.

    Raises:
        PromptError: see `render`; or the last content is no text, or not printed as it is.
    """
    content, end = "", END if continued else ""
    if continued:
        content = _last_content(messages)
        messages = [*messages[:-1], {**messages[-1], "content": content + END}]
    built_in, extra = ({key: plain(value) for key, value in names.items()} for names in (built_in, extra))
    built_in = {"tools": None, "documents": None, **built_in}
    text, chat = _in_some_form(template, messages, {**built_in, **extra})
    shown = _up_to(text, end)
    if shown is None or not shown.rstrip().endswith(content.strip()):
        raise PromptError(
            f"continue_final_message: {template.name} does not print the content of the last message as it is"
        )
    return Printed(shown, template, chat, built_in, extra, end)


def _last_content(messages: Sequence[Mapping[str, Any]]) -> str:
    last = messages[-1] if isinstance(messages, Sequence) and messages else {}
    content = last.get("content") if isinstance(last, Mapping) else None
    if not isinstance(content, str):
        raise PromptError("continue_final_message needs a text as content of the last message")
    return content


def _up_to(text: str, end: str) -> str | None:
    """The text before its last `end`, which a template may have stripped; None where that is not in it."""
    if not end:
        return text
    at = text.rfind(end.strip())
    if at < 0:
        return None
    return text[:at] if text[at : at + len(end)] == end else text[:at].rstrip()


def _in_some_form(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], names: Mapping[str, Any]
) -> tuple[str, Chat]:
    """The text of a conversation in the first form that the template takes, and the conversation in that form."""
    first: PromptError | None = None
    for chat in forms(conversation(messages, null=asks_for_null(template.text, template.name))):
        try:
            text = _rendered(template.text, chat, names, template.name)
            check_printed(text, chat)
        except PromptError as error:
            first = first or error
        else:
            return text, chat
    assert first is not None
    raise first


def _watched(key: str, value: Any) -> Any:
    """What a message has under a key, as what came from outside."""
    return value if key == "role" and SAFE_ROLE.fullmatch(value) else tracked(value)


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


@lru_cache(maxsize=16)
def variables_of(template: str, *, name: str = "the chat template") -> frozenset[str]:
    """The names that a template reads and does not set itself.

    Raises:
        CheckpointError: it is broken.
    """
    from jinja2 import meta

    environment = _compiled(template, name).environment
    return frozenset(meta.find_undeclared_variables(environment.parse(template)))


@lru_cache(maxsize=16)
def asks_for_null(template: str, name: str = "the chat template") -> bool:
    """Whether a template asks if a content is None.

    Raises:
        CheckpointError: it is broken.
    """
    from jinja2 import nodes

    tree = _compiled(template, name).environment.parse(template)
    asked: list[nodes.Node] = [test.node for test in tree.find_all(nodes.Test) if test.name == "none"]
    asked += [
        comparison.expr
        for comparison in tree.find_all(nodes.Compare)
        if any(_is_none(each.expr) for each in comparison.ops)
    ]
    return any(_names_content(node) for node in asked)


def _is_none(node: jinja2.nodes.Node) -> bool:
    return getattr(node, "value", node) is None


def _names_content(node: jinja2.nodes.Node) -> bool:
    """Whether an expression is something called content, not that of thoughts: a variable, an attribute or an item."""
    item = getattr(getattr(node, "arg", None), "value", None)
    words = (getattr(node, "name", None), getattr(node, "attr", None), item)
    return any(isinstance(word, str) and "content" in word and "reasoning" not in word for word in words)


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
    from jinja2.compiler import CodeGenerator, Frame
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

    class Generator(CodeGenerator):
        """Joins texts by the environment's own function everywhere."""

        def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (Jinja's name)
            self.write("concat(map(str, (")
            for each in node.nodes:
                self.visit(each, frame)
                self.write(", ")
            self.write(")))")

    class Environment(ImmutableSandboxedEnvironment):
        code_generator_class = Generator
        concat = staticmethod(joined)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    return environment.from_string(template)
