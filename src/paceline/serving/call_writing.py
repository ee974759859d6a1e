"""Function calls as the chat templates of each family write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.serving import harmony
from paceline.serving.call_readers import CALL, CALL_END, CALLS, CALLS_END, SEPARATOR

Calls = Sequence[tuple[str, Mapping[str, Any]]]
"""Names of functions and their arguments."""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{_json({'name': name, 'arguments': given})}\n</tool_call>" for name, given in calls)


def llama3_json(calls: Calls) -> str:
    return "; ".join(_json({"name": name, "parameters": given}) for name, given in calls)


def mistral(calls: Calls) -> str:
    return f"[TOOL_CALLS]{_json([{'name': name, 'arguments': given} for name, given in calls])}"


def mistral_args(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(given)}" for name, given in calls)


def pythonic(calls: Calls) -> str:
    written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
    return f"[{', '.join(written)}]"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def qwen3_coder(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{_element(name, given, chr(10))}\n</tool_call>" for name, given in calls)


def seed_oss(calls: Calls) -> str:
    return "\n".join(f"<seed:tool_call>\n{_element(name, given, '')}\n</seed:tool_call>" for name, given in calls)


def _element(name: str, given: Mapping[str, Any], around: str) -> str:
    values = "".join(f"<parameter={key}>{around}{_text(value)}{around}</parameter>\n" for key, value in given.items())
    return f"<function={name}>\n{values}</function>"


def glm45(calls: Calls) -> str:
    written = []
    for name, given in calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n" for key, value in given.items()
        )
        written.append(f"<tool_call>{name}\n{pairs}</tool_call>")
    return "\n".join(written)


def deepseek_v3(calls: Calls) -> str:
    written = (f"{CALL}function{SEPARATOR}{name}\n```json\n{_json(given)}\n```{CALL_END}" for name, given in calls)
    return CALLS + "\n".join(written) + CALLS_END


def deepseek_v31(calls: Calls) -> str:
    return CALLS + "".join(f"{CALL}{name}{SEPARATOR}{_json(given)}{CALL_END}" for name, given in calls) + CALLS_END


def kimi_k2(calls: Calls) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{_json(given)}<|tool_call_end|>"
        for number, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def openai(calls: Calls) -> str:
    return f"{harmony.START}assistant".join(
        f"{harmony.CHANNEL}commentary to=functions.{name} {harmony.CONSTRAIN}json{harmony.MESSAGE}{_json(given)}"
        f"{harmony.CALL}"
        for name, given in calls
    )
