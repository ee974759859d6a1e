"""Opening a peer and asking it for tokens.

In: a name of the table, a checkpoint folder, precision, threads, options. Out: a `Peer` that takes and gives token ids,
greedily.
Not here: the environments (install.py), the wire (process.py), endpoints by URL (endpoint.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from paceline.bench.peers import catalog
from paceline.bench.peers.process import DriverProcess, PeerError
from paceline.errors import ConfigError

START_SECONDS = 900.0  # a conversion of the weights included
REQUEST_SECONDS = 600.0
DRIVERS = Path(__file__).parent / "drivers"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """One answer of a peer.

    Attributes:
        token_ids: the new tokens.
        seconds: from the prompt to the last token, measured inside the peer's process (for an endpoint: by the client).
        ttft: seconds to the first token, or None where the peer does not say.
        version: of the peer.
        settings: what it really ran with.
        passes: of the target for this prompt, the one over the prompt included, or None where the peer does not say.
    """

    token_ids: list[int]
    seconds: float
    ttft: float | None
    version: str
    settings: Mapping[str, Any]
    passes: int | None = None


class Peer(Protocol):
    """Something that decodes greedily, ids in and ids out; a context manager."""

    name: str
    version: str
    settings: Mapping[str, Any]

    def generate(self, prompt_ids: Sequence[int], max_tokens: int, ignore_eos: bool = True) -> PeerRun:
        """The greedy continuation of one prompt."""

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool = True
    ) -> list[PeerRun]:
        """Of several at once; every run carries the seconds of the whole batch. ConfigError where the peer cannot."""

    def close(self) -> None:
        """End it; may be called again."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class SubprocessPeer:
    """A peer in its own environment.

    Args:
        name: of the table.
        command: starts its driver.
        request: the open message, without `op`.
        start_timeout, request_timeout: seconds.
    Raises:
        PeerError: it does not start.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        request: Mapping[str, Any],
        *,
        start_timeout: float = START_SECONDS,
        request_timeout: float = REQUEST_SECONDS,
    ) -> None:
        self.name = name
        self._batches, self._timeout = catalog.peer_entry(name).batches, request_timeout
        threads = str(request["threads"])
        self._process = DriverProcess(
            name, command, {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        )
        try:
            answer = self._process.ask({"op": "open", **request}, start_timeout)
            self.version = str(answer["version"])
            self.settings: Mapping[str, Any] = dict(answer["settings"])
        except KeyError as error:
            self.close()
            raise PeerError(f"peer {name} opened without saying its {error.args[0]}") from error

    def generate(self, prompt_ids: Sequence[int], max_tokens: int, ignore_eos: bool = True) -> PeerRun:
        """The greedy continuation of one prompt."""
        return self._ask([prompt_ids], max_tokens, ignore_eos)[0]

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool = True
    ) -> list[PeerRun]:
        """Of several at once.

        Raises:
            ConfigError: this peer takes one prompt at a time.
        """
        if len(prompts) > 1 and not self._batches:
            raise ConfigError(f"peer {self.name} takes one prompt at a time, got {len(prompts)}; use batch size 1")
        return self._ask(prompts, max_tokens, ignore_eos)

    def _ask(self, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool) -> list[PeerRun]:
        request = {"prompts": [list(map(int, p)) for p in prompts], "max_tokens": max_tokens, "ignore_eos": ignore_eos}
        answer = self._process.ask({"op": "generate", **request}, self._timeout)
        tokens, seconds, ttft = answer.get("tokens"), answer.get("seconds"), answer.get("ttft")
        if not isinstance(tokens, list) or len(tokens) != len(prompts) or not isinstance(seconds, int | float):
            self.close()
            raise PeerError(f"peer {self.name} answered without one list of tokens a prompt and its seconds")
        passes = answer.get("passes") or [None] * len(tokens)
        shared: dict[str, Any] = {
            "seconds": float(seconds),
            "ttft": ttft,
            "version": self.version,
            "settings": self.settings,
        }
        return [PeerRun(token_ids=list(row), passes=count, **shared) for row, count in zip(tokens, passes, strict=True)]

    def close(self) -> None:
        """End the driver; may be called again."""
        self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_peer(
    name: str,
    model_folder: str | Path,
    *,
    dtype: str = "bfloat16",
    threads: int = 1,
    options: Mapping[str, Any] | None = None,
    start_timeout: float = START_SECONDS,
    request_timeout: float = REQUEST_SECONDS,
) -> Peer:
    """Start a peer on a checkpoint.

    Args:
        name: of `names()`; "openai" is an endpoint and needs `options["url"]`.
        model_folder: the checkpoint (config.json, safetensors); for an endpoint, the name of the model it serves.
        dtype: float32, bfloat16, float16 or int8, where the peer has it.
        threads: of the CPU.
        options: `method` (plain, ngram, draft_model), `num_speculative_tokens`, `prompt_lookup_max`, `model` (the
            draft's folder), and what the peer's driver names in its docstring.
        start_timeout, request_timeout: seconds.
    Raises:
        ConfigError: a wrong name, method, precision or folder.
        PeerError: not installed, or it does not start.
    """
    found, given = catalog.peer_entry(name), {"method": "plain", **(options or {})}
    if given["method"] not in found.modes:
        raise ConfigError(f"peer {name} has no method {given['method']!r}; it has {', '.join(found.modes)}")
    if name == "openai":
        from paceline.bench.peers.endpoint import Endpoint

        return Endpoint(model=str(model_folder), timeout=request_timeout, **_endpoint_options(given))
    if dtype not in found.dtypes:
        raise ConfigError(f"peer {name} has no dtype {dtype!r}; it has {', '.join(found.dtypes)}")
    folder = _checkpoint(model_folder)
    request = {
        "model": str(folder),
        "work": str(catalog.converted(folder)),
        "dtype": dtype,
        "threads": threads,
        "options": given,
    }
    if given["method"] == "draft_model":
        draft = _draft(name, given)
        given["model"], request["draft_work"] = str(draft), str(catalog.converted(draft))
    command = (_python(name), DRIVERS, found.driver)
    return SubprocessPeer(name, command, request, start_timeout=start_timeout, request_timeout=request_timeout)


def _draft(name: str, given: Mapping[str, Any]) -> Path:
    if "model" not in given:
        raise ConfigError(
            f"method draft_model of peer {name} needs the option model, a folder with the draft's checkpoint"
        )
    return _checkpoint(given["model"])


def _endpoint_options(given: dict[str, Any]) -> dict[str, Any]:
    known = {key: value for key, value in given.items() if key in ("url", "tokenizer", "api_key")}
    if "url" not in known:
        raise ConfigError('peer openai needs the option url, e.g. {"url": "http://127.0.0.1:8000/v1"}')
    return known


def _checkpoint(folder: str | Path) -> Path:
    path = Path(folder).resolve()
    if not (path / "config.json").is_file():
        raise ConfigError(f"{folder} holds no config.json; a peer needs the folder of a checkpoint")
    return path


def _python(name: str) -> Path:
    python = catalog.python_of(name)
    if python.exists():
        return python
    if name == "vllm":  # where it is installed beside Paceline, that one is taken
        from importlib.util import find_spec

        if find_spec("vllm") is not None:
            return Path(sys.executable)
    raise PeerError(f"peer {name} has no environment; run `paceline bench peers install {name}`")
