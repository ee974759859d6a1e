"""The site builds without warnings and fetches nothing; its pages follow the code; links and examples work."""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer

from paceline import LLM, SamplingParams, registry
from paceline.cli.app import app
from paceline.cli.main import main
from paceline.config import KeyLimits, options_of
from paceline.diffusion import METHODS

ROOT = Path(__file__).parent.parent
WITHOUT_SITE = "the site is not built: mkdocs-material is not installed; pip install '.[test]'"
FETCHED = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"']?(?:https?:)?//", re.IGNORECASE)
needs_mkdocs = pytest.mark.skipif(importlib.util.find_spec("material") is None, reason=WITHOUT_SITE)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MADE = load(ROOT / "docs" / "generate.py")


def build(docs: Path, site: Path) -> list[str]:
    """Build the pages of a folder; the warnings."""
    from mkdocs.commands.build import build as mkdocs_build
    from mkdocs.config import load_config

    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mkdocs")
    logger.addHandler(handler)
    try:
        mkdocs_build(load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(docs), site_dir=str(site)))
    finally:
        logger.removeHandler(handler)
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """The site with two broken links more, and the warnings."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    with (folder / "docs" / "strict.md").open("a", encoding="utf-8") as page:
        page.write("\n[nowhere](nowhere.md) [no such part](exactness.md#nowhere)\n")
    yield folder / "site", build(folder / "docs", folder / "site")
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def site(built: tuple[Path, list[str]]) -> Path:
    return built[0]


@needs_mkdocs
def test_every_method_has_a_page_and_its_options(site: Path) -> None:
    for family, table in registry.FAMILIES.items():
        for name in table:
            page = (site / MADE.where(family, name)).with_suffix(".html").read_text(encoding="utf-8")
            assert all(f"<code>{option}</code>" in page for option in MADE.options(registry.load(family, name)))
    groups = "".join(path.read_text(encoding="utf-8") for path in (site / "methods" / "diffusion").glob("*.html"))
    assert not [name for name in METHODS if f">{name}<" not in groups]


@needs_mkdocs
def test_the_site_fetches_nothing(site: Path) -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert len(pages) > len(registry.DRAFTERS)
    assert not [name for name, text in pages.items() if FETCHED.search(text)]
    assert FETCHED.search('<script src="https://example.org/x.js">')


@needs_mkdocs
def test_broken_links_are_warnings_and_there_are_no_others(built: tuple[Path, list[str]]) -> None:
    _, found = built
    assert len(found) == 2
    assert all("nowhere" in warning for warning in found)


def test_pages_are_made_from_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"index": MADE.methods()["methods/index.md"], "cli": MADE.cli(), "exactness": MADE.exactness()}
    monkeypatch.setitem(registry.DRAFTERS, "another", registry.DRAFTERS["ngram"])
    verbs = typer.main.get_command(app)
    verbs.commands["bench"].commands["another"] = verbs.commands["demo"]  # type: ignore[attr-defined]  # a group has them
    monkeypatch.setattr(typer.main, "get_command", lambda app: verbs)
    pages = MADE.methods()
    after = {"index": pages["methods/index.md"], "cli": MADE.cli(), "exactness": MADE.exactness()}
    assert "methods/another.md" in pages
    assert all("another" in after[name] and after[name] != before[name] for name in before)


def test_every_option_is_described() -> None:
    for family, table in registry.FAMILIES.items():
        for name in table:
            found = registry.load(family, name)
            args = MADE.sections(inspect.getdoc(found) or "").get("Args", "")
            told = {one for names, _ in MADE.described(args, MADE.options(found) or ["-"]) for one in names}
            assert told >= set(MADE.options(found)), (family, name)


def terms(page: str) -> Counter[str]:
    """Names that a definition list defines, and how often."""
    heads = re.findall(r"^(`.*)\n:   ", page, re.MULTILINE)
    return Counter(name for head in heads for name in re.findall(r"`(\w+)`", head.partition(" (")[0]))


def test_every_argument_of_llm_is_described_once() -> None:
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8").partition("## `LLM`")[2].partition("\n### ")[0]
    defined = terms(page + "\n" + MADE.fields("LLM"))
    assert {name: defined[name] for name in inspect.signature(LLM).parameters if defined[name] != 1} == {}
    assert terms(MADE.fields("LLM"))["dtype"] == 0  # the page says more than its field
    assert terms("`a`, `b` (default `c`)\n:   What.\n\n`d` and\n") == {"a": 1, "b": 1}


def test_limits_of_keys_are_in_the_text_of_the_page() -> None:
    rows = [f"| `{name}` | {option.doc} |" for name, option in options_of(KeyLimits).items()]
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8").partition("### Limits of a key")[2]
    assert rows == re.findall(r"^\| `[a-z_]+` \| .* \|$", page.partition("\n### ")[0], re.MULTILINE)[1:]


def test_the_table_of_request_fields_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert MADE.with_request_fields(page) == page, "run python docs/generate.py"
    monkeypatch.setattr("paceline.serving.fields.TABLE", ())
    assert MADE.with_request_fields(page) != page, "the control"


def test_examples_of_methods_run() -> None:
    plain, count = LLM(speculative_config=None), 0
    for page in MADE.methods().values():
        for config in re.findall(r"```bash\npaceline generate (?!.*org/)[^`]*-s '(.*)'\n```", page):
            if "datastore" not in config:
                live = plain.with_speculative_config(config)
                assert live.generate("def", SamplingParams(max_tokens=4))[0].outputs[0].token_ids
                count += 1
    assert count > len(registry.CONTROLLERS) + len(registry.VERIFIERS)


def test_examples_of_diffusion_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "diffusion.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [shlex.split(line) for line in re.findall(r"^paceline (generate .*bundled/.*)$", page, re.MULTILINE)]
    assert [flag for words in commands for flag in words if flag in ("--canvas", "--think")] == ["--canvas", "--think"]
    for words in commands:
        assert main(words) == 0
        assert "Jack" in capsys.readouterr().out


def test_advice_is_of_methods_that_exist() -> None:
    told = MADE.advice()
    assert not [
        (family, one) for family, table in registry.FAMILIES.items() for one in told[family] if one not in table
    ]
    assert not [name for group in told["diffusion"] for name in group["methods"] if name not in METHODS]


def test_verbs_of_verbs_are_listed_with_their_flags() -> None:
    page = MADE.cli()
    sections = dict(re.findall(r"^## (paceline [a-z ]+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert {"paceline bench", "paceline bench compare", "paceline datastore build"} <= set(sections)
    assert "`--output`" in sections["paceline datastore build"]


def test_the_drafter_of_the_example_is_taken_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(ROOT / "docs" / "my_module.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_module", raising=False)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one and Path(one) != ROOT / "docs"])
    config = json.dumps({"method": "my_module:EchoDrafter", "num_speculative_tokens": 2})
    words = ["generate", "a b a b a b", "--max-tokens", "8", "--json", "-s", config]
    assert main(words) == 0
    sys.modules.pop("my_module")
    assert json.loads(capsys.readouterr().out)["metrics"]["drafters"]["echo"]["num_draft_tokens"] > 0


def test_the_trainer_of_the_example_makes_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    data, out = tmp_path / "texts.jsonl", tmp_path / "head"
    data.write_text(
        "".join(json.dumps({"text": f"There are {i} of these, and {i + 1} of those."}) + "\n" for i in range(6))
    )
    command = ["train", "my_trainer:MyTrainer", "--data", str(data), "--texts", "-o", str(out), "--decay"]
    quick = ["--steps", "2", "--row-tokens", "32", "--batch-rows", "2", "--depths", "2", "--speed-prompts", "1"]
    assert main([*command, "1.5", *quick]) == 2
    assert "decay must be a number in 0..1, got 1.5" in capsys.readouterr().err
    assert main([*command, "0.5", *quick]) == 0
    assert json.loads((out / "report.json").read_text())["settings"]["decay"] == 0.5
    assert '{"method": "medusa", "model": ' in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [t for t in re.findall(r"\]\(([^)#]+)\)", text) if not t.startswith("http")]
    assert targets
    assert not [t for t in targets if not (ROOT / t).exists()]


def test_ci_runs_the_test_command_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^ *(pip install .*pytest.*)$", text, re.MULTILINE)
    assert len(commands) == 1
    assert "README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
