"""Documents that are made from the code are up to date, and the README's commands are what CI runs."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_methods_is_current() -> None:
    made = load(ROOT / "docs" / "generate.py").methods()
    assert (ROOT / "docs" / "methods.md").read_text(encoding="utf-8") == made, "run: python docs/generate.py"


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = [t for t in re.findall(r"\]\(([^)#]+)\)", text) if not t.startswith("http")]
    assert targets
    assert not [t for t in targets if not (ROOT / t).exists()]


def test_ci_runs_the_test_command_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^ *(pip install .*pytest.*)$", text, re.MULTILINE)
    assert len(commands) == 1
    assert "README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
