"""Makes the method that a `skipping` names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from paceline.assembly.named_methods import open_named
from paceline.models import PassSkipping

logger = logging.getLogger("paceline")


def open_skipping(given: Mapping[str, Any] | str | None, *, exactness: str) -> PassSkipping | None:
    """The method with its options; None where none is named.

    Args:
        given: "method", a name of `registry.table("skippings")` or "module:Class" of a `PassSkipping`, and its options.
        exactness: of `EngineConfig`.
    Raises:
        ConfigError: strict mode, no such method, no such option, or a value that it does not take.
    """
    if given is None:
        return None
    found = open_named("skipping", given, PassSkipping, exactness=exactness)  # type: ignore[type-abstract]  # a base
    logger.warning("skipping %r leaves out a part of the model's work: outputs are approximate", found.name)
    return found
