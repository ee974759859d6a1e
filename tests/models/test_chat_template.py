"""Chat templates as transformers renders them, refusals included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

import paceline
from paceline.errors import CheckpointError, PromptError
from paceline.models.chat_template import render
from paceline.models.tokenizer import Tokenizer

BUNDLED = Path(paceline.__file__).parent / "bundled" / "target"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Größe?", "tool_calls": None},
    {"role": "assistant", "content": "Ja.\n"},
    {"role": "user", "content": "why"},
]
TEMPLATES = [
    "{% for m in messages %}\n    {% if m['role'] == 'user' %}\nU: {{ m['content'] }}\n    {% endif %}\n{% endfor %}\nend",
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "{% for m in messages %}{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ bos_token }}",
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


def test_a_template_that_refuses_says_so_in_one_line() -> None:
    with pytest.raises(PromptError, match=r"refused the messages: roles must alternate$"):
        render("{{ raise_exception('roles must\n alternate') }}", MESSAGES, {})


def test_a_broken_template_is_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        render("{% for %}", MESSAGES, {})


@pytest.mark.parametrize("messages", [[], "hello", {"role": "user"}, ["hello"]])
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(PromptError):
        render("x", messages, {})


def test_templates_cannot_leave_the_sandbox_or_change_messages() -> None:
    for template in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ ''.__class__.__subclasses__() }}"):
        with pytest.raises(PromptError):
            render(template, MESSAGES, {})


def test_objects_with_methods_are_refused() -> None:
    with pytest.raises(PromptError, match=r"got [A-Za-z]*Path$"):
        render("x", [{"role": "user", "content": Path()}], {})
