"""Code of README and the docs works: Python runs, with small models in the place of large ones; the words of commands
are those that the command line takes.

Blocks that stand behind `<!-- not run: REASON -->` are checked without being run: what they import exists, and calls
have arguments of the names that they are given.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from code_blocks import ROOT, Block, WrongCommandError, blocks_of, check_command, check_python, commands, pages
from forked import FORKING
from serving.conftest import serve

from paceline import LLM, AsyncLLM, SamplingParams, registry
from paceline.config import option
from paceline.errors import ConfigError

PAGES = dict(pages())
BLOCKS = {page: blocks_of(page, text) for page, text in PAGES.items()}
OTHERS = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / ".github").rglob("*.yml"))}
OTHERS["SECURITY.md"] = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
INLINE = re.compile(r"`((?:paceline|pip|python) [^`]+)`")
PLACEHOLDER = re.compile(r"[A-Z]{4,}|module:Class")

STAND_INS = {
    "org/name": "bundled/target",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "bundled/target",
    "Qwen/Qwen3-4B": "bundled/target",
    "Qwen/Qwen3-0.6B": "bundled/draft",
}
"""Models of the pages -> those that ship with the package."""

SMALLER = {"docs/rollouts.md": {"max_tokens=131072": "max_tokens=24", "segment_tokens=16384": "segment_tokens=8"}}
"""Numbers that would take long."""

GIVEN: dict[str, dict[str, Any]] = {
    "CONTRIBUTING.md": {"option": option},
    "docs/rollouts.md": {"prompts": ["Once upon a time"], "train": len},
}
"""What a page takes for granted."""


def runnable(block: Block, url: str = "") -> str:
    """The code of a block with models that are there, fewer tokens, and the address of a server that runs."""
    code = block.code.replace("http://127.0.0.1:8000", url)
    stand_ins = STAND_INS | ({"org/name": "bundled/diffusion"} if block.page == "docs/diffusion.md" else {})
    for name, stand_in in stand_ins.items():
        code = code.replace(f'"{name}"', f'"{stand_in}"')
    for number, smaller in SMALLER.get(block.page, {}).items():
        code = code.replace(number, smaller)
    return code


def run(block: Block, names: dict[str, Any], url: str = "") -> None:
    """Run a block in what its page has defined so far; lines of its errors are those of the page."""
    if block.why:
        check_python(block.code, names)
    else:
        shifted = "\n" * (block.line - 1) + runnable(block, url)
        exec(compile(shifted, ROOT / block.page, "exec", dont_inherit=True), names)


def of_language(page: str, language: str) -> list[Block]:
    return [block for block in BLOCKS[page] if block.language == language]


@contextmanager
def server(page: str) -> Iterator[str]:
    """The address of a server with the bundled model, for the page that talks to one; "" for the others."""
    if page != "docs/serving.md":
        yield ""
        return
    for live in serve(AsyncLLM(LLM()), served_model_name=["bundled/target"]):
        yield live.url


@contextmanager
def drafter_of_contributing(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The drafter that CONTRIBUTING.md adds, in its module and under its name."""
    module_code, entry = of_language("CONTRIBUTING.md", "python")[:2]
    written = eval("{" + entry.code + "}", {"Entry": registry.Entry})
    ((_, registered),) = written.items()
    module = ModuleType(registered.target.partition(":")[0])
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(module_code.code, vars(module))
    with registry.temporary("drafters", written):
        yield module


@pytest.mark.parametrize("page", [page for page in BLOCKS if page != "CONTRIBUTING.md" and of_language(page, "python")])
def test_python_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All blocks of a page in turn, each with what those before it have defined; what remarks promise is printed."""
    for module in (ROOT / "docs").glob("my_*.py"):
        shutil.copy(module, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.drafters.learning.trainer_process.subprocess", FORKING)
    names: dict[str, Any] = {"__name__": "page", **GIVEN.get(page, {})}
    with server(page) as url:
        for block in of_language(page, "python"):
            run(block, names, url)
            printed = capsys.readouterr().out
            assert all(shown in printed for shown in re.findall(r"^print\(.*\)  # (\(.*)$", block.code, re.MULTILINE))


def test_the_drafter_of_contributing_passes_its_test_and_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, tests, field = of_language("CONTRIBUTING.md", "python")
    with drafter_of_contributing(monkeypatch):
        names: dict[str, Any] = {}
        exec(tests.code, names)
        found = [run_test for name, run_test in names.items() if name.startswith("test_")]
        assert len(found) == 2
        for run_test in found:
            run_test()
        (out,) = LLM(speculative_config="echo").generate("a b a b a b", SamplingParams(temperature=0, max_tokens=8))
        assert out.metrics.drafters["echo"].num_draft_tokens > 0
    run(field, GIVEN["CONTRIBUTING.md"] | {"__annotations__": {}})


@pytest.mark.parametrize(
    ("page", "name", "given"),
    [
        (
            "docs/plugins.md",
            "EveryOther",
            {"speculative_config": {"method": "ngram", "controller": "page:EveryOther"}},
        ),
        ("docs/search.md", "Greedy", {"search": {"method": "page:Greedy"}}),
        ("docs/steering.md", "Mixture", {"steering": {"method": "page:Mixture", "prompt": "Once upon a time"}}),
    ],
)
def test_classes_pages_decode(page: str, name: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [one for one in of_language(page, "python") if f"class {name}(" in one.code]
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(block.code, vars(module))
    params = SamplingParams(max_tokens=8, steering=given.get("steering"))
    llm = LLM(speculative_config=given.get("speculative_config"))
    (out,) = llm.generate("a b a b a b", params, search=given.get("search"))
    assert out.outputs[0].token_ids


@pytest.mark.parametrize("page", [page for page in BLOCKS if of_language(page, "bash")])
def test_commands_of_a_page_are_those_that_there_are(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")  # the modules that pages show
    with drafter_of_contributing(monkeypatch):
        found = [words for block in of_language(page, "bash") for words in commands(block.code)]
        assert found
        for words in found:
            check_command(words)


@pytest.mark.parametrize("page", [page for page, text in (PAGES | OTHERS).items() if INLINE.search(text)])
def test_commands_in_sentences_are_those_that_there_are(page: str) -> None:
    """They may leave out what a command cannot do without, and have names in capitals in the place of others."""
    for text in INLINE.findall((PAGES | OTHERS)[page]):
        for words in commands(" ".join(text.split())):
            if not PLACEHOLDER.search(" ".join(words[:3])):
                _check_incomplete(words)


def _check_incomplete(words: list[str]) -> None:
    try:
        check_command(words)
    except WrongCommandError as error:
        if not re.search("Missing|requires an argument", str(error)):
            raise


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("paceline generat 'a b'", "No such command"),
        ("paceline generate 'a b' --max-token 4", "No such option"),
        ("paceline generate 'a b' --max-tokens", "requires an argument"),
        ("paceline train eagle9 --data a.jsonl -o b", "unknown trainer"),
        ("""paceline generate a -s '{"method": "ngrams"}'""", "unknown drafter"),
        ("""paceline generate a -s '{"method": "ngram", "lookup_most": 3}'""", "options of"),
        ("""paceline generate a --search '{"method": "beam", "width": 3}'""", "width"),
        ("""paceline generate a --steering '{"method": "dolly"}'""", "dolly"),
        ("torchrun --nproc_per_node 2 -m paceline trainn eagle3", "No such command"),
        ("python -m lab benches --model a", "No such command"),
        ("python benchmarks/nothing.py", "no script"),
        ("HF_HUB_OFFLINE=1 paceline serve --prt 80 && true", "No such option"),
        ("pip install '.[tests]'", "no extra"),
        ("pacelin generate", "no command"),
    ],
)
def test_wrong_commands_are_found(line: str, told: str) -> None:
    (words, *_) = commands(line)
    with pytest.raises((WrongCommandError, ConfigError, AssertionError), match=told):
        check_command(words)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("from paceline import LLMs", "LLMs"),
        ("import paceline.nothing", "nothing"),
        ("from paceline import SamplingParams\nSamplingParams(max_token=4)", "max_token"),
        ("from paceline import LLM\nllm = LLM()\nllm.generated('a')", "generated"),
        ("from paceline import LLM\nLLM('a').", "invalid syntax"),
        ("from paceline.training import TrainConfig, train\ntrain(None, TrainConfig(way='a'), 'b')", "way"),
    ],
)
def test_wrong_code_is_found_without_running_it(code: str, told: str) -> None:
    with pytest.raises((AssertionError, ImportError, SyntaxError), match=told):
        check_python(code, {})
    check_python("from paceline import LLM\nllm = LLM('no such model')\nllm.generate('a', use_tqdm=False)", {})


def test_blocks_are_found_with_their_lines_and_marks() -> None:
    page = (
        "Text\n\n    echo a\n\n- item\n\n  ```bash\n  b \\\n    c\n  ```\n\n<!-- not run: so -->\n```python\nd()\n```\n"
    )
    found = [(block.line, block.language, block.code, block.why) for block in blocks_of("x.md", page)]
    assert found == [(3, "bash", "echo a\n", ""), (8, "bash", "b \\\n  c\n", ""), (14, "python", "d()\n", "so")]
    assert commands("A=1 B_C=2 b -c 'd\ne' # f\ng  # h | i\n# j\nk | l && m \\\n n") == [
        ["b", "-c", "d\ne", "#", "f"],
        *[["g"], ["k"], ["l"], ["m", "n"]],
    ]
