"""Opening a peer and requesting tokens: a driver in a process of its own, or an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, Self
from urllib.parse import SplitResult, urlsplit

from lab.peers import catalogue
from lab.peers.process import DriverProcess, PeerError
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
        request_timeout: seconds.
    Raises:
        PeerError: it does not start.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        request: Mapping[str, Any],
        *,
        request_timeout: float = REQUEST_SECONDS,
    ) -> None:
        self.name = name
        self._batches, self._timeout = catalogue.peer_entry(name).batches, request_timeout
        threads = str(request["threads"])
        self._process = DriverProcess(
            name, command, {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        )
        try:
            answer = self._process.ask({"op": "open", **request}, START_SECONDS)
            self.version = str(answer["version"])
            self.settings: Mapping[str, Any] = dict(answer["settings"])
        except KeyError as error:
            self.close()
            raise PeerError(f"peer {name} opened without reporting its {error.args[0]}") from error

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
            raise PeerError(f"peer {self.name} did not answer with one list of tokens per prompt and its seconds")
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
    request_timeout: float = REQUEST_SECONDS,
) -> Peer:
    """Start a peer on a checkpoint.

    Args:
        name: of the table; "openai" is an endpoint and needs `options["url"]`.
        model_folder: the checkpoint (config.json, safetensors); for an endpoint, the name of the model it serves.
        dtype: float32, bfloat16, float16, int8 or int4, where the peer has it.
        threads: of the CPU.
        options: `method` (plain, ngram, draft_model), `num_speculative_tokens`, `prompt_lookup_max`, `model` (the
            draft's folder), and what the peer's driver names in its docstring.
        request_timeout: seconds.
    Raises:
        ConfigError: a wrong name, method, precision or folder.
        PeerError: not installed, or it does not start.
    """
    found, given = catalogue.peer_entry(name), {"method": "plain", **(options or {})}
    if not found.modes:
        raise ConfigError(f"peer {name} decodes nothing; it is for `python -m lab structured`")
    if given["method"] not in found.modes:
        raise ConfigError(f"peer {name} has no method {given['method']!r}; it has {', '.join(found.modes)}")
    if name == "openai":
        return Endpoint(model=str(model_folder), timeout=request_timeout, **_endpoint_options(given))
    if dtype not in found.dtypes:
        raise ConfigError(f"peer {name} has no dtype {dtype!r}; it has {', '.join(found.dtypes)}")
    folder = _checkpoint(model_folder)
    work = {"model": str(folder), "work": str(catalogue.converted(folder))}
    if given["method"] == "draft_model":
        draft = _draft(name, given)
        given["model"], work["draft_work"] = str(draft), str(catalogue.converted(draft))
    request = {**work, "dtype": dtype, "threads": threads, "options": given}
    return SubprocessPeer(name, peer_command(name), request, request_timeout=request_timeout)


def peer_command(name: str) -> tuple[str | Path, ...]:
    """Starts the driver of a peer in the peer's environment.

    Raises:
        PeerError: not installed.
    """
    return (_python(name), DRIVERS, catalogue.peer_entry(name).driver)


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
    python = catalogue.python_of(name)
    if python.exists():
        return python
    if name == "vllm":  # where it is installed beside Paceline, that one is taken
        from importlib.util import find_spec

        if find_spec("vllm") is not None:
            return Path(sys.executable)
    raise PeerError(f"peer {name} has no environment; run `python -m lab peers install {name}`")


class StatusError(Exception):
    """The server answered with an error status."""


def parts_of(url: str) -> SplitResult:
    """Scheme, host and path of a base URL.

    Raises:
        ConfigError: neither http nor https, no host, or a port that is none.
    """
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond 65535, brackets that do not close
        fine = False
    if not fine:
        raise ConfigError(f"url must begin with http:// or https:// and name a host, got {url!r}")
    return parts


class Endpoint:
    """A served model.

    Args:
        model: its name at the server.
        url: base, e.g. http://127.0.0.1:8000/v1.
        tokenizer: with `encode(text)` and `decode(ids)`, or None: then the server must take and send ids.
        api_key: sent as a bearer token.
        timeout: seconds of silence before giving up.
    Raises:
        ConfigError: a URL that is not http or https.
    """

    name = "openai"

    def __init__(
        self, *, model: str, url: str, tokenizer: Any = None, api_key: str | None = None, timeout: float = 600.0
    ) -> None:
        parts = parts_of(url)
        self._parts, self._model, self._tokenizer, self._timeout = parts, model, tokenizer, timeout
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._as_text = False
        self.version = f"endpoint {parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
        self.settings: Mapping[str, Any] = {"url": url, "model": model}

    def generate(self, prompt_ids: Sequence[int], max_tokens: int, ignore_eos: bool = True) -> PeerRun:
        """The greedy continuation of one prompt; seconds and ttft include the way over the network.

        Raises:
            PeerError: no connection, an error status, a broken stream, or text where no tokenizer was given.
        """
        body = {"model": self._model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"return_token_ids": True} | ({"ignore_eos": True} if ignore_eos else {})
        if not self._as_text:
            try:
                return self._complete(body | {"prompt": list(prompt_ids)})
            except StatusError as error:
                if self._tokenizer is None:
                    raise PeerError(
                        f"{self.version} rejects token ids ({error}); give a tokenizer, so that text can be sent"
                    ) from error
                self._as_text = True
        try:
            return self._complete(body | {"prompt": self._tokenizer.decode(list(prompt_ids))})
        except StatusError as error:
            raise PeerError(f"{self.version} rejects the request: {error}") from error

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool = True
    ) -> list[PeerRun]:
        """One prompt; several are rejected, as their timing would be the server's."""
        if len(prompts) > 1:
            raise ConfigError(f"peer openai takes one prompt at a time, got {len(prompts)}; use batch size 1")
        return [self.generate(prompts[0], max_tokens, ignore_eos)] if prompts else []

    def _complete(self, body: Mapping[str, Any]) -> PeerRun:
        ids: list[int] = []
        text, first, start = "", None, perf_counter()
        for event in self._events(body):
            for choice in event.get("choices") or []:
                text += choice.get("text") or ""
                ids += choice.get("token_ids") or []
                if first is None and (choice.get("text") or choice.get("token_ids")):
                    first = perf_counter() - start
        seconds = perf_counter() - start
        how = "sent"
        if text and not ids:
            if self._tokenizer is None:
                raise PeerError(
                    f"{self.version} sends text without token ids; give a tokenizer, so that it can be encoded again"
                )
            ids, how = [int(i) for i in self._tokenizer.encode(text)], "re-encoded"
        self.settings = {**self.settings, "prompt": "text" if self._as_text else "ids", "ids": how}
        return PeerRun(token_ids=ids, seconds=seconds, ttft=first, version=self.version, settings=self.settings)

    def _events(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        kind = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout)
        try:
            connection.request("POST", self._parts.path.rstrip("/") + "/completions", json.dumps(body), self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise StatusError(f"{answer.status}: {' '.join(answer.read(300).decode('utf-8', 'replace').split())}")
            yield from _data(answer)
        except TimeoutError as error:
            raise PeerError(
                f"{self.version} did not answer for {self._timeout:g} s; raise the time-out or request fewer tokens"
            ) from error
        except (OSError, HTTPException, ValueError) as error:
            raise PeerError(
                f"{self.version} failed: {type(error).__name__}: {error}; is the server running at that URL?"
            ) from error
        finally:
            connection.close()

    def close(self) -> None:
        """Nothing to end: every request has its own connection."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _data(answer: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events, up to [DONE].

    Raises:
        ValueError: the stream ends before, or an event is no JSON object or an error.
    """
    for line in answer:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if not isinstance(event, dict) or "error" in event:
            raise ValueError(f"the stream reports {data[:200].decode('utf-8', 'replace')}")
        yield event
    raise ValueError("the stream ended before [DONE]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAgreement:
    """Comparison of two outputs.

    Attributes:
        first_difference: index of the first token that differs, or None if one output begins with the other and both
            are as long.
        equal_share: positions with the same token over the longer length, in 0..1; 1 for two empty outputs.
        length: tokens compared (the longer length).
    """

    first_difference: int | None
    equal_share: float
    length: int


def agreement_with(ours: Sequence[int], theirs: Sequence[int]) -> PeerAgreement:
    """Compare token by token; a missing token counts as different."""
    length = max(len(ours), len(theirs))
    same = [a == b for a, b in zip(ours, theirs, strict=False)]
    same += [False] * (length - len(same))
    first = same.index(False) if False in same else None
    return PeerAgreement(first_difference=first, equal_share=sum(same) / length if length else 1.0, length=length)
