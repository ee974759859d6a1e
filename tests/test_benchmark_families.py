"""Scripts that put hybrid models, and one model of every family, beside llama.cpp."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import benchmark_scripts
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

from paceline.checkpoints import spec_from_config

MODULES = ("llama_files", "hybrid_shapes", "hybrids", "family_table")
MADE = {"cpu": "chip", "threads": 3, "date": "2026-01-02T03:04", "command": "that"}


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with benchmark_scripts.imported(*MODULES) as found:
        yield dict(zip(MODULES, found, strict=True))


def test_every_shape_is_that_of_a_native_model_with_states(scripts: dict[str, ModuleType]) -> None:
    shapes = scripts["hybrid_shapes"]
    small = {name: (kind, shapes.SIZES | sizes) for name, (kind, sizes) in shapes.SMALL.items()}
    for name, (kind, sizes) in {**shapes.PUBLISHED, **small}.items():
        known = kind in CONFIG_MAPPING  # of transformers
        spec = spec_from_config(
            AutoConfig.for_model(kind, **sizes).to_dict() if known else {"model_type": kind, **sizes}
        )
        assert spec.states, name
    assert not spec_from_config(AutoConfig.for_model("llama").to_dict()).states


@pytest.mark.parametrize(("noise", "moved"), [(0.004, 0), (0.05, 0), (0.0, 1)])
def test_nothing_is_timed_where_the_engines_differ(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, noise: float, moved: int
) -> None:
    files = scripts["llama_files"]
    ours = torch.randn(files.WINDOW, 50, generator=torch.Generator().manual_seed(0))
    found = (ours + noise * torch.randn(ours.shape)).roll(moved, 0)
    engines(files, monkeypatch, tmp_path, ours, found)
    if noise < files.APART and not moved:
        assert files.agreement(None, tmp_path, 1)["apart"] == pytest.approx(noise, rel=0.2)
    else:
        with pytest.raises(SystemExit, match=r"log-probabilities of llama\.cpp are .* nothing is timed"):
            files.agreement(None, tmp_path, 1)


def test_log_probabilities_that_are_the_same_everywhere_prove_nothing(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = scripts["llama_files"]
    same = torch.randn(1, 50).expand(files.WINDOW, 50)
    engines(files, monkeypatch, tmp_path, same, same)
    with pytest.raises(SystemExit, match=r"those of another position 0\.0000"):
        files.agreement(None, tmp_path, 1)


def engines(
    files: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, ours: torch.Tensor, found: torch.Tensor
) -> None:
    """Both, with log-probabilities at hand."""
    (folder / "f32.gguf").touch()
    monkeypatch.setattr(files, "converted", lambda *_: folder / "f32.gguf")
    monkeypatch.setattr(files, "load_runner", lambda *_, **__: None)
    monkeypatch.setattr(files, "logprobs", lambda *_: iter([ours]))
    monkeypatch.setattr(files, "llama_logprobs", lambda *_: iter([found]))


def test_a_refusal_is_kept_in_llama_cpps_own_words(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files, commands = scripts["llama_files"], list[list[str]]()

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        if "--outfile" in command:
            Path(command[command.index("--outfile") + 1]).touch()
        said = "loading\nerror loading model: unknown architecture\nno model" if "-m" in command else ""
        return subprocess.CompletedProcess(command, int(bool(said)), "", said)

    monkeypatch.setattr(files.subprocess, "run", run)
    llama = SimpleNamespace(source=tmp_path, bench=tmp_path / "llama-bench", programs=tmp_path)
    assert files.agreement(llama, tmp_path, 1) == {"llama.cpp": "error loading model: unknown architecture"}
    assert [command[0] for command in commands] == [sys.executable, str(llama.bench)]
    assert not list((tmp_path / "llama.cpp").iterdir())


def test_of_llama_cpp_the_best_setting_counts(scripts: dict[str, ModuleType]) -> None:
    settings = {"a": {"step": 2.0, "prompt": 50.0}, "b": {"step": 1.0, "prompt": 40.0}}
    assert scripts["hybrids"].best(settings) == {"step": 1.0, "prompt": 50.0}


def passes(scale: float) -> dict[str, float]:
    names = ("step", "chain of 4", "chain of 16", "tree of 16", "commit", "prompt of 4", "prompt of 16", "prompt")
    return {name: scale * number for number, name in enumerate(names, 1)} | {"pays": 1.5, "state": 2e6}


def test_the_table_of_hybrids_names_llama_cpps_figures_or_its_reason(scripts: dict[str, ModuleType]) -> None:
    table = scripts["family_table"]
    found = {"transformers": 9.0, "threads": 3, "bfloat16": passes(1.0) | {"llama.cpp": passes(2.0)}}
    found["int8"] = passes(1.0) | {"llama.cpp": "no such architecture"}
    for processor in ("AVX2 alone", "all instructions"):
        part = f"{processor}, Some-1B"
        shown = table.hybrids({"parts": {part: MADE}, part: found})
        row = "| Some-1B | bfloat16 | 1.00 / 2.00 / 3.00 | 2.00 / 12.0 / 14.0 | 4.00 / 5.00 | 1.5 | 8.00 / 16.0 |"
        assert row in shown
        assert "|  | int8 | 1.00 / 2.00 / 3.00 | - | 4.00 / 5.00 | 1.5 | 8.00 / - |  |" in shown
        assert f"{processor[0].upper()}{processor[1:]}: chip, 3 threads, 2026-01-02; made by `that`." in shown
        assert "transformers, bfloat16, ms: 9.00 (Some-1B). llama.cpp does not read Some-1B: `no such" in shown


def test_the_table_of_families_shows_both_processors(scripts: dict[str, ModuleType]) -> None:
    duel = {"tokens_per_second": {"paceline": 30.0, "llama.cpp": 20.0}, "over_llama.cpp": {"median": 1.5}}
    cells = {"one": {"bf16": duel | {"llama.cpp": {"version": "peer 1"}}}}
    cells["two"] = {"int4": {"tokens_per_second": {"paceline": 40.0}, "llama.cpp": "no such architecture"}}
    parts = {"one": MADE, "two": MADE, "AVX2 alone, one": MADE | {"cpu": "other"}}
    result = {"parts": parts, "families": cells, "AVX2 alone": {"families": {"one": cells["one"]}}}
    shown = scripts["family_table"].families(result)
    assert shown.count("| one | 30.0 / 20.0 (1.50) | - | - |") == 2
    assert "| two | - | - | 40.0 / - |" in shown
    assert "Ratios from 1.50 to 1.50. one: chip, 3 threads, 2026-01-02; made by `that`, beside peer 1." in shown
    assert "one: other, 3 threads" in shown
    assert "llama.cpp does not read two: `no such architecture`." in shown


def test_the_table_of_quantised_files_shows_what_was_measured(scripts: dict[str, ModuleType]) -> None:
    error = {"error": 0.03, "error_median": 0.02, "other_token": 0.015}
    found: dict[str, Any] = {"parts": {"a, speed": MADE, "a, logits": MADE}}
    found["speed"] = {"a": {"file": 30.0, "int4": 20.0, "ratio": {"median": 1.5}}}
    found["logits"] = {
        "a": {"default": error, "control": error | {"error": 0.3}},
        "b": {"default": {"error": 0.5, "other_token": 0.0}},
    }
    found["memory"] = {"a": {"over_own_first": 0.9, "over_own_next": 1.1}}
    shown = scripts["family_table"].quantized({"Some-1B": found})
    assert "| Some-1B | a | 30.0 / 20.0 (1.50) | 0.020 / - / 0.020 | 0.030 / - / 0.300 | 1.5 | 0.90 / 1.10 |" in shown
    assert "|  | b | - | - | 0.500 / - / - | 0.0 | - |" in shown
    assert shown.endswith("Some-1B: chip, 3 threads, 2026-01-02; made by `that`.")


def test_the_pages_show_the_committed_figures(scripts: dict[str, ModuleType]) -> None:
    table = scripts["family_table"]
    for name, text in table.texts().items():
        page = table.PAGES[name].read_text(encoding="utf-8")
        assert table.within(name, page, text) == page, "run: python benchmarks/family_table.py"
        assert table.within(name, page, "other") != page
    results = json.loads((table.RESULTS / "hybrids.json").read_text())
    results["all instructions, LFM2-350M"]["int8"]["step"] = 1234.0
    assert "1,234" in table.hybrids(results)
