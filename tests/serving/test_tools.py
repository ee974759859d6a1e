"""Function calls and thoughts: read from whole and growing texts alike, and enforced by grammars."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from serving.conftest import calls_grammar, serve

from paceline import LLM, AsyncLLM
from paceline.config import StructuredOutputsParams
from paceline.grammar import constraint
from paceline.serving.api_errors import ApiError
from paceline.serving.chat import FORMATS, Reader, format_of
from paceline.serving.chat.message_parts import Delta
from paceline.serving.protocol import Tool

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
    "hermes, blanks and marks in texts": (
        "hermes",
        '<tool_call> {"name" : "add", "arguments" : {"a": "</tool_call> \\\\", "b": {"c": ["}"]}}, "id": "x"} '
        '</tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call>',
    ),
    "hermes, a list": ("hermes", '<tool_call>[{"name": "add", "arguments": {}}, {"name": "now"}]</tool_call>'),
    "hermes, arguments first": ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>'),
    "hermes, arguments in a text": ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'),
    "hermes, without an end": ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}'),
    "hermes, half an end": ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool'),
    "pythonic": ("pythonic", "[add(a=1, b=[2, 'x']), now()]"),
}  # fmt: skip


def pieces(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def fed(form: str, parts: list[str], *, thinking: bool = False, most: int | None = None) -> list[Any]:
    reader = Reader(FORMATS[form], thinking=thinking, most=most)
    return [reader.feed(part, last=i == len(parts) - 1) for i, part in enumerate(parts)]


def joined(found: list[Any]) -> tuple[str, str, list[tuple[str, str]]]:
    """What a client makes of deltas: content, reasoning, and each call's name and arguments."""
    calls: list[list[str]] = []
    for delta in found:
        for one in delta.calls:
            if "id" in one:
                assert one["index"] == len(calls)
                calls.append([one["function"]["name"], ""])
            else:
                assert set(one) == {"index", "function"}
            calls[one["index"]][1] += one["function"]["arguments"]
    return "".join(d.content for d in found), "".join(d.reasoning for d in found), [(a, b) for a, b in calls]


def read(form: str, parts: list[str], *, thinking: bool = False) -> tuple[str, str, list[Any]]:
    content, reasoning, calls = joined(fed(form, parts, thinking=thinking))
    return content, reasoning, [(name, json.loads(arguments)) for name, arguments in calls]


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
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call> and on'),
    ("hermes", '<tool_call>{"name": "add"'),
    ("hermes", "<tool_call>"),
    ("llama3_json", '{"colour": "red"}'),
    ("llama3_json", '{"name": "Paul", "age": 3}'),
    ("mistral", "[TOOL_CALL] is no mark"),
    ("pythonic", "[1, 2, 3]"),
])  # fmt: skip
def test_what_is_no_call_stays_text_to_the_letter(form: str, text: str) -> None:
    for size in (1, 3, 100):
        assert read(form, pieces(text, size)) == (text, "", [])


STREAMED = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": [1, 2, 3], "b": "a longer text"}}\n</tool_call>',
    "llama3_json": '{"name": "add", "parameters": {"a": [1, 2, 3], "b": "a longer text"}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": [1, 2, 3], "b": "a longer text"}}]',
}


@pytest.mark.parametrize("form", STREAMED)
def test_arguments_come_while_they_are_written(form: str) -> None:
    text = STREAMED[form]
    start = text.index('{"a"')
    arguments = text[start : text.index("}", start) + 1]
    found = fed(form, list(text))
    first = next(i for i, delta in enumerate(found) if delta.calls)
    assert first == start  # the brace that tells an object from a text
    assert found[first].calls[0]["function"] == {"name": "add", "arguments": "{"}
    for at in range(start, start + len(arguments)):
        assert joined(found[: at + 1])[2] == [("add", text[start : at + 1])]
    whole = fed(form, [text])
    assert joined(whole)[2] == joined(found)[2] == [("add", arguments)]
    cut = text[: start + 10]
    assert joined(fed(form, [cut]))[2] == joined(fed(form, list(cut)))[2] == [("add", text[start : start + 10])]


def test_calls_beyond_the_most_are_dropped() -> None:
    form, text = TEXTS["hermes, two"]
    for size in (1, 7, 1000):
        content, _, calls = joined(fed(form, pieces(text, size), most=1))
        assert (content, calls) == ("", [("add", '{"a": 1}')])


def test_thoughts_are_split_off() -> None:
    for size in (1, 4, 100):
        assert read("hermes", pieces("<think>\nhm <b\n</think>\n\nYes.", size)) == ("Yes.", "hm <b\n", [])
        assert read("hermes", pieces("hm</think>Yes.", size), thinking=True) == ("Yes.", "hm", [])
        assert read("hermes", pieces("No <think> here", size)) == ("No <think> here", "", [])


def test_the_format_is_read_off_the_template() -> None:
    assert format_of("... <tool_call> ...") == "hermes"
    assert format_of("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert format_of('{"name": x, "parameters": y}') == "llama3_json"
    assert format_of(None) is None


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


def obeys(model: LLM, grammar: str, text: str) -> bool:
    """Whether a whole text is one that the grammar allows."""
    rule = constraint(StructuredOutputsParams(grammar=grammar), model.tokenizer, model.runner.info.vocab_size,
                      model.defaults.eos_ids)  # fmt: skip
    tokens = [*model.tokenizer.encode(text, add_special_tokens=False), model.defaults.eos_ids[0]]
    return rule.allowed(tokens) == len(tokens)


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral"])
def test_required_calls_are_a_grammar_of_what_is_read(model: LLM, form: str) -> None:
    key = "parameters" if form == "llama3_json" else "arguments"
    good = {"hermes": '<tool_call>\n{"name": "add", "%s": {"a": 7}}\n</tool_call>',
            "llama3_json": '{"name": "add", "%s": {"a": 7}}',
            "mistral": '[TOOL_CALLS][{"name": "add", "%s": {"a": 7}}]'}[form] % key  # fmt: skip
    grammar = calls_grammar(TOOLS, form)

    def whole(text: str) -> bool:
        return obeys(model, grammar, text)

    assert whole(good)
    assert read(form, [good])[2] == [("add", {"a": 7})]
    for wrong in (
        good.replace("7", '"x"'),
        good.replace("add", "sub"),
        f"Hello {good}",
        good.replace('{"a": 7}', "{}"),
    ):
        assert not whole(wrong)
    only = calls_grammar(TOOLS, form, only="now", many=False)
    assert '"add"' not in only
    assert all(a != b for a, b in pairwise([grammar, only]))


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral"])
def test_arguments_may_have_escaped_slashes_and_marks_may_not(model: LLM, form: str) -> None:
    parameters = {"type": "object", "properties": {"a/b": {"enum": ["/x"]}}, "required": ["a/b"]}
    tool = Tool.model_validate({"type": "function", "function": {"name": "add", "parameters": parameters}})
    grammar = calls_grammar([tool], form)
    call = STREAMED[form].replace('{"a": [1, 2, 3], "b": "a longer text"}', r'{"a\/b": "\/x"}')
    assert obeys(model, grammar, call)
    assert read(form, [call])[2] == [("add", {"a/b": "/x"})]
    assert not obeys(model, grammar, call.replace("x", "y"))
    assert not obeys(model, grammar, call.replace('"add"', r'"ad\/d"'))
    assert form != "hermes" or not obeys(model, grammar, call.replace("</", r"<\/"))


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral", "pythonic"])
def test_required_calls_do_not_go_on_for_ever(model: LLM, form: str) -> None:
    call = "[add(a=7)]" if form == "pythonic" else STREAMED[form].replace('[1, 2, 3], "b": "a longer text"', "7")
    grammar = calls_grammar(TOOLS, form)
    assert obeys(model, grammar, call)
    assert obeys(model, grammar, call.replace("7", 15 * "7"))
    for wrong in (call.replace("7", 200 * "7"), call.replace("7", 200 * " " + "7"), call.replace("(", "(" + 99 * "\n")):
        assert wrong == call or not obeys(model, grammar, wrong)
    if form != "pythonic":
        assert obeys(model, grammar, call.replace(": 7", ":\n        7"))


PARAMETERS = {
    "type": "object",
    "properties": {
        "where": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "it's", None]},
        "more": {"type": "object", "properties": {"a": {"type": ["number", "null"]}}, "required": ["a"]},
        "tree": {"$ref": "#/$defs/tree"},
    },
    "required": ["where"],
    "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
}


def python(*, only: str | None = None, many: bool = True, strict: bool = False, **parameters: Any) -> str:
    function = {"name": "weather", "parameters": parameters or PARAMETERS, "strict": strict}
    tools = [Tool.model_validate({"type": "function", "function": function}), TOOLS[1]]
    return calls_grammar(tools, "pythonic", only=only, many=many)


@pytest.mark.parametrize(("arguments", "expected"), [
    ("where='Rome'", {"where": "Rome"}),
    ('where="a \\"b\\" \\n \'c\'", days=3', {"where": "a \"b\" \n 'c'", "days": 3}),
    ("where='', unit=\"it's\",more={'a': -1.5e3}", {"where": "", "unit": "it's", "more": {"a": -1500.0}}),
    ("where='ä', unit=None, tree=[[], [[]]]", {"where": "ä", "unit": None, "tree": [[], [[]]]}),
])  # fmt: skip
def test_calls_of_python_are_a_grammar_of_what_is_read(model: LLM, arguments: str, expected: dict[str, Any]) -> None:
    for grammar in (python(), python(strict=True)):
        for text, calls in (
            (f"[weather({arguments})]", [("weather", expected)]),
            (f"[now(), weather({arguments})]", [("now", {}), ("weather", expected)]),
        ):
            assert obeys(model, grammar, text)
            assert read("pythonic", [text])[2] == calls
    one = python(many=False, only="weather")
    assert obeys(model, one, f"[weather({arguments})]")
    assert not obeys(model, one, f"[weather({arguments}), weather({arguments})]")
    assert not obeys(model, one, "[now()]")


@pytest.mark.parametrize("wrong", [
    "weather(where='Rome')", "[weather()]", "[weather(days=3)]", "[weather(where=3)]", "[weather(where='a', days=10)]",
    "[weather(where='a', days=1.5)]", "[weather(where='a', unit='F')]", "[weather(where='a', more={})]",
    "[weather(days=3, where='a')]", "[weather(where='a', other=1)]", "[weather(where='a' 'b')]", "[other()]", "[]",
    "[weather(where='a', tree=[[], [], []])]", "[weather(where='\\x41')]", "[now(a=1)]", "Hello",
    "[weather(where=f'a')]",
])  # fmt: skip
def test_what_is_no_call_of_python_is_not_allowed(model: LLM, wrong: str) -> None:
    assert not obeys(model, python(), wrong)


def test_what_python_calls_cannot_hold_is_rejected() -> None:
    text = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}
    assert python(**text)
    for strict, parameters, words in (
        (True, text, "pattern"),
        (False, {"type": "object", "properties": {"a-b": {}}}, "no name in Python"),
        (False, {"type": "object", "properties": {"class": {}}}, "no name in Python"),
        (True, {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}, "not there"),
        (False, {"type": "object", "properties": {"a": {"type": "tuple"}}}, "tuple"),
        (False, {"type": "object", "required": ["a"]}, "require"),
        (False, {"type": "object", "properties": {"a": False}}, "satisfies"),
    ):
        with pytest.raises(ApiError, match=words) as caught:
            python(strict=strict, **parameters)
        assert caught.value.param == "tools"


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral", "pythonic"])
def test_calls_over_http_are_the_same_whole_and_streamed(model: LLM, tmp_path: Path, form: str) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ tools | tojson if tools }}{% for message in messages %}{{ message.content }}{% endfor %}")
    tools = [tool.model_dump(exclude_none=True) for tool in TOOLS]
    body = {"messages": [{"role": "user", "content": "Go"}], "tools": tools, "temperature": 1.3, "max_tokens": 80}
    for live in serve(AsyncLLM(model), chat_template=str(file), tool_call_parser=form):
        several = False
        for seed in range(6):
            given = body | {"seed": seed, "tool_choice": "required", "parallel_tool_calls": seed < 3}
            whole = live.ok("/v1/chat/completions", **given)["choices"][0]
            with live.http.stream("POST", "/v1/chat/completions", json=given | {"stream": True}) as answer:
                lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
            deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
            content, _, calls = joined([Delta(d.get("content", ""), "", d.get("tool_calls", [])) for d in deltas])
            assert [(one["function"]["name"], one["function"]["arguments"]) for one in
                    whole["message"].get("tool_calls", ())] == calls  # fmt: skip
            assert content == (whole["message"]["content"] or "")
            several = several or sum("tool_calls" in delta for delta in deltas) > len(calls) > 0
            if whole["finish_reason"] == "length":
                continue
            assert whole["finish_reason"] == "tool_calls"
            for name, arguments in calls:
                assert set(json.loads(arguments)) == ({"a"} if name == "add" else set())
        assert several == (form != "pythonic")
