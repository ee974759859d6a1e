"""`paceline analyze acceptance`: tables, object, plot, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from command import Command
from tiny_checkpoint import edit_weights

ROWS = ("--p", "p.npy", "--q", "q.json")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    np.save("p.npy", np.array([0.5, 0.3, 0.2]))
    Path("q.json").write_text("[[0.2, 0.3, 0.5]]")


def test_tables(run: Command) -> None:
    found = run("analyze", "acceptance", *ROWS, "--drafts", "2,1")
    assert (found.code, found.err) == (0, "")
    lines = {
        line.strip().rsplit("  ", 2)[0].strip(): line.split()[-2:]
        for line in found.out.splitlines()
        if "0.7000" in line
    }
    assert lines["k_seq"] == ["0.7000", "0.7914"]
    assert lines["optimum without replacement"] == ["0.7000", "0.9857"]
    assert "tokens per pass by nodes of the tree" in found.out


def test_an_object_and_a_plot(run: Command, tmp_path: Path) -> None:
    found = run("analyze", "acceptance", *ROWS, "--json", "--drafts", "2", "--budgets", "1,3", "--html", "plot.html")
    data = json.loads(found.out)
    assert (data["positions"], data["drafts"], data["budgets"]) == (1, [2], [1, 3])
    assert data["acceptance"]["greedy_draft_sampling"] == pytest.approx([0.9])
    page = (tmp_path / "plot.html").read_text(encoding="utf-8")
    assert page.count('<svg class="plot"') == 2
    assert page.count('id="series-') == page.count("<li>") == 2 * len(data["acceptance"]) + 2
    assert "http://" not in page
    assert run("analyze", "acceptance", *ROWS, "--html", "plot.html").code == 0


def test_two_models_on_a_text(run: Command) -> None:
    flags = ("--positions", "3", "--drafts", "1,2", "--budgets", "2", "--dtype", "float32", "--json")
    found = run("analyze", "acceptance", "def add(a, b): return a + b", *flags)
    assert found.code == 0, found.err
    data = json.loads(found.out)
    assert data["positions"] == 3
    one, two = data["acceptance"]["optimum without replacement"]
    assert 0 < one <= two <= 1
    assert data["acceptance"]["k_seq"][0] == pytest.approx(one, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--p", "p.npy"), "--p and --q belong together"),
        (("a text", *ROWS), "give either --p and --q or a text"),
        (("--p", "p.npy", "--q", "none.json"), "cannot read 'none.json' (No such file or directory)"),
        ((*ROWS, "--drafts", "0"), "--drafts must be integers in 1..32, separated by commas, got '0'"),
        ((*ROWS, "--budgets", "2,x"), "--budgets must be integers in 1..1024"),
        ((*ROWS, "--temperature", "0"), "--temperature must be above 0"),
        (
            (*ROWS, "--html", "nowhere/plot.html"),
            "--html must lie in a folder that exists, got 'nowhere/plot.html'; make the folder",
        ),
        ((*ROWS, "--html", "q.json"), "exists and is not a page of `paceline analyze`; add --force"),
        ((*ROWS, "--model", "x", "--dtype", "float32"), "without models; leave out --model, --dtype"),
        ((*ROWS, "--draft-model", "x"), "leave out --draft-model"),
        ((*ROWS, "--temperature", "0.5", "--positions", "3"), "leave out --temperature, --positions"),
        (("text", "-s", "null"), "leave --speculative-config out"),
        (("text", "--model", "some/model"), "a draft model is needed beside --model"),
    ],
)
def test_bad_input_is_one_line(run: Command, arguments: tuple[str, ...], text: str) -> None:
    found = run("analyze", "acceptance", *arguments)
    assert found.code == 2
    assert text in found.line


@pytest.mark.parametrize(
    "text",
    ["[[1" + "0" * 400 + ", 1]]", '[["0.5", "0.5"]]', "[null, 1]", "[[0.5, 0.5], [1]]", "", "{}"],
    ids=lambda text: text[:12],
)
def test_a_file_of_something_else_is_one_line(run: Command, text: str) -> None:
    Path("odd.json").write_text(text)
    found = run("analyze", "acceptance", "--p", "p.npy", "--q", "odd.json")
    assert (found.code, found.out) == (2, "")
    assert found.line.startswith("cannot read 'odd.json' (")


def test_an_array_of_something_else_is_one_line(run: Command) -> None:
    np.save("complex.npy", np.array([0.5 + 0.5j, 0.3, 0.2]))
    np.savez("zip.npz", p=np.array([1.0]))
    Path("zip.npz").rename("zip.npy")
    Path("empty.npy").write_bytes(b"")
    for name in ("complex.npy", "zip.npy", "empty.npy"):
        found = run("analyze", "acceptance", "--p", "p.npy", "--q", name)
        assert (found.code, found.out) == (2, "")
        assert found.line.startswith(f"cannot read {name!r} (")
    np.save("half.npy", np.array([0.5, 0.25, 0.25], np.float16))
    assert run("analyze", "acceptance", "--p", "p.npy", "--q", "half.npy").code == 0
    np.save("wrong.npy", np.array([0.5, np.inf, 0.2]))
    assert "got inf" in run("analyze", "acceptance", "--p", "p.npy", "--q", "wrong.npy").line


def test_a_checkpoint_that_gives_nan_is_named(run: Command, tiny: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(tiny, tmp_path / "broken")
    edit_weights(broken, lambda weights: weights["lm_head.weight"].fill_(float("nan")))
    flags = ("--dtype", "float32", "--threads", "1", "--drafts", "1", "--budgets", "2")
    line = "the model returned NaN among its logits; check the checkpoint, or try dtype='float32'"
    for target, draft in ((broken, tiny), (tiny, broken)):
        found = run("analyze", "acceptance", "a text", "--model", target, "--draft-model", draft, *flags)
        assert (found.code, found.line) == (2, f"{broken}: {line}")
    assert run("analyze", "acceptance", "a text", "--model", tiny, "--draft-model", tiny, *flags).code == 0


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which no file can be made")
def test_a_page_that_cannot_be_written_names_its_flag(run: Command) -> None:
    found = run("analyze", "acceptance", *ROWS, "--html", "/proc/x.html")
    assert (found.code, found.out) == (2, "")
    assert found.line == "--html '/proc/x.html' cannot be written (No such file or directory); name another file"
