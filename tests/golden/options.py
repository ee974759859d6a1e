"""Arguments of the public classes, and the options of every method by name."""

from __future__ import annotations

import inspect
from typing import Any

from paceline import LLM, SamplingParams, SpeculativeConfig, registry
from paceline.config import EngineConfig
from paceline.diffusion import METHODS


def signature(made: Any) -> list[str]:
    """One line for each parameter: name, type, default."""
    return [str(parameter) for parameter in inspect.signature(made).parameters.values()]


def found(golden: Any) -> dict[str, Any]:
    public = {one.__name__: signature(one) for one in (LLM, SamplingParams, SpeculativeConfig, EngineConfig)}
    public |= {
        f"LLM.{name}": signature(call) for name, call in inspect.getmembers(LLM, callable) if not name.startswith("_")
    }
    methods = {
        family: {name: signature(registry.load(family, name)) for name in table}
        for family, table in registry.FAMILIES.items()
    }
    return {"public": public, **methods, "diffusion": {name: str(method) for name, method in METHODS.items()}}
