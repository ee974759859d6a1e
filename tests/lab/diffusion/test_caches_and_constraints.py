"""Caches and constraints in the diffusion benchmark, on tiny random models with a tokenizer of single characters."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Fast

from lab.diffusion import (
    Case,
    DiffusionBench,
    DiffusionOptions,
    broken_constrained,
    caches_and_constraints,
    draw_methods,
    front,
    measure_constrained,
    parse_lines,
    points,
    score_methods,
)
from paceline.bench import pyplot
from paceline.checkpoints import Tokenizer
from paceline.diffusion import TokenTexts
from paceline.models import load_denoiser
from tests.models import denoiser_references as layouts
from tests.models.denoiser_reference import VOCAB

CHARACTERS = ["?", "a", "b", "\0", *"cde1234 /[],tru"]
ITEMS = 2


def quiet(*_: object) -> None:
    """No progress is shown."""


def folder_of(path: Path, layout: str) -> Path:
    {"llada": layouts.llada, "sdar": layouts.sdar}[layout](path)
    fast = Fast(models.WordLevel({c: i for i, c in enumerate(CHARACTERS[: VOCAB - 1])}, unk_token="?"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast.decoder = decoders.Fuse()
    fast.save(str(path / "tokenizer.json"))
    return path


def bench_of(path: Path, layout: str) -> DiffusionBench:
    folder = folder_of(path, layout)
    denoiser, tokenizer = load_denoiser(folder, dtype="float32", device="cpu"), Tokenizer.load(folder)
    size = 4 if layout == "llada" else None
    options = DiffusionOptions(tasks=("copy",), count=ITEMS, timed=1, repeats=1, length=8, block_length=size)
    return DiffusionBench(denoiser, tokenizer, options, dtype="float32", token_text=TokenTexts(tokenizer))


def test_approximate_caches_deviate_and_claim_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches_and_constraints, "RULES", ("static",))
    bench = bench_of(tmp_path, "llada")
    found = dict(caches_and_constraints.measure_caches(bench, quiet))
    assert set(found) == {f"static, {name}" for name in caches_and_constraints.APPROXIMATE}
    one = found["static, dual"]
    assert one["kept"] is None
    assert one["prompts"] == ITEMS
    assert one["largest"] > 0
    assert one["cost"]["slots_computed"] < one["cost_without"]["slots_computed"]
    assert found["static, prefix"]["cost"]["slots_computed"] > one["cost"]["slots_computed"]
    timed = caches_and_constraints.with_cache_times(bench, {"static, dual": one}, quiet)["static, dual"]["times"]
    assert len(timed["raw"]["line"]) == len(timed["raw"]["static"]) == 1
    json.dumps(found, allow_nan=False)


def test_the_block_cache_is_exact_to_the_bit(tmp_path: Path) -> None:
    found = dict(caches_and_constraints.measure_caches(bench_of(tmp_path, "sdar"), quiet))
    for one in found.values():
        assert one["kept"] is True
        assert one["largest"] == 0.0
        assert one["different"] == 0


def test_a_block_cache_that_rounds_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(tmp_path, "sdar")
    inner = type(bench.denoiser).forward

    def rough(self: Any, calls: Any) -> Any:
        return [rows * (1 + 1e-7) if call.read is not None and call.read.size else rows
                for call, rows in zip(calls, inner(self, calls), strict=True)]  # fmt: skip

    monkeypatch.setattr(type(bench.denoiser), "forward", rough)
    found = dict(caches_and_constraints.measure_caches(bench, quiet))
    assert [one["kept"] for one in found.values()] == [False, False]
    assert all(one["times"] is None for one in caches_and_constraints.with_cache_times(bench, found, quiet).values())


def test_constrained_texts_parse_and_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = "[1-4]( [1-4])*"
    case = Case({"regex": pattern}, ("copy",), lambda text: re.fullmatch(pattern, text) is not None)
    monkeypatch.setattr(caches_and_constraints, "CASES", {"digits": case})
    found = dict(measure_constrained(bench_of(tmp_path, "llada"), quiet, prompts=ITEMS))
    assert found["digits"]["parses"]["right"] == ITEMS
    assert found["digits"]["parses_without"]["right"] == 0
    assert found["digits"]["tests_per_round"] >= 1
    assert not broken_constrained(found)
    found["digits"]["parses"]["right"] -= 1
    assert broken_constrained(found) == ["digits"]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("a queue (regex)", " Bill, Mary", "Bill,Mary"),
        ("a grid (regex)", " 1 2 3 4 / 1 2 3 4 / 1 2 3 4 / 1 2 3 4", "1 2 3 4"),
        ("a sentence (regex)", "Bill gave Mary a red ball.", "Bill gave a red ball."),
        ("an object (JSON schema)", '{"name": "Sam", "age": 7}', '{"name": "Sam", "age": 700}'),
        ("a list (JSON schema)", "[true]", "[true"),
    ],
)
def test_what_keeps_a_constraint(name: str, good: str, bad: str) -> None:
    keeps = caches_and_constraints.CASES[name].keeps
    assert keeps(good)
    assert not keeps(bad)


def test_the_front_is_what_nothing_beats() -> None:
    given = [
        (4.0, 50.0, "a"),
        (8.0, 90.0, "b"),
        (9.0, 90.0, "c"),
        (2.0, 50.0, "d"),
        (16.0, 91.0, "e"),
        (3.0, 10.0, "f"),
    ]
    assert [name for _, _, name in front(given)] == ["d", "b", "e"]


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench = bench_of(tmp_path, "llada")
    document = score_methods(bench, parse_lines(["threshold", "freedave"], 4), quiet)
    draw_methods(document, tmp_path / "plot.svg", "tiny", pyplot())
    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.startswith("<?xml")
    assert not points(document, "ms")
    assert len(points(document, "calls")) == 3
