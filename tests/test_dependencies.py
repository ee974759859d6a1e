"""What the package needs is what it imports, and scripts that need more say so."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = SETTINGS["project"]
MODULES = {"huggingface-hub": "huggingface_hub", "lazy-loader": "lazy_loader", "pyyaml": "yaml"}
"""Distribution -> module, where the names differ."""


def modules_of(requirements: list[str]) -> set[str]:
    names = [Requirement(one).name for one in requirements]
    return {MODULES.get(name, name) for name in names}


def imported(source: str) -> set[str]:
    """Top-level modules that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            found.add(node.module.split(".")[0])
    return found


def not_imported(modules: set[str], folder: Path) -> set[str]:
    """Those that no file of a folder imports; only files are parsed that seem to import one that is still missing."""
    missing = set(modules)
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if missing & set(re.findall(r"^\s*(?:from|import)\s+(\w+)", source, re.MULTILINE)):
            missing -= imported(source)
    return missing


def test_every_dependency_is_imported_by_the_package() -> None:
    needed = modules_of(PROJECT["dependencies"])
    assert not_imported(needed | {"pandas"}, ROOT / "src") == {"pandas"}


def test_what_only_benchmarks_import_is_an_extra() -> None:
    drawing = [path.name for path in (ROOT / "src").rglob("*.py") if "matplotlib" in path.read_text(encoding="utf-8")]
    assert not not_imported({"matplotlib"}, ROOT / "src" / "paceline" / "bench")
    assert set(drawing) <= {"drawing.py", "report.py"}, "all else works without it"
    assert modules_of(PROJECT["optional-dependencies"]["bench"]) == {"matplotlib", "accelerate", "jiwer"}


def test_a_script_that_cannot_draw_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "common", raising=False)
    common = __import__("common")
    sys.modules.pop("common")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"pip install '\.\[bench\]'"):
        common.pyplot()


def not_packaged(patterns: list[str]) -> set[str]:
    """Files beside the modules, those that running makes left out, which the wheel would lack."""
    source = ROOT / "src" / "paceline"
    beside = {path for path in source.rglob("*") if path.is_file() and path.suffix != ".py"}
    kept = {path for path in beside if "__pycache__" not in path.parts}
    return {str(path.relative_to(source)) for path in kept - {path for one in patterns for path in source.glob(one)}}


def test_the_wheel_has_every_file_beside_the_modules() -> None:
    patterns = SETTINGS["tool"]["setuptools"]["package-data"]["paceline"]
    assert not not_packaged(patterns)
    assert not_packaged([one for one in patterns if one != "tune/*.html"]) == {"tune/static_tree.html"}
