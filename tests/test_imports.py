"""The map of the code, read off the source: imports go one way and without cycles, packages are entered by their public
names, modules say what they are.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "paceline"
LOW = {"errors", "utils", "config", "registry", "bundled", "version"}
METHODS = LOW | {"tree"}
MODELS = {"checkpoints", "models"}
FLOORS = (
    {"models.mixer_spec"},
    {"models.spec"},
    {"checkpoints"},
    {"models.inputs"},
    {"models.base", "models.denoiser_base", "models.devices", "models.loading"},
    {"models.added_rows", "models.block_memory"},
    {"models.abilities", "models.checks"},
    {"models.cpu", "models.cuda"},
    {"models.state"},
    {"models.attention"},
    {"models.layers"},
    {"models.heads"},
    {"models.passes"},
    {"models.memory", "models.load_request"},
    {"models.runners"},
    {"models.weight_plan"},
    {"models.load"},
    {"models.denoiser_loading", "models.source_draft_loading", "models.stored_rows"},
)
"""What `models` is made of, lowest first, with `checkpoints` between: each imports those of lower floors alone."""
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "utils": {"errors"},
    "config": {"errors", "utils"},
    "arguments": {"checkpoints", "config", "errors", "utils"},
    "catalogue": set(),
    "registry": {"errors", "catalogue", "utils"},
    "tree": LOW,
    **{unit: METHODS.union(*FLOORS[:floor]) for floor, units in enumerate(FLOORS) for unit in units},
    "models.mixer_spec": set(),
    "models.spec": {"models.mixer_spec"},
    "checkpoints": LOW | {"models.mixer_spec", "models.spec"},
    "models": set(),
    "diffusion": METHODS | MODELS | {"engine", "sampling", "grammar"},
    "drafters": METHODS | MODELS,
    "verifiers": METHODS | MODELS | {"sampling"},
    "controllers": METHODS | {"models"},
    "sampling": METHODS,
    "grammar": METHODS | {"checkpoints", "sampling"},
    "profiles": METHODS | MODELS | {"controllers"},
    "codebooks": METHODS | MODELS,
    "engine": METHODS | MODELS | {"drafters", "verifiers", "controllers", "sampling", "grammar"},
    "assembly": METHODS | MODELS | {"engine", "drafters", "verifiers", "controllers", "sampling"},
    "retrieval": LOW | {"checkpoints"},
    "search": METHODS | MODELS | {"engine", "drafters", "retrieval", "sampling", "verifiers"},
    "speech": LOW | {"checkpoints", "sampling"},
    "claims": LOW,
    "llm": METHODS
    | MODELS
    | {"arguments", "assembly", "diffusion", "engine", "sampling", "search", "speech", "profiles", "transcriber"}
    | {"live_transcriber"},
    "transcriber": METHODS | MODELS | {"engine", "speech"},
    "live_transcriber": LOW | {"speech", "transcriber"},
    "async_llm": METHODS | {"arguments", "engine", "llm", "search"},
    "serving": METHODS
    | MODELS
    | {"async_llm", "batch", "engine", "explain", "grammar", "llm", "sampling", "search"}
    | {"speech", "transcriber"},
    "batch": LOW,
    "doctor": METHODS | MODELS | {"assembly", "controllers", "engine", "llm", "profiles"},
    "explain": METHODS | MODELS | {"controllers", "engine", "llm", "verifiers"},
    "tune": METHODS | MODELS | {"assembly", "controllers", "engine", "explain", "llm", "profiles", "verify"},
    "verify": METHODS | MODELS | {"assembly", "engine", "llm", "profiles", "sampling"},
    "bench": METHODS | MODELS | {"drafters", "engine", "explain", "llm", "sampling", "verifiers", "verify"},
    "training": METHODS | MODELS | {"llm", "drafters", "engine", "sampling", "speech", "codebooks"},
    "cli": METHODS
    | MODELS
    | {"async_llm", "batch", "serving", "training", "diffusion", "llm", "engine", "drafters"}
    | {"bench", "codebooks", "doctor", "explain", "profiles", "retrieval", "search", "tune", "verify"}
    | {"live_transcriber", "speech", "transcriber"},
    "__init__": METHODS | {"llm", "async_llm", "engine", "sampling"},
    "__main__": {"cli"},
}
"""Unit -> units that it may import; a package of many units stands for all of them."""
CYCLES: tuple[str, ...] = ()
"""Parts in which cycles are known; they are to go."""


@pytest.fixture(scope="module", autouse=True)
def _forgotten() -> Iterator[None]:
    """The trees of all files, millions of objects in which every search for garbage would look."""
    gc.disable()
    yield
    for known in (parse, nodes, imports, homes):
        known.cache_clear()
    gc.enable()


parse = cache(ast.parse)


def parsed(path: Path) -> ast.Module:
    return parse(path.read_text())


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


def modules(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(folder.rglob("*.py"))


def module_name(path: Path) -> str:
    """As it is imported: paceline.engine.loop, and paceline.engine for its __init__."""
    return ".".join(("paceline", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__")


def part(path: Path) -> str:
    """The first-level part of the package that a module belongs to."""
    return path.relative_to(SRC).parts[0].removesuffix(".py")


@cache
def homes() -> dict[str, str]:
    """Public name -> module that a package's stub takes it from: paceline.models.Runner -> paceline.models.base."""
    found = {}
    for stub in SRC.rglob("__init__.pyi"):
        package = module_name(stub.with_suffix(".py"))
        for node in parsed(stub).body:
            assert isinstance(node, ast.ImportFrom), stub
            found |= {f"{package}.{alias.name}": f"{package}.{node.module}" for alias in node.names}
    return found


def unit(name: str) -> str:
    """What a module or public name belongs to on the map: a first-level part, or a folder or module of `models`."""
    first, *rest = homes().get(name, name).split(".")[1:]
    return f"{first}.{rest[0]}" if first == "models" and rest and rest[0] else first


def unit_of(path: Path) -> str:
    """The unit of a module by its file."""
    return part(path) if path.parent == SRC else unit(module_name(path))


@cache
def imports(tree: ast.Module) -> list[tuple[str, str]]:
    """Every absolute import of the package, lazy and type-only ones included: (module, name)."""
    every: list[tuple[str, str]] = []
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [("paceline" if node.level else node.module or "", alias.name) for alias in node.names]
        else:
            continue
        every += (pair for pair in found if pair[0].split(".")[0] == "paceline")
    return every


# ------------------------------------------------------------------------------------------------ one way


def arrows(tree: ast.Module) -> set[str]:
    """Units that a module imports."""
    names = {f"{module}.{of}".removesuffix(".") for module, of in imports(tree)}
    return {unit(name) for name in names - {"paceline", "paceline.__version__"}}


def wrong_arrows(name: str, tree: ast.Module) -> set[str]:
    """Units that a module of the unit `name` imports and must not."""
    allowed = ALLOWED[name] | {name}
    return {other for other in arrows(tree) if not {other, other.split(".")[0]} & allowed}


def test_imports_go_one_way() -> None:
    unknown = {unit_of(path) for path in modules(SRC)} - ALLOWED.keys()
    assert not unknown, f"not on the map; add to ALLOWED: {sorted(unknown)}"
    found = {str(path.relative_to(SRC)): wrong_arrows(unit_of(path), parsed(path)) for path in modules(SRC)}
    assert not {path: wrong for path, wrong in found.items() if wrong}, "must not import these"


def test_no_units_import_each_other() -> None:
    found: dict[str, set[str]] = {}
    for path in modules(SRC):
        found.setdefault(unit_of(path), set()).update(arrows(parsed(path)))
    assert not cycles({name: others & found.keys() - {name} for name, others in found.items()})


def test_the_rule_catches_a_drafter_that_imports_the_engine() -> None:
    def wrong(name: str, source: str) -> set[str]:
        return wrong_arrows(name, ast.parse(source))

    assert wrong("drafters", "from paceline.engine.loop import Engine") == {"engine"}
    assert wrong("drafters", "def f():\n    import paceline.verifiers.greedy") == {"verifiers"}
    assert wrong("tree", "from paceline import models") == {"models"}
    assert not wrong("drafters", "from paceline.models import Runner\nfrom paceline.drafters.base import Drafter")
    assert wrong("models.state", "from paceline.models.runners.native import NativeRunner") == {"models.runners"}
    assert wrong("models.cpu", "def f():\n    from paceline.models.state.arena import Arena") == {"models.state"}
    assert wrong("models.base", "if TYPE_CHECKING:\n    from paceline.models import load_runner") == {"models.load"}
    assert wrong("models.cuda", "from paceline.models.cpu import pages") == {"models.cpu"}
    assert wrong("checkpoints", "from paceline.models import ModelSpec, Runner") == {"models.base"}
    assert not wrong("models.passes", "from paceline.models.layers.decoder import Decoder\nimport paceline.checkpoints")


# ------------------------------------------------------------------------------------------------ no cycles


def graph(sources: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Module -> modules that it imports; a public name of a package counts as an import of the package's own module."""
    found: dict[str, set[str]] = {}
    for name, tree in sources.items():
        targets = {f"{module}.{of}" if f"{module}.{of}" in sources else module for module, of in imports(tree)}
        found[name] = (targets & sources.keys()) - {name}
    return found


def cycles(arrows: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Groups of modules each of which reaches all others of its group."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            for other in arrows[left.pop()] - seen:
                seen.add(other)
                left.append(other)
        return seen

    reached = {name: reach(name) for name in arrows}
    return {
        frozenset(other for other in there if name in reached[other])
        for name, there in reached.items()
        if name in there
    }


def public_modules() -> dict[str, ast.Module]:
    """All modules; a package that resolves its names lazily imports nothing by itself."""
    lazy = {path.with_suffix(".py") for path in SRC.rglob("__init__.pyi")} | {SRC / "__init__.py"}
    return {module_name(path): ast.Module([], []) if path in lazy else parsed(path) for path in modules(SRC)}


def test_no_imports_go_round_in_circles() -> None:
    found = [sorted(group) for group in cycles(graph(public_modules()))]
    assert not [group for group in found if not any(all(name.startswith(part) for name in group) for part in CYCLES)]


def test_the_cycle_check_catches_a_lazy_and_a_type_only_import() -> None:
    sources = {
        "paceline.a": "from paceline.b import x",
        "paceline.b": "def f():\n    from paceline import c",
        "paceline.c": "if TYPE_CHECKING:\n    from paceline.a import y",
        "paceline.d": "import paceline.a",
    }
    found = cycles(graph({name: ast.parse(source) for name, source in sources.items()}))
    assert found == {frozenset({"paceline.a", "paceline.b", "paceline.c"})}


# ------------------------------------------------------------------------------------------------ public names


def deep_imports(name: str, tree: ast.Module) -> set[str]:
    """Modules inside other packages from which a module imports, where the package states public names.

    Tests of inner parts do so openly.

    Args:
        name: the module's own first-level part; "" outside the package.
    """
    found = set()
    for module, _ in imports(tree):
        parts = module.split(".")[1:]
        inner = len(parts) > 1 and SRC.joinpath(*parts).with_suffix(".py").exists()
        if inner and parts[0] != name and SRC.joinpath(*parts[:-1], "__init__.pyi").exists():
            found.add(module)
    return found


def test_packages_are_entered_by_their_public_names() -> None:
    found = {str(path.relative_to(SRC)): deep_imports(part(path), parsed(path)) for path in modules(SRC)}
    outside = modules(ROOT / "benchmarks", ROOT / "lab", ROOT / "recipes")
    found |= {str(path.relative_to(ROOT)): deep_imports("", parsed(path)) for path in outside}
    assert not {path: deep for path, deep in found.items() if deep}


def test_that_rule_catches_a_module_inside_another_package() -> None:
    def deep(name: str, source: str) -> set[str]:
        return deep_imports(name, ast.parse(source))

    assert deep("engine", "from paceline.tree.merging import merge") == {"paceline.tree.merging"}
    assert deep("", "def f():\n    import paceline.tree.merging") == {"paceline.tree.merging"}
    assert not deep("engine", "from paceline.tree import merge\nfrom paceline.engine.loop import Engine")


def inner_imports(tree: ast.Module) -> set[str]:
    """Modules inside packages of Paceline that a module imports, or imports from; names of packages are public."""

    def is_inner(module: str) -> bool:
        parts = module.split(".")[1:]
        return len(parts) > 1 and SRC.joinpath(*parts).with_suffix(".py").exists()

    return {name for module, of in imports(tree) for name in (module, f"{module}.{of}") if is_inner(name)}


def test_the_laboratory_imports_public_names_only() -> None:
    found = {str(path.relative_to(ROOT)): inner_imports(parsed(path)) for path in modules(ROOT / "lab")}
    assert len(found) > 10
    assert not {path: inner for path, inner in found.items() if inner}


def test_that_rule_catches_a_module_inside_a_package() -> None:
    def inner(source: str) -> set[str]:
        return inner_imports(ast.parse(source))

    assert inner("from paceline.cli.terminal import say") == {"paceline.cli.terminal"}
    assert inner("def f():\n    from paceline.engine import loop") == {"paceline.engine.loop"}
    assert not inner(
        "from paceline import LLM\nfrom paceline.llm import BUNDLED\nfrom paceline.bench.run import Harness"
    )


def of_repository(tree: ast.Module) -> set[str]:
    """Packages at the top of the repository, which the wheel lacks, that a module imports."""
    names = {alias.name for node in nodes(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes(tree) if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names} & {path.name for path in ROOT.iterdir() if path.is_dir()}


def test_the_wheel_imports_nothing_that_it_lacks() -> None:
    found = {str(path.relative_to(SRC)): of_repository(parsed(path)) for path in modules(SRC)}
    assert not {path: names for path, names in found.items() if names}
    assert of_repository(ast.parse("def f():\n    from lab.peers import PEERS")) == {"lab"}


def test_every_public_name_is_there_and_no_module_is_called_so() -> None:
    """A module of the same name would hide the public one as soon as somebody imports it."""
    for stub in sorted(SRC.rglob("__init__.pyi")):
        package = import_module(".".join(["paceline", *stub.parent.relative_to(SRC).parts]))
        assert package.__all__, stub
        for name in package.__all__:
            assert getattr(package, name) is not None, (stub, name)
        assert not hidden(stub.parent, package.__all__)


def hidden(folder: Path, names: list[str]) -> list[str]:
    return [name for name in names if (folder / f"{name}.py").exists() or (folder / name).is_dir()]


def test_that_rule_catches_a_module_of_a_public_name() -> None:
    assert hidden(SRC, ["LLM", "llm", "engine"]) == ["llm", "engine"]


# ------------------------------------------------------------------------------------------------ private names


PRIVATE_NEEDED = "# private: "
"""Begins the comment that says why a test needs a private name."""


def own_names(tree: ast.Module) -> set[str]:
    """Private names that a module of tests gives itself."""
    functions = {node.name for node in nodes(tree) if isinstance(node, ast.FunctionDef)}
    attributes = {node for node in nodes(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return functions | {node.attr for node in attributes if ast.unparse(node.value) == "self"}


def private_names(source: str, own: Iterable[str] = ()) -> set[str]:
    """Private names of others, read or replaced from outside; a subclass may use those of its base."""
    found, lines = set(), source.splitlines()
    for node in nodes(tree := parse(source)):
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            name = str(getattr(node.args[1], "value", "")).split(".")[-1]
        else:
            continue
        private = name.startswith("_") and not name.startswith("__")
        if private and PRIVATE_NEEDED not in lines[(node.end_lineno or node.lineno) - 1] and _of_others(node):
            found.add(name)
    return found - {"_replace", "_asdict"} - own_names(tree) - set(own)


def _of_others(node: ast.Attribute | ast.Call) -> bool:
    if isinstance(node, ast.Attribute):
        return ast.unparse(node.value) not in ("self", "cls", "super()")
    return ast.unparse(node.func).endswith("setattr")


def test_tests_use_no_private_names() -> None:
    tests = ROOT / "tests"
    paths = list(modules(tests))
    helpers = set().union(*(own_names(parsed(path)) for path in paths if not path.name.startswith("test_")))
    found = {str(path.relative_to(tests)): private_names(path.read_text(), helpers) for path in paths}
    assert not {path: names for path, names in found.items() if names}


def test_that_rule_catches_private_names_of_others() -> None:
    assert private_names("x._a\nmodule._b()\nmonkeypatch.setattr(C, '_c', 1)\nsetattr(m, 'p.q._d', 1)") == {
        *("_a", "_b", "_c", "_d")
    }
    assert private_names("x._a = 1") == {"_a"}
    assert not private_names("self._a, super()._b(), x.__len__(), row._replace()\nmonkeypatch.setattr(C, 'c', 1)")
    assert not private_names("x._a  # private: no other way", ()) | private_names("x._a", ("_a",))


# ------------------------------------------------------------------------------------------------ others


@cache
def names_of_tests() -> set[str]:
    """Of all that a script could import of the test suite."""
    names = {path.relative_to(ROOT / "tests").parts[0].removesuffix(".py") for path in modules(ROOT / "tests")}
    names -= {path.parent.name for path in ROOT.glob("*/__init__.py")}  # tested, and no part of the tests
    return names - {path.stem for path in (ROOT / "benchmarks").glob("*.py")} | {"tests"}


def of_tests(tree: ast.Module) -> set[str]:
    """Modules of the test suite that a script imports."""
    found = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found & names_of_tests()


def test_benchmarks_import_nothing_from_the_tests() -> None:
    found = {path.name: of_tests(parsed(path)) for path in modules(ROOT / "benchmarks")}
    assert not {name: wrong for name, wrong in found.items() if wrong}


def test_that_rule_catches_a_benchmark_that_uses_a_toy() -> None:
    assert of_tests(ast.parse("from toys import ToyRunner\nimport tests.toys, json")) == {"toys", "tests"}


def silent(sources: Mapping[str, ast.Module]) -> list[str]:
    """Modules without a docstring."""
    return [name for name, tree in sources.items() if not ast.get_docstring(tree)]


def test_modules_say_what_they_are() -> None:
    assert not silent({str(path): parsed(path) for path in modules(SRC)})
    assert silent({"mute.py": ast.parse("x = 1"), "fine.py": ast.parse('"""Fine."""')}) == ["mute.py"]
