"""The command itself: version, help, exit codes, whatever goes wrong on one line."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from command import Command, Terminal

from paceline import PacelineError, __version__, registry
from paceline.cli import app as entry
from paceline.cli import methods


def test_version(run: Command) -> None:
    assert run("--version").out == f"paceline {__version__}\n"


@pytest.mark.parametrize("arguments", [(), ("--help",), ("generate", "--help"), ("verify", "--help")])
def test_help(run: Command, arguments: tuple[str, ...]) -> None:
    found = run(*arguments)
    assert found.code == 0
    assert "paceline" in found.out
    assert not found.err


def test_help_names_every_flag_in_full_at_80_columns(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    help_text = run("generate", "--help").out
    command = typer.main.get_command(entry.app).commands["generate"]
    names = [
        name
        for parameter in command.params
        if not getattr(parameter, "hidden", False)
        for name in getattr(parameter, "opts", [])
        if name.startswith("--")
    ]
    assert len(names) > 30
    assert not [name for name in names if name not in help_text]
    assert "…" not in help_text


def test_help_has_no_styles_where_no_colour_is_wanted(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for plain in ("", "1"):
        monkeypatch.setenv("NO_COLOR", plain)
        monkeypatch.setattr(sys, "stdout", screen := Terminal())
        run("chat", "--help")
        assert "tokens" in screen.getvalue()
        assert ("\x1b[" in screen.getvalue()) is not bool(plain)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("run", "x"), "No such command 'run'; use generate or chat; see"),
        (
            ("my model.gguf",),
            "No such command 'my model.gguf'; say first what to do with it, as in `paceline chat -m 'my model.gguf'` "
            "or `paceline generate -m 'my model.gguf' PROMPT`; see `paceline --help`",
        ),
        (("methods", "ngram"), "extra argument(s) (ngram); this command takes flags only; see `paceline methods"),
        (("generate", "x", "y"), "extra argument(s) (y); put a text of several words into quotes; see"),
    ],
)
def test_what_other_tools_have_says_what_to_do_here(run: Command, arguments: tuple[str, ...], line: str) -> None:
    found = run(*arguments)
    assert (found.code, found.out) == (2, "")
    assert line in found.line


def test_help_and_version_import_neither_torch_nor_transformers() -> None:
    program = """if True:
        import sys
        from paceline.cli.main import main
        main(["generate", "--help"])
        main(["--version"])
        main(["methods"])
        heavy = {"torch", "transformers", "tokenizers", "numpy", "huggingface_hub"} & set(sys.modules)
        sys.exit(f"imported: {heavy}" if heavy else 0)
    """
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_python_m_paceline() -> None:
    found = subprocess.run([sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, f"paceline {__version__}\n")
    found = subprocess.run([sys.executable, "-m", "paceline", "nonsense"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == "paceline: No such command 'nonsense'; see `paceline --help`\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (PacelineError("two\nlines"), 2, "two lines"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (typer.Abort(), 130, "interrupted"),
        (typer.Exit(130), 130, "interrupted"),
        (typer.Exit(1), 1, None),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, None),
        (MemoryError(), 2, "not enough memory; use a smaller model, dtype, --max-model-len or prompt"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"),
            2,
            "not enough memory; use a smaller model",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "secret"), 2, "Permission denied: secret"),
        (KeyError("x"), 70, "internal error, KeyError: 'x' at "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_ends_a_verb_is_one_line(
    run: Command, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str | None
) -> None:
    def fail(*arguments: Any) -> None:
        print("text so far")
        raise error

    monkeypatch.setattr(registry, "table", fail)
    found = run("methods", "--json")
    assert (found.code, found.out) == (code, "text so far\n")
    if line is None:
        assert not found.err
    else:
        assert found.line.startswith(line)


def test_a_bug_shows_its_traceback_only_when_asked(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise KeyError("x")

    monkeypatch.setattr(registry, "table", fail)
    assert "Traceback" not in run("methods", "--json").err
    assert "Traceback" in run("--log-level", "debug", "methods", "--json").err


@pytest.mark.parametrize("arguments", [("--log-level", "info", "methods"), ("methods", "--log-level", "info")])
def test_log_level_before_and_after_the_verb(
    run: Command, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    def speak(*arguments: Any) -> list[str]:
        logging.getLogger("paceline.somewhere").info("hello")
        logging.getLogger("paceline.somewhere").debug("too much")
        return []

    monkeypatch.setattr(methods, "describe", speak)
    assert "INFO paceline.somewhere: hello" in run(*arguments).err
    assert "too much" not in run(*arguments).err
    assert not run("methods").err


@pytest.mark.parametrize("arguments", [("--log-level", "loud", "methods"), ("methods", "--log-level", "loud")])
def test_an_unknown_log_level(run: Command, arguments: tuple[str, ...]) -> None:
    found = run(*arguments)
    assert (found.code, found.out) == (2, "")
    assert found.line == "--log-level must be one of debug, info, warning, error, got 'loud'"


def test_closed_and_full_streams(tmp_path: Path) -> None:
    paceline = f"{sys.executable} -m paceline methods"
    closed = subprocess.run(f"{paceline} >&-", shell=True, capture_output=True, text=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, "")
    if Path("/dev/full").exists():
        full = subprocess.run(f"{paceline} >/dev/full", shell=True, capture_output=True, text=True, check=False)
        assert (full.returncode, full.stderr) == (2, "paceline: No space left on device\n")
