"""Methods put together: a name and options become the parts that decode one canvas.

    {"method": "threshold", "confidence_threshold": 0.8, "block_length": 32, "cache": "dual"}

A name stands for a composition; every kind of part in it can be replaced by name, and every other key is an option of
the parts chosen, which are its keyword arguments. An option that no part takes is rejected.
"""

from __future__ import annotations

import inspect
import math
import pkgutil
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Any

from paceline.diffusion.base import Setting, TokenText, Transition
from paceline.diffusion.canvas import Canvas
from paceline.diffusion.catalogue import METHODS, PARTS, Method
from paceline.diffusion.loop import CanvasMethod
from paceline.diffusion.options import RANGES, canonical
from paceline.errors import ConfigError
from paceline.models import Denoiser
from paceline.utils import check_types, need, number

RULES = ("correction", "score", "commit", "edit", "check", "stop")
OPTIONAL = ("correction", "edit", "check", "stop")
KINDS = ("schedule", *RULES, "cache", "verification")
STRATEGIES = {
    "low_confidence_static": "static",
    "low_confidence_dynamic": "threshold",
    "sequential": "leftmost",
    "low_confidence": "static",
    "maskgit_plus": "static",
    "topk_margin": "margin",
    "origin": "dream_origin",
    "joint_threshold": "llada2.1_s",
}
"""Names that LLaDA, Dream, LMDeploy and SGLang use -> ours."""
CONSTRAINTS = frozenset({"grammar", "regex", "json_schema"})
"""Options that ask for a constraint by themselves."""


@cache
def part(kind: str, name: str) -> Any:
    """The class of a part.

    Raises:
        ConfigError: an unknown name, with near matches.
    """
    table = PARTS[kind]
    if name not in table:
        raise ConfigError(f"unknown {kind} {name!r}; {_near(name, table)}")
    return pkgutil.resolve_name(f"paceline.diffusion.{table[name]}")


@cache
def options_of(factory: Any) -> Mapping[str, inspect.Parameter]:
    """Keyword arguments of a part."""
    parameters = inspect.signature(factory).parameters.values()
    return MappingProxyType({p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY})


class ConfiguredMethod:
    """A method with its options, checked once; `parts` makes it for a canvas.

    Args:
        config: see the module; keys may begin with `dllm_`.
    Raises:
        ConfigError: an unknown method, part or option, or parts that do not go together.
    """

    def __init__(self, config: Mapping[str, Any] | str | None = None) -> None:
        options: dict[str, Any] = self._renamed({"method": config} if isinstance(config, str) else dict(config or {}))
        name, temperature = options.pop("method", "threshold"), options.pop("temperature", 0.0)
        need(isinstance(name, str), "method", "be the name of a diffusion method", name)
        number("temperature", temperature, 0.0, math.inf, "be 0 or more")
        self.name, self.temperature = STRATEGIES.get(name, name), float(temperature)
        if self.name not in METHODS:
            raise ConfigError(f"unknown diffusion method {self.name!r}; {_near(self.name, METHODS)}")
        self.method: Method = METHODS[self.name]
        if CONSTRAINTS & options.keys():
            options.setdefault("check", "grammar")
        self.names = self._names({kind: options.pop(kind, getattr(self.method, kind)) for kind in KINDS})
        modifiers = options.pop("modifiers", self.method.modifiers)
        listed = isinstance(modifiers, list | tuple) and all(isinstance(name, str) for name in modifiers)
        need(listed, "modifiers", f"be a list of {', '.join(PARTS['modifier'])}", modifiers)
        self.modifiers = tuple(modifiers)
        self.options = {**self.method.options, **options}
        self._check_options()
        both = "edit" in self.names and "check" in self.names
        rule = "be left out where a constraint is checked (an edit could break what was checked)"
        need(not both, "edit", rule, self.names.get("edit"))

    @staticmethod
    def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
        """The same options under our names."""
        renamed: dict[str, Any] = {}
        for key, value in config.items():
            need(isinstance(key, str), "each key of a diffusion_config", "be a string", key)
            ours = canonical(key)
            rule = f"be given once: {key!r} is another name of {ours!r}"
            need(ours not in renamed, "diffusion_config", rule, dict(config))
            renamed[ours] = value
        return renamed

    @staticmethod
    def _names(chosen: Mapping[str, Any]) -> dict[str, str]:
        """The parts by kind, without those that a method may lack and does."""
        for kind, name in chosen.items():
            fine = isinstance(name, str) or (name is None and kind in OPTIONAL)
            need(fine, kind, f"be one of {', '.join(PARTS[kind])}" + ", or None" * (kind in OPTIONAL), name)
        return {kind: name for kind, name in chosen.items() if name is not None}

    def _check_options(self) -> None:
        factories = [part(kind, name) for kind, name in self.names.items()] + [
            part("modifier", m) for m in self.modifiers
        ]
        known = {name for factory in factories for name in options_of(factory)}
        for key in self.options:
            if key not in known:
                raise ConfigError(f"diffusion method {self.name!r} has no option {key!r}; {_near(key, sorted(known))}")
        for factory in factories:
            check_types(factory, self.options, RANGES)
        self._check_unread(factories)

    def _check_unread(self, factories: list[Any]) -> None:
        """Options that no part reads with the values of the others."""
        for key, value in self.options.items():
            takers = [factory for factory in factories if key in options_of(factory)]
            rules = [factory.unread(self.options).get(key) for factory in takers]
            need(None in rules or value == options_of(takers[0])[key].default, key, str(rules[0]), value)

    def _check_idle(self, denoiser: Denoiser) -> None:
        """Options that no part reads with this model."""
        drafts = "blocks_ahead" in options_of(part("verification", self.names["verification"]))
        ahead = self.options.get("blocks_ahead", 0)
        rule = (
            "be left out: this model has no blocks of its own, and only drafts (verification freedave) reach into "
            "others"
        )
        need(not ahead or drafts or denoiser.attention == "block", "blocks_ahead", rule, ahead)

    def parts(
        self, denoiser: Denoiser, canvas: Canvas, *, seed: int = 0, token_text: TokenText | None = None
    ) -> CanvasMethod:
        """The method, made for one canvas.

        Args:
            token_text: what each token writes, needed where the text is constrained.
        Raises:
            ConfigError: options that do not fit the model or the canvas, a verification of rules with a memory.
        """
        need(canvas.length <= denoiser.max_length, "prompt and text", f"fit {denoiser.max_length} slots", canvas.length)
        self._check_idle(denoiser)
        setting = Setting(canvas, denoiser, seed, temperature=self.temperature, token_text=token_text)
        setting.schedule = self._make("schedule", self.names["schedule"], setting)
        rules = {kind: self._make(kind, name, setting) for kind, name in self.names.items() if kind in RULES}
        modifiers = [self._make("modifier", name, setting) for name in self.modifiers]
        setting.transition = Transition(schedule=setting.schedule, modifiers=modifiers, **rules)
        policy = setting.cache = self._make("cache", self.names["cache"], setting)
        verification = self._make("verification", self.names["verification"], setting)
        parts = setting.transition, policy, verification, verification.layout, setting.store
        return CanvasMethod(*parts, self.temperature, seed, denoiser.needs_left)

    def _make(self, kind: str, name: str, setting: Setting) -> Any:
        factory = part(kind, name)
        return factory(setting, **{key: value for key, value in self.options.items() if key in options_of(factory)})


def _near(name: str, known: Any) -> str:
    near = get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known) or 'none'}"
