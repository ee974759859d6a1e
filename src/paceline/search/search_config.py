"""The `search` argument: a method's name, or a dict with its options and what a search may spend."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from paceline import registry
from paceline.config import SamplingParams
from paceline.errors import ConfigError
from paceline.retrieval import opened
from paceline.search.base import Search
from paceline.search.running import SearchBudget
from paceline.utils import integer, json_value, need, number, reject_unknown

MEANT: Final = MappingProxyType(
    {
        "num_beams": "beam_width",
        "width": "beam_width",
        "max_tokens": "it is a sampling parameter, of each text; budget_tokens limits a whole search",
        "n": "it is a sampling parameter: how many texts are returned, the best ones",
    }
)
"""Names of others."""


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """How to search.

    Attributes:
        method: a name of `registry.table("searches")`, or "module:Class" of a `Search`. options: of its class.
        budget: of a prompt, keys `budget_tokens` and `budget_seconds`.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    budget: SearchBudget = field(default_factory=SearchBudget)

    @classmethod
    def parse(cls, search: GivenSearch) -> SearchConfig:
        """From a dict, its JSON, or the name of a method; one that is parsed already stays as it is.

        Raises:
            ConfigError: no such method, no such option, or a value outside its range.
        """
        if isinstance(search, SearchConfig):
            return search
        config = cls._read(search)
        config.open()
        return config

    @classmethod
    def of_client(cls, search: Mapping[str, Any] | str, *, programs: bool = False) -> SearchConfig:
        """The same from somebody who may not run code of his own here, nor choose models or files to read.

        Args:
            programs: options may hold programs, which run in the sandbox.
        Raises:
            ConfigError: as `parse`, or an option that is not for clients.
        """
        config, known = cls._read(search), registry.table("searches")
        need(config.method in known, "search", f"name a method, one of {', '.join(sorted(known))}", config.method)
        method = config._class()
        for name, value in config.options.items():
            if name in method.withheld:
                raise ConfigError(f"search option {name!r} is not for requests to a server; leave it out")
            if name in method.programs:
                need(programs, name, "be left out: this server runs no programs", value)
                fine = isinstance(value, list | tuple) and len(value) <= MOST_PROGRAMS
                need(fine, name, f"be a list of at most {MOST_PROGRAMS}", value)
            elif isinstance(value, int) and value > MOST_COUNT:
                raise ConfigError(
                    f"search option {name!r} must be at most {MOST_COUNT} in requests to a server, got {value}"
                )
            elif name not in method.words and not _numbers(value):
                raise ConfigError(
                    f"search option {name!r} must be made of numbers in requests to a server, which may not name "
                    "functions, models or files; leave it out"
                )
        if method.needs_code:
            raise ConfigError(
                f"search method {config.method!r} needs a function or another model, which requests to a server may "
                "not name; give another method, as 'self_consistency'"
            )
        config.open()
        return config

    @classmethod
    def _read(cls, search: Mapping[str, Any] | str) -> SearchConfig:
        if not isinstance(search, str):
            read: Any = search
        else:
            read = json_value("search", search) if search.lstrip().startswith("{") else {"method": search}
        rule = 'be the name of a method, or a dict as {"method": "beam", "beam_width": 4}'
        need(isinstance(read, Mapping) and isinstance(read.get("method"), str), "search", rule, search)
        options = {key: value for key, value in read.items() if key not in ("method", *BUDGET)}
        if "num_beams" in options:
            options["beam_width"] = options.pop("num_beams")
        return cls(read["method"], options, _budget(read))

    def open(self) -> Search:
        """A search of one prompt.

        Raises:
            ConfigError: as `parse`.
        """
        search_class = self._class()
        known = list(inspect.signature(search_class).parameters)
        reject_unknown(f"option of search method {self.method!r}", self.options, [*known, *BUDGET], meant=MEANT)
        try:
            return search_class(**self.options)
        except TypeError as error:
            raise ConfigError(f"search method {self.method!r}: {error}") from None

    def check(self, params: SamplingParams) -> None:
        """Reject parameters that a search, or this one, cannot honour.

        Raises:
            ConfigError: naming the parameter.
        """
        for name in ("logprobs", "prompt_logprobs", "steering"):
            need(getattr(params, name) is None, name, "be left out with search", getattr(params, name))
        method = self._class()
        single = f"be 1 with search method {self.method!r}, which makes one text"
        need(params.n == 1 or not method.one_text, "n", single, params.n)
        method.check(params)

    def _class(self) -> type[Search]:
        search_class = registry.load("searches", self.method)
        registry.check_derives("searches", self.method, search_class, Search)
        return search_class  # type: ignore[no-any-return]


GivenSearch = Mapping[str, Any] | str | SearchConfig
"""A method's name, a dict with its options or its JSON, or what was parsed from them."""


def searches_for(given: GivenSearch | Sequence[GivenSearch], params: Sequence[SamplingParams]) -> list[SearchConfig]:
    """The search of each request with these parameters: one for all, or one each.

    Raises:
        ConfigError: something else, another number of them, or one that does not go with the parameters.
    """
    if isinstance(given, Mapping | str | SearchConfig):
        configs = [SearchConfig.parse(given)] * len(params)
    else:
        rule = f"be one for all or one per prompt ({len(params)})"
        need(isinstance(given, Sequence) and len(given) == len(params), "search", rule, given)
        configs = [SearchConfig.parse(one) for one in given]
    for config, one in zip(configs, params, strict=True):
        config.check(one)
    return configs


GivenRetrieval = Mapping[str, Any] | str | Path
"""The folder of an index, a dict with `index` and options of the method that uses it, or its JSON."""


def retrieval_search(given: GivenRetrieval) -> SearchConfig:
    """The search that writes with what an index finds: `knn_lm` with a store of tokens, `ralm` with passages, unless
    `method` names another.

    Raises:
        ConfigError: as `SearchConfig.parse`, or no such index.
    """
    read: Any = {"index": given} if isinstance(given, Path) else given
    if isinstance(read, str):
        read = json_value("retrieval", read) if read.lstrip().startswith("{") else {"index": read}
    rule = 'be the folder of an index, or a dict as {"index": FOLDER, "interval": 4}'
    need(isinstance(read, Mapping) and read.get("index") is not None, "retrieval", rule, given)
    kind = opened(read["index"]).kind
    return SearchConfig.parse({"method": "knn_lm" if kind == "knn" else "ralm", **read})


def retrievals_for(
    given: GivenRetrieval | Sequence[GivenRetrieval], params: Sequence[SamplingParams]
) -> list[SearchConfig]:
    """The search of each request with these parameters: one for all, or one each.

    Raises:
        ConfigError: as `retrieval_search`, another number of them, or one that does not go with the parameters.
    """
    if isinstance(given, Mapping | str | Path):
        return searches_for(retrieval_search(given), params)
    rule = f"be one for all or one per prompt ({len(params)})"
    need(isinstance(given, Sequence) and len(given) == len(params), "retrieval", rule, given)
    return searches_for([retrieval_search(one) for one in given], params)


BUDGET: Final = ("budget_tokens", "budget_seconds")

MOST_COUNT: Final = 1024
"""Of a client's whole numbers: none keeps others waiting for a million rounds."""

MOST_PROGRAMS: Final = 64
"""Programs, or tests, of a client's search."""


def _numbers(value: object) -> bool:
    """Whether a value is made of numbers, True, False and None."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(map(_numbers, value))
    return value is None or isinstance(value, bool | int | float)


def _budget(options: Mapping[str, Any]) -> SearchBudget:
    tokens, seconds = (options.get(name) for name in BUDGET)
    if tokens is not None:
        integer("budget_tokens", tokens, 1)
    if seconds is not None:
        number("budget_seconds", seconds, 0.0, 1e9, "be above 0", open_low=True)
    return SearchBudget(tokens, seconds)
