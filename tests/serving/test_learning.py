"""What operators and users see of a drafter that learns: versions in metrics, on the live page, in explanations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from serving.conftest import Live, serve

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.bench import BUNDLED_DRAFT
from paceline.drafters.learning import learning_drafter
from paceline.explain import Recorder, Replay
from paceline.serving import warm_up

CONFIG = {"method": "draft_model", "num_speculative_tokens": 2, "learn": {"interval": 1000}}


class Idle:
    """In the place of the trainer's process, which these tests do not need."""

    started, pid = 0, 0

    def __init__(self, *_: object) -> None:
        Idle.started += 1

    def pause(self, paused: bool) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing was opened."""


@pytest.fixture(scope="module")
def taught() -> Iterator[Live]:
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(learning_drafter, "TrainerProcess", Idle)
        yield from serve(AsyncLLM(LLM(dtype="float32", speculative_config=CONFIG)), api_key=["mine", "yours"])


def header(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def ask(live: Live, key: str) -> Any:
    body = {"prompt": "One day", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = live.http.post("/v1/completions", json=body, headers=header(key))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_versions_are_in_the_metrics_on_the_page_and_in_explanations(taught: Live) -> None:
    llm = taught.model.llm
    (drafter,) = llm.engine.parts.drafter_set.drafters
    text = ask(taught, "mine")
    (tenant,) = drafter.learner.tenants()
    drafter.learner.adopt(tenant, BUNDLED_DRAFT)
    assert ask(taught, "mine") == ask(taught, "yours") == text
    page = taught.http.get("/metrics", headers=header("mine")).text
    found = dict(re.findall(r'^paceline:(drafter_\w+)\{drafter="draft_model"\} (\S+)$', page, re.MULTILINE))
    assert {name: float(value) for name, value in found.items() if name != "drafter_traffic_bytes"} == {
        "drafter_version": 1, "drafter_training_rounds": 0, "drafter_rollbacks": 0, "drafter_trainer_running": 1,
    }  # fmt: skip
    assert 0 < float(found["drafter_traffic_bytes"]) < 1e6
    words = {key: taught.http.get("/page/state", headers=header(key)).json()["learning"] for key in ("mine", "yours")}
    assert words["mine"] == ["draft_model: version 1, learned from requests (0 rounds)"]
    assert words["yours"] == ["draft_model: version 0, as it was loaded (0 rounds)"]
    recorder = Recorder(llm)
    for _ in recorder.run("One day", SamplingParams(temperature=0, max_tokens=8)):
        pass
    sentences = Replay(recorder.data()).sentences
    assert "draft_model drafts with version 1, learned from requests (0 rounds)." in sentences


def test_engines_beside_the_one_that_serves_learn_nothing(taught: Live) -> None:
    before = Idle.started
    warm_up(taught.model.llm)
    assert Idle.started == before
