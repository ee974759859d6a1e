"""A whole benchmark on a tiny model: what is run, what is rejected, what is kept; documents hold to their schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint

from paceline import LLM
from paceline.bench.report import compare_documents, document_remarks
from paceline.bench.run import (
    BenchSetting,
    Harness,
    Options,
    build_document,
    default_settings,
    dial_registered,
    dial_settings,
    load_document,
    load_sweep,
    parse_settings,
    save_document,
)
from paceline.bench.run.document import check_document
from paceline.bench.run.settings import setting_name
from paceline.errors import ConfigError
from paceline.utils import Arrival, Conversation, Workload, timed

TALKS = (
    Conversation(id="one", task="a", turns=("Hello there", "And again")),
    Conversation(id="two", task="b", turns=("one two one two one two",)),
    Conversation(id="three", task="b", turns=("def f(x):",), chat=False),
)
WORK = Workload(name="talks", format="jsonl", source="talks.jsonl", conversations=TALKS)
LONG = Conversation(id="long", task="b", turns=("word " * 400, "never asked"))
OPTIONS = Options(max_tokens=8, repeats=2, ignore_eos=True)
NGRAM = BenchSetting("ngram", {"method": "ngram", "num_speculative_tokens": 3})


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(
        tiny_checkpoint.write(tmp_path_factory.mktemp("model")), speculative_config=None, dtype="float32", seed=0
    )


@dial_registered()
def bench(llm: LLM, settings: list[BenchSetting], options: Options = OPTIONS, work: Workload = WORK) -> dict[str, Any]:
    harness = Harness(llm, settings, options)
    harness.run([work])
    made = build_document(harness, [work])
    check_document(made)
    return made


def cell(made: Mapping[str, Any], setting: str, temperature: float = 0.0, batch: int = 1) -> dict[str, Any]:
    (found,) = [
        c for c in made["cells"] if (c["setting"], c["temperature"], c["batch"]) == (setting, temperature, batch)
    ]
    return found


class Broken(BenchSetting):
    """Plain decoding whose outputs are spoilt: by another token, or by an error for one prompt."""

    __slots__ = ()
    how = "token"

    def open(self, llm: LLM, records: Any = None) -> LLM:
        made = super().open(llm, records)
        generate = made.generate

        def spoilt(prompts: Any, params: Any) -> Any:
            if self.how == "raise" and len(prompts[0]["prompt_token_ids"]) % 2:
                raise RuntimeError("the drafter has burnt down")
            found = generate(prompts, params)
            for one in found:
                if self.how == "token":
                    one.outputs[0].token_ids[2] = (one.outputs[0].token_ids[2] + 1) % 100
            return found

        made.generate = spoilt  # type: ignore[method-assign]
        return made


def test_every_setting_runs_every_prompt_in_every_repeat(llm: LLM) -> None:
    made = bench(
        llm,
        [NGRAM, *dial_settings([0.5], 3)],
        Options(max_tokens=8, repeats=2, batches=(1, 3), temperatures=(0.0, 0.9)),
    )
    assert len(made["cells"]) == 3 * 2 * 2
    for one in made["cells"]:
        assert (one["prompts"], one["failed"], one["repeats"], len(one["rows"])) == (4, 0, 2, 8)
        assert one["comparable"], one["reason"]
        assert one["tokens"] == sum(row["tokens"] for row in one["rows"])
        assert [task["task"] for task in one["tasks"]] == ["a", "b"]
        assert one["setting"] == "plain" or one["equality"]["identical"] + one["equality"]["near_ties"] == 8
        assert one["mean_acceptance_length"] == pytest.approx(
            1 + sum(row["accepted_tokens"] for row in one["rows"]) / sum(row["steps"] for row in one["rows"])
        )
        assert sum(one["latency_histogram"]["counts"]) == one["inter_token_latency"]["count"] > 0
    assert cell(made, "plain", 0.0, 3)["speedup"] == {"value": 1.0, "low": 1.0, "high": 1.0, "level": 0.95, "n": 2}
    assert cell(made, "dial 0.5 x 3")["mean_acceptance_length"] > 1.2
    assert cell(made, "dial 0.5 x 3", 0.9)["mean_acceptance_length"] > 1.2


def test_later_turns_hold_the_answers_before_them(llm: LLM) -> None:
    first, second = Harness(llm, [], OPTIONS).record(WORK)[:2]
    assert second.turn == 1
    text = llm.tokenizer.decode(list(second.token_ids))
    assert llm.tokenizer.decode(list(first.reference)) in text
    assert "Hello there" in text


def test_outputs_that_differ_get_no_speed(llm: LLM) -> None:
    """The negative control of the whole harness."""
    made = bench(llm, [Broken("wrong", {"method": "ngram"})])
    found = cell(made, "wrong")
    assert not found["comparable"]
    assert "8 of 8 outputs differ" in found["reason"]
    assert "token 2" in found["reason"]
    assert found["equality"]["different"] == 8
    for name in ("tokens_per_second", "speedup", "speedup_total"):
        assert found[name] is None
    assert found["inter_token_latency"]["p50"] is None
    assert all(task["speedup"] is None for task in found["tasks"])
    assert any("no speed for wrong" in line for line in document_remarks(made))
    assert cell(made, "plain")["tokens_per_second"]["value"] > 0


def test_a_failing_prompt_is_counted_and_does_not_end_the_run(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broken, "how", "raise")
    work = Workload(name="talks", format="jsonl", source="t", conversations=(*TALKS, LONG))
    made = bench(llm, [Broken("fragile", {"method": "ngram"})], work=work)
    base, found = cell(made, "plain"), cell(made, "fragile")
    odd = {(r["prompt"], r["turn"]) for r in base["rows"] if r["prompt_tokens"] % 2 and not r["error"]}
    assert odd
    assert (base["prompts"], base["failed"]) == (6, 2)
    assert (found["prompts"], found["failed"]) == (6, 2 + len(odd))
    errors = {r["error"] for r in found["rows"] if r["error"]}
    assert any("burnt down" in error for error in errors)
    assert any("the context holds" in error for error in errors)
    assert "the turn before it failed" in errors
    failed = [r for r in found["rows"] if (r["prompt"], r["turn"]) in odd]
    assert {r["tokens"] for r in failed} == {0}
    assert found["speedup"]["low"] == 0.0


def test_ctrl_c_keeps_what_was_done(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def once(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 + 8 + 3:  # warm-ups, the first repeat, and a bit of the second
            raise KeyboardInterrupt
        return timed(*given)

    monkeypatch.setattr("paceline.bench.run.harness.timed", once)
    made = bench(llm, [NGRAM])
    assert made["interrupted"]
    assert cell(made, "ngram")["repeats"] == 1
    assert cell(made, "ngram")["speedup"]["n"] == 4


def test_a_trace_is_replayed_under_load(llm: LLM) -> None:
    arrivals = (*(Arrival(0.05 * i, 40 + 20 * i, 10) for i in range(4)), Arrival(0.2, 200, 40))
    work = Workload(name="trace", format="trace", source="t.jsonl", arrivals=arrivals)
    harness = Harness(llm, [NGRAM], Options(repeats=1, rates=(1.0, 4.0)))
    load_sweep(harness, work)
    made = build_document(harness, [work])
    check_document(made)
    assert [(run["setting"], run["rate"]) for run in made["load"]] == [
        ("plain", 1.0),
        ("ngram", 1.0),
        ("plain", 4.0),
        ("ngram", 4.0),
    ]
    for run in made["load"]:
        assert (run["requests"], run["failed"]) == (5, 0)
        assert run["length_scale"] == pytest.approx(126 / 240)
        assert [row["tokens"] for row in run["rows"]] == [5, 5, 5, 5, 21]
        assert all(row["latency"] >= row["time_to_first_token"] > 0 for row in run["rows"])
        assert run["seconds"] >= 0.2 / run["rate"]
    assert not llm.engine.has_work


def test_defaults_are_the_registry_and_reasons(llm: LLM) -> None:
    with dial_registered():
        found, skipped = default_settings(llm)
    assert [setting.name for setting in found][:2] == ["auto", "ngram"]
    assert {"corrupted_oracle", "draft_model", "prediction"} <= {one["name"] for one in skipped}
    bundled, _ = default_settings(LLM(speculative_config=None))
    assert "draft_model" in {setting.name for setting in bundled}


def test_settings_from_text() -> None:
    config = {"method": ["ngram", "draft_model"], "model": "/x/draft", "num_speculative_tokens": 4}
    assert setting_name(config) == "ngram+draft_model(model=draft, num_speculative_tokens=4)"
    assert [one.name for one in parse_settings(["ngram", "null", '{"method": "auto"}'])] == ["ngram", "auto"]
    for texts, message in (
        (["ngram", "ngram"], "given twice"),
        (["{"], "a setting is not JSON"),
        (['{"method": "ngram", "method": "suffix"}'], "a setting must have each key once"),
        (["3"], "JSON object or null"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_settings(texts)


def test_documents_are_checked_when_written_and_read(llm: LLM, tmp_path: Path) -> None:
    made = bench(llm, [NGRAM])
    path = tmp_path / "run.json"
    save_document(made, path)
    assert load_document(path) == made
    made["cells"][0]["tokens"] = -1
    with pytest.raises(ConfigError, match="at cells/0/tokens"):
        save_document(made, path)
    assert load_document(path)["cells"][0]["tokens"] > 0
    for text, message in (("{", "not JSON"), ("{}", "not a benchmark document of version 1")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_document(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_document(tmp_path / "none.json")


def slower(made: dict[str, Any], factor: float, noise: float = 0.0) -> dict[str, Any]:
    """The same document with the ngram cells' seconds made longer, some prompts more than others."""
    cells = []
    for one in made["cells"]:
        scale = factor if one["setting"] == "ngram" else 1.0
        rows = [
            row | {"seconds": row["seconds"] * (scale + noise * (i % 4 - 1.5))} for i, row in enumerate(one["rows"])
        ]
        cells.append(one | {"rows": rows})
    return made | {"cells": cells}


def test_comparison_tells_a_difference_from_noise(llm: LLM) -> None:
    more = [replace(one, id=f"{one.id}-again", turns=("again", *one.turns)) for one in WORK.conversations]
    work = replace(WORK, conversations=(*WORK.conversations, *more))
    made = bench(llm, [NGRAM], Options(max_tokens=6, repeats=3, ignore_eos=True), work)
    worse = compare_documents(made, slower(made, 2.0))
    plain, ngram = worse.lines
    assert plain.speed is not None
    assert (plain.speed.value, plain.speed_significant, plain.gain) == (1.0, False, None)
    assert ngram.speed is not None
    assert ngram.speed.value == pytest.approx(0.5)
    assert ngram.speed_significant
    assert ngram.gain_significant
    assert worse.comparisons == 3
    assert [line.key[0] for line in worse.below(0.9)] == ["ngram"]
    noisy = compare_documents(made, slower(made, 1.0, noise=0.2))
    assert not any(line.speed_significant for line in noisy.lines)
    rejected = compare_documents(made, bench(llm, [Broken("ngram", {"method": "ngram"})]))
    assert "B: 8 of 8 outputs differ" in str(rejected.lines[1].reason)
    assert [line.key[0] for line in rejected.below(0.0)] == ["ngram"]
