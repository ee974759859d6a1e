"""The grammar of calls in every format, and of answers in which calls may come."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from serving.conftest import Live, calls_grammar, serve
from tokenizers import AddedToken
from tokenizers import Tokenizer as Inner

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.checkpoints import Tokenizer
from paceline.config import StructuredOutputsParams
from paceline.errors import ConfigError
from paceline.grammar import constraint
from paceline.serving.api_errors import ApiError
from paceline.serving.chat import FORMATS, Marks, Reader
from paceline.serving.chat.base import AllowedCalls, TextSchema
from paceline.serving.chat.constraints import answer_grammar
from paceline.serving.chat.reasoning import REASONING
from paceline.serving.protocol import Tool


def tool(name: str, strict: bool | None = None, **parameters: Any) -> Tool:
    function = {"name": name, "parameters": parameters or None, "strict": strict}
    return Tool.model_validate({"type": "function", "function": function})


OBJECT = {"type": "object", "additionalProperties": False}
ADD = {**OBJECT, "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"], "$defs": {"n": {"type": "integer"}}}
TOOLS = [tool("add", **ADD), tool("now", **OBJECT, properties={})]


def bars(words: str) -> str:
    """A mark of DeepSeek's."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


def deepseek(*calls: str, between: str = "") -> str:
    inside = between.join(f"{bars('tool call begin')}{call}{bars('tool call end')}" for call in calls)
    return f"{bars('tool calls begin')}{inside}{bars('tool calls end')}"


def kimi(*calls: str) -> str:
    inside = "".join(f"<|tool_call_begin|>{call}<|tool_call_end|>" for call in calls)
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


SEPARATOR, ARGUMENT = bars("tool sep"), "<|tool_call_argument_begin|>"
PUBLISHED: dict[str, tuple[str, str]] = {
    "hermes": (
        '<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>',
        '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 7}, "id": "abcDEF123"}]',
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 7}}, {"name": "now", "arguments": {}}]',
    ),
    "mistral_args": ('[TOOL_CALLS]add[ARGS]{"a": 7}', "[TOOL_CALLS]now[ARGS]{}"),
    "llama3_json": ('{"name": "add", "parameters": {"a": 7}}', ""),
    "pythonic": ("[add(a=7)]", "[add(a=7), now()]"),
    "qwen3_coder": (
        "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>",
        "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=add>\n<parameter=a>7</parameter>\n</function>\n</seed:tool_call>",
        "\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">7</parameter>\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">7</parameter>\n</invoke>\n<invoke name="now">\n'
        "</invoke>\n</minimax:tool_call>",
    ),
    "hunyuan_a13b": (
        '<tool_calls>[{"name": "add", "arguments": {"a": 7}}]</tool_calls>',
        '<tool_calls>[{"name": "add", "arguments": {"a": 7}}, {"name": "now", "arguments": {}}]</tool_calls>',
    ),
    "olmo3": ("<function_calls>add(a=7)</function_calls>", "<function_calls>add(a=7)\nnow()</function_calls>"),
    "apertus": (
        '<|tools_prefix|>[{"add": {"a": 7}}]<|tools_suffix|>',
        '<|tools_prefix|>[{"add": {"a": 7}}, {"now": {}}]<|tools_suffix|>',
    ),
    "gemma4": ("<|tool_call>call:add{a:7}<tool_call|>", "<|tool_call>call:now{}<tool_call|>"),
    "phi4_mini_json": (
        'functools[{"name": "add", "arguments": {"a": 7}}]',
        'functools[{"name": "add", "arguments": {"a": 7}}, {"name": "now", "arguments": {}}]',
    ),
    "glm45": (
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
        "\n<tool_call>now\n</tool_call>",
    ),
    "deepseek_v3": (
        deepseek(f'function{SEPARATOR}add\n```json\n{{"a": 7}}\n```'),
        deepseek(f'function{SEPARATOR}add\n```json\n{{"a": 7}}\n```', f"function{SEPARATOR}now\n```json\n{{}}\n```",
                 between="\n"),
    ),
    "deepseek_v31": (
        deepseek(f'add{SEPARATOR}{{"a": 7}}'),
        deepseek(f'add{SEPARATOR}{{"a": 7}}', f"now{SEPARATOR}{{}}"),
    ),
    "kimi_k2": (
        kimi(f'functions.add:0{ARGUMENT}{{"a": 7}}'),
        kimi(f'functions.add:0{ARGUMENT}{{"a": 7}}', f"functions.now:1{ARGUMENT}{{}}"),
    ),
    "openai": ('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 7}<|call|>', ""),
}  # fmt: skip
"""A call of `add` as the chat templates write it, and what makes two of it: more text, or another one."""

WHOLE = ("mistral", "pythonic", "deepseek_v3", "deepseek_v31", "kimi_k2", "minimax_m2", "hunyuan_a13b", "olmo3")
WHOLE += ("apertus", "phi4_mini_json")
"""Formats of which all calls are one text."""

MARKS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>"),
    *("<minimax:tool_call>", "</minimax:tool_call>", "<tool_calls>", "</tool_calls>"),
    *("<function_calls>", "</function_calls>", "<|tools_prefix|>", "<|tools_suffix|>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>'),
    *("<seed:tool_call>", "</seed:tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *(bars(f"tool {words}") for words in ("calls begin", "calls end", "call begin", "call end", "sep")),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *(ARGUMENT, "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"),
)


def several(form: str) -> str:
    one, more = PUBLISHED[form]
    return more if form in WHOLE else one + more


@pytest.fixture(scope="module")
def model() -> LLM:
    return LLM(dtype="float32", profile=False)


class World:
    """What follows a grammar: a tokenizer and the end of texts."""

    def __init__(self, tokenizer: Tokenizer, size: int, ends: Sequence[int]) -> None:
        self.tokenizer, self.size, self.ends = tokenizer, size, tuple(ends)
        self.marks = Marks.of(tokenizer, ends)

    def rule(self, grammar: str) -> Any:
        return constraint(StructuredOutputsParams(grammar=grammar), self.tokenizer, self.size, self.ends)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def obeys(self, grammar: str, text: str) -> bool:
        """Whether a whole text is one that the grammar allows."""
        tokens = [*self.ids(text), self.ends[0]]
        return self.rule(grammar).allowed(tokens) == len(tokens)

    def begins(self, grammar: str, text: str) -> bool:
        """Whether a text may be the beginning of one."""
        return self.rule(grammar).allowed(self.ids(text)) == len(self.ids(text))


@pytest.fixture(scope="module")
def plain(model: LLM) -> World:
    """Marks are texts."""
    return World(model.tokenizer, model.runner.info.vocab_size, model.defaults.eos_ids)


@pytest.fixture(scope="module", params=[True, False], ids=["special", "added"])
def marked(model: LLM, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> World:
    """All marks are tokens of their own, special ones or such as have their text."""
    folder = tmp_path_factory.mktemp("marked")
    inner = Inner.from_file(str(Path(model.folder) / "tokenizer.json"))
    inner.add_tokens([AddedToken(mark, special=request.param, normalized=False) for mark in MARKS])
    inner.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    ends = [tokenizer.encode(mark, False)[0] for mark in ("<|return|>", "<|call|>")]
    return World(tokenizer, tokenizer.vocab_size, ends)


def required(form: str, marks: Marks | None = None, **more: Any) -> str:
    return calls_grammar(TOOLS, form, **more, **({} if marks is None else {"marks": marks}))


def possible(form: str, marks: Marks, *, tools: Sequence[Tool] = TOOLS, many: bool = True, **more: Any) -> str:
    """Free text, in which calls may begin."""
    calls = AllowedCalls([one.function for one in tools], needed=False, many=many, strict=True)
    return answer_grammar(calls, more.pop("schema", None), FORMATS[form], marks=marks, **more)


def wrong(text: str, call: str) -> list[str]:
    """What is like a text that ends with a call of `add`, and is not allowed."""
    return [
        text.replace("add", "sub"),
        text.replace("7", "x"),
        text.replace("7", '"x"'),
        text.replace("7", "7.5"),
        text.replace("7", f"7{200 * ' '}"),
        text.replace("7", 200 * "7"),
        re.sub(r'("a"|(?<=[(=>{])a(?=[=><:]))', lambda found: found[0].replace("a", "b"), text),
        f"{text} and so on",
        text[:-1] if form_ends(call) else f"{text}}}",
    ]


def form_ends(call: str) -> bool:
    return call[-1] in ">])"


@pytest.mark.parametrize("form", PUBLISHED)
def test_required_calls_are_those_of_the_chat_templates(plain: World, form: str) -> None:
    call, grammar = PUBLISHED[form][0], required(form)
    assert plain.obeys(grammar, call)
    for text in (*wrong(call, call), f"Hello {call}", "", "Hello", call.replace("7", "")):
        assert text != call
        assert not plain.obeys(grammar, text), text
    one = required(form, many=False)
    assert plain.obeys(one, call)
    if several(form) != call:  # there may be two
        assert plain.obeys(grammar, several(form))
        assert not plain.obeys(one, several(form))
    only = required(form, only="now")
    assert not plain.begins(only, call)
    assert not plain.begins(only, call[: call.index("add") + 3])
    with pytest.raises(ApiError, match="not among tools"):
        required(form, only="sub")


@pytest.mark.parametrize("form", PUBLISHED)
def test_marks_come_as_the_tokens_that_they_are(marked: World, form: str) -> None:
    call = PUBLISHED[form][0].removesuffix("<|call|>")  # which ends the text
    grammar = required(form, marked.marks)
    assert marked.obeys(grammar, call)
    tokens = marked.ids(call)
    special = [at for at, token in enumerate(tokens) if token in marked.tokenizer.added_ids]
    assert bool(special) == (form not in ("llama3_json", "pythonic", "phi4_mini_json"))
    for at in special:  # the same text in other tokens
        spelled = [marked.ids(sign)[0] for sign in marked.tokenizer.tokens()[tokens[at]]]
        path = [*tokens[:at], *spelled, *tokens[at + 1 :]]
        assert at <= marked.rule(grammar).allowed(path) < at + len(spelled)  # "<" may begin another call
    assert not marked.obeys(grammar, call.replace("7", "x"))


@pytest.mark.parametrize("form", PUBLISHED)
def test_text_is_free_until_a_call_begins(plain: World, form: str) -> None:
    call, grammar = PUBLISHED[form][0], possible(form, plain.marks)
    text = "<|channel|>final<|message|>" if form == "openai" else ""
    for free in ("Hello <b>, {1: 2} [3]", 'He said \\"so\\" \\/ "', "<tool", "{", "[", 300 * " ", 300 * "7", "\n\n"):
        assert plain.obeys(grammar, text + free)
    before = ["", "\n"] if form in ("llama3_json", "pythonic") else ["", "Well. ", "{}\n\n", "<", 99 * "\n"]
    for said in [""] if form == "openai" else before:
        assert plain.obeys(grammar, said + call)
        assert plain.obeys(grammar, said + several(form))
        for text in wrong(call, call):
            if "sub" not in text or form not in ("llama3_json", "pythonic"):  # where that is text
                assert not plain.obeys(grammar, said + text), said + text
    one = possible(form, plain.marks, many=False)
    assert plain.obeys(one, call)
    assert several(form) == call or not plain.obeys(one, several(form))


@pytest.mark.parametrize("form", PUBLISHED)
def test_calls_begin_in_free_text_at_their_tokens(marked: World, form: str) -> None:
    call = PUBLISHED[form][0].removesuffix("<|call|>")
    grammar = possible(form, marked.marks)
    said = "<|channel|>final<|message|>Hello" if form == "openai" else "Hello [TOOL <tool"
    assert marked.obeys(grammar, said)
    assert marked.obeys(grammar, call)
    assert not marked.obeys(grammar, call.replace("7", "x"))
    if form not in ("openai", "llama3_json", "pythonic"):
        assert marked.obeys(grammar, said + call)
        assert not marked.obeys(grammar, said + call.replace("7", "x"))
    if form != "openai" and "<tool_call>" not in call:  # other special tokens are free
        assert marked.obeys(grammar, "Hello <|end|> and <|end|>")


def test_what_is_read_without_its_first_mark_is_bound_too(plain: World) -> None:
    qwen = possible("qwen3_coder", plain.marks)
    call = "<function=add>\n<parameter=a>\n7\n</parameter>\n</function>"
    assert plain.obeys(qwen, f"So: {call}\n</tool_call>")
    assert plain.obeys(qwen, f"So: {call}")
    assert not plain.obeys(qwen, f"So: {call.replace('7', 'x')}")
    assert plain.obeys(qwen, "So: <function=sub>")  # no function
    for form in ("kimi_k2", "deepseek_v31", "deepseek_v3"):
        text = PUBLISHED[form][0]
        text = text[text.index(text[:2], 1) :]  # from the mark of the call on
        assert plain.obeys(possible(form, plain.marks), f"So {text}")
        assert not plain.obeys(possible(form, plain.marks), f"So {text.replace('7', 'x')}")
    llama = possible("llama3_json", plain.marks)
    assert plain.obeys(llama, f"[{PUBLISHED['llama3_json'][0]}]")
    assert plain.obeys(llama, '{"name": "Paul", "age": 3}')
    assert not plain.begins(llama, '{"name": "add", "arguments"')


@pytest.mark.parametrize("kind", ["think", "mistral"])
@pytest.mark.parametrize("form", ["hermes", "llama3_json", "qwen3_coder", "pythonic"])
def test_thoughts_may_come_first(plain: World, form: str, kind: str) -> None:
    thoughts, call = REASONING[kind], PUBLISHED[form][0]
    begin, end = thoughts.begin, thoughts.end
    opened: dict[str, Any] = {"thoughts": thoughts, "opened": True}
    schema = TextSchema({"type": "integer"}, True)
    for grammar, fine, bad in (
        (required(form, thoughts=thoughts), [call, f"{begin}\nI call {call}, or not.\n{end}\n\n{call}"],
         [f"{begin}Hm.{end}", f"{begin}{call}", "Hm."]),
        (required(form, **opened), [f"Hm.{end}{call}", f"{end}\n{call}"], [call, f"{begin}{end}"]),
        (possible(form, plain.marks, thoughts=thoughts),
         ["Hello", f"{begin}Hm", f"{begin}{call.replace('7', 'x')}", f"{begin}Hm{end}\n\nHello", f"{begin}{end}{call}"],
         [f"{begin}Hm{end}\n{call.replace('7', 'x')}"]),
        (possible(form, plain.marks, **opened), ["Hm", f"Hm{end}Hello", f"{call.replace('7', 'x')}{end}{call}"],
         [f"Hm{end}{call.replace('7', 'x')}"]),
        (answer_grammar(None, schema, FORMATS[form], thoughts=thoughts), ["7", f"{begin}Hm{end}\n7"],
         ["Hm", f"{begin}Hm{end}"]),
        (answer_grammar(None, schema, FORMATS[form], **opened), [f"Hm{end}7"], ["7"]),
    ):  # fmt: skip
        assert [text for text in fine if not plain.obeys(grammar, text)] == []
        assert [text for text in bad if plain.obeys(grammar, text)] == []


def test_thoughts_between_special_tokens(marked: World) -> None:
    grammar = required("hermes", marked.marks, thoughts=REASONING["think"])
    call = PUBLISHED["hermes"][0]
    assert marked.obeys(grammar, f"<think>Hm.\n</think>\n\n{call}")
    assert not marked.obeys(grammar, "<think>Hm.</think>")


RECORD = {**OBJECT, "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["name", "n"]}


@pytest.mark.parametrize("form", PUBLISHED)
def test_a_schema_leaves_room_for_calls(plain: World, form: str) -> None:
    grammar = possible(form, plain.marks, schema=TextSchema(RECORD, True))
    call, final = PUBLISHED[form][0], "<|channel|>final<|message|>" if form == "openai" else ""
    record = '{"name": "add", "n": 7}'
    assert plain.obeys(grammar, final + record)
    assert plain.obeys(grammar, call)
    assert plain.obeys(grammar, several(form))
    for text in ("Hello", record.replace("7", "x"), call.replace("7", "x"), f"{record}{call}", f"{call}{record}", "{"):
        assert not plain.obeys(grammar, text)
        assert not plain.obeys(grammar, final + text)


def test_channels_of_gpt_oss(marked: World) -> None:
    call = PUBLISHED["openai"][0].removesuffix("<|call|>")
    thought = "<|channel|>analysis<|message|>I call functions.add.<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>I will add.<|end|><|start|>assistant"
    other = ' to=functions.add<|channel|>commentary json<|message|>{"a": 7}'
    for grammar in (required("openai", marked.marks), possible("openai", marked.marks)):
        for before in ("", thought, preamble, thought + thought, thought + preamble):
            for one in (call, other):
                assert marked.obeys(grammar, before + one)
                assert not marked.obeys(grammar, before + one.replace("7", "x"))
                assert not marked.obeys(grammar, before + one.replace("add", "sub"))
    final = f"{thought}<|channel|>final<|message|>Seven."
    assert marked.obeys(possible("openai", marked.marks), final)
    assert not marked.obeys(required("openai", marked.marks), final)
    text = answer_grammar(None, TextSchema(RECORD, True), FORMATS["openai"], marks=marked.marks)
    assert marked.obeys(text, f'{thought}<|channel|>final <|constrain|>json<|message|>{{"name": "a", "n": 1}}')
    assert not marked.obeys(text, final)


def test_every_format_that_is_read_has_a_grammar() -> None:
    assert PUBLISHED.keys() == FORMATS.keys()


def read(form: str, text: str, tools: Sequence[Tool] = TOOLS) -> tuple[str, list[tuple[str, Any]]]:
    """Content, and calls."""
    functions = {one.function.name: one.function.parameters for one in tools}
    found = Reader(FORMATS[form], thinking=False, functions=functions).feed(text, last=True)
    calls = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in found.calls]
    return found.content, calls


@pytest.mark.parametrize("form", PUBLISHED)
def test_what_the_grammar_allows_is_read(form: str) -> None:
    assert read(form, PUBLISHED[form][0]) == ("", [("add", {"a": 7})])
    if several(form) != PUBLISHED[form][0]:
        two = [("add", {"a": 7}), ("now", {})]
        assert read(form, several(form)) == ("", two)


# ------------------------------------------------------------------------------------------------ arguments in tags

KINDS = {
    **OBJECT,
    "properties": {
        "text": {"type": "string"},
        "unit": {"enum": ["C", "it's", None]},
        "few": {"type": "string", "minLength": 2, "maxLength": 4},
        "code": {"type": "string", "pattern": "^[a-z]+/(\\d|x)$"},
        "deep": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"],
                 "additionalProperties": False},
        "list": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1},
        "flag": {"type": "boolean"},
        "real": {"type": "number", "minimum": 0},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"type": ["string", "integer"]},
    },
    "required": ["text"],
    "$defs": {"n": {"type": "integer"}},
}  # fmt: skip


def between_tags(form: str, **given: str) -> str:
    if form == "qwen3_coder":
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
        return f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"
    values = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in given.items())
    return f"<tool_call>f\n{values}</tool_call>"


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize("strict", [True, False])
def test_arguments_between_tags_are_of_their_types(plain: World, form: str, strict: bool) -> None:
    grammar = calls_grammar([tool("f", strict, **KINDS)], form)
    for key, fine, bad in (
        ("unit", ["C", "it's", "null"], ["F", '"C"', ""]),
        ("few", ["ab", "<p>", "äöü\n"], ["a", "abcde"]),
        ("code", ["ab/3", "a/x"], ["ab/", "ab3", "ab/33", "A/x"]),
        ("deep", ['{"n": 3}', '{ "n":3}'], ["{}", '{"n": "3"}', "3", '{"n": 3, "m": 3}']),
        ("list", ["[1, 2]"], ["[]", "1", '["1"]']),
        ("flag", ["true", "false"], ["yes", "1", '"true"']),
        ("real", ["0", "1.5", "20"], ["-1", "x", "", 90 * "1"]),
        ("maybe", ["3", "null", "-3"], ["x", "3.5", "nul"]),
        ("either", ["3", "x", "[1]"], []),
    ):
        for value in fine:
            assert plain.obeys(grammar, between_tags(form, text="t", **{key: value})), (key, value)
        for value in bad:
            assert not plain.obeys(grammar, between_tags(form, text="t", **{key: value})), (key, value)
    long = 'line 1\n  "line" 2 \\/ </para\n'
    for text in ("", "a", long, 300 * " ", 300 * "7"):
        assert plain.obeys(grammar, between_tags(form, text=text, flag="true"))
    for text in (
        between_tags(form, flag="true"),
        between_tags(form, flag="true", text="t"),
        between_tags(form, text="t", other="t"),
        between_tags(form),
    ):
        assert not plain.obeys(grammar, text)
    if form == "qwen3_coder":  # whose template writes constants as Python does
        assert plain.obeys(grammar, between_tags(form, text="t", flag="True", maybe="None"))


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45"])
def test_what_tags_cannot_hold_is_rejected_or_ignored(plain: World, form: str) -> None:
    def made(strict: bool, **parameters: Any) -> str:
        return calls_grammar([tool("f", strict, **parameters)], form)

    text = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}
    assert plain.obeys(made(False, **text), between_tags(form, a="x"))
    assert plain.obeys(made(False, type="object"), between_tags(form, a="x", b="y"))
    assert plain.obeys(made(False), between_tags(form, a="x"))
    assert plain.obeys(made(True, **{"$ref": "#/$defs/o", "$defs": {"o": ADD}}), between_tags(form, a="7"))
    for strict, parameters, words in (
        (True, text, "format"),
        (True, {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "pattern"),
        (False, {"type": "object", "properties": {"a\nb": {}}}, "cannot write"),
        (True, {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}, "not there"),
        (False, {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}, "circle"),
        (False, {"type": "object", "properties": {"a": {"type": "tuple"}}}, "tuple"),
        (False, {"type": "object", "required": ["a"]}, "require"),
        (False, {"type": "object", "properties": {"a": False}}, "satisfies"),
    ):
        with pytest.raises(ApiError, match=words) as caught:
            made(strict, **parameters)
        assert caught.value.param == "tools"


@pytest.mark.parametrize("form", ["hermes", "pythonic", "qwen3_coder"])
def test_references_are_found_or_hold_of_anything(plain: World, form: str) -> None:
    """As LiteLLM writes them, and to nothing."""
    call, other = PUBLISHED[form][0], PUBLISHED[form][0].replace("7", '"x"' if form != "qwen3_coder" else "x")

    def made(target: str, strict: bool) -> str:
        schema = {"properties": {"a": {"$ref": target}}, "required": ["a"], "$defs": {"N": {"type": "integer"}}}
        add = tool("add", strict, **{"type": "object", "additionalProperties": False} | schema)
        return calls_grammar([add], form)

    for target in ("#/$defs/N", "/$defs/N"):
        grammar = made(target, True)
        assert plain.obeys(grammar, call)
        assert not plain.obeys(grammar, other)
    for target in ("#/$defs/M", "/$defs/M"):
        assert plain.obeys(made(target, False), call)
        assert plain.obeys(made(target, False), other)
        with pytest.raises((ApiError, ConfigError), match=rf"refer to .*'{re.escape(target)}'"):
            made(target, True)


def test_functions_have_definitions_and_strictness_of_their_own(plain: World) -> None:
    def of(kind: str, strict: bool | None, **more: Any) -> Tool:
        schema = {
            **OBJECT,
            "properties": {"x": {"$ref": "#/$defs/T"}},
            "required": ["x"],
            "$defs": {"T": {"type": kind}},
        }
        return tool(f"f_{kind}", strict, **(schema | more))

    tools = [of("integer", True), of("string", False, propertyNames={"not": {"const": "y"}}), of("boolean", None)]
    for form in ("hermes", "mistral_args", "llama3_json"):
        grammar = calls_grammar(tools, form)
        call = PUBLISHED[form][0].replace('"a"', '"x"')
        values = {"integer": "7", "string": '"7"', "boolean": "true"}
        for kind in values:
            for other, value in values.items():
                text = call.replace("add", f"f_{kind}").replace("7}", f"{value}}}")
                assert plain.obeys(grammar, text) == (kind == other)


# ------------------------------------------------------------------------------------------------ whole outputs

METHODS = (None, "grammar", "ngram", "auto")


class Begin:
    """Makes an output begin with some tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)

    def __call__(self, tokens: Sequence[int], row_v: torch.Tensor) -> torch.Tensor:
        if len(tokens) < len(self._tokens):
            forced = torch.full_like(row_v, -float("inf"))
            forced[self._tokens[len(tokens)]] = 0.0
            return forced
        return row_v


PROMPTS = ["The cheapest way to", "def add(a, b):\n    return a"]


@pytest.mark.parametrize("form", ["hermes", "pythonic"])
def test_free_text_is_what_it_is_without_functions(model: LLM, plain: World, form: str) -> None:
    bound = {"structured_outputs": {"grammar": possible(form, plain.marks)}}
    for more in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 3}):
        free, bounded = (model.generate(PROMPTS, SamplingParams(max_tokens=16, **more, **one)) for one in ({}, bound))
        assert [one.outputs[0].token_ids for one in bounded] == [one.outputs[0].token_ids for one in free]


@pytest.mark.parametrize("form", PUBLISHED)
def test_outputs_obey_once_a_call_begins(model: LLM, plain: World, form: str) -> None:
    grammar, call = possible(form, plain.marks, many=False), PUBLISHED[form][0]
    begun = call[: call.index("add") + 3] + {"llama3_json": '"', "pythonic": "("}.get(form, "")
    begin = [Begin(plain.ids(begun))]
    bound = {"logits_processors": begin, "structured_outputs": {"grammar": grammar}}
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=120, **bound)
    methods = METHODS if form == "hermes" else METHODS[1:2]
    outputs = [model.with_speculative_config(one).generate(PROMPTS[0], params)[0].outputs[0] for one in methods]
    assert {one.text for one in outputs} == {outputs[0].text}
    assert outputs[0].finish_reason == "stop"
    assert plain.obeys(grammar, outputs[0].text)
    _, ((name, arguments),) = read(form, outputs[0].text)
    assert (name, list(arguments), type(arguments["a"])) == ("add", ["a"], int)


def test_what_a_text_must_be_holds_behind_thoughts(model: LLM, plain: World) -> None:
    small = TextSchema({"enum": ["red", "blue"]}, True)
    opened: dict[str, Any] = {"thoughts": REASONING["think"], "opened": True}
    grammar = answer_grammar(None, small, FORMATS["hermes"], marks=plain.marks, **opened)
    begin = [Begin(plain.ids("I think so.</think>\n\n"))]
    bound = {"logits_processors": begin, "structured_outputs": {"grammar": grammar}}
    output = model.generate(PROMPTS[0], SamplingParams(temperature=1.0, seed=1, max_tokens=40, **bound))[0].outputs[0]
    assert output.text.rpartition("</think>")[2].strip() in ('"red"', '"blue"')


# ------------------------------------------------------------------------------------------------ over HTTP

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
TEMPLATE = "{{ tools | tojson if tools }}{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def calling(model: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    file = tmp_path_factory.mktemp("calling") / "template.jinja"
    file.write_text(TEMPLATE)
    yield from serve(AsyncLLM(model), chat_template=str(file), tool_call_parser="hermes")


STRICT = [one.model_dump() | {"function": one.function.model_dump() | {"strict": True}} for one in TOOLS]
LOOSE = [one.model_dump() for one in TOOLS]


@pytest.mark.parametrize("form", ["openai", "qwen3_coder"])
def test_required_calls_come_whole_in_new_formats(model: LLM, tmp_path: Path, form: str) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    for live in serve(AsyncLLM(model), chat_template=str(file), tool_call_parser=form):
        body = {"messages": HELLO, "tools": STRICT, "tool_choice": "required", "parallel_tool_calls": False}
        found = live.ok(CHAT, temperature=0.5, seed=2, max_tokens=200, **body)["choices"][0]
        assert found["finish_reason"] == "tool_calls"
        (call,) = found["message"]["tool_calls"]
        assert list(json.loads(call["function"]["arguments"])) == (["a"] if call["function"]["name"] == "add" else [])


def said(found: Any) -> Any:
    return found["choices"][0]["message"]


def test_strict_functions_leave_free_text_as_it_is(calling: Live) -> None:
    for more in ({}, {"tool_choice": "auto"}, {"parallel_tool_calls": False}):
        body = {"messages": HELLO, "max_tokens": 12, "temperature": 0} | more
        one, other = (calling.ok(CHAT, tools=tools, **body) for tools in (LOOSE, STRICT))
        assert said(one)["content"] is not None
        assert one["usage"]["completion_tokens"] == other["usage"]["completion_tokens"]


def test_strict_functions_in_the_other_apis(calling: Live) -> None:
    function = STRICT[0]["function"]
    tools = [{"type": "function", **function}]
    assert calling.ok("/v1/responses", input="Hello", tools=tools, max_output_tokens=4)["output"]
    named = {"name": "add", "input_schema": ADD, "strict": True}
    answer = calling.ok("/v1/messages", model="bundled", messages=HELLO, tools=[named], max_tokens=4)
    assert answer["content"]


def form_of(schema: Any, strict: bool | None = None) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}


def test_a_schema_beside_functions_bounds_the_text(calling: Live) -> None:
    small = {**OBJECT, "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    for tools, wanted in ((LOOSE, form_of(small)), (STRICT, form_of(small, True)), (LOOSE, {"type": "json_object"})):
        body = {"messages": HELLO, "tools": tools, "temperature": 0.5, "seed": 1, "max_tokens": 60}
        choice = calling.ok(CHAT, response_format=wanted, **body)["choices"][0]
        if wanted["type"] == "json_schema":
            assert choice["finish_reason"] == "stop"
            assert json.loads(choice["message"]["content"]) in ({"n": 1}, {"n": 2})
        assert choice["message"]["content"].lstrip().startswith("{")
        assert "schema_errors" not in choice
    config = {"format": {"type": "json_schema", "schema": small}}
    tool = {"name": "add", "input_schema": ADD}
    body = {"model": "bundled", "messages": HELLO, "tools": [tool], "max_tokens": 60, "output_config": config}
    answers = [calling.ok("/v1/messages", temperature=value, **body) for value in (0.0, 1.0, 1.0, 1.0)]
    ended = [answer for answer in answers if answer["stop_reason"] == "end_turn"]
    texts = [part["text"] for answer in ended for part in answer["content"] if part["type"] == "text"]
    assert texts
    assert all(set(json.loads(text)) == {"n"} for text in texts)


def test_calls_that_must_come_win_over_a_schema(calling: Live) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        body = {"messages": HELLO, "tools": LOOSE, "tool_choice": choice, "max_tokens": 100, "seed": 1}
        found = calling.ok(CHAT, response_format=form_of(RECORD), parallel_tool_calls=False, **body)["choices"][0]
        assert found["finish_reason"] == "tool_calls"
        (call,) = found["message"]["tool_calls"]
        assert choice == "required" or call["function"]["name"] == "now"
    error = calling.error(CHAT, structured_outputs={"regex": "a"}, **body)
    assert error["param"] == "structured_outputs"


def test_what_cannot_be_enforced_is_named(calling: Live) -> None:
    odd = {**OBJECT, "properties": {"n": {"not": {"const": 1}}}, "required": ["n"]}
    bad = [{"type": "function", "function": {"name": "f", "parameters": odd, "strict": True}}]
    for more, param in (
        ({"tools": bad}, "tools"),
        ({"tools": bad, "tool_choice": "required"}, "tools"),
        ({"tools": bad, "response_format": form_of(RECORD)}, "tools"),
        ({"tools": STRICT, "response_format": form_of(odd, True)}, "response_format"),
        ({"tools": bad, "tool_choice": "required", "response_format": form_of(odd, True)}, "tools"),
    ):
        error = calling.error(CHAT, messages=HELLO, max_tokens=4, **more)
        assert error["param"] == param
        assert "not" in error["message"]
    assert calling.ok(CHAT, messages=HELLO, max_tokens=4, tools=bad, tool_choice="none")


OPENED = TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"


def test_thoughts_are_free_where_the_prompt_opens_them(model: LLM, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(OPENED)
    for live in serve(AsyncLLM(model), chat_template=str(file), tool_call_parser="hermes"):
        body = {"messages": HELLO, "temperature": 0, "max_tokens": 8}
        free = said(live.ok(CHAT, **body))["reasoning_content"]
        assert free
        for more in (
            {"response_format": form_of(RECORD)},
            {"response_format": form_of(RECORD), "tools": STRICT, "tool_choice": "auto"},
            {"tools": STRICT, "tool_choice": "required"},
        ):
            found = said(live.ok(CHAT, **body, **more))
            assert found["reasoning_content"]
            assert not found["content"]
        assert said(live.ok(CHAT, **body, response_format=form_of(RECORD)))["reasoning_content"] == free


def test_functions_as_clients_make_them_of_types(openai: Any, calling: Live) -> None:
    pydantic = pytest.importorskip("pydantic")
    place = pydantic.create_model("Place", city=(str, ...), days=(list[int], ...), unit=(str | None, ...))
    answer = pydantic.create_model("Answer", fine=(bool, ...))
    made = openai.pydantic_function_tool(place, name="forecast")
    assert made["function"]["strict"] is True
    client = openai.OpenAI(base_url=f"{calling.url}/v1", api_key="none")
    given = {"model": "bundled", "messages": HELLO, "tools": [made], "max_tokens": 40, "temperature": 0.5, "seed": 1}
    free = client.chat.completions.create(**given | {"max_tokens": 4})
    assert free.choices[0].message.tool_calls is None
    (choice,) = client.chat.completions.parse(**given, response_format=answer).choices
    assert isinstance(choice.message.parsed, answer)
    named = {"type": "function", "function": {"name": "forecast"}}
    (choice,) = client.chat.completions.parse(**given | {"max_tokens": 300}, tool_choice=named).choices
    (call,) = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, place)
