"""`paceline bench` and `bench compare`: tables, documents, exit codes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
from command import ENDS, Command, arrive

from paceline import LLM, bench
from paceline.verify import Difference, tokens

PROMPTS = '{"prompt": "one two one two one", "task": "a"}\n{"prompt": "Hello there", "task": "b"}\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    bandwidth = {"bytes_per_second": 1e9, "method": "made up", "samples": [1e9]}
    monkeypatch.setattr(bench, "read_bandwidth", lambda device: bandwidth)
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def arguments(tmp_path: Path, model: Path) -> list[str]:
    (tmp_path / "mine.jsonl").write_text(PROMPTS)
    flags = ["--threads", "1", "--max-tokens", "6", "--repeats", "2", "--ignore-eos", "-s", "ngram"]
    return ["bench", "--model", str(model), "-w", str(tmp_path / "mine.jsonl"), *flags]


def test_a_run_prints_tables_and_writes_a_document(run: Command, arguments: list[str], tmp_path: Path) -> None:
    found = run(*arguments, "--dial", "0.9", "--dial-tokens", "2", "--batch", "1,2", "-o", tmp_path / "run.json")
    assert found.code == 0, found.err
    for text in (
        "mine, temperature 0, batch 1",
        "mine, temperature 0, batch 2",
        "ngram",
        "dial 0.9 x 2",
        "speed-up by task",
    ):
        assert text in found.out
    made = json.loads((tmp_path / "run.json").read_text())
    assert {cell["setting"] for cell in made["cells"]} == {"plain", "ngram", "dial 0.9 x 2"}
    assert made["options"]["batches"] == [1, 2]
    assert str(tmp_path) not in json.dumps(made["provenance"])


def test_a_report_is_written_with_the_run_or_later(run: Command, arguments: list[str], tmp_path: Path) -> None:
    page, path = tmp_path / "run.html", tmp_path / "run.json"
    found = run(*arguments, "--html", page, "-o", path)
    assert found.code == 0, found.err
    assert json.loads(path.read_text())["provenance"]["command"].startswith("paceline bench --model ")
    assert page.read_text().startswith("<!doctype html>")
    again = run("bench", "report", path, "-o", tmp_path / "again.html")
    assert (again.code, again.out) == (0, f"{tmp_path / 'again.html'}\n")
    assert (tmp_path / "again.html").read_text() == page.read_text()
    assert run("bench", "report", path).out == f"{tmp_path / 'run.html'}\n"


def test_a_large_batch_runs_at_once(run: Command, arguments: list[str], tmp_path: Path) -> None:
    more = ["-w", "synthetic:prompt=4,output=6,count=20", "--batch", "20", "--limit", "20", "-o", tmp_path / "run.json"]
    assert run(*arguments, *more).code == 0
    made = json.loads((tmp_path / "run.json").read_text())
    (plain,) = [c for c in made["cells"] if (c["setting"], c["workload"]) == ("plain", "synthetic")]
    assert plain["steps"] == 2 * 20 * 6
    assert plain["limit"]["bytes_per_step"] > 0
    assert plain["limit"]["floor_tokens_per_second"] == pytest.approx(20 * 1e9 / plain["limit"]["bytes_per_step"])


def test_outputs_that_differ_exit_with_1(run: Command, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "difference", lambda *given: Difference(2, 5, 6, 1.0, 1e-3, False))
    found = run(*arguments)
    assert found.code == 1
    assert "outputs differ" in found.out
    assert "first at prompt '1', turn 1, token 2" in found.out


@pytest.mark.parametrize(("number", "code", "words"), ENDS)
def test_a_signal_writes_what_was_done(
    run: Command, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals, code: int, words: str,
) -> None:  # fmt: skip
    generate, calls = LLM.generate, []

    def stop(self: LLM, *given: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) > 7:
            arrive(number)
        return generate(self, *given, **more)

    monkeypatch.setattr(LLM, "generate", stop)
    found = run(*arguments, "--json", tmp_path / "run.json")
    assert (found.code, found.line) == (code, words)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert json.loads((tmp_path / "run.json").read_text())["interrupted"]


def test_compare(run: Command, arguments: list[str], tmp_path: Path) -> None:
    path, slow = tmp_path / "a.json", tmp_path / "b.json"
    arguments[arguments.index("-w") + 1] = "synthetic:prompt=4,output=6,count=6"
    assert run(*arguments, "-o", path).code == 0
    same = run("bench", "compare", path, path, "--fail-below", "0.99")
    assert same.code == 0
    assert "1.000 [1.000, 1.000]" in same.out
    made = json.loads(path.read_text())
    for cell in made["cells"]:
        for row in cell["rows"]:
            row["seconds"] *= 3.0
    slow.write_text(json.dumps(made))
    assert same.err == ""
    failed = run("bench", "compare", path, slow, "--fail-below", "0.9")
    assert failed.code == 1
    assert "2 of 2 tokens/s ratios B / A may be under 0.9 (--fail-below); " in failed.err
    assert "has a lower 95 % bound of 0.333" in failed.err
    slow.write_text(path.read_text().replace("{", '{"baseline": "other", ', 1))
    twice = run("bench", "compare", path, slow)
    assert (twice.code, twice.out) == (2, "")
    assert "b.json' must have each key once, and 'baseline' occurs 2 times" in twice.line
    slow.write_text(json.dumps(made))
    line = json.loads(run("bench", "compare", path, slow, "--json").out)["lines"][1]
    assert line["speed"]["value"] == pytest.approx(1 / 3)
    assert line["speed_significant"]
    assert line["gain"]["value"] == pytest.approx(1.0)
    assert not line["gain_significant"]
    assert "too few for a star" not in same.out


def test_a_comparison_of_few_prompts_says_so(run: Command, arguments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert run(*arguments, "-o", path).code == 0
    assert "2 of 2 lines rest on fewer than 6 prompts or batches" in run("bench", "compare", path, path).out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-s", "nope"], "unknown drafter 'nope'"),
        (["-w", "nope=x"], "unknown format 'nope'"),
        (["--batch", "0"], "--batch must be integers in 1..1024"),
        (["--temperature", "hot"], "--temperature must be numbers in 0..10"),
        (["--dial", "2"], "--dial must be numbers in 0..1"),
        (["--random-shape", "7b"], "must be 291m, 1b, 8b"),
        (["--model", "x", "--random-shape", "1b"], "not both"),
        (["-o", "/nowhere/at/all.json"], "--json (or --output) must lie in a folder that exists"),
        (["--html", "/nowhere/at/all.html"], "--html must lie in a folder that exists"),
        (["--peers", "all"], "No such option: --peers; `python -m lab bench` in the repository has it; see"),
        (["diffusion"], "No such command 'diffusion'; run `python -m lab diffusion` in the repository; see"),
        (["structured"], "No such command 'structured'; run `python -m lab structured` in the repository; see"),
        (["peers", "list"], "No such command 'peers'; run `python -m lab peers` in the repository; see"),
        (["-w", "synthetic:prompt=4,prompt=5"], "synthetic prompt must be given once, got 'prompt=4,prompt=5'"),
        (["--random-shape", "llama:layers=1,layers=2"], "random model layers must be given once"),
        (["--load", "2"], "--load is the rate of a request trace, and no workload is one"),
        (["report", "a.json"], "cannot read 'a.json'"),
        (["compare", "a.json", "b.json"], "cannot read 'a.json'"),
    ],
)
def test_bad_input_gets_one_line(run: Command, flags: list[str], message: str) -> None:
    found = run("bench", *flags)
    assert found.code == 2
    assert message in found.line


def test_a_synthetic_prompt_beyond_the_context_is_one_line(run: Command, model: Path) -> None:
    found = run("bench", "--model", model, "--workload", "synthetic:prompt=999999,output=1,entropy=8")
    assert (found.code, found.out) == (2, "")
    assert found.line == (
        "synthetic prompt must be at most 127: the context holds 128 tokens including at least one new token, got "
        "999999"
    )


def test_files_that_are_no_earlier_run_are_kept(run: Command, tmp_path: Path) -> None:
    mine, page = tmp_path / "prompts.jsonl", tmp_path / "run.html"
    mine.write_text('{"prompt": "mine"}\n')
    for flag, path in (("-o", mine), ("--html", mine)):
        assert "exists and is not a " in run("bench", flag, path).line
    assert "must be two files" in run("bench", "-o", page, "--html", page).line
    assert [path.read_text() for path in tmp_path.iterdir()] == ['{"prompt": "mine"}\n']


def test_an_output_that_cannot_be_written_names_both_flags(run: Command) -> None:
    for flag in ("--output", "--json"):
        assert run("bench", flag, "/nonexistent/a").line.startswith(
            "--json (or --output) must lie in a folder that exists, got"
        )
    assert run("bench", "--html", "/nonexistent/a").line.startswith("--html must lie in a folder that exists, got")
