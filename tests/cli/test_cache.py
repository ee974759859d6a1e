"""`paceline cache`: what is kept, how large, where; and what goes away, by name or because it is made again by itself.
`paceline warmup`: what is made ahead.
"""

from __future__ import annotations

import json
import os
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from time import time
from typing import Any

import pytest
from command import Command
from tiny_checkpoint import write

from paceline.utils import compiled, kernel_files

DAY = 86400


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PACELINE_CACHE_GB", "2")
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    monkeypatch.setattr("paceline.utils.kernel_files", lambda package: sorted(kernels.iterdir()))
    return tmp_path


def fill(folder: Path, *names: str, size: int = 1000, days: int = 3) -> list[Path]:
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
        os.utime(path, (time() - days * DAY - 60,) * 2)
    return paths


def filled(folder: Path) -> dict[str, Path]:
    """One file of everything, by its name in the list."""
    names = {
        "packed/small-1a": "kept/packed/small-1a.safetensors",
        "packed/large-2b": "kept/packed/large-2b.safetensors",
        "kernels": "kernels/forward.nbc",
        "exactness": "kept/exactness/1.json",
        "costs": "kept/costs/1.json",
        "acceptance": "kept/acceptance/1.json",
        "profiles": "kept/profiles/mine.json",
        "random": "kept/random/llama/model.safetensors",
        "models": "kept/models/smol/model.safetensors",
        "peers": "home/peers/vllm/bin/python",
    }
    fill(folder, *names.values())
    fill(folder, names["packed/large-2b"], size=3_500_000, days=0)
    return {name: folder / path for name, path in names.items()}


def test_the_list_names_everything_with_its_size_and_age(run: Command, folder: Path) -> None:
    names = filled(folder)
    found = json.loads(run("cache", "list", "--json").out)
    rows = {row["name"]: row for row in found["entries"]}
    assert rows.keys() == names.keys()
    assert (found["folder"], found["most_packed_bytes"]) == (str(folder / "kept"), 2 * 10**9)
    assert found["bytes"] == 3_500_000 + 9 * 1000
    assert (rows["packed/large-2b"]["bytes"], rows["costs"]["bytes"]) == (3_500_000, 1000)
    assert rows["packed/large-2b"]["age_seconds"] < 1000 < 3 * DAY <= rows["costs"]["age_seconds"] < 4 * DAY
    lines = run("cache", "list").out.splitlines()
    assert re.match(r"packed/large-2b +3.5 MB +\d+ (second|minute)s? +packed weights", lines[0])
    assert any(re.match(r"costs +1 kB +3 days +what passes and drafts cost", line) for line in lines)
    assert "3.51 MB in" in " ".join(lines)
    assert str(folder / "kept") in "".join(lines)


def test_what_is_made_again_by_itself_is_cleared_and_nothing_else(run: Command, folder: Path) -> None:
    names = filled(folder)
    found = run("cache", "clear")
    assert (found.code, found.err) == (0, "")
    assert {name for name, path in names.items() if path.exists()} == {"profiles", "random", "models", "peers"}
    assert run("cache", "clear").out == "removed nothing\n"


@pytest.mark.parametrize(
    ("given", "gone"),
    [
        (("small-1a",), {"packed/small-1a"}),
        (("packed/large-2b", "costs"), {"packed/large-2b", "costs"}),
        (("packed",), {"packed/small-1a", "packed/large-2b"}),
        (("models",), {"models"}),
    ],
)
def test_what_is_named_is_cleared(run: Command, folder: Path, given: tuple[str, ...], gone: set[str]) -> None:
    names = filled(folder)
    assert run("cache", "clear", *given).code == 0
    assert {name for name, path in names.items() if not path.exists()} == gone


def test_an_unknown_name_clears_nothing(run: Command, folder: Path) -> None:
    names = filled(folder)
    assert "nothing called 'other' is kept; there is packed/large-2b," in run("cache", "clear", "costs", "other").line
    assert all(path.exists() for path in names.values())


def test_nothing_is_kept(run: Command, folder: Path) -> None:
    assert json.loads(run("cache", "list", "--json").out)["entries"] == []
    assert "0 B in" in run("cache", "list").out


def test_compiled_code_is_found(tmp_path: Path) -> None:
    source = tmp_path / "fast.py"
    source.write_text("def add(a, b):\n    return a + b\n")
    spec = spec_from_file_location("fast", source)
    assert spec is not None
    assert spec.loader is not None
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert kernel_files(tmp_path) == []
    assert compiled(module.add)(1, 2) == 3
    assert {path.suffix for path in kernel_files(tmp_path)} == {".nbi", ".nbc"}


def test_warming_up_compiles_and_packs(run: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.checkpoints.packed_files.LEAST", 1)
    model = write(folder / "model", hidden_size=64, head_dim=32, intermediate_size=64)
    found = run("warmup", str(model), "--dtype", "float32", "--threads", "1")
    assert found.code == 0, found.err
    steps = re.findall(r"\[(\d+)/(\d+)\] (.+?): (?:[\d.]+ s|not used here)", " ".join(found.out.split()))
    assert [int(number) for number, *_ in steps] == list(range(1, len(steps) + 1))
    assert {total for _, total, _ in steps} == {str(len(steps))}
    assert {"the CPU kernels", "the method ngram", "the method suffix", str(model)} < {what for *_, what in steps}
    assert f"{len(steps)} steps in " in found.out
    kept = [row["name"] for row in json.loads(run("cache", "list", "--json").out)["entries"]]
    assert any(name.startswith("packed/model-") for name in kept)


def test_a_model_is_given_once(run: Command) -> None:
    assert "as an argument or with --model, not both" in run("warmup", "a", "--model", "b").line
