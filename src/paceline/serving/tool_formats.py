"""How families of models write function calls: one table of what tells a format, what reads it and what writes it.

Which one a model has is read off its chat template. A template that takes tools and speaks of none of these has a
format that is not known; then the server needs to be told.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from paceline.serving import call_readers, call_writing, harmony
from paceline.serving.call_writing import Calls
from paceline.serving.growing_text import GrowingText, Steps
from paceline.serving.message_parts import Parts, new_id

Read = Callable[[GrowingText, Parts, str], Steps[bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How calls are written.

    Attributes:
        signs: regular expressions that are found in the chat templates of such models, all of them.
        begins: marks of which one begins calls.
        read: reads calls behind such a mark, or "" where they begin the text; None where the whole answer has a form
            of its own.
        write: the text of calls.
        opens: characters of which one begins calls without a mark, at the beginning of the content.
        named: in calls that begin without a mark: the name, once it is clear.
        marks: what else belongs to the format and may be a special token.
        make_id: ids of calls, as the chat templates take them back.
    """

    signs: tuple[str, ...]
    begins: tuple[str, ...]
    read: Read | None
    write: Callable[[Calls], str]
    opens: str = ""
    named: re.Pattern[str] | None = None
    marks: tuple[str, ...] = ()
    make_id: Callable[[], str] = new_id


def nine_signs() -> str:
    """An id as Mistral's chat templates want it."""
    return secrets.token_hex(5)[:9]


def _elements(end: str) -> Read:
    return partial(call_readers.read_elements, end=end)


FORMATS: Final[Mapping[str, ToolFormat]] = {
    "openai": ToolFormat(
        signs=(r"<\|start\|>", r"<\|message\|>"),
        begins=(),
        read=None,
        write=call_writing.openai,
        marks=harmony.MARKS,
    ),
    "kimi_k2": ToolFormat(
        signs=(r"<\|tool_call_begin\|>|<\|im_system\|>tool_declare",),
        begins=(call_readers.SECTION, call_readers.KIMI_CALL),
        read=call_readers.read_kimi,
        write=call_writing.kimi_k2,
        marks=(call_readers.SECTION_END, call_readers.KIMI_ARGUMENTS, call_readers.KIMI_END),
    ),
    "deepseek_v3": ToolFormat(
        signs=(call_readers.SEPARATOR, "```json"),
        begins=(call_readers.CALLS, call_readers.CALL),
        read=call_readers.read_deepseek,
        write=call_writing.deepseek_v3,
        marks=(call_readers.CALLS_END, call_readers.CALL_END, call_readers.SEPARATOR),
    ),
    "deepseek_v31": ToolFormat(
        signs=(call_readers.SEPARATOR,),
        begins=(call_readers.CALLS, call_readers.CALL),
        read=call_readers.read_deepseek,
        write=call_writing.deepseek_v31,
        marks=(call_readers.CALLS_END, call_readers.CALL_END, call_readers.SEPARATOR),
    ),
    "glm45": ToolFormat(
        signs=("<tool_call>", "<arg_key>"),
        begins=("<tool_call>",),
        read=call_readers.read_pairs,
        write=call_writing.glm45,
        marks=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "seed_oss": ToolFormat(
        signs=("<seed:tool_call>", "<function="),
        begins=("<seed:tool_call>",),
        read=_elements("</seed:tool_call>"),
        write=call_writing.seed_oss,
        marks=("</seed:tool_call>",),
    ),
    "qwen3_coder": ToolFormat(
        signs=("<tool_call>", "<function=", "<parameter="),
        begins=("<tool_call>", "<function="),
        read=_elements("</tool_call>"),
        write=call_writing.qwen3_coder,
        marks=("</tool_call>",),
    ),
    "mistral_args": ToolFormat(
        signs=(r"\[TOOL_CALLS\]", r"\[ARGS\]"),
        begins=("[TOOL_CALLS]",),
        read=call_readers.read_mistral,
        write=call_writing.mistral_args,
        marks=("[ARGS]", "[CALL_ID]"),
        make_id=nine_signs,
    ),
    "mistral": ToolFormat(
        signs=(r"\[TOOL_CALLS\]",),
        begins=("[TOOL_CALLS]",),
        read=call_readers.read_mistral,
        write=call_writing.mistral,
        make_id=nine_signs,
    ),
    "hermes": ToolFormat(
        signs=("<tool_call>",),
        begins=("<tool_call>",),
        read=partial(call_readers.read_objects, end="</tool_call>"),
        write=call_writing.hermes,
        marks=("</tool_call>",),
    ),
    "llama3_json": ToolFormat(
        signs=(r'\{"name": [^{}"]{1,64}, "parameters": ',),
        begins=("<|python_tag|>",),
        read=partial(call_readers.read_objects, end=""),
        write=call_writing.llama3_json,
        opens="{[",
        named=call_readers.NAMED,
    ),
    "pythonic": ToolFormat(
        signs=(r"\[func_name1\(",),
        begins=("<|python_start|>",),
        read=partial(call_readers.read_python, end="<|python_end|>"),
        write=call_writing.pythonic,
        opens="[",
        named=call_readers.CALLED,
        marks=("<|python_end|>",),
    ),
}
"""By name; of those that a template speaks of, the first is meant."""


def format_of(template: str | None) -> str | None:
    """The format that a chat template speaks of; None where it speaks of none that is known."""
    for name, one in FORMATS.items():
        if template is not None and all(re.search(sign, template) for sign in one.signs):
            return name
    return None


def schemas_of(tools: Any) -> dict[str, Any]:
    """The functions of a request, with the JSON schemas of their parameters."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools or ()}
