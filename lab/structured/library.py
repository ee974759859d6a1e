"""Libraries of structured outputs, each in a process that is ended and replaced where it crashes or takes too long."""

from __future__ import annotations

import os
import sys
from base64 import b64decode
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch

import lab
import paceline
from lab.peers import DriverProcess, PeerError, library_names, peer_command
from paceline.checkpoints import token_bytes
from paceline.errors import ConfigError
from paceline.llm import LLM

Command = Sequence[str | Path]
START_SECONDS: Final = 120.0
JUDGE_SECONDS: Final = 10.0
OURS: Final[Mapping[str, bool]] = {"paceline": True, "paceline, lenient": False}
"""Our own, as named in results -> whether strict."""

QUIET: Final = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Environment of a peer's process."""

PATH: Final = os.pathsep.join(str(Path(one.__path__[0]).parent) for one in (lab, paceline))
SERVE: Final = "from lab.peers.drivers.wire import serve; serve('lab.structured.{}')"


class LibraryProcess:
    """One library, a context manager; its process is started at once, and again after each end.

    Args:
        command: starts its driver.
        request: the open message, without `op`.
        seconds: that an answer may take.
        environment: variables of its process.
    Attributes:
        version, settings: as the driver says.
    Raises:
        PeerError: it does not start.
    """

    def __init__(
        self, name: str, command: Command, request: Mapping[str, Any], seconds: float,
        environment: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.name, self._seconds = name, seconds
        self._make = partial(DriverProcess, name, command, environment)
        self._request = {"op": "open", **request}
        self._process: DriverProcess | None = None
        self._open()

    def ask(self, op: str, **given: Any) -> dict[str, Any]:
        """An answer of the driver.

        Raises:
            PeerError: it crashed, took too long or failed; the next question goes to a new process.
        """
        process = self._process or self._open()
        try:
            return process.ask({"op": op, **given}, self._seconds)
        except PeerError:
            self.close()
            raise

    def _open(self) -> DriverProcess:
        process = self._make()
        answer = process.ask(self._request, START_SECONDS)
        self.version, self.settings = str(answer["version"]), dict(answer["settings"])
        self._process = process
        return process

    def close(self) -> None:
        """End the process; may be called again."""
        if self._process is not None:
            self._process.close()
        self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def parse_libraries(text: str) -> dict[str, Command]:
    """What --peers of `python -m lab structured` names, and what starts each; `all` are those of the table.

    Raises:
        ConfigError: a peer that is none of them, or one twice.
        PeerError: one that is not installed.
    """
    known, names = library_names(), [name.strip() for name in text.split(",") if name.strip()]
    found: dict[str, Command] = {}
    for name in known if names == ["all"] else names:
        if name not in known:
            raise ConfigError(f"--peers must be all or of {', '.join(known)}, separated by commas, got {name!r}")
        if name in found:
            raise ConfigError(f"--peers names {name!r} twice; name it once")
        found[name] = peer_command(name)
    return found


def open_libraries(llm: LLM, peers: Mapping[str, Command], seconds: float) -> list[LibraryProcess]:
    """Ours, strict and lenient, and peers, for the vocabulary of a model.

    Args:
        peers: see `parse_libraries`.
        seconds: that compiling a schema, or following its texts, may take.
    Raises:
        ConfigError: the model has no end token.
        PeerError: one does not start.
    """
    size = llm.runner.info.vocab_size
    ends = [end for end in llm.defaults.eos_ids if 0 <= end < size]
    if not ends:
        raise ConfigError("python -m lab structured needs a model with an end token, and this one declares none")
    texts = [(text or b"").hex() for text in token_bytes(llm.tokenizer)][:size]
    request = {"tokens": texts + [""] * (size - len(texts)), "ends": ends, "model": str(llm.folder)}
    found: list[LibraryProcess] = []
    with ExitStack() as started:
        for name, strict in OURS.items():
            found.append(started.enter_context(_own(name, "ours", {**request, "strict": strict}, seconds)))
        for name, command in peers.items():
            found.append(started.enter_context(LibraryProcess(name, command, request, seconds, QUIET)))
        started.pop_all()
    return found


def open_judge() -> LibraryProcess:
    """The process that says what satisfies a schema, see `judge.Judge`."""
    return _own("judge", "judge", {}, JUDGE_SECONDS)


def _own(name: str, module: str, request: Mapping[str, Any], seconds: float) -> LibraryProcess:
    environment = {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
    return LibraryProcess(name, (sys.executable, "-c", SERVE.format(module)), request, seconds, environment)


class Masked:
    """A logits processor that forbids what a library forbids behind the text so far; for one output.

    Args:
        library: whose last compiled schema counts.
    Raises:
        PeerError: the library fails; the output then ends with an error.
    """

    def __init__(self, library: LibraryProcess) -> None:
        self._library, self._taken = library, 0
        library.ask("begin")

    def __call__(self, output: Sequence[int], logits_v: torch.Tensor) -> torch.Tensor:
        answer = self._library.ask("allowed", taken=list(output[self._taken :]))
        self._taken = len(output)
        bits = np.unpackbits(np.frombuffer(b64decode(answer["mask"]), np.uint8), bitorder="little")
        forbidden_v = torch.from_numpy(bits[: len(logits_v)] == 0)
        return logits_v.masked_fill(forbidden_v.to(logits_v.device), -torch.inf)
