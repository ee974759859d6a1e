"""A diffusion language model behind the server: the text and thoughts of the other routes, wrong values by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from command import Command

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.errors import ConfigError
from paceline.serving.metrics import Metrics
from tests.serving.conftest import Live, serve
from tests.serving.test_api import CHAT, COMPLETIONS, events
from tests.serving.test_operations import value

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
PROMPT = "insert Henry at 4: Holmes, Bill, John, York, Don, Jack =>"
MODELS = ("bundled/diffusion", "bundled/block_diffusion")
ASKED: list[dict[str, Any]] = [
    {"canvas": [" Holmes,", 3, " Zoe"]},
    {"think": 13},
    {"think": {"max_tokens": 20, "check_prompt": " again:", "end": ", John"}, "canvas": [1, " Bill"]},
]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(capsys, monkeypatch)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> tuple[str, LLM]:
    return request.param, LLM(request.param, dtype="float32", seed=0)


@pytest.fixture(scope="module")
def live(model: tuple[str, LLM], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    template = tmp_path_factory.mktemp("chat") / "template.jinja"
    template.write_text(TEMPLATE)
    yield from serve(AsyncLLM(model[1]), chat_template=str(template), max_request_tokens=100)


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_three_routes_give_the_same_tokens(
    run: Command, model: tuple[str, LLM], live: Live, asked: dict[str, Any]
) -> None:
    name, llm = model
    [out] = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=21, **asked))
    whole = out.outputs[0]
    [free] = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=21))
    assert whole.token_ids != free.outputs[0].token_ids
    flags = [f"--{key}={json.dumps(value)}" for key, value in asked.items()]
    found = json.loads(run("generate", PROMPT, "-m", name, "--dtype=float32", "--max-tokens=21", "--json", *flags).out)
    assert (found["token_ids"], found.get("reasoning")) == (whole.token_ids, whole.reasoning)
    body = {"temperature": 0, "max_tokens": 21, **asked}
    answer = live.ok(COMPLETIONS, prompt=PROMPT, return_token_ids=True, **body)
    [choice] = answer["choices"]
    assert (choice["token_ids"], choice.get("reasoning_content")) == (whole.token_ids, whole.reasoning)
    made = len(whole.token_ids) + len(whole.reasoning_token_ids)
    assert answer["usage"]["completion_tokens"] == made
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(whole.reasoning_token_ids)
    messages = [{"role": "user", "content": PROMPT}]
    said = live.ok(CHAT, messages=messages, **body)["choices"][0]["message"]
    assert (said["content"], said["reasoning_content"] or None) == (whole.text, whole.reasoning)
    asked_for = {**asked, "temperature": 0, "max_output_tokens": 21, "store": False}
    response = live.ok("/v1/responses", input=PROMPT, **asked_for)
    blocks = [item["content"][0]["text"] for item in response["output"]]
    assert blocks == [text for text in (whole.reasoning, whole.text) if text is not None]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len(whole.reasoning_token_ids)
    deltas = [event["choices"][0]["delta"] for event in events(live, CHAT, messages=messages, **body)]
    assert "".join(delta.get("content", "") for delta in deltas) == whole.text
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == (whole.reasoning or "")


def test_the_bare_text_is_the_answer_alone(run: Command, model: tuple[str, LLM]) -> None:
    name, llm = model
    [out] = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=21, think=13))
    found = run("generate", PROMPT, "-m", name, "--dtype=float32", "--max-tokens=21", "--think=13")
    assert found.out == out.outputs[0].text + "\n"


def test_what_runs_and_what_waits_is_in_the_metrics(model: tuple[str, LLM]) -> None:
    _, llm = model
    metrics = Metrics(AsyncLLM(llm))

    def counted() -> list[float]:
        page = metrics.page().decode()
        return [value(page, f"paceline:num_requests_{name}") for name in ("running", "waiting")]

    requests = [llm.request(PROMPT, SamplingParams(temperature=0.0, max_tokens=21))[0] for _ in range(3)]
    assert counted() == [0, 0]
    for request in requests:
        llm.backend.open(request)
    llm.backend.step()
    assert counted() == [1, 2]
    for request in requests:
        llm.backend.drop(request.id)
    assert counted() == [0, 0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a " * 3000, "max_tokens": 8}, "prompt"),
        ({"prompt": PROMPT, "max_tokens": 8, "top_p": 0.5}, "top_p"),
        ({"prompt": PROMPT, "max_tokens": 8, "canvas": [500, "a"]}, "canvas"),
    ],
    ids=["long", "top_p", "canvas"],
)
def test_what_is_wrong_is_told_before_a_stream_begins(live: Live, body: dict[str, Any], param: str) -> None:
    assert live.error(COMPLETIONS, **body, stream=True)["param"] == param
    assert events(live, COMPLETIONS, prompt=PROMPT, max_tokens=8, stream=True)


def test_a_wrong_request_is_not_queued_and_a_checked_one_gives_the_same(model: tuple[str, LLM]) -> None:
    _, llm = model
    with pytest.raises(ConfigError, match="top_p"):
        llm.request(PROMPT, SamplingParams(max_tokens=8, top_p=0.5))
    params = SamplingParams(temperature=0.0, max_tokens=8)
    [whole] = llm.generate(PROMPT, params)
    *_, last = llm.stream(PROMPT, params)
    assert last.output.outputs[0].token_ids == whole.outputs[0].token_ids


NAN, INF = float("nan"), float("inf")
WRONG: list[tuple[str, Any]] = [
    *[("canvas", value) for value in ("a", 5, True, {}, [], [1], [0, "a"], [-1, "a"], [True, "a"], [1.5, "a"])],
    *[("canvas", value) for value in ([NAN, "a"], [INF, "a"], [None, "a"], [""], [[-1]], [[99999]], ["a", 10**30])],
    *[("think", value) for value in (0, -1, True, 1.5, "4", [], {}, NAN, INF, 101, 10**30, {"max_tokens": NAN})],
    *[("think", value) for value in ({"max_tokens": "4"}, {"max_tokens": 4, "x": 1}, {"max_tokens": 4, "end": 5})],
    *[("temperature", value) for value in (NAN, INF, -1, True, "x")],
    *[("max_tokens", value) for value in (-1, True, "x", NAN)],
    *[("seed", value) for value in (NAN, True, "x", 2**70)],
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=str)
def test_wrong_values_name_their_field(live: Live, field: str, value: Any) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 8, field: value})
    answer = live.http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert "\n" not in error["message"]
