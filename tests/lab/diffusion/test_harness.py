"""`lab.diffusion`: what is measured of decoding methods, on a denoiser that knows the answers."""

from __future__ import annotations

import json
from math import ceil
from typing import Any

import pytest
import torch

from lab.diffusion import (
    DiffusionBench,
    DiffusionLine,
    DiffusionOptions,
    broken_methods,
    default_lines,
    difference,
    parse_lines,
    score_methods,
    split_of,
    texts_to_score,
    texts_to_time,
    time_methods,
    timing_figures,
    with_method_times,
)
from paceline.errors import ConfigError
from tests.lab.diffusion.answering import Answering

LENGTH = 16
TASKS = ("copy", "shuffle")


def bench_of(count: int = 2, **changes: Any) -> DiffusionBench:
    denoiser = Answering(count, **changes)
    options = DiffusionOptions(tasks=TASKS, count=count, length=LENGTH, repeats=2, timed=2)
    return DiffusionBench(denoiser, denoiser.tokenizer, options, dtype="float32")


def quiet(*_: object) -> None:
    """No progress is shown."""


def measured(bench: DiffusionBench, *methods: str) -> dict[str, Any]:
    return score_methods(bench, parse_lines(methods, bench.options.block_length), quiet)


def test_the_baseline_takes_a_call_for_each_slot() -> None:
    found = measured(bench_of())["lines"]["static"]
    assert found["score"]["value"] == 1.0
    assert found["score"]["n"] == 4
    assert found["calls"] == LENGTH
    assert found["filled_per_call"] == 1.0
    assert found["fewer_calls"] == 1.0
    assert found["local_at_1"] == found["global_at_1"] == 1.0  # it is surest at the left
    assert found["difference"]["value"] == 0.0
    assert set(found["tasks"]["copy"]["right"]) == {"1"}


def test_slots_calls_and_lengths_are_counted() -> None:
    bench = bench_of()
    found = measured(bench, "threshold")["lines"]
    prompts = [len(bench.tokenizer.encode(item.prompt)) for item in bench.asked]
    slots = sum(LENGTH * (n + LENGTH) for n in prompts) / len(prompts)
    assert found["static"]["slots_computed"] == slots
    tokens = [len(bench.tokenizer.encode(item.answer)) for item in bench.asked]
    assert found["static"]["length"] == pytest.approx(sum(tokens) / len(tokens))
    assert found["static"]["tokens_per_call"] == pytest.approx(sum(tokens) / len(tokens) / LENGTH)
    assert found["threshold"]["calls"] < LENGTH
    assert found["threshold"]["fewer_calls"] == pytest.approx(LENGTH / found["threshold"]["calls"])
    assert found["threshold"]["nats_per_round"] > found["static"]["nats_per_round"]


def test_wrong_answers_are_counted_where_they_are() -> None:
    found = measured(bench_of(wrong=["shuffle"]))["lines"]["static"]
    assert found["score"]["right"] == 2
    assert found["determined"]["value"] == 1.0
    assert found["choice"]["value"] == 0.0
    assert found["tasks"]["shuffle"]["right"] == "00"


def after(texts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C when so many texts were decoded."""
    decode, done = DiffusionBench.decode, [0]

    def interrupted(self: DiffusionBench, *given: Any) -> Any:
        done[0] += 1
        if done[0] > texts:
            raise KeyboardInterrupt
        return decode(self, *given)

    monkeypatch.setattr(DiffusionBench, "decode", interrupted)


@pytest.mark.parametrize(("texts", "kept"), [(3, []), (4, ["static"]), (7, ["static"]), (99, ["static", "threshold"])])
def test_ctrl_c_keeps_the_lines_that_were_finished(
    monkeypatch: pytest.MonkeyPatch, texts: int, kept: list[str]
) -> None:
    after(texts, monkeypatch)
    document = measured(bench_of(), "threshold")
    assert list(document["lines"]) == kept
    assert document["interrupted"] is (texts < 99)


@pytest.mark.parametrize(("texts", "shape"), [(3, None), (4, (1, 1)), (6, (2, 1)), (9, (2, 1)), (10, (2, 2))])
def test_ctrl_c_keeps_the_rounds_that_were_finished(
    monkeypatch: pytest.MonkeyPatch, texts: int, shape: tuple[int, int] | None
) -> None:
    """Two to warm up, then two a prompt and round."""
    bench, lines = bench_of(), parse_lines(["threshold"])
    assert texts_to_time(bench, lines) == 10
    after(texts, monkeypatch)
    found, interrupted = time_methods(bench, lines, quiet)
    assert interrupted is (texts < 10)
    if shape is None:
        assert not found
        return
    rows = [row.split() for row in found["threshold"]["raw"]["line"]]
    assert (len(rows), len(rows[0])) == shape


def test_progress_counts_the_texts_of_all_lines() -> None:
    bench, lines, seen = bench_of(), parse_lines(["threshold"]), list[tuple[int, int]]()
    told: list[str] = []
    score_methods(bench, lines, lambda _, done, total: seen.append((done, total)), lambda name, _: told.append(name))
    assert seen == [(number, texts_to_score(bench, lines)) for number in range(8)]
    assert told == ["static", "threshold"]


def test_a_lossless_line_is_checked_on_every_prompt() -> None:
    document = measured(bench_of(), "freedave", '{"method": "freedave", "drafts": 2}')
    for name, drafts in (("freedave", 4), ("freedave drafts=2", 2)):
        line = document["lines"][name]
        assert line["identical"] == {"same": 4, "prompts": 4, "dtype": "float32", "exact": True}
        assert line["calls"] == 1 + ceil((LENGTH - 1) / drafts)
    assert not broken_methods(document)
    assert document["lines"]["static"]["identical"] is None


def test_another_canvas_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """FreeDave that keeps its furthest draft unseen is found out."""
    monkeypatch.setattr(
        "paceline.diffusion.verification.FreeDave.choose", lambda self, drafts, predictions: len(predictions) - 1
    )
    monkeypatch.setattr(Answering, "logits_of", _turning(Answering.logits_of))
    bench, lines = bench_of(), parse_lines(["freedave", "threshold"])
    document = score_methods(bench, lines, quiet)
    assert broken_methods(document) == ["freedave"]
    found = with_method_times(document, time_methods(bench, lines, quiet)[0])["lines"]
    assert found["freedave"]["fewer_calls"] is None
    assert found["freedave"]["times"] is None
    assert found["threshold"]["times"] is not None


def _turning(inner: Any) -> Any:
    """Tokens depend on how much is written."""

    def logits(self: Answering, call: Any) -> Any:
        found = inner(self, call)
        found = found.roll(int((call.ids == self.mask_token_id).sum()) % 5, dims=1)
        found[:, self.mask_token_id] = -torch.inf
        return found

    return logits


def test_all_lines_take_turns_on_every_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, lines, ran = bench_of(), parse_lines(["threshold", "factor"]), list[tuple[str, str]]()
    names = {id(line.recipe): line.name for line in lines}
    monkeypatch.setattr(DiffusionBench, "decode", lambda self, recipe, prompt: ran.append((names[id(recipe)], prompt)))
    found, _ = time_methods(bench, lines, quiet)
    turns = [ran[low : low + 3] for low in range(3, len(ran), 3)]  # the first three warm up
    assert [{prompt for _, prompt in turn} for turn in turns] == [{item.prompt} for item in bench.to_time] * 2
    assert all({name for name, _ in turn} == set(names.values()) for turn in turns)
    for one in found.values():
        assert [len(row.split()) for row in one["raw"]["line"]] == [2, 2]
        assert one["raw"]["static"] == found["static"]["raw"]["line"]


def test_ratios_are_paired() -> None:
    found = timing_figures([[2.0, 4.0], [20.0, 40.0]], [[1.0, 2.0], [10.0, 20.0]])
    assert found["over_static"]["value"] == found["over_static"]["low"] == 2.0
    assert found["median_over_static"]["value"] == 2.0
    assert found["seconds"] == (1.5 + 15.0) / 2


def test_a_failing_line_says_so_and_leaves_the_others() -> None:
    document = measured(bench_of(), '{"method": "static", "cache": "block"}', "threshold")
    assert [one["name"] for one in document["failed"]] == ["static cache=block"]
    assert broken_methods(document) == ["static cache=block"]
    assert set(document["lines"]) == {"static", "threshold"}


def test_a_document_is_json() -> None:
    bench = bench_of(1)
    lines = parse_lines(["threshold"])
    json.dumps(
        with_method_times(score_methods(bench, lines, quiet), time_methods(bench, lines, quiet)[0]), allow_nan=False
    )


def test_differences_are_of_the_same_prompts() -> None:
    bench = bench_of()
    ours = [bench.sample(DiffusionLine.of("static").recipe, item) for item in bench.asked]
    other = bench_of(wrong=["shuffle"])
    theirs = [other.sample(DiffusionLine.of("static").recipe, item) for item in other.asked]
    found = difference(theirs, ours)
    assert found is not None
    assert found["value"] == -0.5
    assert found["low"] < -0.5 < found["high"]


def test_defaults_are_all_that_need_no_training() -> None:
    bench = bench_of(1)
    lines, skipped = default_lines(bench.denoiser, bench.canvas(bench.asked[0].prompt), 8)
    names = [line.name for line in lines]
    assert names[0] == "static"
    assert {"freedave", "local_leap", "dimple", "prophet", "remdm"} <= set(names)
    assert {"learn2pd", "llada2.1_s", "cfg_dllm"} <= {one["name"] for one in skipped}
    assert all(one["reason"] for one in skipped)
    assert len(set(names)) == len(names)


def test_blocks_go_to_methods_that_take_them() -> None:
    assert DiffusionLine.of("threshold", 8).config["block_length"] == 8
    assert DiffusionLine.of({"method": "threshold", "block_length": 4}, 8).config["block_length"] == 4
    assert "block_length" not in DiffusionLine.of("window_diffusion", 8).config
    assert DiffusionLine.of("threshold", 8).name == "threshold"


def test_references_of_lossless_lines() -> None:
    line = DiffusionLine.of({"method": "freedave", "drafts": 2, "layout": "tree"}, 8)
    assert line.reference is not None
    assert line.reference.names == DiffusionLine.of("static").recipe.names
    assert line.reference.options == {"block_length": 8}
    assert DiffusionLine.of("freedave++").reference is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["{oops"], "--method is not JSON"),
        (["treshold"], "did you mean threshold"),
        (["threshold", "threshold"], "--method must name every method once"),
        (['{"method": "threshold", "drafts": 3}'], "has no option 'drafts'"),
    ],
)
def test_wrong_methods(given: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_lines(given)


@pytest.mark.parametrize(
    "wrong", [{"tasks": ("count",)}, {"count": 0}, {"repeats": 0}, {"block_length": 0}, {"timed": 99, "count": 1}]
)
def test_wrong_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--"):
        DiffusionOptions(**wrong)


def test_only_held_out_prompts_are_asked() -> None:
    assert {split_of(item.prompt) for item in bench_of(3).asked} == {"test"}
