"""Files of settings that a user writes: YAML, JSON or TOML, by the end of their names."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from paceline.errors import ConfigError
from paceline.utils.validation import keys_once


def read_text(name: str, file: str) -> str:
    """Read the text of a file that field `name` gives.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} must be a text file that can be read, got {file!r} ({error})") from None


def is_settings(file: str) -> bool:
    """Tell whether a file's name ends as those of settings do: .yaml, .yml, .json or .toml."""
    return Path(file).suffix.lower() in READERS


def read_settings(name: str, file: str) -> Any:
    """Read the settings of a file that field `name` gives; one whose name ends otherwise is read as YAML.

    Raises:
        ConfigError: it cannot be read, is no such file, or has a key twice. The error quotes nothing of the file, which
            may hold secrets.
    """
    text = read_text(name, file)
    try:
        return READERS.get(Path(file).suffix.lower(), _yaml)(f"{name} {file}", text)
    except yaml.MarkedYAMLError as error:
        place = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise ConfigError(f"{name} must be YAML, got {file!r} ({error.problem}{place})") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        kind = Path(file).suffix.upper().removeprefix(".") or "YAML"
        raise ConfigError(f"{name} must be {kind}, got {file!r} ({str(error).splitlines()[0]})") from None


class _OnceLoader(yaml.SafeLoader):  # type: ignore[misc]  # which has no types
    """Reads YAML; a key that a mapping has twice is an error, since YAML would drop the first."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} occurs twice", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _yaml(_: str, text: str) -> Any:
    return yaml.load(text, _OnceLoader)  # which is a safe one


def _json(name: str, text: str) -> Any:
    return json.loads(text, object_pairs_hook=keys_once(name))


def _toml(_: str, text: str) -> Any:
    return tomllib.loads(text)


READERS: Final[Mapping[str, Callable[[str, str], Any]]] = {
    ".yaml": _yaml, ".yml": _yaml, ".json": _json, ".toml": _toml
}  # fmt: skip
"""End of a name -> reader of the text."""
