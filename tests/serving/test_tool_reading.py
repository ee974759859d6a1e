"""Thoughts, content and calls in the forms of today's families: whole, in two pieces cut anywhere, by characters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from paceline.config.server import TOOL_FORMATS
from paceline.serving.api_errors import ApiError
from paceline.serving.chat import FORMATS, Reader, ThoughtSteering, format_of, reasoning_of
from paceline.serving.chat.reasoning import REASONING
from paceline.serving.chat.values import typed_value

BAR, LOW = "\uff5c", "\u2581"


def deepseek(words: str) -> str:
    return f"<{BAR}{words.replace(' ', LOW)}{BAR}>"


FUNCTIONS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "more": {"type": "object"},
    }},
    "now": {"type": "object", "properties": {}},
}  # fmt: skip
OSLO = {"city": 'Os"lo\n<b> \\', "days": 3, "exact": True, "unit": None, "more": {"a": [1, {"b": "}"}], "c": "ü☃"}}
CALLS = [("weather", OSLO), ("now", {})]
PUBLISHED: dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "hermes": ('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n<tool_call>\n'
               '{"name": "now", "arguments": {}}\n</tool_call>', [("weather", {"city": "Oslo"}), ("now", {})]),
    "mistral": ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}, "id": "a1b2c3d4e"}, {"name": "now", '
                '"arguments": {}, "id": "a1b2c3d4f"}]', [("weather", {"city": "Oslo"}), ("now", {})]),
    "mistral_args": ('[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Oslo"}[TOOL_CALLS]now[ARGS]{}',
                     [("weather", {"city": "Oslo"}), ("now", {})]),
    "llama3_json": ('<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Oslo"}}',
                    [("weather", {"city": "Oslo"})]),
    "pythonic": ('<|python_start|>[weather(city="Oslo", exact=true, unit=null), now()]<|python_end|>',
                 [("weather", {"city": "Oslo", "exact": True, "unit": None}), ("now", {})]),
    "qwen3_coder": ("<tool_call>\n<function=weather>\n<parameter=city>\nOslo\nand\n\nround it\n</parameter>\n"
                    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
                    [("weather", {"city": "Oslo\nand\n\nround it", "days": 3})]),
    "openai": ("<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\": \"Oslo\"}<|call|>"
               "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
               [("weather", {"city": "Oslo"}), ("now", {})]),
    "glm45": ("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
              "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
              [("weather", {"city": "Oslo", "days": 3}), ("now", {})]),
    "deepseek_v3": (f"{deepseek('tool calls begin')}{deepseek('tool call begin')}function{deepseek('tool sep')}"
                    f"weather\n```json\n{{\"city\": \"Oslo\"}}\n```{deepseek('tool call end')}\n"
                    f"{deepseek('tool call begin')}function{deepseek('tool sep')}now\n```json\n{{}}\n```"
                    f"{deepseek('tool call end')}{deepseek('tool calls end')}",
                    [("weather", {"city": "Oslo"}), ("now", {})]),
    "deepseek_v31": (f"{deepseek('tool calls begin')}{deepseek('tool call begin')}weather{deepseek('tool sep')}"
                     f"{{\"city\": \"Oslo\"}}{deepseek('tool call end')}{deepseek('tool call begin')}now"
                     f"{deepseek('tool sep')}{{}}{deepseek('tool call end')}{deepseek('tool calls end')}",
                     [("weather", {"city": "Oslo"}), ("now", {})]),
    "kimi_k2": ('<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>'
                '{"city": "Oslo"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
                "<|tool_call_end|><|tool_calls_section_end|>", [("weather", {"city": "Oslo"}), ("now", {})]),
    "seed_oss": ("<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n<parameter=more>{'a': True}"
                 "</parameter>\n</function>\n</seed:tool_call>", [("weather", {"city": "Oslo", "more": {"a": True}})]),
    "minimax_m2": ('<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
                   '<parameter name="more">{"a": true}</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
                   "</minimax:tool_call>", [("weather", {"city": "Oslo", "more": {"a": True}}), ("now", {})]),
    "hunyuan_a13b": ('<tool_calls>[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "now", '
                     '"arguments": {}}]</tool_calls>', [("weather", {"city": "Oslo"}), ("now", {})]),
    "olmo3": ('<function_calls>weather(city="Oslo", exact=true, unit=null)\nnow()</function_calls>',
              [("weather", {"city": "Oslo", "exact": True, "unit": None}), ("now", {})]),
    "apertus": ('<|tools_prefix|>[{"weather": {"city": "Oslo"}}, {"now": {}}]<|tools_suffix|>',
                [("weather", {"city": "Oslo"}), ("now", {})]),
    "gemma4": ('<|tool_call>call:weather{city:<|"|>Oslo, {}<|"|>,days:3,more:{a:[1,true]},unit:null}<tool_call|>'
               "<|tool_call>call:now{}<tool_call|>",
               [("weather", {"city": "Oslo, {}", "days": 3, "more": {"a": [1, True]}, "unit": None}), ("now", {})]),
    "phi4_mini_json": ('functools[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "now", '
                       '"arguments": {}}]', [("weather", {"city": "Oslo"}), ("now", {})]),
}  # fmt: skip
"""Calls as the published templates of each family write them."""

THOUGHTS: dict[str, str] = {
    "think": "<think>\nhm < b\n</think>\n\n",
    "mistral": "[THINK]hm < b\n[/THINK]",
    "seed": "<seed:think>hm < b\n</seed:think>",
    "command": "<|START_THINKING|>hm < b\n<|END_THINKING|>",
    "apertus": "<|inner_prefix|>hm < b\n<|inner_suffix|>",
    "gemma": "<|channel>thought\nhm < b\n<channel|>",
    "harmony": "<|channel|>analysis<|message|>hm < b\n<|end|><|start|>assistant",
}

Read = tuple[str, str, list[tuple[str, str]]]


def fed(pieces: Iterable[str], *, cut: bool = False, **options: Any) -> tuple[Read, Reader]:
    """What a client makes of the deltas: content, thoughts, and each call's name and arguments."""
    reader = Reader(**{"functions": FUNCTIONS} | options)
    content, thoughts, calls = "", "", list[list[str]]()
    parts = list(pieces)
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        delta = reader.feed(part, last=last, cut=cut and last)
        content, thoughts = content + delta.content, thoughts + delta.reasoning
        for one in delta.calls:
            if "id" in one:
                assert one["index"] == len(calls)
                calls.append([one["function"]["name"], ""])
            calls[one["index"]][1] += one["function"]["arguments"]
    return (content, thoughts, [(name, arguments) for name, arguments in calls]), reader


def cuts(text: str) -> Iterator[list[str]]:
    """The text by characters, and in two pieces, cut everywhere."""
    yield list(text) or [""]
    for at in range(len(text) + 1):
        yield [text[:at], text[at:]]


def everywhere(text: str, **options: Any) -> tuple[Read, Reader]:
    """What is read of the whole text, which is what is read of its pieces."""
    expected, reader = fed([text], **options)
    for pieces in cuts(text):
        found, other = fed(pieces, **options)
        assert found == expected, pieces
        assert (other.whole, other.called) == (reader.whole, reader.called)
    return expected, reader


def parsed(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


def options_of(form: str, reasoning: str = "think") -> dict[str, Any]:
    return {"form": FORMATS[form], "reasoning": REASONING["harmony" if form == "openai" else reasoning]}


def test_the_server_takes_the_names_of_the_table() -> None:
    assert set(TOOL_FORMATS) == set(FORMATS) == set(PUBLISHED)


@pytest.mark.parametrize("form", FORMATS)
def test_calls_as_published_are_read_however_they_come(form: str) -> None:
    text, calls = PUBLISHED[form]
    (content, thoughts, found), reader = everywhere(text, **options_of(form))
    assert (content, thoughts, parsed(found)) == ("", "", calls)
    assert (reader.whole, reader.called) == (True, len(calls))
    assert parsed(fed([text], **options_of(form), most=1)[0][2]) == calls[:1]


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_written_is_read(form: str) -> None:
    text = FORMATS[form].write(CALLS)
    (content, _, found), reader = everywhere(text, **options_of(form))
    assert (content, parsed(found), reader.whole) == ("", CALLS, True)


@pytest.mark.parametrize("form", [one for one in FORMATS if one not in ("openai", "pythonic", "llama3_json")])
@pytest.mark.parametrize("reasoning", [one for one in THOUGHTS if one != "harmony"])
def test_thoughts_and_words_come_before_calls(form: str, reasoning: str) -> None:
    text = f"{THOUGHTS[reasoning]}Let me look.\n{PUBLISHED[form][0]}"
    options = options_of(form, reasoning)
    expected, _ = fed([text], **options)
    assert expected[:2] == ("Let me look.\n", "hm < b\n")
    assert parsed(expected[2]) == PUBLISHED[form][1]
    assert fed(list(text), **options)[0] == expected


@pytest.mark.parametrize("reasoning", THOUGHTS)
def test_thoughts_are_read_however_they_come(reasoning: str) -> None:
    answer = "<|channel|>final<|message|>Yes, <b>." if reasoning == "harmony" else "Yes, <b>."
    given: dict[str, Any] = {"form": None, "reasoning": REASONING[reasoning]}
    found, reader = everywhere(THOUGHTS[reasoning] + answer, **given)
    assert (found, reader.called, reader.whole) == (("Yes, <b>.", "hm < b\n", []), 0, False)
    assert everywhere("Yes, <b>.", **given)[0] == ("Yes, <b>.", "", [])
    around = f"{THOUGHTS[reasoning]}<|START_RESPONSE|>Yes.<|END_RESPONSE|>"
    assert reasoning != "command" or everywhere(around, **given)[0] == ("Yes.", "hm < b\n", [])
    form = REASONING[reasoning]
    if form.begin:
        assert everywhere(f"hm{form.end}\nYes.", thinking=True, **given)[0] == ("Yes.", "hm", [])
        assert everywhere(f"{form.begin}hm{form.end}\nYes.", thinking=True, **given)[0] == ("Yes.", "hm", [])
        assert everywhere("hm", thinking=True, **given)[0] == ("", "hm", [])
        assert everywhere(f"No {form.begin} here", **given)[0] == (f"No {form.begin} here", "", [])


def test_messages_have_channels() -> None:
    text = ("<|channel|>analysis<|message|>First.<|end|><|start|>assistant<|channel|>commentary<|message|>I look it up."
            "<|end|><|start|>assistant<|channel|>analysis<|message|>Second.<|end|><|start|>assistant<|channel|>commentary"
            ' to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>')  # fmt: skip
    given = options_of("openai")
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    for more in ({}, {"prompt": prompt}):
        (content, thoughts, calls), reader = everywhere(text, **given, **more)
        assert (content, thoughts) == ("I look it up.", "First.\n\nSecond.")
        assert (parsed(calls), reader.whole) == ([("weather", {"city": "Oslo"})], True)
    assert everywhere("<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>final<|message|>a<|end|>"
                      "<|start|>assistant<|channel|>final<|message|>b", **given)[0] == ("a\n\nb", "x", [])  # fmt: skip
    inside = f"{prompt}<|channel|>final<|message|>It goes "
    assert everywhere("on.<|return|>", prompt=inside, **given)[0] == ("on.", "", [])
    assert everywhere("hm<|end|><|start|>assistant<|channel|>final<|message|>a",
                      prompt=f"{prompt}<|channel|>analysis<|message|>", **given)[0] == ("a", "hm", [])  # fmt: skip
    for header in ("commentary to=functions.other", "commentary to=python", "final"):
        found, reader = everywhere(f'<|channel|>{header}<|message|>{{"a": 1}}<|call|>', **given)
        assert (found, reader.whole) == (('{"a": 1}', "", []), False)
    none: dict[str, Any] = {"form": None, "reasoning": REASONING["harmony"]}
    found, _ = everywhere('<|channel|>commentary to=functions.weather<|message|>{"a": 1}<|call|>', **none)
    assert found == ('{"a": 1}', "", [])
    assert everywhere("No headers < here <|en", **given)[0] == ("No headers < here <|en", "", [])
    assert everywhere("<|message|>analysis<|message|>x<|start|>assistant<|message|>final<|message|>y",
                      **given)[0] == ("y", "x", [])  # fmt: skip


@pytest.mark.parametrize("form", [one for one in FORMATS if one != "openai"])
def test_calls_of_what_is_no_tool_are_content_to_the_letter(form: str) -> None:
    text = PUBLISHED[form][0].replace("weather", "climate").replace("now", "later")
    found, reader = everywhere(text, **options_of(form))
    assert found == (text, "", [])
    assert not reader.whole
    assert everywhere(text, **options_of(form) | {"form": None})[0] == (text, "", [])
    both = f"{text} {FORMATS[form].write(CALLS)}" if form not in ("llama3_json", "pythonic") else ""
    content, _, calls = everywhere(both, **options_of(form))[0]
    assert parsed(calls) == (CALLS if both else [])
    assert content.strip() == (text if both else "")


def test_a_list_may_hold_calls_of_what_is_no_tool() -> None:
    calls = [("weather", {"city": "a"}), ("climate", {"city": "b"}), ("now", {})]
    (content, _, found), reader = everywhere(FORMATS["mistral"].write(calls), **options_of("mistral"))
    assert (parsed(found), reader.whole) == ([calls[0], calls[2]], True)
    assert content == '{"name": "climate", "arguments": {"city": "b"}}'


def marked(form: str) -> bool:
    return form not in ("llama3_json", "pythonic")


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_cut_off_within_a_call_is_no_content(form: str) -> None:
    text = PUBLISHED[form][0] if marked(form) else FORMATS[form].write([("weather", {"city": "Oslo"})])
    names = [name for name, _ in PUBLISHED[form][1]]
    begins = FORMATS[form].begins or ("<|channel|>", "<|start|>")
    for at in range(len(text) + 1):
        found, reader = fed([text[:at]], cut=True, **options_of(form))
        content, _, calls = found
        assert fed(list(text[:at]) or [""], cut=True, **options_of(form))[0] == found
        assert reader.whole <= all(is_json(arguments) for _, arguments in calls)
        assert [name for name, _ in calls] == names[: len(calls)]
        if marked(form):
            assert content == "" or any(one.startswith(content) and one != content for one in begins), content
        else:
            assert not any(one in content for one in ('weather"', "weather("))
    assert fed([text], cut=True, **options_of(form))[1].whole


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_what_ends_of_itself_within_what_began_like_a_call_is_content() -> None:
    for text in ("<tool_call>", '<tool_call>\n{"name": "weather"', "<tool_call>\nno"):
        assert everywhere(text, **options_of("hermes"))[0] == (text, "", [])
        assert fed([text], cut=True, **options_of("hermes"))[0][0] == (text if "no" in text else "")
    for text in ('{"n', '{"name": "climate"'):
        assert fed([text], cut=True, **options_of("llama3_json"))[0] == (text, "", [])
    assert fed(['{"name": "weather"'], cut=True, **options_of("llama3_json"))[0] == ("", "", [])


def test_arguments_that_are_no_json_are_no_whole_call() -> None:
    for arguments, whole in (('{"city": "a"}', True), ("{city: 1}", False), ('{"a": NaN}', False)):
        text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
        found, reader = everywhere(text, **options_of("hermes"))
        assert found == ("", "", [("weather", arguments)])
        assert (reader.called, reader.whole) == (1, whole)


def test_json_that_is_no_call_comes_while_it_is_written() -> None:
    reader = Reader(FORMATS["llama3_json"], functions=FUNCTIONS)
    assert reader.feed('{"answer": 4', last=False).content == '{"answer": 4'
    assert reader.feed("2}", last=True).content == "2}"
    python = Reader(FORMATS["pythonic"], functions=FUNCTIONS)
    assert python.feed("[1, 2", last=False).content == "[1, 2"


def test_blanks_around_calls_are_no_content() -> None:
    call = PUBLISHED["hermes"][0]
    for text, content in ((f"\n \n{call}\n", ""), (f"{call}\n\nDone.", "Done."), ("\n ", "\n "), (" a ", " a ")):
        assert everywhere(text, **options_of("hermes"))[0][0] == content


def test_special_tokens_are_not_left_over() -> None:
    given = options_of("kimi_k2")
    hidden = (*FORMATS["kimi_k2"].begins, *FORMATS["kimi_k2"].marks)
    text = PUBLISHED["kimi_k2"][0].replace("weather", "climate").replace("now", "later")
    plain = text
    for mark in hidden:
        plain = plain.replace(mark, "")
    assert everywhere(text, hidden=hidden, **given)[0] == (plain, "", [])
    assert everywhere("a<|tool_call_end|>b", hidden=hidden, **given)[0] == ("ab", "", [])
    assert everywhere("a<|tool_call_end|>b", **given)[0] == ("a<|tool_call_end|>b", "", [])
    inside = f"<think>hm{PUBLISHED['kimi_k2'][0]}"  # a token that can only begin calls ends thoughts
    content, thoughts, calls = everywhere(inside, hidden=hidden, **given)[0]
    assert (content, thoughts, parsed(calls)) == ("", "hm", PUBLISHED["kimi_k2"][1])


def test_ids_are_what_the_templates_take_back() -> None:
    def ids(form: str) -> list[str]:
        return [one["id"] for one in Reader(FORMATS[form]).feed(PUBLISHED[form][0], last=True).calls if "id" in one]

    assert ids("kimi_k2") == ["functions.weather:0", "functions.now:1"]
    first, second = ids("mistral_args")
    assert (first, len(second), second.isalnum()) == ("a1b2c3d4e", 9, True)
    assert all(len(one) == 9 and one.isalnum() for one in ids("mistral"))
    assert all(one.startswith("call_") for one in ids("hermes"))


def test_python_has_texts_around_its_calls() -> None:
    given = options_of("pythonic")
    for text, content, arguments in (
        ("[weather(city='it\\'s (', more={'k': [1, (2,)]})] So.", " So.", {"city": "it's (", "more": {"k": [1, [2]]}}),
        ('[weather(days=-3, city="""a"b""")]', "", {"days": -3, "city": 'a"b'}),
        ("[weather(city='a' 'b',)]\n", "", {"city": "ab"}),
    ):
        found, reader = everywhere(text, **given)
        assert (found[0].strip(), parsed(found[2]), reader.whole) == (content.strip(), [("weather", arguments)], True)
    wrong = ("1", "city=b'x'", "city=x", "days=1e999", "**{}", "days=1+2", f"city={'[' * 300}{']' * 300}")
    for text in (*(f"[weather({one})]" for one in wrong), "weather(city='a')"):
        assert everywhere(text, **given)[0] == (text, "", [])


def test_elements_hold_marks_of_their_own() -> None:
    value = "a</parameter> b <parameter=x>\n  </function>"
    text = f"<tool_call>\n<function=weather>\n<parameter=city>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert parsed(everywhere(text, **options_of("qwen3_coder"))[0][2]) == [("weather", {"city": value})]
    bare = text.removeprefix("<tool_call>\n")
    assert parsed(everywhere(f"Well. {bare}", **options_of("qwen3_coder"))[0][2]) == [("weather", {"city": value})]
    short = "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n</tool_call>"
    assert parsed(everywhere(short, **options_of("qwen3_coder"))[0][2]) == [("weather", {"days": 3})]
    broken = "<tool_call>\n<function=weather>\nsorry\n</function>\n</tool_call>"
    assert not everywhere(broken, **options_of("qwen3_coder"))[1].whole


SCHEMA: dict[str, Any] = {
    "$defs": {"size": {"enum": [1, 2]}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}},
    "properties": {
        "text": {"type": "string"}, "whole": {"type": "integer"}, "real": {"type": "number"}, "any": {},
        "perhaps": {"type": ["string", "null"]}, "list": {"type": "array"}, "size": {"$ref": "#/$defs/size"},
        "either": {"oneOf": [{"type": "integer"}, {"type": "string"}]}, "loop": {"$ref": "#/$defs/loop"},
        "yes": {"type": "boolean"}, "one": {"const": "5"}, "wrong": {"type": 3, "enum": 4, "anyOf": "x"},
    },
}  # fmt: skip


@pytest.mark.parametrize(("key", "text", "value"), [
    ("text", "5", "5"), ("text", "null", "null"), ("text", ' "a" ', ' "a" '), ("whole", "5", 5), ("whole", "5.0", 5),
    ("whole", "5.5", "5.5"), ("whole", "five", "five"), ("whole", "null", None), ("real", "5", 5),
    ("real", "1e2", 100.0),
    ("real", "1e999", "1e999"), ("real", "NaN", "NaN"), ("any", "5", 5), ("any", "five", "five"), ("any", "true", True),
    ("any", '"a"', '"a"'), ("any", "[1]", [1]), ("perhaps", "5", "5"), ("perhaps", "null", None),
    ("perhaps", "None", None),
    ("list", "['a', True]", ["a", True]), ("list", '["a", null]', ["a", None]), ("size", "2", 2), ("either", "5", 5),
    ("either", "five", "five"), ("loop", "5", 5), ("yes", "True", True), ("yes", "false", False), ("yes", "1", "1"),
    ("one", "5", "5"), ("wrong", "5", 5), ("unknown", "{}", {}),
])  # fmt: skip
def test_values_have_the_types_of_their_schema(key: str, text: str, value: Any) -> None:
    found = typed_value(text, SCHEMA, key)
    assert (found, type(found)) == (value, type(value))
    assert typed_value("x", None, key) == "x"


@pytest.mark.parametrize(("template", "form", "reasoning"), [
    ("<tool_call>\\n{\\\"name\\\": <function-name>}\\n</tool_call> <think>", "hermes", "think"),
    ("'<tool_call>\\n<function=' + name + '>\\n' '<parameter='", "qwen3_coder", "think"),
    ("<tool_call>{name}\\n<arg_key>{key}</arg_key> /nothink", "glm45", "think"),
    ("\"[TOOL_CALLS] [\" tool_call.function|tojson", "mistral", "think"),
    ("'[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' [THINK]", "mistral_args", "mistral"),
    ("{\"name\": function name, \"parameters\": dictionary of argument name and its value}", "llama3_json", "think"),
    ("[func_name1(params_name1=params_value1), func_name2(params)]", "pythonic", "think"),
    ("<|start|>assistant to=functions. <|channel|>commentary json<|message|> <|call|>", "openai", "harmony"),
    ("function" + deepseek("tool sep") + "' + name + '\\n' + '```json'", "deepseek_v3", "think"),
    (deepseek("tool call begin") + "' + name + '" + deepseek("tool sep"), "deepseek_v31", "think"),
    ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", "kimi_k2", "think"),
    ("<|im_system|>tool_declare<|im_middle|>", "kimi_k2", "think"),
    ("<seed:tool_call>\\n<function= <seed:think>", "seed_oss", "seed"),
    ("'<minimax:tool_call>' <invoke name=\"tool-name-1\"> <think>", "minimax_m2", "think"),
    ("'<function_calls>' + calls + '</function_calls>' <think>", "olmo3", "think"),
    ("'<tool_calls>[' + tool_call|tojson + ']</tool_calls>'", "hunyuan_a13b", "think"),
    ("'<|inner_prefix|>' '<|tools_prefix|>' '[' {\"name\": arguments}", "apertus", "apertus"),
    ("'<|tool_call>call:' + name + '{' '<|channel>thought\\n' + thinking_text + '\\n<channel|>'", "gemma4", "gemma"),
    ("in a single JSON list formatted as functools[{\"name\": [name], \"arguments\": [JSON]}]", "phi4_mini_json",
     "think"),
    ("<|START_ACTION|>[{\"tool_call_id\": \"0\", \"tool_name\": \"x\", \"parameters\": {}}] <|START_THINKING|>", None,
     "command"),
    ("<|tool_call|> {{ tools | tojson }}", None, "think"),
    ("{{ tools }}", None, "think"),
    (None, None, "think"),
])  # fmt: skip
def test_formats_are_read_off_the_template(template: str | None, form: str | None, reasoning: str) -> None:
    assert format_of(template) == form
    assert reasoning_of(template) is REASONING[reasoning]


Ask = Callable[[ThoughtSteering], dict[str, Any]]


@pytest.mark.parametrize(("template", "reads", "ask", "expected"), [
    ("<think>", {"enable_thinking"}, lambda s: s.switched(False, "thinking"), {"enable_thinking": False}),
    ("<think>", {"thinking"}, lambda s: s.switched(True, "thinking"), {"thinking": True}),
    ("<seed:think>", {"thinking_budget"}, lambda s: s.switched(False, "thinking"), {"thinking_budget": 0}),
    ("<think>", set(), lambda s: s.switched(True, "thinking"), {}),
    ("<think>", set(), lambda s: s.switched(False, "thinking"), "thinking"),
    ("", set(), lambda s: s.switched(False, "thinking"), {}),
    ("<|start|><|message|>", {"reasoning_effort"}, lambda s: s.effort("high"), {"reasoning_effort": "high"}),
    ("<|start|><|message|>", {"reasoning_effort"}, lambda s: s.effort("none"), "reasoning_effort"),
    ("<|start|><|message|>", {"reasoning_effort"}, lambda s: s.effort("minimal"), "reasoning_effort"),
    ("[THINK]", {"reasoning_effort"}, lambda s: s.effort("none"), {"reasoning_effort": "none"}),
    ("<think>", {"enable_thinking"}, lambda s: s.effort("none"), {"enable_thinking": False}),
    ("<think>", {"enable_thinking"}, lambda s: s.effort("low"), {"enable_thinking": True}),
    ("<think>", set(), lambda s: s.effort("none"), "reasoning_effort"),
    ("<think>", set(), lambda s: s.effort("low"), "reasoning_effort"),
    ("", set(), lambda s: s.effort("none"), {}),
    ("", set(), lambda s: s.effort("low"), "reasoning_effort"),
    ("<seed:think>", {"thinking_budget"}, lambda s: s.budgeted(512, "thinking"), {"thinking_budget": 512}),
    ("<think>", {"enable_thinking"}, lambda s: s.budgeted(512, "thinking"), "thinking"),
    ("<think>", {"thinking"}, lambda s: s.renamed({"enable_thinking": True, "a": 1}), {"thinking": True, "a": 1}),
    ("<think>", {"enable_thinking"}, lambda s: s.renamed({"thinking": True}), {"enable_thinking": True}),
    ("<think>", set(), lambda s: s.renamed({"thinking": True}), {"thinking": True}),
])  # fmt: skip
def test_templates_are_asked_for_thoughts(template: str, reads: set[str], ask: Ask, expected: Any) -> None:
    steering = ThoughtSteering(template, reads)
    if not isinstance(expected, str):
        assert ask(steering) == expected
        return
    with pytest.raises(ApiError, match=expected) as caught:
        ask(steering)
    assert (caught.value.status, caught.value.param) == (400, expected)
