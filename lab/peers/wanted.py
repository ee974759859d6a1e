"""Which peers take part in a benchmark, and one process each.

all                                     every method of every installed peer
NAME,NAME:METHOD                        every method of one, one method of another
{"name": NAME, "method": METHOD, ...}   with options: dtype, and those of the peer, as num_speculative_tokens
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.peers import catalogue
from lab.peers.catalogue import PEERS, peer_names
from lab.peers.install import peer_state
from lab.peers.peer import Peer, PeerRun, open_peer, parts_of
from paceline.bench.run import BenchPrompt
from paceline.errors import ConfigError
from paceline.utils import json_object, need, reject_unknown

if TYPE_CHECKING:
    from paceline.checkpoints import Tokenizer
    from paceline.llm import LLM

ENDPOINT = "openai"
PEER_KEY = "PACELINE_PEER_API_KEY"
TRIES = 3
"""Failures in a row after which a peer is not opened again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedPeer:
    """One peer with one method.

    Attributes:
        dtype: precision; None is the model's own.
        options: of the peer, without the method.
    """

    name: str
    method: str = "plain"
    dtype: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def setting(self) -> str:
        """The method with what is special about it."""
        special = [f"{key}={value}" for key, value in self.options.items() if key not in ("url", "model", "tokenizer")]
        special += [self.dtype] if self.dtype else []
        return f"{self.method}({', '.join(special)})" if special else self.method

    @property
    def at_once(self) -> bool:
        """Whether it decodes several prompts together: what transformers calls assisted generation takes one."""
        return PEERS[self.name].batches and not (self.name == "transformers" and self.method != "plain")

    @property
    def title(self) -> str:
        """Peer and setting."""
        return f"{self.name} {self.setting}"


def parse_peers(
    texts: Sequence[str], url: str | None = None, served: str | None = None, *, lora: object = None
) -> list[WantedPeer]:
    """What --peers, --peer-url and --peer-model name, in order.

    Args:
        lora: the model's adapter, which peers do not load.
    Raises:
        ConfigError: an unknown peer, method or precision, no JSON, the same thing twice, an endpoint without its URL,
            peers beside an adapter.
    """
    found: list[WantedPeer] = []
    for text in texts:
        found += (
            _object(text)
            if text.lstrip().startswith("{")
            else [one for part in text.split(",") for one in _named(part.strip())]
        )
    if any(one.name == ENDPOINT for one in found):
        raise ConfigError(f"peer {ENDPOINT} is an endpoint; name it with --peer-url URL")
    if url is not None:
        parts_of(url)
        found.append(WantedPeer(name=ENDPOINT, options={"url": url} | ({"model": served} if served else {})))
    elif served is not None:
        raise ConfigError("--peer-model names a model at an endpoint; give --peer-url too")
    for place, one in enumerate(found):
        if any(other.title == one.title for other in found[:place]):
            raise ConfigError(f"the peer {one.title!r} was given twice; give it once")
        if lora is not None and one.name != ENDPOINT:
            raise ConfigError(f"peer {one.name} loads the checkpoint without --lora; leave out --peers or --lora")
    return found


def _named(text: str) -> list[WantedPeer]:
    if text == "all":
        return [
            WantedPeer(name=name, method=mode)
            for name in peer_names()
            if name != ENDPOINT
            for mode in PEERS[name].modes
        ]
    name, colon, method = text.partition(":")
    modes = catalogue.peer_entry(name).modes
    if not modes:
        raise ConfigError(f"peer {name} decodes nothing; it is for `python -m lab structured --peers {name}`")
    if colon and method not in modes:
        raise ConfigError(f"peer {name} has no method {method!r}; it has {', '.join(modes)}")
    return [WantedPeer(name=name, method=mode) for mode in ([method] if colon else modes)]


def _object(text: str) -> list[WantedPeer]:
    form = 'be names or JSON as {"name": "llama.cpp", "method": "ngram"}'
    given = json_object("--peers", text) or {}
    need(isinstance(given.get("name"), str), "--peers", form, text)
    entry = catalogue.peer_entry(given["name"])
    known = [key for key in entry.options if key not in _OURS]
    reject_unknown(f"--peers of {given['name']}", given, ("name", "method", "dtype", *known))
    dtype = given.get("dtype")
    if dtype is not None and dtype not in entry.dtypes:
        raise ConfigError(f"peer {given['name']} has no dtype {dtype!r}; it has {', '.join(entry.dtypes)}")
    options = {key: value for key, value in given.items() if key in known}
    method = str(given["method"]) if "method" in given else ""
    named = _named(f"{given['name']}:{method}" if method else given["name"])
    return [WantedPeer(name=one.name, method=one.method, dtype=dtype, options=options) for one in named]


_OURS = ("model", "device", "url", "api_key")
"""Options that the benchmark fills in."""


class Lane:
    """One peer with one method: open, or to be opened (again).

    Args:
        start: opens it.
    Attributes:
        at_once: whether a group is decoded together.
        version, settings: what it reported when it was opened.
    """

    def __init__(
        self, wanted: WantedPeer, start: Callable[[], Peer], *, dtype: str | None, threads: int | None
    ) -> None:
        self.wanted, self.dtype, self.threads, self.at_once = wanted, dtype, threads, wanted.at_once
        self.version: str | None = None
        self.settings: dict[str, Any] = {}
        self._start, self._failures = start, 0
        self._peer: Peer | None = None
        self._last: Exception | None = None

    def open(self) -> Peer:
        """The peer; started where it is not running.

        Raises:
            PeerError, ConfigError: it does not start.
        """
        if self._peer is None:
            self._peer = self._start()
            self._learn(self._peer.version, self._peer.settings)
        return self._peer

    def _learn(self, version: str, settings: Mapping[str, Any]) -> None:
        self.version, self.settings = (
            version,
            {key: value for key, value in settings.items() if key not in ("tokenizer", "api_key")},
        )

    def decode(self, pieces: Sequence[BenchPrompt], *, counts: bool = True) -> list[PeerRun]:
        """Decode a group, all at once where the peer can; a peer that failed is started again the next time.

        Args:
            counts: whether an answer ends a row of failures.
        Raises:
            PeerError, ConfigError: as the peer's; after `TRIES` failures in a row the last one, without another try.
        """
        if self._last is not None and self._failures >= TRIES:
            raise self._last
        try:
            runs = self._ask(self.open(), pieces)
        except BaseException as error:
            self.close()
            if isinstance(error, Exception):
                self._failures, self._last = self._failures + 1, error
            raise
        if counts:
            self._failures, self._last = 0, None
        self._learn(runs[0].version, runs[0].settings)
        return runs

    def _ask(self, peer: Peer, pieces: Sequence[BenchPrompt]) -> list[PeerRun]:
        """All prompts at once, or one after the other; then every run carries the sum of the seconds."""
        if len(pieces) == 1 or not self.at_once:
            runs = [peer.generate(list(piece.token_ids), piece.max_tokens, piece.ignore_eos) for piece in pieces]
            whole = sum(run.seconds for run in runs)
            return [replace(run, seconds=whole) for run in runs]
        limits = {(piece.max_tokens, piece.ignore_eos) for piece in pieces}
        if len(limits) > 1:
            raise ConfigError(
                "a peer decodes prompts of one length together; the prompts of this batch ask for different ones"
            )
        ((most, ignore),) = limits
        return peer.generate_batch([list(piece.token_ids) for piece in pieces], most, ignore)

    def close(self) -> None:
        """End it; it may be opened again."""
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.close()


class _Words:
    """A tokenizer as an endpoint needs it: no special tokens around a text that goes on."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode(ids)


def lanes_of(llm: LLM, wanted: Sequence[WantedPeer], draft: str | None, skip: Callable[[str, str], None]) -> list[Lane]:
    """A lane for everything that can run here; `skip(name, why)` gets the rest."""
    found = []
    for one in wanted:
        why = _missing(llm, one, draft)
        if why is not None:
            skip(one.name if why.startswith("no environment") else one.title, why)
        else:
            found.append(_lane(llm, one, draft))
    return found


def _missing(llm: LLM, one: WantedPeer, draft: str | None) -> str | None:
    """Why it cannot run here, or None."""
    if one.name == ENDPOINT:
        return None
    beside = one.name == "vllm" and find_spec("vllm") is not None
    if not beside and not peer_state(one.name).ready:
        return f"no environment; run `python -m lab peers install {one.name}`"
    info = llm.runner.info
    if info.device.type != "cpu" and one.name not in ("transformers", "vllm") and "gpu_layers" not in one.options:
        return f"it runs on the CPU here, and the model is on {info.device}"
    if one.method == "draft_model" and draft is None:
        return "it needs a draft model; give --draft-model"
    return None


def _lane(llm: LLM, one: WantedPeer, draft: str | None) -> Lane:
    import torch

    info, options = llm.runner.info, {**one.options, "method": one.method}
    threads = torch.get_num_threads()
    if one.name == ENDPOINT:
        served = str(options.pop("model", None) or Path(info.name).name)
        options |= {"tokenizer": _Words(llm.tokenizer)} | (
            {"api_key": key} if (key := os.environ.get(PEER_KEY)) else {}
        )
        return Lane(one, lambda: open_peer(one.name, served, options=options), dtype=None, threads=None)
    dtype = one.dtype or str(info.dtype).removeprefix("torch.")
    if one.method == "draft_model" and draft is not None:
        from paceline.checkpoints import resolve

        options["model"] = str(resolve(draft))
    if info.device.type != "cpu" and one.name == "transformers":
        options["device"] = str(info.device)

    def start() -> Peer:
        _must_fit(info.weight_bytes, one.title)
        return open_peer(one.name, llm.folder, dtype=dtype, threads=threads, options=options)

    return Lane(one, start, dtype=dtype, threads=threads)


def _must_fit(weight_bytes: int, title: str) -> None:
    """Reject a process that would drive this machine out of memory."""
    import psutil

    need, free = 1.5 * weight_bytes, psutil.virtual_memory().available
    if need > free:
        sizes = f"{need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        raise ConfigError(
            f"{title} needs about {sizes}; name fewer peers, so that their processes fit beside each other"
        )
