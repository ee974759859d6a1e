"""Result files of the benchmarks: every part says which run made it, and the table of the README quotes the runs of its
rows.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def common() -> ModuleType:
    return script("common")


@pytest.fixture
def run(common: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Save like a script that was started with some command; what the file holds then."""

    def save(command: str, result: dict[str, Any], **parts: list[str]) -> dict[str, Any]:
        monkeypatch.setattr(common, "provenance", lambda: {"command": command})
        return json.loads(common.save("some", result, tmp_path, **parts).read_text())

    return save


def commands(found: dict[str, Any]) -> dict[str, str]:
    return {part: made["command"] for part, made in found["parts"].items()}


def test_a_part_keeps_the_provenance_of_its_own_run(common: ModuleType, run: Any, tmp_path: Path) -> None:
    run("first", {"plain": 1, "large": 2}, parts=["plain", "large"])
    assert common.kept("some", tmp_path) == {"plain": 1, "large": 2}
    found = run("second", common.kept("some", tmp_path) | {"large": 3}, parts=["large"])
    assert commands(found) == {"plain": "first", "large": "second"}
    assert found["provenance"] == {"command": "second"}
    assert (found["plain"], found["large"]) == (1, 3)


def test_what_an_older_file_holds_is_of_an_earlier_run(common: ModuleType, run: Any, tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text(json.dumps({"provenance": {"command": "older"}, "plain": 1}))
    assert commands(run("new", common.kept("some", tmp_path) | {"large": 3}, parts=["large"])) == {
        "earlier": "older",
        "large": "new",
    }


def test_a_run_that_made_everything_drops_what_was_there(run: Any) -> None:
    run("first", {"plain": 1}, parts=["plain"])
    assert run("second", {"plain": 2}) == {"provenance": {"command": "second"}, "plain": 2}


def made_by(command: str, threads: int = 2) -> dict[str, Any]:
    packages = {"torch": "2", "transformers": "5"}
    return {"cpu": "chip", "threads": threads, "date": "2026-01-02T03:04", "packages": packages, "command": command}


def test_the_table_names_the_runs_of_its_rows() -> None:
    table, result = script("table"), json.loads((FOLDER / "results" / "speed_cpu.json").read_text())
    parts = [*(f"demo {name}" for name in result["demo"]), "large"]
    one = table.table(result | {"parts": {part: made_by("all") for part in parts}, "provenance": made_by("plain")})
    assert one.endswith("transformers 5; made by `all`. Raw results in `benchmarks/results/`.")
    assert "chip, 2 threads, bfloat16" in one
    parts = {"earlier": made_by("older"), "demo smollm2": made_by("new", 8)}
    two = table.note({"provenance": made_by("last"), "parts": parts, "demo": {"smollm2": {}}})
    assert two.startswith("SmolLM2-135M: chip, 8 threads")
    assert two.endswith("made by `older`.")
    assert "made by `new`. 291M Llama, random weights: chip, 2 threads" in two


def test_the_table_of_a_committed_result_can_be_made() -> None:
    table, result = script("table"), json.loads((FOLDER / "results" / "speed_cpu.json").read_text())
    older = {name: value for name, value in result.items() if name != "parts"}
    assert table.note(older) == f"{table.origin(older['provenance'])}."


def test_every_model_of_a_result_has_its_rows_and_the_real_one_comes_first() -> None:
    table, result = script("table"), json.loads((FOLDER / "results" / "speed_cpu.json").read_text())
    one = result["demo"]["bundled"]
    without_repetition = {key: value for key, value in one.items() if key != "with repetition"}
    rows = table.table(result | {"demo": {"bundled": one, "smollm2": without_repetition}}).splitlines()[2:]
    assert [row.split(",")[0] for row in rows[:4]] == [
        "| SmolLM2-135M",
        "| bundled model (6M)",
        "| bundled model (6M)",
        "| 291M Llama",
    ]


def test_the_readme_shows_the_committed_table() -> None:
    table, result = script("table"), json.loads((FOLDER / "results" / "speed_cpu.json").read_text())
    assert table.table(result) in (FOLDER.parent / "README.md").read_text(encoding="utf-8")


def test_results_are_summaries() -> None:
    large = {path.name: path.stat().st_size for path in (FOLDER / "results").iterdir() if path.stat().st_size > 200_000}
    assert not large


def test_a_stored_figure_is_rounded(common: ModuleType, tmp_path: Path) -> None:
    path = common.save("some", {"third": 1 / 3, "count": 10**12, "text": "0.3333333333333333"}, tmp_path)
    assert common.kept("some", tmp_path) == {"third": 0.33333333, "count": 10**12, "text": "0.3333333333333333"}
    assert path.exists()
