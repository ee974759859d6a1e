"""Code blocks of Markdown pages: found, taken apart, and checked against the code without being run."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import shlex
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import dropwhile, groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from command import get_command
from packaging.requirements import Requirement

from paceline import SamplingParams, registry
from paceline.cli.app import app
from paceline.config import SpeculativeConfig
from paceline.diffusion import parse_config
from paceline.search import SearchConfig

ROOT = Path(__file__).parent.parent
FENCED = re.compile(
    r"(?:<!-- not run: (?P<why>[^>]+) -->\n+)?^(?P<indent> *)```(?P<language>\w+)\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
INDENTED = re.compile(r"(?<=\n\n)((?: {4}.*\n)+)")
ELSEWHERE = {
    "accelerate",
    "arecord",
    "bash",
    "cd",
    "curl",
    "docker",
    "echo",
    "ffmpeg",
    "git",
    "guidellm",
    "lm_eval",
    "mkdocs",
    "mypy",
}
ELSEWHERE |= {"install", "openssl", "pre-commit", "pytest", "ruff", "torchrun", "umask", "vllm", "."}
"""Commands of other tools; where they start a module of ours (`-m paceline`), its words are checked."""


@dataclass(frozen=True)
class Block:
    """A block of code: its page, the line that it begins in, its language, and why it is not run; "" where it is."""

    page: str
    line: int
    language: str
    code: str
    why: str = ""


def blocks_of(page: str, text: str) -> list[Block]:
    """All blocks in the order of the page; indented ones are shell commands."""
    found = []
    for match in FENCED.finditer(text):
        code = re.sub(rf"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
        found.append(Block(page, _line(text, match.start("code")), match["language"], code, match["why"] or ""))
    outside = FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in INDENTED.finditer(outside):
        if not re.match(r" +[-*\d]", match[1]):
            code = re.sub(r"^ {4}", "", match[1], flags=re.MULTILINE)
            found.append(Block(page, _line(outside, match.start()), "bash", code))
    return sorted(found, key=lambda block: block.line)


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


# The shell


def commands(code: str) -> list[list[str]]:
    """The words of each command, without the variables that are set for it and without remarks."""
    code = re.sub(r"(?m)(^|\s{2,})#.*$", "", code.replace("\\\n", " "))
    lexer = shlex.shlex(code, posix=True, punctuation_chars="|&;\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    parts = groupby(lexer, key=lambda word: set(word) <= set("|&;\n"))
    found = [list(words) for between, words in parts if not between]
    return [shown for words in found if (shown := _without_variables(words))]


def _without_variables(words: list[str]) -> list[str]:
    return list(dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words))


def check_command(words: list[str]) -> None:
    """Fail where a command is not one of ours, or has a flag or a value that it does not take."""
    name, rest = words[0], words[1:]
    if "-m" in rest[:-1] and rest[rest.index("-m") + 1] in ("paceline", "lab"):
        where = rest.index("-m") + 1
        name, rest = rest[where], rest[where + 1 :]
    name = name.rpartition("/bin/")[2]  # of an environment
    if name in ("paceline", "lab"):
        check_parameters(parsed(rest, app if name == "paceline" else _lab()))
    elif name == "pip" and rest[0] in ("install", "wheel"):
        check_extras(rest[1:])
    elif name in ("python", "python3"):
        assert rest[0] in ("-m", "-c") or (ROOT / rest[0]).is_file(), f"no script {rest[0]}"
    else:
        assert name in ELSEWHERE, f"no command {name}"


def _lab() -> typer.Typer:
    from lab.commands.app import app as found

    return found


class WrongCommandError(Exception):
    """A command line that its parser rejects, in the parser's words."""


def parsed(words: list[str], commands: typer.Typer = app) -> dict[str, Any]:
    """What the command line's own parser makes of a command's words, without running it: parameters by name.

    Raises:
        WrongCommandError: an unknown command or flag, or a value that is missing or not of its kind.
    """
    command: Any = get_command(commands)
    if "--config" in words:  # a file that the reader has
        at = words.index("--config")
        words = [*words[:at], *words[at + 2 :]]
    try:
        context = command.make_context("paceline", list(words) or ["--help"])
        found = dict(context.params)
        while hasattr(command, "resolve_command"):
            _, left, _ = command.make_parser(context).parse_args(args=list(words))
            if not left:
                break  # a group that does something without a command in it
            name, command, words = command.resolve_command(context, left)
            context = command.make_context(name, list(words), parent=context)
            found |= context.params
    except typer.Exit:  # it was asked for its help or version
        return {}
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's have it, whose classes are not public
            raise
        raise WrongCommandError(error.format_message()) from None
    return found


def check_parameters(found: Mapping[str, Any]) -> None:
    """Fail where a value that is JSON or a name of a method would be rejected; what the shell fills in is left out."""
    for name, check in CHECKS.items():
        values = found.get(name)
        for value in values if isinstance(values, list | tuple) else [values]:
            if isinstance(value, str) and not value.startswith("$("):
                check(value)


def _check_speculative(given: str) -> None:
    config = SpeculativeConfig.parse(given)
    for one in config.method if config is not None and isinstance(config.method, tuple) else [config]:
        if one is not None and ":" not in one.method and one.method != "auto":
            known = inspect.signature(registry.load("drafters", one.method)).parameters
            growing = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
            controlled = set(inspect.signature(registry.load("controllers", one.controller or "auto")).parameters)
            assert growing or set(one.options) <= set(known) | controlled, f"options of {given}"


def _check_search(given: str) -> None:
    SearchConfig.parse(given)


def _check_steering(given: str) -> None:
    config = json.loads(given) if given.startswith("{") else {"method": given}
    SamplingParams(steering=config)
    registry.load("steerings", config["method"])


def _check_json(given: str) -> None:
    json.loads(given)


CHECKS: dict[str, Callable[[str], object]] = {
    "speculative_config": _check_speculative,
    "search": _check_search,
    "steering": _check_steering,
    "diffusion_config": parse_config,
    "canvas": _check_json,
    "think": _check_json,
}
"""Parameter -> what its text has to pass."""


@cache
def _extras() -> frozenset[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return frozenset(project["optional-dependencies"])


def check_extras(words: list[str]) -> None:
    """Fail where `pip` is told an extra that there is not."""
    for extras in re.findall(r"(?:paceline|\.|\))\[([\w,-]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= _extras(), f"no extra {extras}"
    for word in words:
        if re.match(r"[a-z]", word) and "/" not in word:
            Requirement(word)


# Python that is not run


def check_python(code: str, names: dict[str, Any]) -> None:
    """Fail where code does not parse, imports what there is not, or calls what is known with keywords that it lacks.

    Args:
        names: what the page has defined so far; the imports of this block are added.
    """
    tree = ast.parse(code)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), "<imports>", "exec"), names)
    made = dict(names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
            made[node.targets[0].id] = _result(_resolved(node.value.func, made))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            _check_keywords(_resolved(node.func, made), node)


UNKNOWN = object()


def _resolved(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """What an expression stands for: an object, for instances their class, UNKNOWN where that takes running."""
    if isinstance(node, ast.Name):
        return names.get(node.id, UNKNOWN)
    if isinstance(node, ast.Attribute):
        base = _resolved(node.value, names)
        if base is UNKNOWN or (not isinstance(base, ModuleType) and not hasattr(base, node.attr)):
            known = base is UNKNOWN or not inspect.isclass(base) or node.attr in typing.get_type_hints(base)
            assert known, f"{base} has no {node.attr}"
            return UNKNOWN
        return getattr(base, node.attr)
    return UNKNOWN


def _result(called: Any) -> Any:
    return called if inspect.isclass(called) else UNKNOWN


def _check_keywords(called: Any, node: ast.Call) -> None:
    if called is UNKNOWN or not callable(called):
        return
    known = inspect.signature(called).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
        wrong = [word.arg for word in node.keywords if word.arg is not None and word.arg not in known]
        assert not wrong, f"{ast.unparse(node.func)} takes no {wrong}"


def pages() -> Iterator[tuple[str, str]]:
    """Path of every page, and its Markdown, the modules of `docs/` that it shows included."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        yield str(path.relative_to(ROOT)), re.sub(r"<!-- made: example (\w+) -->", lambda m: made.example(m[1]), text)
