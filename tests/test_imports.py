"""The dependency direction of the map, read off the source: imports go one way."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "paceline"
LOW = {"errors", "utils", "config", "registry", "bundled"}
METHODS = LOW | {"tree"}
ALLOWED = {
    "errors": set(),
    "utils": {"errors"},
    "config": {"errors", "utils"},
    "catalogue": set(),
    "registry": {"errors", "catalogue"},
    "tree": LOW,
    "models": METHODS,
    "diffusion": METHODS | {"models", "engine", "sampling", "grammar"},
    "drafters": METHODS | {"models"},
    "verifiers": METHODS | {"sampling"},
    "controllers": METHODS | {"models"},
    "sampling": METHODS,
    "grammar": METHODS,
    "profiles": METHODS | {"controllers", "models"},
    "engine": METHODS | {"drafters", "verifiers", "controllers", "sampling", "models"},
    "claims": LOW,
    "llm": METHODS | {"diffusion", "engine", "models", "sampling", "verifiers", "profiles"},
    "bench": METHODS
    | {"diffusion", "llm", "engine", "drafters", "models", "verifiers", "controllers", "sampling", "profiles"},
    "cli": METHODS | {"diffusion", "llm", "engine", "drafters", "models", "bench", "profiles"},
    "__init__": METHODS | {"llm", "engine", "sampling"},
    "__main__": {"cli"},
}


def unit(path: Path) -> str:
    first = path.relative_to(SRC).parts[0]
    return first.removesuffix(".py")


def imported(source: str) -> set[str]:
    """The first-level parts of the package that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "paceline" if node.level else node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "paceline" else [base]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("paceline.")}
    return found - {"__version__"}


def wrong_arrows(name: str, source: str) -> set[str]:
    return imported(source) - ALLOWED[name] - {name}


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_go_one_way(path: Path) -> None:
    assert unit(path) in ALLOWED, f"{unit(path)} is not on the map; add it to ALLOWED"
    assert not wrong_arrows(unit(path), path.read_text()), f"{path} must not import these"


def test_the_rule_catches_a_drafter_that_imports_the_engine() -> None:
    assert wrong_arrows("drafters", "from paceline.engine.loop import Engine") == {"engine"}
    assert wrong_arrows("drafters", "def f():\n    import paceline.verifiers.greedy") == {"verifiers"}
    assert wrong_arrows("tree", "from paceline import models") == {"models"}


def test_modules_say_what_they_are() -> None:
    silent = [str(p.relative_to(SRC)) for p in SRC.rglob("*.py") if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not silent


def deep_imports(name: str, source: str) -> set[str]:
    """Modules inside other packages that a module imports, where the package states public names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("paceline."):
            parts = node.module.split(".")[1:]
            inner = (SRC / "/".join(parts)).with_suffix(".py").exists() and len(parts) > 1
            if inner and parts[0] != name and (SRC / "/".join(parts[:-1]) / "__init__.pyi").exists():
                found.add(node.module)
    return found


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_packages_are_entered_by_their_public_names(path: Path) -> None:
    assert not deep_imports(unit(path), path.read_text())


def test_that_rule_catches_a_module_inside_another_package() -> None:
    assert deep_imports("engine", "from paceline.tree.merging import merge") == {"paceline.tree.merging"}
    assert not deep_imports("engine", "from paceline.tree import merge\nfrom paceline.engine.loop import Engine")


@pytest.mark.parametrize("stub", sorted(SRC.rglob("__init__.pyi")), ids=lambda p: str(p.parent.relative_to(SRC)))
def test_every_public_name_is_there_and_no_module_is_called_so(stub: Path) -> None:
    """A module of the same name would hide the public one as soon as somebody imports it."""
    package = import_module(".".join(["paceline", *stub.parent.relative_to(SRC).parts]))
    assert package.__all__
    for name in package.__all__:
        assert getattr(package, name) is not None
        assert not (stub.parent / f"{name}.py").exists()
        assert not (stub.parent / name).is_dir()
