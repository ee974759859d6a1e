"""Makes the method that a `kv_selection` names."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from paceline import registry
from paceline.config import parse_kv_selection
from paceline.errors import ConfigError
from paceline.models import KVSelection
from paceline.utils import check_types, need, reject_unknown

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
    options = dict(parse_kv_selection(given))
    method = str(options.pop("method"))
    made = registry.load("kv_selections", method)
    registry.check_derives("kv_selections", method, made, KVSelection)
    need(exactness != "strict", "kv_selection", "be left out with exactness='strict': it is approximate", method)
    known = inspect.signature(made).parameters
    reject_unknown(f"option of kv_selection {method!r}", options, list(known))
    lacking = [name for name, one in known.items() if one.default is one.empty and name not in options]
    if lacking:
        raise ConfigError(f"kv_selection {method!r} needs {lacking[0]!r}; give it beside the method")
    check_types(made, options)
    found: KVSelection = made(**options)
    logger.warning("kv_selection %r attends to a part of long texts: outputs are approximate", method)
    return found
