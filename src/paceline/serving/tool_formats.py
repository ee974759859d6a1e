"""How families of models write function calls, and which way a chat template speaks of.

Formats: Hermes (Qwen, SmolLM2, many others): `<tool_call>{"name": ..., "arguments": ...}</tool_call>`; Llama 3:
`{"name": ..., "parameters": ...}`; Mistral: `[TOOL_CALLS][{"name": ..., "arguments": ...}]`; pythonic (Llama 3.2
and 4): `[name(key=value)]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written.

    Attributes:
        signs: what the chat templates of such models contain, all of them.
        begin: what starts calls; "" where they start the text.
        end: what ends one; "" where the text's end does.
        key: under which the arguments are.
        listed: calls are the items of one list.
    """

    signs: tuple[str, ...]
    begin: str
    end: str
    key: str
    listed: bool


FORMATS: Final[Mapping[str, ToolFormat]] = {
    "mistral": ToolFormat(("[TOOL_CALLS]",), "[TOOL_CALLS]", "", "arguments", True),
    "hermes": ToolFormat(("<tool_call>",), "<tool_call>", "</tool_call>", "arguments", False),
    "llama3_json": ToolFormat(('"parameters"',), "", "", "parameters", False),
    "pythonic": ToolFormat(("[func_name1(",), "", "", "", True),
}


def format_of(template: str | None) -> str:
    """The format that a chat template speaks of; Hermes where it speaks of none."""
    for name, one in FORMATS.items():
        if template is not None and all(sign in template for sign in one.signs):
            return name
    return "hermes"
