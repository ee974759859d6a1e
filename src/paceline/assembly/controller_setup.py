"""Builds the controller that a speculative_config names, tells its options from the drafters', and keeps it within the
memory that speculation may take.

Options of both are given side by side in speculative_config. A key belongs to whoever has an option of that name;
beside a list of methods it can only be the controller's, inside an entry of the list only the drafter's. A name that
both have is rejected where it is ambiguous.

Of memory (`EngineConfig.speculative_memory_bytes`), weights do not count: they are read once and checked when they are
loaded. Nor do tables learned from text, which have limits of their own.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from paceline import registry
from paceline.config import SpeculativeConfig, near, reject_unknown_keys
from paceline.controllers import Controller, Footprint, LimitedController
from paceline.controllers.auto import CostKey, Costs, CostStore, MemoryKey
from paceline.controllers.policies import FixedController
from paceline.drafters import Drafter
from paceline.engine import Probe
from paceline.errors import ConfigError, PacelineError
from paceline.models import MappedRunner, Runner, cache_bytes, save_memory, slot_bytes
from paceline.utils import check_types, described, need, user_cache

logger = logging.getLogger("paceline")

GIVEN: Final = ("self", "num_speculative_tokens", "disable_by_batch_size", "drafters", "cost_model", "memory")
"""Parameters of a controller that the engine fills in."""

PARTS: Final = ("name", "max_nodes", "plan", "select", "observe", "forget", "explain")
"""Of every controller."""

METHODS: Final = ("plan", "select", "observe", "forget")
"""Of every class of controllers."""


OTHER_TOKENIZER: Final = "use_heterogeneous_vocab"
"""vLLM's option of draft models whose tokenizer is not the target's (`assembly.build` makes it method "tli")."""

PARALLEL: Final = "parallel_drafting"
"""vLLM's option of draft models and heads that draft all tokens in one pass (`assembly.build` makes it method "pard" or
"p_eagle").
"""

OTHER_METHODS: Final[Mapping[str, Mapping[str, str]]] = {
    "draft_model": {OTHER_TOKENIZER: "tli", PARALLEL: "pard"},
    "eagle3": {PARALLEL: "p_eagle"},
}
"""By method, these options -> the method that they ask for."""

OF_THE_DRAFT: Final = (
    *OTHER_METHODS["draft_model"],
    "draft_vocab_size",
    "draft_vocab_file",
    "draft_device",
    "draft_sample_method",
)
"""Options beside "auto" that are its draft model's."""

INFERRED: Final = ("auto", "draft_model")
"""Methods that a configuration gets where it names none."""

AUTO_LIMITS: Final = {"max_nodes", "max_depth"}
"""Options of the automatic controller: beside a method without a controller they ask for it."""

ACCEPTANCE_HEAD: Final = "acceptance_head"
"""Option of a draft model that asks for the controller which reads the head, where none is named."""

FORETOLD: Final = "specdec_pp"
"""That controller."""

AUTO_TABLES = ("suffix", "ngram")
"""Tables that `auto` may read, one at a time: the first is right more often where requests resemble each other."""


def split_options(config: SpeculativeConfig) -> tuple[SpeculativeConfig, dict[str, Any]]:
    """The configuration without the controller's own options, and these.

    Raises:
        ConfigError: an unknown policy; an option that the drafter and the controller both have; beside a controller
            named by the user, an option that neither has.
    """
    if not config.options:
        return config, {}
    name = _name(config, drafting=True)
    own = [key for key in _parameters(name, registry.load("controllers", name)) if key not in GIVEN]
    theirs = _drafter_options(config)
    for key in config.options:
        if key in own and key in theirs:
            raise ConfigError(
                f"both method {config.method!r} and controller {name!r} have an option {key!r}; for the drafter write "
                f'"method": [{{"method": {config.method!r}, {key!r}: ...}}], and {key!r} beside that list for the '
                f"controller"
            )
    _reject_unknown(config, theirs, own)
    rest = {key: value for key, value in config.options.items() if key not in own}
    return replace(config, options=rest), {key: value for key, value in config.options.items() if key in own}


def with_published_number(config: SpeculativeConfig, *, say: bool = False) -> SpeculativeConfig:
    """A method named alone, without a number of tokens or a controller, drafts as its paper or code does.

    What that takes may be a list of methods, of which the named one gets the options that were given.

    Args:
        say: log it.
    """
    if not isinstance(config.method, str) or config.method == "auto":
        return config
    if (
        config.num_speculative_tokens is not None
        or config.controller is not None
        or AUTO_LIMITS & config.options.keys()
        or _has_head(config)
    ):
        return config
    published = registry.lookup("drafters", config.method).published
    if say:
        logger.info(
            'method %r drafts as published (%s), whatever that costs here; with "controller": "auto" it drafts as much '
            "as pays",
            config.method,
            ", ".join(f"{key} {value!r}" for key, value in published.items()),
        )
    if "method" in published:
        methods = published["method"]
        entries = [{**entry, **(config.options if entry["method"] == config.method else {})} for entry in methods]
        listed = SpeculativeConfig.parse({**published, "method": entries})
        assert listed is not None
        return replace(config, method=listed.method, num_speculative_tokens=listed.num_speculative_tokens, options={})
    known = SpeculativeConfig.general_keys()
    options = {key: value for key, value in published.items() if key not in known}
    return replace(
        config,
        **{key: value for key, value in published.items() if key in known},
        options=options | dict(config.options),
    )


def _reject_unknown(config: SpeculativeConfig, theirs: Sequence[str], own: Sequence[str]) -> None:
    """Reject options that neither the drafter (`theirs`) nor the controller (`own`) has. Beside a list of methods, and
    for a method without a controller of the user's, that are the misspelt ones: of the rest the drafters' builder says
    whose they may be.

    Raises:
        ConfigError: there is such a one, or "auto" got options of two methods.
    """
    general, kind, single = SpeculativeConfig.general_keys(), "speculative_config", isinstance(config.method, str)
    unknown = [key for key in config.options if key not in own and key not in theirs]
    if not single:
        drafters = [key for one in config.method for key in options_of(str(one.method))]  # type: ignore[union-attr]  # a tuple
        unknown = [key for key in unknown if key not in drafters]
    if not single or (config.controller is None and config.method != "auto"):
        unknown = [key for key in unknown if near(key, [*general, *own, *theirs])]
    if single and config.method not in INFERRED:
        kind += f" of {config.method!r}"
    if config.controller is not None:
        kind += f" with controller {config.controller!r}"
    reject_unknown_keys(kind, unknown, [*theirs, *own], general)
    rest = {key for key in config.options if key not in own and key not in OF_THE_DRAFT}
    if config.method == "auto" and not rest <= set(options_of(auto_table(dict.fromkeys(rest)))):
        raise ConfigError(
            f"no single method of 'auto' has all of the options {', '.join(sorted(rest))}; name the method"
        )


def check_controller(name: str) -> Any:
    """What makes the controller of this name.

    Raises:
        ConfigError: no such name, or no class of controllers.
    """
    factory = registry.load("controllers", name)
    registry.check_class("controllers", name, factory, METHODS)
    return factory


def build_controller(
    config: SpeculativeConfig,
    options: Mapping[str, Any],
    runner: Runner,
    drafters: Sequence[Drafter],
    names: Sequence[str],
    *,
    beside: Callable[[int], int] | None = None,
) -> Controller:
    """The policy by name; "fixed" where the user fixed the number of tokens, else "auto".

    Args:
        options: its own, from `split_options`.
        names: of the drafters, in their order, as the outputs have them.
        beside: as of `Costs`.
    Raises:
        ConfigError: no controller by that name, an option with a value outside its range, no number of tokens where it
            needs one, a head that it does not read, or none that it reads.
    """
    name = _name(config, drafting=bool(names))
    factory = check_controller(name)
    arguments = _limits(name, config, options, names) | _measures(name, config, runner, names, beside)
    arguments |= options
    try:
        controller: Controller = factory(**arguments)
    except PacelineError:
        raise
    except Exception as error:  # a value of a wrong type, or a third party's constructor
        check_types(factory, options)
        raise ConfigError(f"controller {name!r}: {described(error)}") from error
    check_types(factory, options)
    lacking = [part for part in PARTS if not hasattr(controller, part)]
    if lacking:
        raise ConfigError(
            f"{name!r} is not a controller: it has no {', '.join(lacking)}; see paceline.controllers.base"
        )
    controller.drafters = len(drafters)
    _check_head(name, controller, drafters)
    return FixedController(0) if config.num_speculative_tokens == 0 else controller


def _check_head(name: str, controller: Controller, drafters: Sequence[Drafter]) -> None:
    """Reject a head that foretells acceptance to a controller that does not read it, and the reverse.

    Raises:
        ConfigError: it is so.
    """
    reads = isinstance(controller, Controller) and controller.reads_acceptance
    foretells = any(drafter.foretells for drafter in drafters)
    if foretells and not reads and name in registry.CONTROLLERS:
        raise ConfigError(
            f"controller {name!r} does not read an acceptance head; leave {ACCEPTANCE_HEAD} out, or use controller "
            f"{FORETOLD!r}"
        )
    if reads and drafters and not foretells:
        raise ConfigError(
            f"controller {name!r} reads an acceptance head, and no method has one; train one with `paceline train "
            f"specdec_pp` and name it as {ACCEPTANCE_HEAD} of draft_model, or use controller 'online_acceptance'"
        )


def _limits(name: str, config: SpeculativeConfig, options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """What a configuration says of how much is drafted, as far as the controller takes it."""
    known, number = _parameters(name, registry.load("controllers", name)), config.num_speculative_tokens
    filled: dict[str, Any] = {"disable_by_batch_size": config.disable_by_batch_size}
    if "num_speculative_tokens" in known:
        optional = known["num_speculative_tokens"].default is not inspect.Parameter.empty
        need(
            optional or number is not None or not names,
            "num_speculative_tokens",
            f"be given with controller {name!r}",
            None,
        )
        filled["num_speculative_tokens"] = number if optional else number or 0
    if "max_nodes" in known and number:
        filled["max_nodes"], most = number, options.get("max_nodes")
        need(
            not isinstance(most, int) or most <= number,
            "max_nodes",
            f"be at most num_speculative_tokens, {number}",
            most,
        )
    return filled


def _measures(
    name: str,
    config: SpeculativeConfig,
    runner: Runner,
    names: Sequence[str],
    beside: Callable[[int], int] | None,
) -> dict[str, Any]:
    """The drafters' names, measured times and kept acceptance, as far as the controller takes them."""
    known, filled = _parameters(name, registry.load("controllers", name)), dict[str, Any]()
    if "drafters" in known:
        filled["drafters"] = names
    if "cost_model" in known:
        filled["cost_model"] = Costs(CostStore(CostKey.of(runner.info)), probe=Probe(runner), beside=beside)
    if "memory" in known:
        drafts = f"{[*names]} {config.method!r} {config.model!r} {config.options!r}"
        key = MemoryKey(CostKey.of(runner.info), runner.info.name, drafts)
        filled["memory"] = CostStore(key, user_cache("acceptance"))
    return filled


def _name(config: SpeculativeConfig, *, drafting: bool) -> str:
    """The policy that the user named, or the one that goes with the rest."""
    if config.controller is not None:
        return config.controller
    if drafting and _has_head(config):
        return FORETOLD
    return "fixed" if config.num_speculative_tokens is not None or not drafting else "auto"


def _has_head(config: SpeculativeConfig) -> bool:
    """Whether a method has a head that foretells acceptance."""
    methods = [config] if isinstance(config.method, str) else config.method
    return any(method.options.get(ACCEPTANCE_HEAD) is not None for method in methods)


def _parameters(name: str, factory: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name!r} is not a controller class ({error}); give module:Class") from error


def _drafter_options(config: SpeculativeConfig) -> list[str]:
    """Options that the drafter of a single method has; "auto" passes them to its draft model or the table that knows
    them, beside a list there are none.
    """
    if not isinstance(config.method, str):
        return []
    if config.method == "auto":
        return [*OF_THE_DRAFT, *(key for name in AUTO_TABLES for key in options_of(name))]
    return [*options_of(config.method), *OTHER_METHODS.get(config.method, ())]


def auto_table(options: Mapping[str, Any]) -> str:
    """Which table `auto` reads: the first that knows all of these options."""
    return next((name for name in AUTO_TABLES if set(options) <= set(options_of(name))), AUTO_TABLES[0])


def options_of(name: str) -> list[str]:
    """Keyword options of a drafter's constructor."""
    factory = registry.load("drafters", name)
    try:
        return [
            key
            for key in inspect.signature(factory).parameters
            if key not in ("args", "self", "num_speculative_tokens")
        ]
    except (TypeError, ValueError):  # `assembly.build` says what is wrong with it
        return []


SHORTEST = 16
"""Tokens of a text for which at least one drafted token must fit."""

ROW = 4
"""Bytes of a number in the rows that sampling makes."""


def runners_of(drafter: Drafter) -> list[Runner]:
    """The models that a drafter runs beside the target; one with renamed ids for what it wraps."""
    return [runner.inner if isinstance(runner, MappedRunner) else runner for runner in drafter.runners()]


def footprint_of(runner: Runner, drafters: Sequence[Drafter]) -> Footprint:
    """What a drafted token takes, where the caches of draft models take single blocks (`save_memory`).

    Raises:
        ConfigError: caches that are not counted.
    """
    slot, drafts = slot_bytes(runner), [draft for drafter in drafters for draft in runners_of(drafter)]
    rows = sum(drafter.row_bytes for drafter in drafters)
    for model in (runner, *drafts):
        if (slot_bytes(runner) if model is runner else cache_bytes(model, 1)) is None:
            raise ConfigError(
                f"speculative_memory_bytes is not available with {model.info.name}: its caches are not counted"
            )
    vocab = runner.info.vocab_size
    draws = 2 * ROW * vocab if drafts or rows else ROW * vocab
    return Footprint(
        slot or 0,
        vocab * runner.info.dtype.itemsize + rows,
        draws,
        lambda tokens: (
            sum(cache_bytes(draft, tokens) or 0 for draft in drafts)
            + sum(drafter.held_bytes(tokens) for drafter in drafters)
        ),
        2 if any(drafter.works_ahead for drafter in drafters) else 1,
        lambda inputs: max((drafter.rows_beside(inputs) for drafter in drafters if drafter.adds_rows), default=0),
    )


def limited(controller: Controller, runner: Runner, drafters: Sequence[Drafter], limit: int | None) -> Controller:
    """The controller, kept within the limit.

    Raises:
        ConfigError: not even one drafted token of one sequence fits, or caches that are not counted.
    """
    if limit is None or not drafters:
        return controller
    footprint = footprint_of(runner, drafters)
    for drafter in drafters:
        for draft in runners_of(drafter):
            save_memory(draft)
    least = footprint.sequence(SHORTEST, 1, 0.0)
    if limit < least:
        names = ", ".join(drafter.name for drafter in drafters)
        raise ConfigError(
            f"speculative_memory_bytes must be at least {least}, which one drafted token of one sequence takes with "
            f"{names}, got {limit}; raise it or set speculative_config to None"
        )
    return LimitedController(controller, footprint, limit)
