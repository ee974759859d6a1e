"""Makes the method that a `kv_selection` names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from paceline.assembly.named_methods import open_named
from paceline.models import KVSelection

logger = logging.getLogger("paceline")


def open_kv_selection(given: Mapping[str, Any] | str | None, *, exactness: str) -> KVSelection | None:
    """The method with its options; None where none is named.

    Args:
        given: "method", a name of `registry.table("kv_selections")` or "module:Class" of a `KVSelection`, and its
            options.
        exactness: of `EngineConfig`.
    Raises:
        ConfigError: strict mode, no such method, no such option, or a value that it does not take.
    """
    if given is None:
        return None
    found = open_named("kv_selection", given, KVSelection, exactness=exactness)  # type: ignore[type-abstract]  # a base
    logger.warning("kv_selection %r attends to a part of long texts: outputs are approximate", found.name)
    return found
