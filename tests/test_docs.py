"""Documents that are made from the code are up to date, and the README's commands are what CI runs."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import typer

from paceline import registry
from paceline.cli.app import app

ROOT = Path(__file__).parent.parent


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MADE = load(ROOT / "docs" / "generate.py")


@pytest.mark.parametrize("name", ["cli.md", "exactness.md", "methods.md"])
def test_a_page_is_current(name: str) -> None:
    assert sorted(MADE.PAGES) == ["cli.md", "exactness.md", "methods.md"]
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == MADE.PAGES[name](), "run: python docs/generate.py"


def test_a_page_changes_with_what_it_is_made_from(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: make() for name, make in MADE.PAGES.items()}
    monkeypatch.setitem(registry.DRAFTERS, "another", registry.DRAFTERS["ngram"])
    verbs = typer.main.get_command(app)
    verbs.commands["bench"].commands["another"] = verbs.commands["demo"]  # type: ignore[attr-defined]  # a group has them
    monkeypatch.setattr(typer.main, "get_command", lambda app: verbs)
    assert not [name for name, make in MADE.PAGES.items() if make() == before[name]]


def test_verbs_of_verbs_are_listed_with_their_flags() -> None:
    page = MADE.cli()
    sections = dict(re.findall(r"^## (paceline [a-z ]+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert {"paceline bench", "paceline bench compare", "paceline bench peers run", "paceline datastore build"} <= set(
        sections
    )
    assert "`--output`" in sections["paceline datastore build"]


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [t for t in re.findall(r"\]\(([^)#]+)\)", text) if not t.startswith("http")]
    assert targets or page != "README.md"
    assert not [t for t in targets if not ((ROOT / page).parent / t).exists()]


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_every_page_is_linked_from_the_readme_or_the_reference(page: str) -> None:
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/reference.md")]
    assert f"](docs/{page})" in texts[0] or f"]({page})" in texts[1]


def test_ci_runs_the_test_command_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^ *(pip install .*pytest.*)$", text, re.MULTILINE)
    assert len(commands) == 1
    assert "README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
