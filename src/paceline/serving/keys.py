"""Who may use the server: keys of clients and of administrators, and what each key may ask for."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, Final

from paceline.config import KeyLimits, ServerConfig
from paceline.errors import ConfigError
from paceline.utils import is_settings, read_settings, read_text, reject_unknown

ADMIN: Final = "admin"
"""It owns what the administrator's keys ask for."""

NO_LIMITS: Final = KeyLimits()


def read_keys(config: ServerConfig) -> tuple[dict[str, KeyLimits], tuple[str, ...]]:
    """Return the keys of clients, with what each may ask for, and those of administrators: of the configuration, of its
    files, and of PACELINE_API_KEY and PACELINE_ADMIN_KEY.

    Raises:
        ConfigError: a file that cannot be read or holds something else, or a key that is of both kinds.
    """
    file = config.api_key_file
    limited = _limited_keys(file) if file is not None and is_settings(file) else {}
    lines = None if limited else file
    clients = dict.fromkeys(_keys("api_key", config.api_key, lines), NO_LIMITS) | limited
    admins = _keys("admin_key", config.admin_key, config.admin_key_file)
    if set(clients) & set(admins):
        raise ConfigError("admin_key must be another one than each api_key")
    return clients, admins


def limits_by_owner(config: ServerConfig) -> dict[str, KeyLimits]:
    """Return what owners of keys may ask for, those alone who have limits of their own.

    Raises:
        ConfigError: see `read_keys`.
    """
    return {owner_of_key(key): limits for key, limits in read_keys(config)[0].items() if limits != NO_LIMITS}


def owner_of_key(key: str) -> str:
    """Return the name under which a client's key owns its requests. It stays when keys are added or change places: what
    is stored for it outlives the server.
    """
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def _limited_keys(file: str) -> dict[str, KeyLimits]:
    """Return the keys of a file of settings, with what each may ask for.

    Raises:
        ConfigError: the file holds something else. The error names keys by their number, and quotes none.
    """
    settings = read_settings("api_key_file", file)
    entries = settings.get("keys") if isinstance(settings, dict) else None
    if not isinstance(entries, list) or not entries or settings.keys() != {"keys"}:
        raise ConfigError(f"api_key_file {file} must hold one list, `keys`, with an object for each key")
    limited: dict[str, KeyLimits] = {}
    for number, entry in enumerate(entries, 1):
        key, limits = _limited_key(f"api_key_file {file}, key {number}", entry)
        if key in limited:
            raise ConfigError(f"api_key_file {file} must hold each key once, got key {number} again")
        limited[key] = limits
    return limited


def _limited_key(place: str, entry: Any) -> tuple[str, KeyLimits]:
    """Return one key of a file of settings."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{place} must be an object with `key`, and with its limits")
    reject_unknown(place, map(str, entry), ["key", *(field.name for field in fields(KeyLimits))])
    key = entry.get("key")
    if not isinstance(key, str) or not key.strip():
        raise ConfigError(f"{place} must have a text as `key`")
    try:
        return key.strip(), KeyLimits(**{name: value for name, value in entry.items() if name != "key"})
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _keys(name: str, keys: Sequence[str], file: str | None) -> tuple[str, ...]:
    lines = [] if file is None else read_text(f"{name}_file", file).splitlines()
    candidates = [*keys, *lines, os.environ.get(f"PACELINE_{name.upper()}", "")]
    return tuple(dict.fromkeys(key.strip() for key in candidates if key.strip()))


class Keys:
    """Says who may use the server.

    Args:
        keys, admins: of clients and of administrators; none at all lets everybody in.
    """

    def __init__(self, keys: Iterable[str], admins: Iterable[str] = ()) -> None:
        owners = [*((key, owner_of_key(key)) for key in keys), *((key, ADMIN) for key in admins)]
        self._owners = [(hashlib.sha256(key.encode()).digest(), owner) for key, owner in owners]

    def __bool__(self) -> bool:
        return bool(self._owners)

    def owner(self, authorization: str) -> str | None:
        """Return who owns the key in a header `Bearer KEY`, found in constant time; None for a wrong one."""
        scheme, _, key = authorization.partition(" ")
        digest, name = hashlib.sha256(key.strip().encode("latin-1")).digest(), None  # the bytes that were sent
        for known, owner in self._owners:
            if hmac.compare_digest(digest, known):
                name = owner
        return name if scheme.lower() == "bearer" else None
