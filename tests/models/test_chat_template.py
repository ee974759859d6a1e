"""Chat templates as transformers renders them, errors included."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

import paceline
from paceline.checkpoints import Tokenizer
from paceline.checkpoints.chat_template import render
from paceline.errors import CheckpointError, ConfigError, PromptError

BUNDLED = Path(paceline.__file__).parent / "bundled" / "target"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Größe?", "tool_calls": None},
    {"role": "assistant", "content": "Ja.\n"},
    {"role": "user", "content": "why"},
]
TEMPLATES = [
    "{% for m in messages %}\n    {% if m['role'] == 'user' %}\nU: {{ m['content'] }}\n    {% endif %}\n{% endfor "
    "%}\nend",
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "{% for m in messages %}{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor "
    "%}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ bos_token "
    "}}",
    "{% if tools is none %}no tools{% endif %}{% if add_generation_prompt %}<go>{% endif %}{{ strftime_now('%Y') }}",
    "{{ messages[1].tool_calls is defined }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("go", [True, False])
def test_renders_as_transformers_does(template: str, go: bool) -> None:
    chat = [{key: value for key, value in message.items() if value is not None} for message in MESSAGES]
    expected, _ = render_jinja_template([chat], chat_template=template, add_generation_prompt=go, bos_token="<s>")
    assert render(template, MESSAGES, {"add_generation_prompt": go, "bos_token": "<s>"}) == expected[0]


def test_the_bundled_template_renders_as_transformers_does() -> None:
    ours, theirs = Tokenizer.load(BUNDLED), AutoTokenizer.from_pretrained(str(BUNDLED))
    chat = MESSAGES[1:]
    text = ours.apply_chat_template(chat)
    assert text == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert ours.encode(text, add_special_tokens=False) == list(
        theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    )
    assert ours.apply_chat_template(chat, add_generation_prompt=False) != text


def test_a_template_that_rejects_says_so_in_one_line() -> None:
    with pytest.raises(PromptError, match=r"rejected the messages: roles must alternate$"):
        render("{{ raise_exception('roles must\n alternate') }}", MESSAGES, {})


BROKEN = {
    "{% for %}": r"cannot be read \(Expected an expression, got 'end of statement block' at line 1\); repair it",
    "a\n{{ messages | nonsense }}": r"cannot be read \(No filter named 'nonsense' at line 2\); repair it or download",
    "{{" + "(" * 3000 + ")" * 3000 + "}}": r"cannot be read \(maximum recursion depth exceeded",
}
FAILING = {
    "{{ nothing.at.all }}": r"failed on these messages \(UndefinedError: 'nothing' is undefined\); change the",
    "{{ messages[0].content.no() }}": r"failed on these messages \(UndefinedError: 'str object' has no attribute 'no'",
    "{{ 1 / 0 }}": r"failed on these messages \(ZeroDivisionError: division by zero\)",
    "{{ messages.__class__ }}{{ messages.__class__() }}": r"failed on these messages \(SecurityError: ",
    "{% include 'x' %}": r"failed on these messages \(TypeError: no loader",
}


@pytest.mark.parametrize(("template", "line"), [*BROKEN.items(), *FAILING.items()], ids=lambda value: value[:20])
def test_a_broken_template_is_named_with_what_the_engine_says(template: str, line: str) -> None:
    kind = CheckpointError if template in BROKEN else PromptError
    with pytest.raises(kind, match=f"^the chat template of /a/folder {line}") as caught:
        render(template, MESSAGES, {}, name="the chat template of /a/folder")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_names_that_a_template_does_not_read_are_rejected(tmp_path: Path) -> None:
    folder = shutil.copytree(BUNDLED, tmp_path / "checkpoint", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "chat_template.jinja").write_text(
        "{% if not thinking is defined %}{% set thinking = 1 %}{% endif %}{{ thinking }}{{ tools }}"
    )
    tokenizer, chat = Tokenizer.load(folder), MESSAGES[1:]
    assert tokenizer.apply_chat_template(chat, thinking=2, documents=None) == "2None"
    for given, line in (
        ({"thinkin": 2}, f"the chat template of {folder} does not know 'thinkin'; did you mean thinking"),
        ({"max_tokens": 5}, r"'max_tokens' is a sampling parameter, .* give SamplingParams\(max_tokens=...\)"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ({"chat_template": 5}, "chat_template must be a text, got 5"),
    ):
        with pytest.raises(ConfigError, match=line):
            tokenizer.apply_chat_template(chat, **given)
    with pytest.raises(PromptError, match="does not print the content of the last message"):
        tokenizer.apply_chat_template(chat, continue_final_message=True)


STRIPPING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.mark.parametrize("template", [None, STRIPPING], ids=["bundled", "stripping"])
@pytest.mark.parametrize("content", ["It is", "It is ", "It is\n"], ids=repr)
def test_the_last_message_is_continued_as_in_transformers(template: str | None, content: str) -> None:
    tokenizer = Tokenizer.load(BUNDLED)
    chat = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": content}]
    found = tokenizer.apply_chat_template(chat, chat_template=template, continue_final_message=True)
    given = {"chat_template": template, "tokenize": False, "continue_final_message": True}
    assert found == tokenizer.to_transformers().apply_chat_template(chat, **given)
    assert found.endswith(content if template is None else "It is")
    assert found != tokenizer.apply_chat_template(chat, False, chat_template=template)


def test_what_cannot_be_continued() -> None:
    tokenizer = Tokenizer.load(BUNDLED)
    for content in ([{"type": "text", "text": "x"}], None):
        with pytest.raises(PromptError, match="needs a text as content of the last message"):
            tokenizer.apply_chat_template([{"role": "user", "content": content}], continue_final_message=True)


@pytest.mark.parametrize("messages", [[], "hello", {"role": "user"}, ["hello"]])
def test_what_is_no_conversation_is_rejected(messages: Any) -> None:
    with pytest.raises(PromptError):
        render("x", messages, {})


def test_templates_cannot_leave_the_sandbox_or_change_messages() -> None:
    for template in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__subclasses__() }}",
    ):
        with pytest.raises(PromptError):
            render(template, MESSAGES, {})


def test_objects_with_methods_are_rejected() -> None:
    with pytest.raises(PromptError, match=r"got [A-Za-z]*Path$"):
        render("x", [{"role": "user", "content": Path()}], {})


PRINTS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
JOINS = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
SKIPS = "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}"
READS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ({"role": "user"}, r"message 1 \(role 'user'\) has no content; give it a text under 'content'"),
        ({"role": "user", "content": None}, "has no content"),
        ({"role": "assistant"}, "has no content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "has no content"),
        ({"content": "a"}, "message 1 must have a text under 'role', got None"),
        ({"role": 3, "content": "a"}, "message 1 must have a text under 'role', got 3"),
        ({"role": "user", "content": 5}, "content of message 1 must be a text or a list of text parts, got 5"),
        ({"role": "user", "content": True}, "must be a text or a list of text parts, got True"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "got .*image_url.* this model reads text",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "this model reads text"),
        ({"role": "user", "content": ["a"]}, "this model reads text"),
        ({"role": "user", "content": {"a": 1}}, "cannot take the content of message 1, a dict"),
    ],
)
@pytest.mark.parametrize("template", [PRINTS, BUNDLED])
def test_a_message_without_a_content_that_can_be_read_is_rejected_by_name(
    message: Any, line: str, template: Any
) -> None:
    chat = [{"role": "user", "content": "a"}, message]
    with pytest.raises(PromptError, match=line) as rejected:
        _ = (
            render(template, chat, {})
            if isinstance(template, str)
            else Tokenizer.load(template).apply_chat_template(chat)
        )
    assert "\n" not in str(rejected.value)


def test_calls_and_thoughts_stand_for_content() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    assert render(PRINTS, [calls, {"role": "tool", "content": ""}], {}) == "<assistant><tool>"
    tool = {"role": "tool", "content": {"a": 1}}
    assert render("{{ messages[0].content | tojson }}", [tool], {}) == '{"a": 1}'


@pytest.mark.parametrize(
    ("template", "expected"),
    [(READS, "<user>[a][b]"), (PRINTS, "<user>a\nb"), (JOINS, "<user>a\nb"), (SKIPS, "<user>a\nb")],
)
def test_text_parts_reach_every_template(template: str, expected: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(template, [{"role": "user", "content": parts}], {}) == expected


CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
    },
    {"role": "tool", "content": "rain"},
]
TURNS = "{{% for m in messages %}}<{{{{ m.role }}}}>{}{{% endfor %}}"
PRINTED = "{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}"
ASKING = [  # as DeepSeek's, Qwen 3.5's and others have it
    "{% if m['content'] is none %}" + PRINTED + "{% else %}{{ m['content'] }}{% endif %}",
    "{% if m.content is not none %}{{ m.content }}{% else %}" + PRINTED + "{% endif %}",
    "{% set content = m.content %}{% if content == none %}" + PRINTED + "{% else %}{{ content }}{% endif %}",
]


@pytest.mark.parametrize("asking", ASKING)
def test_missing_content_is_null_for_templates_that_ask_for_that(asking: str) -> None:
    template = TURNS.format(asking)
    expected, _ = render_jinja_template([CALLS], chat_template=template)
    assert render(template, CALLS, {}) == expected[0] == "<user>Weather?<assistant>weather<tool>rain"
    left_out = [{key: value for key, value in message.items() if value is not None} for message in CALLS]
    assert render(template, left_out, {}) == expected[0]
    assert render(TURNS.format("{{ m.content }}"), CALLS, {}) == "<user>Weather?<assistant><tool>rain", "not None"
    assert render(TURNS.format("{{ m.content | tojson }}"), CALLS, {}) == '<user>"Weather?"<assistant>null<tool>"rain"'


TAKING_NO_NULL = {
    "Qwen 3's, which asks for null thoughts": "{% if m.reasoning_content is not none and '</t>' in m.content %}thoughts"
    "{% endif %}{{ m.content }}" + PRINTED,
    "Ministral 3's, which counts what is null": "{% if m.content is none and not m.tool_calls %}{{ 1 / 0 }}{% endif %}"
    "{% if m.content | length > 0 %}{{ m.content }}{% endif %}" + PRINTED,
    "Qwen's with thoughts, which cuts it": "{{ m.content.split('</t>')[-1] }}" + PRINTED,
}


@pytest.mark.parametrize("kind", TAKING_NO_NULL)
def test_missing_content_is_left_out_or_empty_where_null_is_not_taken(kind: str) -> None:
    template = TURNS.format(TAKING_NO_NULL[kind])
    assert render(template, CALLS, {}) == "<user>Weather?<assistant>weather<tool>rain"
    with pytest.raises(PromptError, match="failed on these messages"):
        render(template + "{{ messages[1].content.a.b }}", CALLS, {})


def calling(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}]


OF_EACH = "{{% for m in messages %}}{{% for c in m.tool_calls %}}{}{{% endfor %}}{{% endfor %}}"
WRITING = {
    "tojson": "{{ c.function.arguments | tojson }}",
    "concatenated": "{{ '(' + c.function.arguments + ')' }}",  # as DeepSeek's
    "joined": "{{ '(' ~ c['function']['arguments'] ~ ')' }}",
    "printed": "({{ c.function.arguments }})",
    "asked": "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments | tojson }}{% endif %}",  # as Qwen 3's
    "iterated": "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",  # as GLM 4.5's
    "filtered": "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}",
    "refused": "{% if c.function.arguments is mapping %}{{ c.function.arguments | tojson }}{% else %}"
    "{{ raise_exception('no object') }}{% endif %}",  # as Gemma 4's
}
WRITTEN = {
    "tojson": ('{"city": "Oslo", "n": 1}', '"{\\"city\\": "'),
    "concatenated": ('({"city":"Oslo","n":1})', '({"city": )'),
    "joined": ('({"city":"Oslo","n":1})', '({"city": )'),
    "printed": ('({"city":"Oslo","n":1})', '({"city": )'),
    "asked": ('{"city": "Oslo", "n": 1}', '{"city": '),
    "iterated": ("city=Oslo;n=1;", 'arguments={"city": ;'),
    "filtered": ("city=Oslo;n=1;", 'arguments={"city": ;'),
    "refused": ('{"city": "Oslo", "n": 1}', '{"arguments": "{\\"city\\": "}'),
}


@pytest.mark.parametrize("way", WRITING)
def test_arguments_come_in_the_form_that_a_template_takes(way: str) -> None:
    template, (whole, malformed) = OF_EACH.format(WRITING[way]), WRITTEN[way]
    text = '{"city":"Oslo","n":1}'
    assert render(template, calling(text), {}) == whole
    spaced = whole.replace(text, '{"city": "Oslo", "n": 1}')
    assert render(template, calling({"city": "Oslo", "n": 1}), {}) == spaced
    assert render(template, calling('{"city": '), {}) == malformed
    for empty in ("", "{}", "null", {}):
        assert render(template, calling(empty), {}).strip("()") in ("{}", "", "null")
    quoted = str({"city": "Oslo", "n": 1})
    quoting = [{"role": "user", "content": quoted}, *calling(text)]
    assert render("{{ messages[0].content }}" + template, quoting, {}) == quoted + whole


def test_what_a_caller_gave_is_not_changed() -> None:
    chat = calling('{"a": 1}') + calling({"a": 1})
    before = repr(chat)
    render(OF_EACH.format(WRITING["concatenated"]), chat, {})
    assert repr(chat) == before


def test_no_calls_are_like_none_given() -> None:
    template = TURNS.format("{% if m.tool_calls is defined %}(calls){% else %}{{ m.content }}{% endif %}")
    reply = {"role": "assistant", "content": "An earlier reply", "tool_calls": []}
    assert render(template, [reply], {}) == "<assistant>An earlier reply"
    assert render(template, CALLS[1:2], {}) == "<assistant>(calls)"


SPLITTING = (
    "{% for m in messages %}<{{ m.role }}>{% set c = m.content %}{% if '</think>' in c %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}{{ c }}</s>{% endfor %}"
)


@pytest.mark.parametrize("content", ["<think>\nshort\n</think>\n\nThe answer", "<think>a</think>", "x </think> a"])
def test_what_a_template_takes_out_of_a_message_cannot_be_continued(content: str) -> None:
    tokenizer = Tokenizer.load(BUNDLED)
    chat = [{"role": "user", "content": f"Q {content}"}, {"role": "assistant", "content": content}]
    given: dict[str, Any] = {"chat_template": SPLITTING, "continue_final_message": True}
    with pytest.raises(PromptError, match=r"^continue_final_message: .* does not print the content of the last"):
        tokenizer.apply_chat_template(chat, **given)
    with pytest.raises(ValueError, match="does not appear in the chat"):
        tokenizer.to_transformers().apply_chat_template(chat, tokenize=False, **given)
    assert tokenizer.apply_chat_template([*chat[:1], {"role": "assistant", "content": "It is"}], **given).endswith(
        "<assistant>It is"
    )
