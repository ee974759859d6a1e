"""The public names are the documented ones, others have a user, and importing the package is cheap."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import paceline
from paceline import checkpoints

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "paceline"
FOR_METHODS = """
paceline.config: documented option
paceline.controllers: Controller Outcome Plan Signal StepTimes
paceline.drafters: Ahead Context DraftedToken Drafter DrafterArgs Models
paceline.models: Capabilities EmbeddedSpan HasEmbedding HasHead HasMemory Inputs LayerPlan ModelInfo PartAbilities
    Rollback Runner RunsLayers SequenceCache TakesInputs
paceline.models.heads: HeadConfig
paceline.sampling.steering: Steering
paceline.training: Batch Document HeadTrainer NextTokenTrainer PathTrainer TargetView TrainConfig Trainer
paceline.tree: Budget EMPTY_TREE Scores TokenTree Trial Verdict
paceline.verifiers: ArgmaxVerifier BlockVerification GreedyDraftSampling GreedyVerifier KSeq RecursiveRejection Rows
    Verifier residual
"""
"""What methods in other packages build on: each of these keeps its name and place, or has a release of warnings."""
FOR_USERS = {
    "paceline.engine.Rollout",
    *(f"paceline.search.{name}" for name in ("BeamSearchSequence", "BudgetSpentError", "HiddenMessage", "SearchTree")),
}
"""Types of what calls return, or raise, that nobody has to import."""


def undocumented(text: str) -> list[str]:
    return [name for name in paceline.__all__ if f"`{name}`" not in text]


def test_every_public_name_is_in_the_reference_and_nothing_else_is() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert not undocumented(text)
    table = text.split("## `LLM`")[0]
    named = {
        n for row in table.splitlines() if row.startswith("| `") for n in re.findall(r"`([A-Z]\w+)`", row.split("|")[1])
    }
    assert named == set(paceline.__all__)
    assert undocumented(text.replace("`LLM`", "")) == ["LLM"]


def test_every_public_name_exists() -> None:
    for name in paceline.__all__:
        assert getattr(paceline, name).__name__ == name


def test_importing_the_package_and_its_help_loads_no_torch() -> None:
    code = "import sys, paceline.cli.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    control = "import sys, paceline.llm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", control], check=False).returncode == 1


def test_the_old_place_of_checkpoints_still_has_its_public_names() -> None:
    old = import_module("paceline.models.loading")
    assert dir(old) == sorted(checkpoints.__all__)
    assert all(getattr(old, name) is getattr(checkpoints, name) for name in dir(old))
    with pytest.raises(AttributeError):
        old.nowhere  # noqa: B018
    assert import_module("paceline.models.loading.tokenizer").Tokenizer is checkpoints.Tokenizer
    with pytest.raises(ModuleNotFoundError):  # and no second copy of it
        import_module("paceline.models.loading.chat_template")


def for_methods(text: str) -> dict[str, set[str]]:
    """Package -> names, as the table of docs/plugins.md has them."""
    rows = [line.split("|") for line in text.split("## What may be imported")[1].splitlines() if line.startswith("| `")]
    return {package.strip(" `"): set(re.findall(r"`(\w+)`", names)) for _, package, names, _ in rows}


def test_the_names_that_methods_build_on_are_locked() -> None:
    locked = {
        package: set(names.split())
        for package, names in re.findall(r"^([\w.]+): ((?:.|\n )+)$", FOR_METHODS, flags=re.MULTILINE)
    }
    named = for_methods((ROOT / "docs" / "plugins.md").read_text(encoding="utf-8"))
    assert named.pop("paceline") == set()
    assert named == locked
    for package, names in locked.items():
        assert names <= set(import_module(package).__all__), package


def published() -> set[str]:
    """paceline.tree.TokenTree and all others that the stubs of packages name."""
    stubs = [(".".join(("paceline", *stub.parent.relative_to(SRC).parts)), stub) for stub in SRC.rglob("__init__.pyi")]
    return {
        f"{package}.{alias.asname}"
        for package, stub in stubs
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def imported(source: str) -> set[str]:
    """Names that a module takes from packages: by import, as an attribute of an imported package, as "package:name"."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {
        f"{node.module}.{alias.name}": alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    packages = {called: name for name, called in names.items()}
    reads = [
        (node.value.id, node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    named = {text.replace(":", ".") for text in texts if re.fullmatch(r"paceline[\w.]*:\w+", text)}
    return named | names.keys() | {f"{packages.get(value)}.{name}" for value, name in reads}


def test_what_a_package_publishes_has_a_user_beside_the_tests() -> None:
    """Tests of inner parts import the inner module, so that one sees what they are tests of."""
    folders = [SRC, *(ROOT / name for name in ("lab", "benchmarks", "recipes", "docs"))]
    sources = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    for page in (ROOT / "docs").rglob("*.md"):
        sources += re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    sources += [path.read_text() for path in SRC.rglob("__init__.pyi")]
    used = set().union(*map(imported, sources))
    table = for_methods((ROOT / "docs" / "plugins.md").read_text(encoding="utf-8"))
    used |= {f"{package}.{name}" for package, names in table.items() for name in names}
    assert not published() - used - FOR_USERS


def test_that_rule_sees_who_uses_what() -> None:
    source = "from paceline.tree import merge as m\nfrom paceline import checkpoints\ncheckpoints.read, m.speed"
    assert {"paceline.tree.merge", "paceline.checkpoints.read"} <= imported(source)
    assert "paceline.tree.select" not in imported(source)
    assert "paceline.checkpoints.FAMILIES" not in published()
    assert "paceline.checkpoints.Tokenizer" in published()
