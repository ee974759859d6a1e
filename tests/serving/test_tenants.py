"""What one key's texts teach helps that key alone, and nobody is told of another's texts."""

from __future__ import annotations

import re
from typing import Any

import pytest
from serving.conftest import Live, serve

from paceline import LLM, AsyncLLM

LEARNERS: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix", "num_speculative_tokens": 6},
    "token_recycling": {"method": "token_recycling", "num_speculative_tokens": 6},
    "aded": {"method": "aded", "num_speculative_tokens": 6},
}
PROMPT = "The name of the old harbour was"


def usage(live: Live, key: str, **more: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 48, "temperature": 0, "ignore_eos": True, **more}
    answer = live.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["usage"]
    return found


@pytest.mark.parametrize("method", LEARNERS)
def test_drafts_come_from_texts_of_the_same_key(llm: LLM, method: str) -> None:
    for live in serve(AsyncLLM(llm.with_speculative_config(LEARNERS[method])), api_key=["mine", "yours"]):
        first, again, other = (usage(live, key, max_tokens=24)["speculative"] for key in ("mine", "mine", "yours"))
        assert again["num_accepted_tokens"] > first["num_accepted_tokens"]  # it does learn
        assert other == first
        salted = [usage(live, "mine", max_tokens=24, cache_salt=salt)["speculative"] for salt in ("a", "a", "b")]
        assert salted == [first, again, first]


def test_the_drafters_of_auto_learn_for_the_same_key(llm: LLM) -> None:
    """How much they draft follows rates over all requests, so that numbers vary a little; what they draft does not."""
    config = {"method": "auto", "controller": "fixed", "num_speculative_tokens": 6}
    for live in serve(AsyncLLM(llm.with_speculative_config(config)), api_key=["mine", "yours"]):
        first, again, other = (
            usage(live, key)["speculative"]["drafters"]["suffix"]["num_accepted_tokens"]
            for key in ("mine", "mine", "yours")
        )
        assert again > first + 20
        assert other < first + 4


def test_prefixes_are_found_by_the_same_key(llm: LLM) -> None:
    prompt = "A long beginning that two of them have in common, word by word. " * 8
    for live in serve(AsyncLLM(llm), api_key=["mine", "yours"]):
        counts = [
            usage(live, key, prompt=prompt, max_tokens=1, **more)["prompt_tokens_details"]["cached_tokens"]
            for key, more in (("mine", {}), ("mine", {}), ("yours", {}), ("mine", {"cache_salt": "a"}),
                              ("mine", {"prompt_cache_key": "a"}), ("mine", {}))
        ]  # fmt: skip
        assert counts[0] == counts[2] == counts[3] == 0
        assert counts[1] == counts[5] > 0


def test_a_prediction_is_drafted_from_for_its_own_request_only(llm: LLM) -> None:
    config = {"method": "prediction", "num_speculative_tokens": 6}
    for live in serve(AsyncLLM(llm.with_speculative_config(config)), api_key=["mine", "yours"]):
        assert usage(live, "mine", prediction="the name of the harbour")["speculative"]["num_draft_tokens"] > 0
        for key in ("mine", "yours"):
            assert usage(live, key)["speculative"]["num_draft_tokens"] == 0


def test_metrics_hold_sums_over_everybody_and_no_texts(llm: LLM) -> None:
    for live in serve(AsyncLLM(llm), api_key=["mine-secret", "yours"]):
        usage(live, "mine-secret", cache_salt="salt-secret", user="user-secret", request_id="id-secret")
        page = live.http.get("/metrics", headers={"authorization": "Bearer yours"}).text
        assert "secret" not in page
        assert "harbour" not in page
        labels = set(re.findall(r'[{,]([a-z_]+)="', page))
        versions = {"version", "python", "torch"}
        assert labels <= {"le", "status", "drafter", "position", "finished_reason"} | versions
