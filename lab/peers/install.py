"""Making and removing the peers' environments."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab.peers import catalogue
from lab.peers.process import PeerError

MARK = "paceline-peer.json"  # written last: an environment without it is unfinished


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """State of one peer; `packages` are the requirements that were installed, none where it is not ready."""

    name: str
    folder: Path
    ready: bool
    packages: tuple[str, ...]


def has_cuda() -> bool:
    """Whether an NVIDIA driver answers on this machine."""
    found = shutil.which("nvidia-smi")
    return (
        found is not None
        and subprocess.run([found, "-L"], capture_output=True, check=False, timeout=30).returncode == 0
    )


def wanted_peers(name: str) -> list[str]:
    """The peers that a name or "all" stands for; "all" leaves out endpoints and, without CUDA, what needs it."""
    if name != "all":
        if not catalogue.peer_entry(name).driver:
            raise PeerError(f"peer {name} is an endpoint by URL; there is nothing to install")
        return [name]
    return [key for key, entry in catalogue.PEERS.items() if entry.driver and (has_cuda() or not entry.needs_cuda)]


def peer_state(name: str) -> Installed:
    """Whether a peer's environment is complete and what it holds."""
    folder = catalogue.folder(name)
    mark = folder / MARK
    try:
        packages = tuple(json.loads(mark.read_text(encoding="utf-8"))["packages"])
    except (OSError, ValueError, KeyError):
        packages = ()
    return Installed(
        name=name, folder=folder, ready=bool(packages) and catalogue.python_of(name).exists(), packages=packages
    )


def install_peer(name: str, *, python: str | None = None, say: Callable[[str], None] = lambda _line: None) -> Path:
    """Make the peer's environment, or bring it to the table's versions; returns its folder.

    Args:
        name: a peer with a driver.
        python: interpreter the environment is built on; None is this one.
        say: gets every line of the installer.
    Raises:
        PeerError: the interpreter is missing or the installer fails; the last lines are in the message.
    """
    folder, packages = catalogue.folder(name), catalogue.peer_entry(name).packages
    (folder / MARK).unlink(missing_ok=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    run_installer([python or sys.executable, "-m", "venv", str(folder)], f"no environment for {name}", say)
    run_installer(
        [str(catalogue.python_of(name)), "-m", "pip", "install", *packages], f"peer {name} could not be installed", say
    )
    (folder / MARK).write_text(json.dumps({"packages": packages}), encoding="utf-8")
    return folder


def remove_peer(name: str) -> bool:
    """Delete the peer's environment; returns whether there was one."""
    folder = catalogue.folder(name)
    if not folder.exists():
        return False
    shutil.rmtree(folder)
    return True


def remove_converted() -> bool:
    """Delete all converted weights; returns whether there were any."""
    folder = catalogue.peers_home() / "converted"
    if not folder.exists():
        return False
    shutil.rmtree(folder)
    return True


def run_installer(command: list[str], what: str, say: Callable[[str], None]) -> None:
    last: deque[str] = deque(maxlen=3)
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
        )
    except OSError as error:
        raise PeerError(
            f"{what}: {command[0]}: {error.strerror or error}; choose another interpreter with --python"
        ) from error
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip():
                last.append(line.strip())
                say(line.strip())
        code = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if code:
        raise PeerError(f"{what} (exit code {code}): {' '.join(last)[-400:]}")
