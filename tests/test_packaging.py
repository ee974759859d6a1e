"""What a package index shows of the package, and files about the project that repeat its facts."""

from __future__ import annotations

import re
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import yaml

from paceline import __version__

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def setup_script() -> ModuleType:
    spec = spec_from_file_location("setup_script", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def relative(text: str) -> list[str]:
    return re.findall(r"\]\((?!https?://|#)[^)]+\)", text)


def test_the_long_description_leads_to_no_file_that_an_index_lacks() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert relative(readme)
    found = setup_script().long_description
    for repository in (None, "https://host.example/owner/name"):
        text = found(readme, repository)
        assert not relative(text)
        assert text.count("\n## ") == readme.count("\n## ")


def test_links_name_their_file_or_lead_to_the_repository() -> None:
    found = setup_script().long_description
    page = "![Speed](a/b.svg)\n\nSee [how](c.md#part) and [the paper](https://paper.example/x).\n"
    assert found(page, None) == "See how (`c.md#part`) and [the paper](https://paper.example/x).\n"
    assert found(page, "https://host.example/o/n/") == (
        "![Speed](https://host.example/o/n/raw/HEAD/a/b.svg)\n\n"
        "See [how](https://host.example/o/n/blob/HEAD/c.md#part) and [the paper](https://paper.example/x).\n"
    )


def test_the_citation_repeats_the_facts_of_the_package() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["version"], cited["license"]) == (__version__, PROJECT["license"])
    assert [one["name"] for one in cited["authors"]] == [one["name"] for one in PROJECT["authors"]]
    assert cited.get("repository-code") == PROJECT.get("urls", {}).get("Repository")


def test_ci_tests_the_versions_of_python_that_are_declared() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    declared = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert declared
    assert set(declared) <= set(jobs["tests"]["strategy"]["matrix"]["python"])
