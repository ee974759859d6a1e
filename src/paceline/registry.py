"""The registries: names to classes, imported when first used.

A name, or "module:Class", leads to a class and to what is declared of it (`catalogue`). Entry points of the groups
`paceline.drafters`, `paceline.verifiers`, `paceline.controllers` and `paceline.trainers` add methods of other packages;
a name clash is an error, never an overwrite. `temporary` adds what is needed for a while only, such as measuring
devices.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from paceline.catalogue import (
    CONTROLLERS,
    DRAFTERS,
    FAMILIES,
    KV_SELECTIONS,
    LEARNED_HEADS,
    ROUTING,
    STRICT_NOTE,
    TRAINERS,
    VERIFIERS,
    Entry,
    Exactness,
)
from paceline.errors import ConfigError
from paceline.utils import resolve_name

__all__ = [
    "ABILITIES",
    "CONTROLLERS",
    "DRAFTERS",
    "FAMILIES",
    "KV_SELECTIONS",
    "LEARNED_HEADS",
    "ROUTING",
    "STRICT_NOTE",
    "TRAINERS",
    "VERIFIERS",
    "Entry",
    "Exactness",
    "check_class",
    "check_derives",
    "installed",
    "load",
    "lookup",
    "table",
    "temporary",
]

ABILITIES: Final = {
    "trees": "scores several continuations at once",
    "taps": "gives the states behind its layers",
    "layer_subsets": "can run without some of its layers",
    "early_exit": "can run its first layers alone",
    "head": "can predict from the states of any layer",
    "input_embeddings": "takes embeddings in place of tokens",
    "added_rows": "scores rows of a drafter's own beside a tree",
    "fork": "can copy a running sequence",
    "blocks": "keeps its caches in blocks",
    "last_keys": "shows the keys and values of its last layer",
    "truncate": "can take back tokens that it has read",
    "drafts": "scores several tokens in less than a pass for each",
}
"""What a model must be able to do for a method, by the names of `models.has_ability`."""

_temporary: dict[str, dict[str, Entry]] = {}


@cache
def installed(family: str) -> tuple[EntryPoint, ...]:
    """What other packages add to a family; they are looked up once."""
    return tuple(entry_points(group=f"paceline.{family}"))


@contextmanager
def temporary(family: str, entries: Mapping[str, Entry]) -> Iterator[None]:
    """Register methods of a family while the block runs; also a decorator. Blocks may be nested."""
    before = _temporary.get(family, {})
    _temporary[family] = {**before, **entries}
    try:
        yield
    finally:
        _temporary[family] = before


def table(family: str) -> dict[str, Entry]:
    """Name -> entry of a family, entry points of installed packages and temporary entries included.

    Raises:
        ConfigError: two packages give one name to different classes.
    """
    entries = {**({"trainers": TRAINERS} | dict(FAMILIES))[family], **_temporary.get(family, {})}
    for point in installed(family):
        other = entries.setdefault(point.name, Entry(point.value, "plugin"))
        if other.target != point.value:
            raise ConfigError(
                f"two {family} are called {point.name!r}: {other.target} and {point.value}; uninstall one"
            )
    return entries


def lookup(family: str, name: str) -> Entry:
    """The entry of `name`, which may also be "module:Class".

    Raises:
        ConfigError: an unknown name, with near matches.
    """
    entries = table(family)
    if name in entries:
        return entries[name]
    if ":" in name:
        return Entry(name, "plugin")
    if family == "drafters" and name in LEARNED_HEADS:
        known = ", ".join(other for other, entry in entries.items() if entry.kind == "head")
        raise ConfigError(
            f"drafter {name!r}: heads of this kind are not available; use those of {known}, "
            'or "auto", or another one of `paceline methods`'
        )
    near = get_close_matches(name.lower(), entries, n=3, cutoff=0.7)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(sorted(entries))}"
    raise ConfigError(f"unknown {_kind(family)} {name!r}; {hint}")


def _kind(family: str) -> str:
    """What a member of a family is called."""
    special = {
        "searches": "search method", "steerings": "steering method", "kv_selections": "kv_selection method",
        "skippings": "skipping method",
    }  # fmt: skip
    return special.get(family, family.removesuffix("s"))


def load(family: str, name: str) -> Any:
    """The class behind `name`, imported now; the module of "module:Class" may lie in the current folder.

    Raises:
        ConfigError: the module or the class cannot be imported.
    """
    entry = lookup(family, name)
    try:
        return resolve_name(name) if entry.target == name else pkgutil.resolve_name(entry.target)
    except Exception as error:  # a third party's module may raise anything
        where = "" if entry.target == name else f" from {entry.target!r}"
        raise ConfigError(f"cannot import {_kind(family)} {name!r}{where}: {error}") from error


def check_derives(family: str, name: str, factory: Any, base: type) -> None:
    """Reject what makes no members of a family before it is called.

    Otherwise anything that "module:Class" names would run.

    Args:
        base: of every member.
    Raises:
        ConfigError: no class that derives from it, or one without a name, or that leaves a method of it abstract.
    """
    made = factory.func if isinstance(factory, partial) else factory
    kind, where = _kind(family), f"{base.__module__}.{base.__name__}"
    if not (isinstance(made, type) and issubclass(made, base)):
        raise ConfigError(
            f"{name!r} is not a {kind} class: {made!r:.200} does not derive from {where}; give module:Class of one "
            "that does"
        )
    if lacking := sorted(getattr(made, "__abstractmethods__", ())):
        raise ConfigError(f"{name!r} is not a {kind} class: {made!r:.200} has no {', '.join(lacking)}; see {where}")
    if not isinstance(getattr(made, "name", None), str):
        raise ConfigError(f"{name!r} is not a {kind} class: {made!r:.200} has no name; see {where}")


def check_class(family: str, name: str, factory: Any, methods: Sequence[str]) -> None:
    """Reject what makes no members of a family before it is called.

    Otherwise anything that "module:Class" names would run.

    Args:
        methods: of every member.
    Raises:
        ConfigError: not callable, or without those methods.
    """
    made = factory.func if isinstance(factory, partial) else factory
    lacking = [part for part in methods if not callable(getattr(made, part, None))]
    if not callable(factory) or (lacking and not hasattr(made, "__getattr__")):
        kind = _kind(family)
        raise ConfigError(
            f"{name!r} is not a {kind} class: {made!r:.200} has no {', '.join(lacking)}; give module:Class of a class "
            f"with the methods of paceline.{family}.base.{kind.capitalize()}"
        )
