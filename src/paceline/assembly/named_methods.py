"""Makes what an argument names that changes what the model computes: a method of a registry, with its options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from paceline import registry
from paceline.config import parse_named
from paceline.errors import ConfigError
from paceline.utils import check_types, need, reject_unknown

T = TypeVar("T")


def open_named(option: str, given: Mapping[str, Any] | str, base: type[T], *, exactness: str) -> T:
    """The method with its options.

    Args:
        option: name of the argument; its registry has the plural.
        given: "method", a name of the registry or "module:Class" of a `base`, and its options.
        exactness: of `EngineConfig`.
    Raises:
        ConfigError: strict mode, no such method, no such option, or a value that it does not take.
    """
    options = dict(parse_named(option, given))
    method, family = str(options.pop("method")), f"{option}s"
    made = registry.load(family, method)
    registry.check_derives(family, method, made, base)
    need(exactness != "strict", option, "be left out with exactness='strict': it is approximate", method)
    known = inspect.signature(made).parameters
    reject_unknown(f"option of {option} {method!r}", options, list(known))
    lacking = [name for name, one in known.items() if one.default is one.empty and name not in options]
    if lacking:
        raise ConfigError(f"{option} {method!r} needs {lacking[0]!r}; give it beside the method")
    check_types(made, options)
    found: T = made(**options)
    return found
