"""Any OpenAI-compatible endpoint by URL, over its streaming completions.

In: a base URL, a model name. Out: token ids and times as the client sees them. Not here: starting a server.

Prompts go as token ids; a server that refuses them gets text. Ids come back where the server sends `token_ids`; else
the text is encoded again, which needs a tokenizer and says so in the settings (`ids: "re-encoded"`), for text may
encode to other ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from time import perf_counter
from typing import Any, Self
from urllib.parse import SplitResult, urlsplit

from paceline.bench.peers.peer import PeerRun
from paceline.bench.peers.process import PeerError
from paceline.errors import ConfigError


class RefusedError(Exception):
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
            except RefusedError as error:
                if self._tokenizer is None:
                    raise PeerError(
                        f"{self.version} refuses token ids ({error}); give a tokenizer, so that text can be sent"
                    ) from error
                self._as_text = True
        try:
            return self._complete(body | {"prompt": self._tokenizer.decode(list(prompt_ids))})
        except RefusedError as error:
            raise PeerError(f"{self.version} refuses the request: {error}") from error

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool = True
    ) -> list[PeerRun]:
        """One prompt; several are refused, as their timing is the server's own business."""
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
                raise RefusedError(f"{answer.status}: {' '.join(answer.read(300).decode('utf-8', 'replace').split())}")
            yield from _data(answer)
        except TimeoutError as error:
            raise PeerError(
                f"{self.version} was silent for {self._timeout:g} s; raise the time-out or ask for less"
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
            raise ValueError(f"the stream says {data[:200].decode('utf-8', 'replace')}")
        yield event
    raise ValueError("the stream ended before [DONE]")
