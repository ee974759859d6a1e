"""OpenAI's own client against a live server: answers of the types it expects, and its own kinds of errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from serving.conftest import Live

HELLO: Any = [{"role": "user", "content": "Say hello"}]


@pytest.fixture(scope="module")
def client(openai: Any, live: Live) -> Any:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60)


CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "seed": {"seed": 5},
    "two": {"n": 2},
    "nucleus": {"top_p": 0.5},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": -0.5},
    "bias": {"logit_bias": {"5": -100}},
    "one stop": {"stop": "a"},
    "four stops": {"stop": ["a", "b", "c", "d"]},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "user": {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "store": False},
    "prediction": {"prediction": {"type": "content", "content": "def f():"}},
    "cache key": {"prompt_cache_key": "mine"},
    "text": {"response_format": {"type": "text"}, "modalities": ["text"]},
    "json": {"response_format": {"type": "json_object"}},
    "vLLM's": {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True}},
    "choice": {"extra_body": {"structured_outputs": {"choice": ["tea", "coffee"]}}},
    "continued": {"messages": [*HELLO, {"role": "assistant", "content": "Hel"}],
                  "extra_body": {"continue_final_message": True}},
    "talk": {"messages": [*HELLO, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Again"}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
}  # fmt: skip


@pytest.mark.parametrize("case", CHATS)
def test_chats(openai: Any, client: Any, case: str) -> None:
    given = {"model": "bundled", "messages": HELLO, "max_completion_tokens": 8} | CHATS[case]
    whole = client.chat.completions.create(**given)
    assert isinstance(whole, openai.types.chat.ChatCompletion)
    assert len(whole.choices) == given.get("n", 1)
    assert all(isinstance(one.message.content, str) for one in whole.choices)
    assert {one.finish_reason for one in whole.choices} <= {"stop", "length"}
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    if given.get("logprobs"):
        assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    if case == "choice" and whole.choices[0].finish_reason == "stop":
        assert whole.choices[0].message.content in ("tea", "coffee")
    deltas = list(client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    assert all(isinstance(one, openai.types.chat.ChatCompletionChunk) for one in deltas)
    assert deltas[-1].usage is not None
    if case in ("greedy", "seed"):
        text = "".join(choice.delta.content or "" for one in deltas for choice in one.choices)
        assert text == whole.choices[0].message.content


@pytest.mark.parametrize("prompt", ["One day", ["One", "Two"], [5, 6, 7], [[5, 6], [7]]])
def test_completions(openai: Any, client: Any, prompt: Any) -> None:
    whole = client.completions.create(model="bundled", prompt=prompt, max_tokens=6, temperature=0, logprobs=1)
    assert isinstance(whole, openai.types.Completion)
    texts = [one.text for one in whole.choices]
    assert all(len(one.logprobs.tokens) <= 6 for one in whole.choices)
    found: dict[int, str] = {}
    for event in client.completions.create(model="bundled", prompt=prompt, max_tokens=6, temperature=0, stream=True):
        for choice in event.choices:
            found[choice.index] = found.get(choice.index, "") + choice.text
    assert [found[i] for i in range(len(texts))] == texts


def test_models_and_parsed_answers(openai: Any, client: Any) -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        age: int

    assert [one.id for one in client.models.list()] == ["bundled", "other-name"]
    assert client.models.retrieve("bundled").owned_by == "paceline"
    given = {"model": "bundled", "messages": HELLO, "temperature": 0, "max_completion_tokens": 60}
    try:
        whole = client.chat.completions.parse(**given, response_format=Person)
    except openai.LengthFinishReasonError:
        return
    assert isinstance(whole.choices[0].message.parsed, Person)


ERRORS: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "range": ({"temperature": -1}, "BadRequestError", "temperature"),
    "unknown": ({"extra_body": {"colour": 1}}, "BadRequestError", "colour"),
    "model": ({"model": "gpt-9"}, "NotFoundError", "model"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}]},
              "BadRequestError", None),
    "long": ({"messages": [{"role": "user", "content": "word " * 4000}]}, "BadRequestError", None),
    "schema": ({"response_format": {"type": "json_schema", "json_schema": {
        "name": "a", "strict": True, "schema": {"type": "objekt"}}}}, "BadRequestError", "response_format"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.parametrize("stream", [True, False])
def test_errors_are_of_the_clients_own_kinds(openai: Any, client: Any, case: str, stream: bool) -> None:
    more, kind, param = ERRORS[case]
    with pytest.raises(getattr(openai, kind)) as caught:
        client.chat.completions.create(**{"model": "bundled", "messages": HELLO, "stream": stream} | more)
    if param is not None:
        assert caught.value.param == param


def test_many_asynchronous_clients_and_cancels(openai: Any, live: Live) -> None:
    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:

            async def one(i: int) -> str:
                given: Any = {"model": "bundled", "prompt": "One day", "temperature": 0, "max_tokens": 12}
                if i % 3 == 0:  # leaves in the middle
                    stream = await client.completions.create(**given | {"max_tokens": 900, "stream": True})
                    await anext(aiter(stream))
                    await stream.close()
                    return ""
                return (await client.completions.create(**given)).choices[0].text

            return await asyncio.gather(*(one(i) for i in range(18)))

    found = asyncio.run(all_at_once())
    assert len({text for text in found if text}) == 1


def test_answers_are_json_that_anybody_reads(live: Live) -> None:
    body = live.http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2}).text
    assert json.loads(body)["choices"][0]["message"]["role"] == "assistant"
