"""The document of a benchmark: one JSON object with a schema, checked when it is written and when it is read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.bench.machine import provenance
from paceline.bench.run import aggregate
from paceline.bench.run.harness import Harness, Peers
from paceline.bench.run.settings import PLAIN
from paceline.errors import ConfigError
from paceline.llm import BUNDLED
from paceline.utils import Workload, keys_once

DOCUMENT_FORMAT, VERSION = "paceline-bench", 1


@lru_cache(maxsize=1)
def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) that ships with the package."""
    text = (files("paceline") / "bench" / "run" / "document.schema.json").read_text(encoding="utf-8")
    schema_document: dict[str, Any] = json.loads(text)
    return schema_document


def check_document(document: object, name: str = "the document") -> None:
    """Compare a document with the schema.

    Raises:
        ConfigError: the first violation, with its place.
    """
    from jsonschema import Draft202012Validator

    error = min(Draft202012Validator(schema()).iter_errors(document), key=lambda e: len(e.absolute_path), default=None)
    if error is not None:
        place = "/".join(map(str, error.absolute_path)) or "its top"
        raise ConfigError(f"{name} is not a benchmark document of version {VERSION}: at {place}: {error.message[:200]}")


def load_document(path: Path) -> dict[str, Any]:
    """Read and check a document.

    Raises:
        ConfigError: a file that cannot be read, no JSON, a key given twice, another version, or something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=keys_once(repr(str(path))))
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(
            f"cannot read {str(path)!r} ({error.strerror}); give a file that `paceline bench --json` wrote"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{str(path)!r} is not JSON ({error}); give a file that `paceline bench --json` wrote"
        ) from None
    check_document(document, repr(str(path)))
    checked: dict[str, Any] = document
    return checked


def save_document(document: Mapping[str, Any], path: Path) -> None:
    """Check and write a document in one piece: a reader sees the old file or the new one.

    Raises:
        ConfigError: it is against the schema.
        OSError: it cannot be written.
    """
    check_document(document)
    write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a text file in one piece, as UTF-8.

    Raises:
        OSError: it cannot be written; a file that was there is unchanged.
    """
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def build_document(
    harness: Harness,
    workloads: Sequence[Workload],
    *,
    skipped: Sequence[Mapping[str, str]] = (),
    bandwidth: Mapping[str, Any] | None = None,
    random: bool = False,
    peers: Peers | None = None,
    program: str = "paceline",
) -> dict[str, Any]:
    """The document of a benchmark as far as it got.

    Args:
        skipped: methods that cannot run here.
        bandwidth: as from `machine.read_bandwidth`.
        random: the weights are random.
        peers: that took part, if any.
        program: what was run.
    """
    results, options = harness.results, harness.options
    document = {
        "format": DOCUMENT_FORMAT,
        "version": VERSION,
        "interrupted": results.interrupted,
        "provenance": provenance(options.seed, program=program),
        "model": model(harness, random),
        "options": options.to_dict(),
        "bandwidth": bandwidth,
        "baseline": PLAIN,
        "settings": [_setting(harness, setting) for setting in harness.settings],
        "skipped": list(skipped),
        "workloads": [workload.to_dict() for workload in workloads],
        "prompts": [_prompt(piece) for piece in results.pieces],
        "cells": aggregate.cells(results.cells, _surroundings(harness, bandwidth)),
        "load": results.load,
        "peers": [] if peers is None else peers.entries(options.seed),
        "peers_skipped": [] if peers is None else peers.skipped,
    }
    return dict(finite(document))


def _surroundings(harness: Harness, bandwidth: Mapping[str, Any] | None) -> aggregate.Surroundings:
    rate = None if bandwidth is None else float(bandwidth["bytes_per_second"])
    energy = {"source": harness.energy.source, "reason": harness.energy.reason}
    runner, scope = harness.llm.runner, harness.memory.scope
    return aggregate.Surroundings(
        runner=runner, seed=harness.options.seed, bandwidth=rate, energy=energy, rss_scope=scope
    )


def model(harness: Harness, random: bool) -> dict[str, Any]:
    """Describe the model, for the document."""
    info = harness.llm.runner.info
    names = ("family", "weight_bytes", "vocab_size", "hidden_size", "num_layers", "max_context", "fingerprint")
    return {
        "name": "bundled" if info.name == str(BUNDLED / "target") else Path(info.name).name,
        **{name: getattr(info, name) for name in names},
        "dtype": str(info.dtype).removeprefix("torch."),
        "device": str(info.device),
        "cache_bytes_per_token": harness.cache_bytes,
        "random": random,
    }


def _setting(harness: Harness, setting: Any) -> dict[str, Any]:
    record: dict[str, Any] = setting.to_dict(setting.open(harness.llm, {} if setting.needs_record else None))
    return record


def _prompt(piece: Any) -> dict[str, Any]:
    names = ("workload", "prompt", "turn", "task", "error")
    return {**{name: getattr(piece, name) for name in names}, "prompt_tokens": len(piece.token_ids)}


def finite(value: Any) -> Any:
    """The same with NaN and infinity as null, tuples as lists."""
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
