"""Environments: made with the table's versions, marked when complete, removed; failures in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lab.peers import PeerError, install, library_names, peer_entry, peers_home


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A home of the test's own, and an installer that only notes what it would run."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    seen: list[list[str]] = []

    def note(command: list[str], _what: str, _say: object) -> None:
        seen.append(command)
        if "venv" in command:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.touch()

    monkeypatch.setattr(install, "run_installer", note)
    return seen


def test_an_environment_is_made_marked_and_removed(commands: list[list[str]], tmp_path: Path) -> None:
    assert not install.peer_state("llama.cpp").ready
    folder = install.install_peer("llama.cpp", python="/opt/python")
    assert folder == tmp_path / "peers" / "llama.cpp"
    assert commands[0] == ["/opt/python", "-m", "venv", str(folder)]
    assert commands[1][3:] == ["install", *peer_entry("llama.cpp").packages]
    assert install.peer_state("llama.cpp").ready
    assert install.remove_peer("llama.cpp")
    assert not install.peer_state("llama.cpp").ready
    assert not install.remove_peer("llama.cpp")


def test_an_unfinished_environment_is_not_ready(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    install.install_peer("llama.cpp")

    def fail(*_: object) -> None:
        raise PeerError("no room")

    monkeypatch.setattr(install, "run_installer", fail)
    with pytest.raises(PeerError, match="no room"):
        install.install_peer("llama.cpp")
    assert not install.peer_state("llama.cpp").ready


def test_all_leaves_out_what_needs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "has_cuda", lambda: False)
    assert install.wanted_peers("all") == ["transformers", "llama.cpp", "openvino-genai", *library_names()]
    monkeypatch.setattr(install, "has_cuda", lambda: True)
    assert "vllm" in install.wanted_peers("all")
    assert install.wanted_peers("vllm") == ["vllm"]


def test_failures_of_the_installer_are_one_line() -> None:
    lines: list[str] = []
    code = "import sys; print('one'); print(); print('no wheel'); sys.exit(3)"
    with pytest.raises(PeerError, match=r"^peer x \(exit code 3\): one no wheel$"):
        install.run_installer([sys.executable, "-c", code], "peer x", lines.append)
    assert lines == ["one", "no wheel"]
    with pytest.raises(PeerError, match="choose another interpreter with --python"):
        install.run_installer(["/no/such/python"], "peer x", lines.append)


def test_the_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a"))
    monkeypatch.delenv("PACELINE_HOME", raising=False)
    assert peers_home() == tmp_path / "a" / "paceline" / "peers"
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "b"))
    assert peers_home() == tmp_path / "b" / "peers"
