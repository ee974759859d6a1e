"""Files that give the flags of a command: `paceline serve --config FILE`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import typer

from paceline.errors import ConfigError
from paceline.utils import read_settings, reject_unknown, shortened


def use_config(context: typer.Context, file: str | None) -> str | None:
    """Let the flags of a command that are neither typed nor in the environment have the values of a file; the callback
    of an eager flag.

    Raises:
        ConfigError: see `read_config`.
    """
    if file is not None:
        context.default_map = read_config(file, context.command.params)
    return file


def read_config(file: str, parameters: Iterable[Any]) -> dict[str, Any]:
    """Read values of flags.

    Args:
        file: YAML (or JSON or TOML, as its name ends) with names of flags, whose dashes may be underscores.
        parameters: of the command, as typer has them.
    Returns:
        Name of a parameter -> its value, as texts where it is no switch.
    Raises:
        ConfigError: the file cannot be read, a flag that is not known, or a value that none can have.
    """
    settings = read_settings("--config", file)
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"--config {file} must hold names of flags with their values")
    flags = _flags(parameters)
    named: dict[str, Any] = {}
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name in named:
            raise ConfigError(f"--config {file} must hold each flag once, got {name} again")
        named[name] = value
    reject_unknown(f"--config {file}", named, sorted(flags))
    return {flags[name].name: _value(f"{name} in --config {file}", value, flags[name]) for name, value in named.items()}


def _flags(parameters: Iterable[Any]) -> Mapping[str, Any]:
    """Name of a flag with underscores -> its parameter; without `config` itself."""
    return {
        flag.removeprefix("--").replace("-", "_"): parameter
        for parameter in parameters
        for flag in parameter.opts
        if flag.startswith("--") and flag != "--config"
    }


def _value(name: str, value: Any, parameter: Any) -> Any:
    """A value as it would be typed."""
    if value is None:
        raise ConfigError(f'{name} has no value; leave it out, or write "null" with quotes where that is meant')
    if parameter.is_flag:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, got {shortened(value)}")
        return value
    if parameter.multiple:
        return [_text(name, one) for one in (value if isinstance(value, list) else [value])]
    return json.dumps(value) if isinstance(value, dict | list) else _text(name, value)


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{name} must be a text or a number, got {shortened(value)}")
    return str(value)
