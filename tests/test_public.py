"""The public names are the documented ones, and importing the package is cheap."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import paceline
from paceline import checkpoints

ROOT = Path(__file__).parent.parent


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
