"""Other engines in the benchmark: they take turns, are compared, and what fails or is missing is said; peers are made
up here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_checkpoint

from lab.peers import TRIES, PeerError, PeerRun, PeersInTurn, WantedPeer, parse_peers, wanted, with_one_end, without_end
from paceline import LLM, SamplingParams
from paceline.bench.report import document_remarks, document_tables
from paceline.bench.report.page import report_html
from paceline.bench.run import BenchSetting, Harness, Options, build_document
from paceline.bench.run.document import check_document
from paceline.errors import ConfigError
from paceline.utils import Conversation, Workload
from paceline.verify import Pair

TALKS = tuple(Conversation(id=name, task="t", turns=(f"one two {name} one two",)) for name in ("a", "b", "c", "d"))
WORK = Workload(name="talks", format="jsonl", source="t", conversations=TALKS)
OPTIONS = Options(max_tokens=6, repeats=2, ignore_eos=True, chat=False)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(
        tiny_checkpoint.write(tmp_path_factory.mktemp("model")), speculative_config=None, dtype="float32", seed=0
    )


class FakePeer:
    """Plain decoding by the same weights, each token in a set time, spoilt as `how` says."""

    def __init__(self, llm: LLM, log: list[Any], name: str, how: str, given: dict[str, Any]) -> None:
        self.llm, self.log, self.name, self.how, self.given = llm, log, name, how, given
        self.version, self.settings = f"{name} 1.0", {"dtype": given["dtype"], "threads": given["threads"]}
        self.calls, self.passes = 0, 4 if name == "transformers" else None
        log.append(("open", name))

    def generate(self, prompt_ids: Sequence[int], max_tokens: int, ignore_eos: bool = True) -> PeerRun:
        return self.generate_batch([prompt_ids], max_tokens, ignore_eos)[0]

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool = True
    ) -> list[PeerRun]:
        self.calls += 1
        self.log.append((self.name, tuple(map(tuple, prompts)), max_tokens, ignore_eos))
        if self.how == "crash" and self.calls > 2:
            raise PeerError("peer ended unexpectedly")
        if self.how == "one" and len(prompts) > 1:
            raise PeerError("one prompt at a time")
        if self.how == "stop" and self.calls == 5:
            raise KeyboardInterrupt
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        found = self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params)
        rows = [list(one.outputs[0].token_ids) for one in found]
        if self.how == "wrong":
            rows = [[row[0], (row[1] + 1) % 50, *row[2:]] for row in rows]
        seconds = 0.01 * sum(map(len, rows))
        shared = {
            "seconds": seconds,
            "ttft": 0.01,
            "version": self.version,
            "settings": self.settings,
            "passes": self.passes,
        }
        return [PeerRun(token_ids=row, **shared) for row in rows]

    def close(self) -> None:
        self.log.append(("close", self.name))


@pytest.fixture
def log(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Everything that peers were asked; the installed ones are transformers, llama.cpp and openvino-genai."""
    kept: list[Any] = []
    hows = {"transformers": "good", "llama.cpp": "wrong", "openvino-genai": "crash"}

    def opened(name: str, folder: Path, *, options: dict[str, Any], dtype: str = "", threads: int = 0) -> Any:
        assert name == "openai" or Path(folder) == llm.folder
        how = hows.get(name, "good")
        if how == "absent":
            raise PeerError("it does not start")
        return FakePeer(
            llm.with_speculative_config(None), kept, name, how, {**options, "dtype": dtype, "threads": threads}
        )

    monkeypatch.setattr(wanted, "open_peer", opened)
    monkeypatch.setattr(wanted, "peer_state", lambda name: SimpleNamespace(ready=name != "vllm"))
    monkeypatch.setattr(FakePeer, "hows", hows, raising=False)
    yield kept
    assert sum(one[0] == "open" for one in kept) <= sum(one[0] == "close" for one in kept)


def bench(
    llm: LLM, wanted: list[WantedPeer], options: Options = OPTIONS, settings: Sequence[BenchSetting] = ()
) -> dict[str, Any]:
    with PeersInTurn(llm, wanted) as others:
        harness = Harness(llm, settings, options, peers=others)
        harness.run([WORK])
        made = build_document(harness, [WORK], peers=others)
    check_document(made)
    return made


def test_a_peer_decodes_the_same_ids_in_turn_and_is_compared(llm: LLM, log: list[Any]) -> None:
    made = bench(llm, parse_peers(["transformers:plain"]), settings=[BenchSetting("ngram", {"method": "ngram"})])
    (found,) = made["peers"]
    (plain,) = [c for c in made["cells"] if c["setting"] == "plain"]
    asked = [one for one in log if one[0] == "transformers"]
    assert (
        len(asked) == 1 + 2 * 2 * 4
    )  # a warm-up; every prompt in every repeat, and before each a few tokens that do not count
    assert {len(prompts[0]) for _, prompts, _, _ in asked} == {row["prompt_tokens"] for row in plain["rows"]}
    assert [one[2:] for one in asked] == [(6, True), *[(4, True), (6, True)] * 8]
    assert (found["name"], found["setting"], found["version"], found["precision"]) == (
        "transformers",
        "plain",
        "transformers 1.0",
        "float32",
    )
    assert (found["prompts"], found["failed"], len(found["rows"])) == (4, 0, 8)
    assert (found["equality"]["identical"], found["equal_share"], found["first_difference"]) == (8, 1.0, None)
    assert found["tokens_per_second"]["value"] == pytest.approx(100.0)
    assert found["speedup"]["n"] == 4
    assert found["comparable"]
    assert found["mean_acceptance_length"] == 1.5  # 6 tokens in 4 passes
    assert "transformers plain" in report_html(made)
    assert [one.title for one in document_tables(made)][-1] == "talks, temperature 0, batch 1: other engines"


def test_our_turns_begin_awake_where_peers_have_the_others(
    llm: LLM, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    generate = LLM.generate

    def counted(self: LLM, prompts: Any, params: Any = None, **more: Any) -> Any:
        if isinstance(params, list):  # a made-up peer decodes with one for all
            asked.append([one.max_tokens for one in params])
        return generate(self, prompts, params, **more)

    monkeypatch.setattr(LLM, "generate", counted)
    bench(llm, [])
    assert [4] not in asked
    asked.clear()
    bench(llm, parse_peers(["transformers:plain"]))
    turns = [one for i, one in enumerate(asked) if one == [4] or (i and asked[i - 1] == [4])]
    assert turns == [[4], [6]] * 8
    assert asked[-1] != [4]


def test_a_peer_that_decodes_something_else_gets_no_speed(llm: LLM, log: list[Any]) -> None:
    """The negative control of the comparison."""
    (found,) = bench(llm, parse_peers(["llama.cpp:plain"]))["peers"]
    assert not found["comparable"]
    assert "token 1" in found["reason"]
    assert found["equality"]["different"] == 8
    assert found["first_difference"] == 1
    assert 0 < found["equal_share"] < 1
    assert found["tokens_per_second"] is found["speedup"] is None


def test_a_peer_that_crashes_fails_its_prompts_and_is_tried_again(llm: LLM, log: list[Any]) -> None:
    made = bench(llm, parse_peers(["openvino-genai:plain", "transformers:plain"]))
    lost, good = made["peers"]
    assert (lost["failed"], lost["prompts"]) == (2, 4)  # it answers once after every start, so every other prompt
    assert {row["error"] for row in lost["rows"] if row["error"]} == {"peer ended unexpectedly"}
    assert any(row["tokens"] for row in lost["rows"])
    assert 2 <= sum(one == ("open", "openvino-genai") for one in log) <= 8
    assert good["failed"] == 0
    assert any("2 of 4 prompts failed for openvino-genai plain" in line for line in document_remarks(made))


def test_a_peer_that_never_starts_again_is_given_up(llm: LLM, log: list[Any]) -> None:
    with PeersInTurn(llm, parse_peers(["openvino-genai:plain"])) as others:
        FakePeer.hows["openvino-genai"] = "absent"  # type: ignore[attr-defined]
        harness = Harness(llm, [], OPTIONS, peers=others)
        harness.run([WORK])
        (found,) = others.entries(0)
    assert found["mean_acceptance_length"] is None
    assert {row["error"] for row in found["rows"]} == {"peer ended unexpectedly", "it does not start"}
    assert found["reason"] == "no prompt was decoded: peer ended unexpectedly"
    assert TRIES == 3


def test_what_cannot_run_is_left_out_with_the_reason(llm: LLM, log: list[Any]) -> None:
    FakePeer.hows["llama.cpp"] = "absent"  # type: ignore[attr-defined]
    FakePeer.hows["openvino-genai"] = "one"  # type: ignore[attr-defined]
    made = bench(
        llm,
        parse_peers(["all"]),
        Options(max_tokens=4, repeats=1, ignore_eos=True, chat=False, batches=(2,), temperatures=(0.0, 0.5)),
    )
    whys = [(one["name"], one["why"]) for one in made["peers_skipped"]]
    assert ("vllm", "no environment; run `python -m lab peers install vllm`") in whys
    assert sum(name == "vllm" for name, _ in whys) == 1
    assert ("transformers draft_model", "it needs a draft model; give --draft-model") in whys
    assert ("llama.cpp plain", "it does not start") in whys
    assert ("openvino-genai ngram", "batch 2: one prompt at a time") in whys
    assert any("greedily only" in why for _, why in whys)
    assert {(one["name"], one["batch"], one["temperature"]) for one in made["peers"]} == {("transformers", 2, 0.0)}
    assert {one["setting"] for one in made["peers"]} == {"plain", "ngram, one by one"}


def test_a_batch_goes_out_at_once(llm: LLM, log: list[Any]) -> None:
    (found,) = bench(
        llm,
        parse_peers(["transformers:plain"]),
        Options(max_tokens=6, repeats=1, ignore_eos=True, chat=False, batches=(4,)),
    )["peers"]
    assert [len(one[1]) for one in log if one[0] == "transformers"] == [4, 1, 4]
    assert found["tokens_per_second"]["value"] == pytest.approx(100.0)
    assert {(row["group"], row["seconds"]) for row in found["rows"]} == {(0, 0.24)}


def test_a_batch_goes_out_one_by_one_where_a_peer_takes_one_prompt(llm: LLM, log: list[Any]) -> None:
    options = Options(max_tokens=6, repeats=1, ignore_eos=True, chat=False, batches=(4,))
    (found,) = bench(llm, parse_peers(["transformers:ngram"]), options)["peers"]
    assert [len(one[1]) for one in log if one[0] == "transformers"] == [1] * 9
    assert found["tokens_per_second"]["value"] == pytest.approx(100.0)
    assert [row["seconds"] for row in found["rows"]] == [pytest.approx(0.24)] * 4


def test_ctrl_c_ends_the_peers_and_keeps_what_was_done(llm: LLM, log: list[Any]) -> None:
    FakePeer.hows["transformers"] = "stop"  # type: ignore[attr-defined]
    made = bench(llm, parse_peers(["transformers:plain"]))
    assert made["interrupted"]
    assert len(made["peers"][0]["rows"]) == 1
    assert ("close", "transformers") in log


def test_an_endpoint_gets_its_url_and_no_key_is_kept(llm: LLM, log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wanted.PEER_KEY, "secret-key")
    made = bench(llm, parse_peers([], "http://127.0.0.1:1/v1", "served"))
    (found,) = made["peers"]
    assert (found["name"], found["precision"], found["comparable"]) == ("openai", None, True)
    assert "secret-key" not in str(made)


def test_end_tokens_do_not_count_as_differences() -> None:
    assert without_end([5, 6, 2, 2], (2,)) == [5, 6]
    assert without_end([2, 5], (2,)) == [2, 5]
    assert without_end([], (2,)) == []


def test_an_output_that_ended_is_compared_with_its_end() -> None:
    def closed(base: list[int], other: list[int], most: int = 9) -> tuple[Sequence[int], Sequence[int]]:
        found = with_one_end(Pair("p", 0, 0, [1], base, other), (2, 3), most)
        return found.base, found.other

    assert closed([5, 6, 3], [5, 6, 7, 8], 4) == (
        [5, 6, 3],
        [5, 6, 7, 8],
    )  # only one ended: its end meets the other's token
    assert closed([5, 6], [5, 6, 7, 8], 4) == ([5, 6, 2], [5, 6, 7, 8])  # and where it is not handed out
    assert closed([5, 6, 3], [5, 6]) == ([5, 6, 3], [5, 6, 3])
    assert closed([5, 6], [5, 6, 2]) == ([5, 6, 2], [5, 6, 2])
    assert closed([5, 6], [5, 7], 2) == ([5, 6], [5, 7])


def test_peers_from_text() -> None:
    assert [one.title for one in parse_peers(["llama.cpp,transformers:ngram"])] == [
        "llama.cpp plain",
        "llama.cpp ngram",
        "transformers ngram",
    ]
    (one,) = parse_peers(['{"name": "llama.cpp", "method": "ngram", "dtype": "float16", "num_speculative_tokens": 16}'])
    assert one.title == "llama.cpp ngram(num_speculative_tokens=16, float16)"
    assert {one.name for one in parse_peers(["all"])} == {"transformers", "llama.cpp", "openvino-genai", "vllm"}


@pytest.mark.parametrize(
    ("texts", "url", "served", "message"),
    [
        (["lama.cpp"], None, None, "unknown peer 'lama.cpp'; did you mean llama.cpp"),
        (["llama.cpp:draft_model"], None, None, "peer llama.cpp has no method 'draft_model'"),
        (["llama.cpp", "llama.cpp:plain"], None, None, "'llama.cpp plain' was given twice"),
        (["{"], None, None, "--peers is not JSON"),
        (['{"method": "ngram"}'], None, None, "must be names or JSON"),
        (['{"name": "llama.cpp", "name": "vllm"}'], None, None, "must have each key once, and 'name' occurs"),
        (['{"name": "llama.cpp", "kv_cache": "u8"}'], None, None, "--peers of llama.cpp does not know 'kv_cache'"),
        (['{"name": "llama.cpp", "dtype": "int3"}'], None, None, "has no dtype 'int3'"),
        (['{"name": "llama.cpp", "speed": 3}'], None, None, "does not know 'speed'"),
        (["openai"], None, None, "name it with --peer-url"),
        ([], None, "m", "give --peer-url too"),
    ],
)
def test_bad_input(texts: list[str], url: str | None, served: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_peers(texts, url, served)
