"""Indices in folders: `index.json` says what lies beside it. Nothing in them is code or pickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from paceline.errors import ConfigError, PacelineError
from paceline.retrieval.base import Index
from paceline.retrieval.bm25 import Bm25Index
from paceline.retrieval.token_store import TokenStore
from paceline.retrieval.vectors import DenseIndex
from paceline.utils import described, need

KINDS: Final[Mapping[str, Callable[[Path, dict[str, Any]], Index[Any]]]] = {
    "bm25": Bm25Index.open,
    "dense": DenseIndex.open,
    "knn": TokenStore.open,
}


def facts_of(folder: str | Path) -> dict[str, Any]:
    """What `index.json` says: kind, entries, and what each kind adds.

    Raises:
        ConfigError: no such folder, or no index in it.
    """
    path = Path(folder) / "index.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"index: cannot read {str(path)!r} ({described(error)}); give a folder that `paceline retrieval build` made"
        ) from None
    need(isinstance(facts, dict) and facts.get("kind") in KINDS, "index", f"be of kind {', '.join(KINDS)}", facts)
    return facts  # type: ignore[no-any-return]


def open_index(folder: str | Path) -> Index[Any]:
    """The index in a folder; one that was opened lately and has not changed is the same object.

    Raises:
        ConfigError: there is none, or what reads it is not installed.
    """
    facts_of(folder)
    path = Path(folder).resolve()
    return _opened(path, (path / "index.json").stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _opened(folder: Path, changed: int) -> Index[Any]:
    del changed
    facts = facts_of(folder)
    try:
        return KINDS[facts["kind"]](folder, facts)
    except PacelineError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"index: {str(folder)!r} cannot be read ({described(error)}); build it again") from None


def opened(given: object) -> Index[Any]:
    """An index that is given as such, or by its folder.

    Raises:
        ConfigError: neither, or as `open_index`.
    """
    if isinstance(given, Index):
        return given
    rule = "be the folder of an index (`paceline retrieval build`), or an index of paceline.retrieval"
    need(isinstance(given, str | Path) and str(given) != "", "index", rule, given)
    return open_index(given)  # type: ignore[arg-type]
