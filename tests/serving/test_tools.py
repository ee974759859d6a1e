"""Function calls and thoughts: read from whole and growing texts alike, and enforced by grammars."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from paceline import LLM
from paceline.config import StructuredOutputsParams
from paceline.grammar import constraint
from paceline.serving import FORMATS, Reader, Tool, calls_grammar, format_of

TEXTS: dict[str, tuple[str, str]] = {
    "hermes": ("hermes", 'Sure.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'),
    "hermes, two": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "now", "arguments": {}}'
        "</tool_call>",
    ),
    "llama3_json": ("llama3_json", '{"name": "add", "parameters": {"a": 1, "b": 2}}'),
    "llama3_json, two": ("llama3_json", '{"name": "add", "parameters": {}}; {"name": "now", "parameters": {}}'),
    "mistral": (
        "mistral",
        'Well [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
    ),
    "pythonic": ("pythonic", "[add(a=1, b=[2, 'x']), now()]"),
}  # fmt: skip


def pieces(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def read(form: str, parts: list[str], *, thinking: bool = False) -> tuple[str, str, list[Any]]:
    reader = Reader(FORMATS[form], thinking=thinking)
    found = [reader.feed(part, last=i == len(parts) - 1) for i, part in enumerate(parts)]
    calls = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for d in found for one in d.calls]
    assert [one["index"] for d in found for one in d.calls] == list(range(len(calls)))
    return "".join(d.content for d in found), "".join(d.reasoning for d in found), calls


@pytest.mark.parametrize("case", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_calls_are_read_from_whole_and_growing_texts_alike(case: str, size: int) -> None:
    form, text = TEXTS[case]
    content, _, calls = read(form, pieces(text, size))
    names = [name for name, _ in calls]
    assert names == (["add", "now"] if "now" in text else ["add"])
    assert not any(mark in content for mark in ("tool_call", "TOOL_CALLS", '"name"'))
    assert (calls, content) == (read(form, [text])[2], read(form, [text])[0])


@pytest.mark.parametrize(("form", "text"), [
    ("hermes", "Use <tool_ or <tool_call or a < b."),
    ("hermes", "<tool_call>{broken</tool_call> and on"),
    ("llama3_json", "An answer in words, {not} a call."),
    ("llama3_json", '{"colour": "red"}'),
    ("mistral", "[TOOL_CALL] is no mark"),
    ("pythonic", "[1, 2, 3]"),
])  # fmt: skip
def test_what_is_no_call_stays_text_to_the_letter(form: str, text: str) -> None:
    for size in (1, 3, 100):
        assert read(form, pieces(text, size)) == (text, "", [])


def test_thoughts_are_split_off() -> None:
    for size in (1, 4, 100):
        assert read("hermes", pieces("<think>\nhm <b\n</think>\n\nYes.", size)) == ("Yes.", "hm <b\n", [])
        assert read("hermes", pieces("hm</think>Yes.", size), thinking=True) == ("Yes.", "hm", [])
        assert read("hermes", pieces("No <think> here", size)) == ("No <think> here", "", [])


def test_the_format_is_read_off_the_template() -> None:
    assert format_of("... <tool_call> ...") == "hermes"
    assert format_of("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert format_of('{"name": x, "parameters": y}') == "llama3_json"
    assert format_of(None) == "hermes"


TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": "add", "parameters": {
        "type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"], "additionalProperties": False,
        "$defs": {"n": {"type": "integer"}}}}}),
    Tool.model_validate({"type": "function", "function": {"name": "now", "parameters": {
        "type": "object", "properties": {}, "additionalProperties": False}}}),
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> LLM:
    return LLM(dtype="float32", profile=False)


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral"])
def test_required_calls_are_a_grammar_of_what_is_read(model: LLM, form: str) -> None:
    key = FORMATS[form].key
    good = {"hermes": '<tool_call>\n{"name": "add", "%s": {"a": 7}}\n</tool_call>',
            "llama3_json": '{"name": "add", "%s": {"a": 7}}',
            "mistral": '[TOOL_CALLS][{"name": "add", "%s": {"a": 7}}]'}[form] % key  # fmt: skip
    grammar = calls_grammar(TOOLS, form, only=None, parallel=True)

    def whole(text: str) -> bool:
        rule = constraint(StructuredOutputsParams(grammar=grammar), model.tokenizer, model.runner.info.vocab_size,
                          model.defaults.eos_ids)  # fmt: skip
        tokens = [*model.tokenizer.encode(text, add_special_tokens=False), model.defaults.eos_ids[0]]
        return rule.allowed(tokens) == len(tokens)

    assert whole(good)
    assert read(form, [good])[2] == [("add", {"a": 7})]
    for wrong in (
        good.replace("7", '"x"'),
        good.replace("add", "sub"),
        f"Hello {good}",
        good.replace('{"a": 7}', "{}"),
    ):
        assert not whole(wrong)
    only = calls_grammar(TOOLS, form, only="now", parallel=False)
    assert '"add"' not in only
    assert all(a != b for a, b in pairwise([grammar, only]))
