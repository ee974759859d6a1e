"""The peers: one literal table of what each needs, and where things are kept."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from paceline.errors import ConfigError
from paceline.utils import user_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEntry:
    """One peer.

    Attributes:
        driver: module in `drivers/` that runs in the peer's environment; "" for an endpoint, which needs none.
        packages: what `pip` installs, with versions.
        modes: decoding modes the adapter offers, see `open`; none for a library of structured outputs, which is for
            `python -m lab structured`.
        dtypes: precisions it takes.
        batches: whether several prompts are decoded together.
        options: that the driver reads, beside the method; `model` is the folder of the draft.
        needs_cuda: left out of "all" on a machine without CUDA.
    """

    driver: str
    packages: tuple[str, ...]
    modes: tuple[str, ...]
    dtypes: tuple[str, ...]
    batches: bool
    options: tuple[str, ...]
    needs_cuda: bool = False


def _library(driver: str, *packages: str) -> PeerEntry:
    """One that only says which tokens may come next."""
    return PeerEntry(driver=driver, packages=packages, modes=(), dtypes=(), batches=False, options=())


DRAFTING = ("num_speculative_tokens", "prompt_lookup_max")
FLOATS = ("float32", "bfloat16", "float16")
PEERS: Mapping[str, PeerEntry] = {
    "transformers": PeerEntry(
        driver="transformers_peer",
        packages=("torch==2.13.0", "transformers==5.23.0"),
        modes=("plain", "draft_model", "ngram"),
        dtypes=FLOATS,
        batches=True,
        options=(*DRAFTING, "model", "device"),
    ),
    "llama.cpp": PeerEntry(
        driver="llama_cpp_peer",
        packages=("llama-cpp-python==0.3.36", "gguf==0.18.0", "numpy>=2.0,<3"),
        modes=("plain", "ngram"),
        dtypes=(*FLOATS, "int8", "int4"),
        batches=False,
        options=(*DRAFTING, "context", "gpu_layers", "batch"),
    ),
    "openvino-genai": PeerEntry(
        driver="openvino_peer",
        packages=("openvino-genai==2026.4.1", "numpy>=2.0,<3"),
        modes=("plain", "draft_model", "ngram"),
        dtypes=(*FLOATS, "int8"),
        batches=True,
        options=(*DRAFTING, "model", "backend", "kv_cache", "compute", "cache_gb"),
    ),
    "vllm": PeerEntry(
        driver="vllm_peer",
        packages=("vllm",),
        modes=("plain", "draft_model", "ngram"),
        dtypes=FLOATS,
        batches=True,
        options=(*DRAFTING, "model", "max_model_len", "gpu_memory_utilization"),
        needs_cuda=True,
    ),
    "xgrammar": _library("xgrammar_peer", "xgrammar==0.2.8", "torch==2.13.0", "transformers==5.23.0", "numpy>=2.0,<3"),
    "outlines": _library("outlines_peer", "outlines-core==0.2.14", "numpy>=2.0,<3"),
    "lm-format-enforcer": _library("lmfe_peer", "lm-format-enforcer==0.11.3", "numpy>=2.0,<3"),
    "openai": PeerEntry(driver="", packages=(), modes=("plain",), dtypes=(), batches=False, options=("url", "api_key")),
}


def peer_names() -> list[str]:
    """All peers, in the table's order."""
    return list(PEERS)


def library_names() -> list[str]:
    """Peers that are libraries of structured outputs, in the table's order."""
    return [name for name, entry in PEERS.items() if not entry.modes]


def peer_entry(name: str) -> PeerEntry:
    """The table's entry.

    Raises:
        ConfigError: no such peer.
    """
    if name not in PEERS:
        near = get_close_matches(name, PEERS, n=2, cutoff=0.7)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(PEERS)}"
        raise ConfigError(f"unknown peer {name!r}; {hint}")
    return PEERS[name]


def peers_home() -> Path:
    """Folder of environments and converted weights: PACELINE_HOME, XDG_CACHE_HOME/paceline or ~/.cache/paceline."""
    return user_cache("peers", "PACELINE_HOME")


def folder(name: str) -> Path:
    """The peer's own environment."""
    peer_entry(name)
    return peers_home() / name


def python_of(name: str) -> Path:
    """The interpreter of the peer's environment, whether it exists or not."""
    return folder(name) / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def converted(model: Path) -> Path:
    """Where a checkpoint's conversions are kept: a folder that changes with the checkpoint's files."""
    from hashlib import sha256

    stamp = [str(model.resolve())]
    for path in sorted([*model.glob("*.safetensors"), *model.glob("config.json")]):
        found = path.stat()
        stamp.append(f"{path.name} {found.st_size} {found.st_mtime_ns}")
    return peers_home() / "converted" / sha256("\n".join(stamp).encode()).hexdigest()[:20]
