"""What the live page is told, to whom, and only while somebody looks."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from serving.conftest import Live, serve

from paceline import LLM, AsyncLLM
from paceline.config import KeyLimits, ServerConfig
from paceline.engine import StepRecord, watching
from paceline.engine.record import TimeSplit
from paceline.errors import ConfigError
from paceline.serving import read_keys
from paceline.serving.limits import PAGE_FILES
from paceline.serving.page import Sums, clipped_step, hidden_step, undrafted_seconds
from paceline.tree import EMPTY_TREE, TokenTree

ROOT = Path(__file__).parent.parent.parent
PROMPT = "one two three four one two three four one two"
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def keyed(llm: LLM) -> Iterator[Live]:
    """A server of its own engine, with two keys and an administrator's."""
    model = AsyncLLM(llm.with_speculative_config(DRAFTS))
    yield from serve(model, api_key=["mine", "yours"], admin_key=["boss"])


def state(live: Live, key: str, wanted: str = "", answer: str = "") -> dict[str, Any]:
    asked = {"request": wanted, "answer": answer}
    reply = live.http.get("/page/state", params=asked, headers={"authorization": f"Bearer {key}"})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def decode(live: Live, key: str, prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **more}
    answer = live.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_the_page_is_open_and_what_it_shows_is_not(keyed: Live) -> None:
    for path in ("/", *(f"/static/{name}" for name in PAGE_FILES)):
        answer = keyed.http.get(path)
        assert answer.status_code == 200
        assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text), "a host elsewhere"
    markup = keyed.http.get("/").text
    assert not re.search(r"<script(?! src=)|\son\w+=|style=", markup), "inline code"
    for path in ("/page/state", "/static/", "/static/page.html", "/static/../v1/models"):
        assert keyed.http.get(path).status_code == 401
    assert keyed.http.get("/page/state", headers={"authorization": "Bearer wrong"}).status_code == 401


def test_a_key_sees_its_own_requests_and_the_administrator_all_without_texts(keyed: Live) -> None:
    before = {key: state(keyed, key)["counts"] for key in ("mine", "yours", "boss")}
    answer = decode(keyed, "mine")
    after = {key: state(keyed, key) for key in before}
    tokens = {key: after[key]["counts"]["tokens"] - before[key]["tokens"] for key in before}
    assert tokens == {"mine": 40, "yours": 0, "boss": 40}
    drafted = answer["usage"]["speculative"]["drafters"]["ngram"]
    found = after["mine"]["counts"]["drafters"]["ngram"]
    assert (found["verified"], found["accepted"]) == (drafted["num_draft_tokens"], drafted["num_accepted_tokens"])
    assert 0 < sum(found["reached"]) == found["accepted"]  # of chains
    assert after["yours"]["tree"] is None
    mine, boss = after["mine"]["tree"], after["boss"]["tree"]
    assert mine["id"] == boss["id"]
    assert mine["readable"]
    assert not boss["readable"]
    assert mine["texts"][str(mine["step"]["root"])]
    assert boss["texts"] == {"0": "\N{BULLET}"}
    assert len(boss["step"]["nodes"]) == len(mine["step"]["nodes"])
    assert state(keyed, "yours", wanted=mine["id"])["tree"] is None
    told = {key: state(keyed, key, answer=mine["id"])["answer"] for key in before}
    assert told["yours"] is None
    assert told["mine"] == told["boss"]
    assert told["mine"]["tokens"] == 40
    assert told["mine"]["steps"] == 40 - drafted["num_accepted_tokens"]
    assert after["mine"]["words"]
    assert "three" not in json.dumps(after["boss"]) + json.dumps(after["yours"])


def test_an_administrator_reads_texts_where_requests_are_logged(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    model = AsyncLLM(llm.with_speculative_config(DRAFTS))
    for live in serve(model, api_key=["mine"], admin_key=["boss"], log_requests=True):
        state(live, "boss")
        with caplog.at_level(logging.INFO, "paceline.serving"):
            decode(live, "mine")
        assert state(live, "boss")["tree"]["readable"]
        lines = [json.loads(line.message) for line in caplog.records if line.message.startswith("{")]
        prompts = [one["prompt"] for one in lines if one.get("owner", "").startswith("key-") and "prompt" in one]
        assert prompts == [PROMPT]


@pytest.mark.parametrize(("host", "readable"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_without_keys_texts_are_for_this_machine_alone(llm: LLM, host: str, readable: bool) -> None:
    for live in serve(AsyncLLM(llm.with_speculative_config(DRAFTS)), host=host):
        live.http.get("/page/state")
        live.ok("/v1/completions", prompt=PROMPT, max_tokens=20, cache_salt="a salt")
        found = live.http.get("/page/state").json()
        assert found["counts"]["tokens"] > 0
        assert found["tree"]["readable"] is readable


def test_nothing_is_watched_before_somebody_looks_nor_long_after(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AsyncLLM(llm.with_speculative_config(DRAFTS))
    watchers = model.llm.engine.watchers
    for live in serve(model):
        live.ok("/v1/completions", prompt=PROMPT, max_tokens=8)
        assert not watchers
        live.http.get("/page/state")
        live.ok("/v1/completions", prompt=PROMPT, max_tokens=8)
        assert len(watchers) == 1
        monkeypatch.setattr("paceline.serving.page.monotonic", lambda: 1e12)
        live.ok("/v1/completions", prompt=PROMPT, max_tokens=8)
        assert not watchers
        monkeypatch.undo()
        assert live.http.get("/page/state").json()["counts"]["tokens"] == 0  # counted anew


def test_a_page_that_fails_ends_no_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("paceline.serving.page.plain_step", broken)
    model = AsyncLLM(llm.with_speculative_config(DRAFTS))
    for live in serve(model):
        live.http.get("/page/state")
        assert (
            live.ok("/v1/completions", prompt=PROMPT, max_tokens=8, ignore_eos=True)["usage"]["completion_tokens"] == 8
        )
        assert not model.llm.engine.watchers


@pytest.mark.parametrize(("config", "least"), [(None, 60), ("auto", 60), (DRAFTS, 40)])
def test_plain_decoding_costs_what_its_steps_take(llm: LLM, config: Any, least: int) -> None:
    """Without drafts both speeds are one. With them `auto` has measured the plain one; else it is seen now and then."""
    for live in serve(AsyncLLM(llm.with_speculative_config(config))):
        live.http.get("/page/state")
        live.ok("/v1/completions", prompt=PROMPT, max_tokens=60, ignore_eos=True)
        counts = live.http.get("/page/state").json()["counts"]
        assert least <= counts["priced_tokens"] <= counts["tokens"] == 60
        assert counts["plain_seconds"] > 0
        if config is None:
            assert counts["plain_seconds"] == pytest.approx(counts["seconds"])


def test_looking_for_drafts_in_vain_is_no_part_of_a_plain_step() -> None:
    """Else what drafters cost where they find nothing would be charged to plain decoding."""

    def took(drafting: float, tree: TokenTree = EMPTY_TREE) -> float | None:
        times = TimeSplit(draft=drafting, score=2.0, other=0.5)
        return undrafted_seconds(cast(StepRecord, SimpleNamespace(proposed=[tree], times=times)))

    assert took(1.0) == took(0.0) == 2.5
    assert took(1.0, TokenTree.chain([1], source=0)) is None


def test_what_drafting_saved_is_the_plain_time_of_the_tokens_less_that_of_the_steps() -> None:
    """Of a batch of two: a step with drafts that brought 3 and 1 tokens, one without, and one of unknown plain time."""

    def step(kept: list[int], seconds: float, tree: TokenTree) -> StepRecord:
        sequences = [SimpleNamespace(context=SimpleNamespace(tokens=[0] * (10 + count))) for count in kept]
        record = SimpleNamespace(
            sequences=sequences, lengths=[10] * len(kept), times=TimeSplit(score=seconds), trees=[tree, EMPTY_TREE]
        )
        return cast(StepRecord, record)

    drafted = TokenTree.chain([1, 2], source=0)
    sums = Sums()
    sums.add(step([3, 1], 0.5, drafted), [0], 0.25)
    sums.add(step([1, 1], 0.25, EMPTY_TREE), [0], 0.25)
    sums.add(step([2, 1], 9.0, drafted), [0], None)
    told = sums.to_dict()
    assert (told["tokens"], told["steps"], told["seconds"]) == (6, 3, 9.75)
    assert (told["priced_tokens"], told["priced_seconds"], told["plain_seconds"]) == (4, 0.75, 1.0)
    assert (told["checks"], told["check_tokens"], told["check_seconds"], told["check_plain"]) == (1, 3, 0.5, 0.25)


def test_the_last_tree_with_drafts_stays(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the last step of a request had none, and where a later request drafts nothing at all."""
    for name in ("TREE_EVERY", "LAST_EVERY"):
        monkeypatch.setattr(f"paceline.serving.page.{name}", 0.0)
    monkeypatch.setattr("paceline.serving.page.TREE_SHARE", 1e9)  # every tree is shown
    drafts: list[int] = []

    def note(record: StepRecord) -> None:
        drafts.append(len(record.trees[0]))

    model = AsyncLLM(llm.with_speculative_config(DRAFTS))
    for live in serve(model):
        live.http.get("/page/state")
        with watching(model.llm.engine, note):
            ending = 0
            for count in range(20, 40):
                drafts.clear()
                live.ok("/v1/completions", prompt=PROMPT, max_tokens=count, ignore_eos=True, temperature=0)
                found = live.http.get("/page/state").json()
                assert found["tree"]["tokens"] == count
                assert found["tree"]["ended"]
                assert len(found["tree"]["step"]["nodes"]) == next(filter(None, reversed(drafts)))
                assert (found["tree"]["at"] == count) == (drafts[-1] > 0)
                ending += drafts[-1] == 0
            assert 0 < ending < 20  # the control: some end with a step without drafts, some with one that has them
            live.ok("/v1/completions", prompt=PROMPT, max_tokens=9, ignore_eos=True, speculative_config="none")
        later = live.http.get("/page/state").json()
        assert later["tree"] == found["tree"]
        assert later["words"] != found["words"]
        (newest,) = {f"request-{int(found['tree']['id'].rpartition('-')[2]) + 1}"}
        plain = live.http.get("/page/state", params={"request": newest}).json()["tree"]
        assert (plain["id"], plain["step"]["nodes"]) == (newest, [])  # where that very request is asked for


def test_large_trees_are_cut_and_hidden_ones_tell_no_token() -> None:
    def node(parent: int, status: str) -> dict[str, Any]:
        return {"token": 77, "parent": parent, "status": status, "depth": 1, "source": 0, "p": 0.5, "confidence": 0.5}

    nodes = [node(-1, "rejected") for _ in range(400)] + [node(-1, "accepted"), node(400, "accepted"), node(3, "cut")]
    rest = {"count": 3, "root": 77, "next": {"token": 77, "p": 0.1}, "top": [{"token": 77, "p": 0.1}], "words": "w"}
    step = clipped_step({"nodes": nodes, "drafters": [None], "seconds": {}, "error": None, **rest})
    assert len(step["nodes"]) == 130
    assert [one["parent"] for one in step["nodes"][-2:]] == [-1, 128]
    assert "77" not in json.dumps(hidden_step(step))


def test_streams_tell_who_drafted_which_text_where_they_are_asked(keyed: Live) -> None:
    plain = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stream": True}
    key = {"authorization": "Bearer mine"}
    texts = []
    for options in ({}, {"include_segments": True}):
        body = plain | {"stream_options": options}
        with keyed.http.stream("POST", "/v1/completions", json=body, headers=key) as answer:
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
        texts.append("".join(one["text"] for one in choices))
        assert all(("segments" in one) is bool(options) for one in choices)
    pieces = [piece for one in choices for piece in one["segments"]]
    assert "".join(piece["text"] for piece in pieces) == texts[0] == texts[1]
    assert {piece["drafter"] for piece in pieces} == {None, "ngram"}
    assert len({json.loads(line)["engine_request"] for line in lines}) == 1


def test_the_dashboard_reads_metrics_that_there_are(keyed: Live) -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    read = {name for query in queries for name in re.findall(r"paceline:\w+", query)}
    text = keyed.http.get("/metrics", headers={"authorization": "Bearer mine"}).text
    there = set(re.findall(r"^# TYPE (paceline:\w+)", text, re.MULTILINE))
    names = {name if name in there else re.sub("_(bucket|sum|count)$", "", name) for name in read}
    assert len(queries) > 10
    assert names <= there
    assert there - names <= {"paceline:engine_faults"} | {one for one in there if one.endswith("_created")}
    assert not re.search(r"https?://", json.dumps(dashboard))


def test_keys_of_administrators_come_as_those_of_clients_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("of the file\n\n")
    monkeypatch.setenv("PACELINE_ADMIN_KEY", "of the environment")
    config = ServerConfig(admin_key=["given"], admin_key_file=str(file), api_key=["other"])
    assert read_keys(config) == ({"other": KeyLimits()}, ("given", "of the file", "of the environment"))
    with pytest.raises(ConfigError, match="admin_key must be another one"):
        read_keys(ServerConfig(api_key=["same"], admin_key=["same"]))


@pytest.mark.parametrize("flooding", ["yours", "mine"])
def test_a_key_that_follows_many_requests_keeps_no_other_from_following_one(llm: LLM, flooding: str) -> None:
    """A viewer's own requests are bounded: the control is one that has no room left itself."""
    model = AsyncLLM(llm.with_speculative_config(DRAFTS))
    for live in serve(model, api_key=["mine", "yours"]):
        for number in range(40):
            state(live, flooding, f"none-{number}")
        state(live, "mine")
        decode(live, "mine")
        assert (state(live, "mine")["tree"] is not None) == (flooding == "yours")
