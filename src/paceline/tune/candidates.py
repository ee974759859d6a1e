"""Settings that tuning tries: every method in the registry that can run on a model, each with a small grid of its
options.

A method that is registered later is tried without a change here; an option of its constructor gets a grid by a line in
OPTIONS. Since the registry grows, at most MOST settings are tried: those that come first where all kinds of settings
take turns, the order of the registry within each.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from paceline import registry

MAX_CANDIDATES: Final = 24
"""Settings that a search starts with."""

TOKENS: Final = (5, 3, 8)
"""num_speculative_tokens of the fixed controller, the likeliest first."""

OPTIONS: Final[Mapping[str, Sequence[Mapping[str, Any]]]] = {
    "prompt_lookup_max": (
        {"prompt_lookup_min": 2, "prompt_lookup_max": 3},
        {"prompt_lookup_min": 2, "prompt_lookup_max": 8},
    ),
    "tree_width": ({"tree_width": 2}, {"tree_width": 4}),
}
"""Parameter of a drafter's constructor -> what is tried besides its default."""

USUAL: Final = set(registry.DRAFTERS["draft_model"].needs)
"""What a draft model needs that is tried wherever one is given; methods that need special ones are not."""

TREE: Final = "speculative_token_tree"

UNSAID: Final = ("method", "model", "num_speculative_tokens", TREE)
"""Keys whose values the words of a setting have in another way."""

MEMORY: Final = "memory for "
"""How needs begin that the loader checks itself: such a method is tried, and rejected where there is too little."""

GUESS_NOTHING: Final = {
    "prediction": (
        "it follows what a request predicts, and prompts predict nothing; a profile reads predictions all the same"
    ),
    "grammar": "it follows what constrains a request, and prompts constrain nothing; a profile reads it all the same",
}
"""Methods that no set of prompts can measure -> why."""

CHEAP: Final = "table"
"""Kind of drafters that are merged with those of the other kinds."""

AUTO: Final = "auto"
"""What decodes without a profile, so that a search knows it too."""

SHARED: Final = ("num_speculative_tokens", "disable_by_batch_size")
"""What is given beside a list of methods, not in its entries."""


@dataclass(frozen=True, slots=True)
class Arm:
    """Names one setting that the search races: a configuration and a number of threads.

    Attributes:
        config: speculative_config; None is plain decoding.
        threads: of PyTorch.
    """

    config: Mapping[str, Any] | None
    threads: int

    @property
    def drafts(self) -> tuple[str, ...]:
        """List the draft models that it names."""
        entries = [] if self.config is None else [self.config, *_entries(self.config)]
        return tuple(dict.fromkeys(str(entry["model"]) for entry in entries if "model" in entry))

    @property
    def fixed(self) -> bool:
        """Whether the number of tokens is fixed."""
        return self.config is not None and "num_speculative_tokens" in self.config

    def words(self, default_threads: int) -> str:
        """For people: methods, options, controller, and the threads where they are not the default."""
        if self.config is None:
            text = "off"
        else:
            entries = _entries(self.config) or [self.config]
            text = " + ".join(_entry_words(entry) for entry in entries)
            tokens = self.config.get("num_speculative_tokens")
            if self.config.get("method") != AUTO:
                text += ", controller auto" if tokens is None else f", {tokens} token{'s' if tokens != 1 else ''}"
        number = self.threads
        return text if number == default_threads else f"{text}, {number} thread{'s' if number > 1 else ''}"


@dataclass(frozen=True, slots=True)
class Candidates:
    """Settings in the order of their promise, method -> why it is not among them, and the settings beyond MOST."""

    settings: Sequence[Arm]
    skipped: Mapping[str, str]
    beyond: Sequence[Arm] = ()


def find_candidates(abilities: Collection[str], *, drafts: Sequence[str], threads: Sequence[int]) -> Candidates:
    """All settings to try; plain decoding with the first number of threads is the baseline and not listed.

    Args:
        abilities: of the model's runner (`models.abilities_of`).
        drafts: folders or hub ids of draft models.
        threads: numbers to try, the default first.
    """
    singles, skipped = _singles(abilities, drafts)
    lists = _lists(singles)
    default, *others = threads
    first = [*lists[:1], *singles, *lists[1:]]
    fixed = [{**config, "num_speculative_tokens": tokens} for tokens in TOKENS for config in first]
    options = [
        {**config, **more} for config in singles for more in _grid(str(config["method"]), trees="trees" in abilities)
    ]
    elsewhere = [Arm(config, number) for number in others for config in (None, *first[:1])]
    turns = [lists, singles[::2], singles[1::2], fixed]
    kinds = [[Arm(config, default) for config in kind] for kind in (auto_configs(drafts), *turns)]
    kinds.append([*elsewhere, *(Arm(config, default) for config in options)])
    settings = [setting for turn in zip_longest(*kinds) for setting in turn if setting is not None]
    return Candidates(settings[:MAX_CANDIDATES], skipped, settings[MAX_CANDIDATES:])


def with_request_drafters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same methods beside the drafters that follow a request's prediction and its constraint.

    They do nothing where a request has none.
    """
    if config.get("method") == AUTO:  # has it
        return dict(config)
    entries = _entries(config) or [{key: value for key, value in config.items() if key not in SHARED}]
    known = {entry.get("method") for entry in entries}
    methods = [*({"method": name} for name in GUESS_NOTHING if name not in known), *entries]
    if len(methods) == len(entries):
        return dict(config)
    return {"method": methods, **{key: value for key, value in config.items() if key in SHARED}}


def thread_counts(now: int, physical: int, device: str) -> list[int]:
    """The numbers of threads worth a try: the present one, the physical cores if fewer, and one."""
    if device != "cpu":
        return [now]
    return list(dict.fromkeys([now, *(number for number in (physical, 1) if 0 < number < now)]))


def auto_configs(drafts: Sequence[str]) -> list[dict[str, Any]]:
    """List the default configuration with each draft model."""
    return [{"method": AUTO, "model": draft} for draft in drafts] or [{"method": AUTO}]


def _singles(abilities: Collection[str], drafts: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """One configuration per method, per draft model where it takes one; and why others cannot run."""
    configs: list[dict[str, Any]] = []
    skipped = {}
    for name, entry in registry.table("drafters").items():
        lacking = [need for need in entry.needs if need in registry.ABILITIES and need not in abilities]
        others = [need for need in entry.needs if need not in registry.ABILITIES and not need.startswith(MEMORY)]
        with_model = "model" in _parameters(name)
        if name in GUESS_NOTHING:
            skipped[name] = GUESS_NOTHING[name]
        elif lacking:
            skipped[name] = f"this model's runner cannot do {', '.join(lacking)}"
        elif set(others) - (USUAL if with_model else set()):
            skipped[name] = f"no search can find {others[0]}; `paceline bench -s` measures with yours"
        elif with_model and drafts:
            configs += [{"method": name, "model": draft} for draft in drafts]
        elif with_model:
            skipped[name] = "it drafts with a second model; name one with --draft-model"
        else:
            configs.append({"method": name})
    return configs, skipped


def _lists(singles: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each cheap method merged with each that runs a model, those that keep a copy of the target last."""
    entries = {str(config["method"]): registry.lookup("drafters", str(config["method"])) for config in singles}
    cheap = [config for config in singles if entries[str(config["method"])].kind == CHEAP]
    dear = [config for config in singles if config not in cheap]
    dear.sort(key=lambda config: any(need.startswith(MEMORY) for need in entries[str(config["method"])].needs))
    return [{"method": [dict(a), dict(b)]} for b in dear for a in cheap]


def _grid(name: str, *, trees: bool) -> list[Mapping[str, Any]]:
    known = _parameters(name)
    return [
        more
        for option, grid in OPTIONS.items()
        if option in known and (trees or option != "tree_width")
        for more in grid
    ]


def _parameters(name: str) -> Mapping[str, Any]:
    return inspect.signature(registry.load("drafters", name)).parameters


def _entries(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The entries of a list of methods; [] where there is one method."""
    method = config.get("method")
    return [] if isinstance(method, str) or method is None else list(method)


def _entry_words(entry: Mapping[str, Any]) -> str:
    options = [f"{key} {value}" for key, value in entry.items() if key not in UNSAID]
    options += ["a static tree"] if TREE in entry else []
    if "model" in entry:
        options.insert(0, Path(str(entry["model"])).name)
    return str(entry["method"]) + (f" ({', '.join(options)})" if options else "")
