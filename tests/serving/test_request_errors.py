"""Errors of requests name the field that is at fault, as the request has it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.serving.api_errors import ApiError
from tests.serving.conftest import Live

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "Hi"}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def body_of(path: str, text: str) -> dict[str, Any]:
    """A request of each API with this prompt."""
    if path in (COMPLETIONS, "/tokenize"):
        return {"prompt": text}
    if path == RESPONSES:
        return {"input": text, "store": False}
    return {"messages": said(text)} | ({"model": "bundled", "max_tokens": 3} if path == MESSAGES else {})


def error_of(live: Live, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The error, of a body that may hold halves of characters, which are sent as JSON writes them."""
    answer = live.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


FIELDS = {COMPLETIONS: "prompt", CHAT: "messages", RESPONSES: "input"}


@pytest.mark.parametrize(
    ("text", "told"), [("a " * 3000, "shorten the prompt"), ("a\ud800", "surrogate")], ids=["long", "surrogate"]
)
@pytest.mark.parametrize("path", FIELDS)
def test_a_wrong_prompt_names_its_field(talking: Live, path: str, text: str, told: str) -> None:
    error = error_of(talking, path, body_of(path, text))
    assert (error["param"], told in error["message"]) == (FIELDS[path], True)
    assert error_of(talking, MESSAGES, body_of(MESSAGES, text))["message"].startswith("messages: ")
    talking.ok(path, **body_of(path, "Hi"), **{"max_output_tokens" if path == RESPONSES else "max_tokens": 1})


def test_empty_prompts_and_those_of_tokenize_name_their_field(talking: Live) -> None:
    assert talking.error(COMPLETIONS, prompt="")["param"] == "prompt"
    assert talking.error(COMPLETIONS, prompt=[[]])["param"] == "prompt"
    assert error_of(talking, "/tokenize", {"prompt": "a\ud800"})["param"] == "prompt"
    assert error_of(talking, "/tokenize", {"messages": said("a\ud800")})["param"] == "messages"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_wrong_prediction_is_not_taken_for_a_wrong_prompt(talking: Live, path: str) -> None:
    error = error_of(talking, path, body_of(path, "Hi") | {"prediction": "a\ud800"})
    assert (error["param"], error["message"][:16]) == ("prediction", "prediction: the ")


def test_sampling_parameters_among_those_of_the_template_are_told_by_their_field(talking: Live) -> None:
    for path in (CHAT, RESPONSES):
        error = talking.error(path, **body_of(path, "Hi"), chat_template_kwargs={"seed": 1})
        assert error["param"] == "chat_template_kwargs"
        assert error["message"].endswith("; give the field seed")
    error = talking.error("/tokenize", messages=HELLO, chat_template_kwargs={"seed": 1})
    assert error["message"].endswith("; leave it out"), "it has no such field"
    talking.ok("/tokenize", messages=HELLO, chat_template_kwargs={"seed": None})


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (COMPLETIONS, {"max_tokens": 3}, "max_tokens=3"),
        (COMPLETIONS, {"n_predict": 3}, "n_predict=3"),
        (CHAT, {"max_tokens": 3}, "max_tokens=3"),
        (CHAT, {"max_completion_tokens": 3}, "max_completion_tokens=3"),
        (RESPONSES, {"max_output_tokens": 3}, "max_output_tokens=3"),
    ],
)
def test_the_limit_of_tokens_has_the_name_that_the_request_gave(
    talking: Live, path: str, body: dict[str, Any], told: str
) -> None:
    error = talking.error(path, **body_of(path, "Hi"), **body, min_tokens=30)
    assert (error["param"], error["message"]) == ("min_tokens", f"min_tokens must be at most {told}, got 30")


def test_a_schema_that_cannot_be_used_is_told_by_its_field(talking: Live) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nosuch"}}}
    assert talking.error(CHAT, messages=HELLO, response_format=form)["message"].startswith("response_format json ")
    own = talking.error(CHAT, messages=HELLO, structured_outputs={"json": {"type": "nosuch"}})
    assert own["message"].startswith("structured_outputs json ")


def test_words_that_are_no_fields_keep_their_names() -> None:
    names = {"max_tokens": "max_output_tokens", "messages": "input"}
    kept = ("think max_tokens must be 1", "got 'max_tokens'", 'as {"max_tokens": 256}', "max_tokens_more")
    for message in kept:
        assert ApiError(message, param="think").renamed(names).message == message
    error = ApiError("max_tokens and messages", param="messages").renamed(names)
    assert (error.message, error.param) == ("max_output_tokens and input", "input")
