"""Ctrl-C and pipes that close, most of them in processes of their own, since only those get signals.

Decoding is slowed down as soon as there is text, so that more of it is still to come when the signal does: a thousand
tokens take sixty steps at least.

A process that was started with Ctrl-C ignored (nohup, a shell's background job) hands that on to its children, and
programs respect it. So these tests say what they start from: a handler of ours, which a new process begins without.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import Command
from forked import Forked

import paceline
from paceline.cli.interrupts import AtOnce
from paceline.engine import Engine, StreamChunk


@pytest.fixture(autouse=True)
def ctrl_c_is_not_ignored() -> Iterator[None]:
    """A signal that is handled here is reset to its default in a new process; one that is ignored here stays
    ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


SLOW = """
import time
from paceline.cli.main import main
from paceline.engine.loop import Engine
import sys
step, texts = Engine.step, []
def slow(self):
    if any(texts):  # the last step's is printed
        open(sys.argv[1], "w").close()
        time.sleep(0.2)
    chunks = step(self)
    texts.extend(chunk.output.outputs[0].text for chunk in chunks)
    return chunks
Engine.step = slow
sys.exit(main(sys.argv[2:]))
"""
ARGUMENTS = (
    "generate",
    "Once upon a time",
    "--max-tokens",
    "1000",
    "--ignore-eos",
    "--threads",
    "1",
    "--dtype",
    "float32",
)


def started(tmp_path: Path, **streams: Any) -> Forked:
    return Forked([tmp_path / "started", *ARGUMENTS], program=SLOW, **streams)


def wait_for_text(process: Forked, tmp_path: Path) -> None:
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)


def test_ctrl_c_in_a_pipe_keeps_the_text_so_far(tmp_path: Path) -> None:
    process = started(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_text(process, tmp_path)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"paceline: interrupted\n")
    assert out.decode().strip()
    assert out.endswith(b"\n")


def in_a_step(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Let something happen as soon as there is text, in this process."""
    step, texts = Engine.step, list[str]()

    def watched(engine: Engine) -> list[StreamChunk]:
        if any(texts):  # the last step's is printed
            act()
        chunks = step(engine)
        texts.extend(chunk.output.outputs[0].text for chunk in chunks)
        return chunks

    monkeypatch.setattr(Engine, "step", watched)


def test_ctrl_c_keeps_the_text_so_far_as_json(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_step(monkeypatch, lambda: signal.raise_signal(signal.SIGINT))
    found = run(*ARGUMENTS, "--json")
    assert (found.code, found.line) == (130, "interrupted")
    made = json.loads(found.out)
    assert made["finish_reason"] == "abort"
    assert 0 < len(made["token_ids"]) < 1000
    assert made["text"]


def test_ctrl_c_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = started(tmp_path, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    wait_for_text(process, tmp_path)
    process.send_signal(signal.SIGINT)
    seen = b""
    with contextlib.suppress(OSError):  # on Linux the end of a terminal is an error
        while data := os.read(ours, 4096):
            seen += data
    os.close(ours)
    assert process.wait(60) == 130
    plain = seen.replace(b"\x1b[0m", b"")  # the end of a colour may come behind
    assert plain.strip().endswith(b"\r\npaceline: interrupted")
    assert b"Traceback" not in seen


def test_a_pipe_whose_reader_leaves(tmp_path: Path) -> None:
    process = started(tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 141


def test_a_table_whose_reader_leaves() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    process = subprocess.run(
        [sys.executable, "-m", "paceline", "methods"], stdout=theirs, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(theirs)
    assert (process.returncode, process.stderr) == (141, b"")


BARE = os.environ | {"PYTHONPATH": str(Path(paceline.__file__).parent.parent)}
ARRIVED = """
import os, runpy, sys
class Marker:
    def find_spec(self, name, path=None, target=None):
        if name == "paceline.cli.app":
            os.write(1, b"!")
sys.meta_path.insert(0, Marker())
sys.argv = ["paceline", *sys.argv[1:]]
if sys.argv.pop(1) == "module":
    runpy.run_module("paceline", run_name="__main__", alter_sys=True)
from paceline.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize("entry", ["module", "script"])
@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.6])
def test_ctrl_c_while_it_starts(entry: str, delay: float) -> None:
    """The delay counts from the first heavy import; what is before it is Python's own start and a few small files."""
    process = subprocess.Popen(
        [sys.executable, "-c", ARRIVED, entry, *ARGUMENTS], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.read(1) == b"!"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(delay)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"paceline: interrupted\n")


def test_little_is_imported_before_ctrl_c_is_caught() -> None:
    program = (
        "import sys; before = set(sys.modules); import paceline.cli.main; print(*sorted(set(sys.modules) - before))"
    )
    found = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True, env=BARE)
    assert len(found.stdout.split()) < 35, found.stdout
    assert not {"typing", "typer", "inspect", "paceline.config"} & set(found.stdout.split())


@pytest.mark.parametrize("name", ["typer", "torch", "paceline.cli.app", "paceline.llm"])
def test_ctrl_c_within_an_import_that_hides_it(name: str) -> None:
    """An import that turns a KeyboardInterrupt into another error ends in the same line."""
    hook = f"""
import os, signal, sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(100000): pass
            except KeyboardInterrupt:
                raise ImportError("hidden") from None
sys.meta_path.insert(0, Hook())
from paceline.cli.main import main
sys.exit(main())
"""
    found = subprocess.run([sys.executable, "-c", hook, *ARGUMENTS], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "paceline: interrupted\n")


HIDING = """
import os, signal, sys
import {module}
before = {module}.{name}
def hiding(*arguments, **more):
    before(*arguments, **more)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100000): pass
    except KeyboardInterrupt:
        raise RuntimeError("hidden") from None
{module}.{name} = hiding
from paceline.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("typer.main", "get_command"),
        ("paceline.config", "SamplingParams.from_dict"),
    ],
    ids=["reading the command line", "checking it"],
)
def test_ctrl_c_that_arrives_as_another_error(module: str, name: str) -> None:
    """Code in C that is interrupted may raise SystemError or RuntimeError."""
    program = HIDING.format(module=module, name=name)
    found = subprocess.run([sys.executable, "-c", program, *ARGUMENTS], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout.strip(), found.stderr) == (130, "", "paceline: interrupted\n")


def test_ctrl_c_that_arrives_as_another_error_while_it_decodes(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RuntimeError("hidden") from None

    in_a_step(monkeypatch, hidden)
    found = run(*ARGUMENTS)
    assert (found.code, found.line) == (130, "interrupted")
    assert found.out.strip()


def test_the_same_error_without_ctrl_c_is_a_fault_of_ours() -> None:
    program = HIDING.format(module="typer.main", name="get_command").replace("os.kill", "0 and os.kill")
    program = program.replace("for _ in range(100000): pass", "raise KeyboardInterrupt")
    found = subprocess.run([sys.executable, "-c", program, *ARGUMENTS], capture_output=True, text=True, check=False)
    assert found.returncode == 70
    assert "RuntimeError: hidden" in found.stderr


def test_a_program_that_handles_ctrl_c_itself_keeps_its_handler() -> None:
    mine = signal.signal(signal.SIGINT, lambda *arguments: None)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with AtOnce():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, mine)
    with AtOnce():
        assert signal.getsignal(signal.SIGINT) is not mine
    assert signal.getsignal(signal.SIGINT) is mine


def test_ctrl_c_that_was_ignored_from_the_start_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with AtOnce():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
