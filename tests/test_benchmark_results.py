"""Result files of the benchmarks: every part says which run made it, and the table of the page quotes the runs of its
rows.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline import registry

FOLDER = Path(__file__).parents[1] / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
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


def results() -> tuple[dict[str, Any], dict[str, Any]]:
    speed, peers = (json.loads((FOLDER / "results" / f"{name}.json").read_text()) for name in ("speed_cpu", "peers"))
    return speed, peers


def test_the_table_of_the_readme_names_the_run_that_made_it() -> None:
    table, (speed, _) = script("table"), results()
    shown = table.figures(speed | {"parts": {"demo smollm2": made_by("new", 8)}}, {})
    assert table.table(shown).endswith("transformers 5; made by `new`.")
    assert "chip, 8 threads, bfloat16" in table.table(shown)
    assert table.figures({name: value for name, value in speed.items() if name != "parts"}, {}).made["cpu"]


def test_all_engines_of_one_run_take_the_place_of_transformers_alone() -> None:
    table, (speed, _) = script("table"), results()
    rates = {"plain": 100.0, "auto": 150.0, "ngram": 160.0, "transformers plain": 20.0, "transformers ngram": 25.0}
    rates |= {"llama.cpp plain": 90.0, "llama.cpp ngram(num_speculative_tokens=16)": 80.0}
    run = [{"batch": 8}, {"batch": 1, "tokens per second": rates}]
    shown = table.figures(speed, {"prompts smollm2": run, "provenance": made_by("peers")})
    assert [(row.engine, row.plain, row.best, row.drafts) for row in shown.rows] == [
        ("transformers", 20.0, 25.0, "ngram"),
        ("llama.cpp", 90.0, 90.0, "plain"),
        ("Paceline", 100.0, 150.0, "auto"),
    ]
    assert "| Paceline | 100 | **150** (auto) |" in table.table(shown)
    assert all(f">{name}<" in table.plot(shown) for name in ("transformers", "llama.cpp", "Paceline"))


def test_the_readme_shows_the_committed_figures() -> None:
    table = script("table")
    shown = table.figures(*results())
    assert table.table(shown) in (FOLDER.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    texts = re.compile(r"<text[^>]*>([^<]*)<")
    kept, drawn = (texts.findall(svg) for svg in (table.PLOT.read_text(encoding="utf-8"), table.plot(shown)))
    assert kept == drawn, "run: python benchmarks/table.py"
    assert f"{shown.rows[-1].best:.0f} auto" in kept


def test_the_page_shows_the_committed_searches() -> None:
    made = script("search_table")
    assert made.committed() in made.PAGE.read_text(encoding="utf-8"), "run: python benchmarks/search_table.py"
    results, toys, steering = (
        json.loads((FOLDER / "results" / f"{name}.json").read_text())
        for name in ("searches_smollm2", "search_toys", "steering_smollm2")
    )
    results["families"]["story"]["methods"]["beam"]["tokens"] = 1234.0
    steering["lol"]["1"]["right"]["lol"] = 0.11
    changed = made.table(results, made.apart(toys, steering))
    assert "| 1,234 |" in changed
    assert "contrasted 11 /" in changed


def test_every_method_is_in_the_table_and_the_tests_that_it_names_are_there() -> None:
    checks = script("search_table").checks()
    assert set(registry.FAMILIES["searches"]) | set(registry.FAMILIES["steerings"]) <= set(checks)

    def missing(tests: list[str]) -> list[str]:
        files = {one: (FOLDER.parent / one.split("::")[0]) for one in tests}
        return [
            one for one, file in files.items()
            if not file.is_file() or f"def {one.split('::')[1]}(" not in file.read_text(encoding="utf-8")
        ]  # fmt: skip

    assert not missing([one for some in checks.values() for tests in some.values() for one in tests])
    assert missing(["tests/nowhere.py::test_x", "tests/test_benchmark_results.py::test_nothing"])


def test_results_are_summaries() -> None:
    large = {path.name: path.stat().st_size for path in (FOLDER / "results").iterdir() if path.stat().st_size > 200_000}
    assert not large


def test_a_stored_figure_is_rounded(common: ModuleType, tmp_path: Path) -> None:
    path = common.save("some", {"third": 1 / 3, "count": 10**12, "text": "0.3333333333333333"}, tmp_path)
    assert common.kept("some", tmp_path) == {"third": 0.33333333, "count": 10**12, "text": "0.3333333333333333"}
    assert path.exists()


def test_the_page_shows_the_committed_clients() -> None:
    made = script("clients_table")
    result = json.loads((FOLDER / "results" / "clients.json").read_text())
    assert made.committed() in made.PAGE.read_text(encoding="utf-8"), "run: python benchmarks/clients_table.py"
    result["clients"]["openai"]["calls"][0] |= {"ok": False}
    assert f"Not held: openai: {result['clients']['openai']['calls'][0]['call']}" in made.table(result)


def test_programs_of_clients_can_be_read() -> None:
    programs = list((FOLDER / "clients").glob("*.py"))
    assert programs
    for program in programs:
        compile(program.read_text(encoding="utf-8"), program.name, "exec")
