"""Puts an engine together from a speculative_config: drafters, verifiers, controller.

What a method needs and the runner lacks is rejected here, before anything runs.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from paceline import registry
from paceline.assembly.controller_setup import (
    INFERRED,
    OF_THE_DRAFT,
    OTHER_METHODS,
    auto_table,
    build_controller,
    check_controller,
    limited,
    options_of,
    split_options,
    with_published_number,
)
from paceline.assembly.learning import learning
from paceline.checkpoints import Tokenizer, prediction_module
from paceline.config import RULE_OPTIONS, SHARED, SpeculativeConfig, reject_unknown_keys
from paceline.drafters import Drafter, DrafterArgs, Models
from paceline.drafters.common import tables_of
from paceline.engine import DrafterSet, EngineParts
from paceline.errors import (
    CapabilityError,
    CheckpointError,
    ConfigError,
    DrafterError,
    NumericsError,
    PacelineError,
    UnsupportedModelError,
)
from paceline.models import Runner, has_ability
from paceline.models.heads import head_methods, is_source_draft
from paceline.sampling import KeyedDraws
from paceline.tree import TokenTree, Verdict
from paceline.utils import check_types, described, need, shortened
from paceline.verifiers import GreedyVerifier, RecursiveRejection, Verifier

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("paceline")

_TURN: Final = {"table": 0, "fusion": 2}
"""By kind of drafter, when it drafts: those that cost nothing first, those that look at the others' trees last."""


def build_parts(
    runner: Runner,
    config: SpeculativeConfig | None,
    *,
    load: Callable[[str], Runner],
    default_draft: str | None = None,
    tokenizer: Tokenizer | None = None,
    models: Models | None = None,
    memory: int | None = None,
) -> tuple[list[str], EngineParts]:
    """The methods by name, and drafters, verifiers and controller for one target.

    Args:
        config: None drafts nothing, as does any where the runner lacks `drafts`, with a warning in the log.
        load: opens a draft model by folder or hub id.
        tokenizer: of the target, for drafters with tables on disk.
        models: opens models in other ways.
        memory: most bytes of speculation (`EngineConfig.speculative_memory_bytes`).
        default_draft: draft model of "auto" and of "draft_model" without one, where the target has one that ships with
            it.
    Raises:
        ConfigError: an unknown method or option, a head as a draft model, or tables of two drafters in one file.
        CapabilityError: a method that this runner cannot serve.
    """
    config, options = split_options(_served(config, runner))
    own_module = config.method == "auto" and _has_module(runner, models)
    found = single_methods(config, default_draft, own_module=own_module)
    methods = sorted(found, key=lambda method: _TURN.get(_kind(method), 1))
    sampled = _verifier(config)
    sampled.prepare(runner, tokenizer)
    if config.acceptance_method == "relaxed_thinking":
        _check_marks(config, runner.info.vocab_size)
    if config.acceptance_method == "lexical_units":
        names = [str(method.method) for method in methods]
        rule = "be 'lud' with acceptance_method 'lexical_units', whose drafts are the model's own"
        need(names == ["lud"], "method", rule, names)

    def make(index: int, method: SpeculativeConfig) -> Drafter:
        return _drafter(method, index, runner, load, tokenizer, models=models, chains_only=sampled.chains_only)

    drafters = [make(index, method) for index, method in enumerate(methods)]
    tables_of(drafters)  # rejects two for one file
    _check_rule(config.acceptance_method, sampled, methods, drafters)
    if config.learn is not None:
        drafters = learning(drafters, methods, make, learn=config.learn, runner=runner, models=models)
    chains_only = sampled.chains_only or not runner.capabilities.trees
    drafter_set = DrafterSet(drafters, runner.info.vocab_size, chains_only=chains_only)
    beside = None if drafter_set.adding is None else drafters[drafter_set.adding].rows_beside
    controller = build_controller(config, options, runner, drafters, drafter_set.names, beside=beside)
    parts = EngineParts(
        runner=runner,
        drafter_set=drafter_set,
        controller=limited(controller, runner, drafters, memory),
        greedy=sampled.at_zero() or GreedyVerifier(),
        sampled=sampled,
    )
    return [str(method.method) for method in methods], parts


def _served(config: SpeculativeConfig | None, runner: Runner) -> SpeculativeConfig:
    """What this runner makes of a configuration: methods without a number draft as published, None drafts nothing."""
    if config is not None and not runner.capabilities.drafts:
        logger.warning("%s: drafts are refused, since it takes every token in a pass of its own", runner.info.name)
        config = None
    return SpeculativeConfig(method=()) if config is None else with_published_number(config, say=True)


def _verifier(config: SpeculativeConfig) -> Verifier:
    """The rule above temperature 0.

    Raises:
        ConfigError: an unknown name, or what is no such rule.
    """
    name = config.acceptance_method
    need(name != "greedy", "acceptance_method", "name a rule for sampling; temperature 0 always has 'greedy'", name)
    factory = registry.load("verifiers", name)
    registry.check_derives("verifiers", name, factory, Verifier)
    verifier: Verifier = factory(**{key: getattr(config, key) for key, rule in RULE_OPTIONS.items() if rule == name})
    return verifier


def _check_marks(config: SpeculativeConfig, vocab_size: int) -> None:
    """Reject marks of thoughts that the model cannot write: nothing would ever be relaxed.

    Raises:
        ConfigError: an id beyond the vocabulary, or one for both.
    """
    for key in ("begin_thinking_phase_token", "end_thinking_phase_token"):
        need(getattr(config, key) < vocab_size, key, f"be below the vocabulary's {vocab_size}", getattr(config, key))
    begin, end = config.begin_thinking_phase_token, config.end_thinking_phase_token
    need(begin != end, "end_thinking_phase_token", "be another token than begin_thinking_phase_token", end)


def _check_rule(
    rule: str, verifier: Verifier, methods: Sequence[SpeculativeConfig], drafters: Sequence[Drafter]
) -> None:
    """Reject drafters whose drafts a rule cannot judge.

    Raises:
        ConfigError: there is such a one.
    """
    if rule == "block_verification":
        _reject_branches(methods, drafters)
    if verifier.chains_only:
        _reject_trees(rule, methods, drafters)


def _reject_trees(rule: str, methods: Sequence[SpeculativeConfig], drafters: Sequence[Drafter]) -> None:
    """Reject what drafts trees beside a rule that is defined on chains.

    Raises:
        ConfigError: a method that is nothing without trees, or one that is set to grow them.
    """
    for method, drafter in zip(methods, drafters, strict=True):
        name = str(method.method)
        grows = f" by its tree_policy {drafter.tree_policy!r}" if drafter.tree_policy != "chain" else ""
        if grows or "trees" in registry.lookup("drafters", name).needs:
            raise ConfigError(
                f"acceptance_method {rule!r} judges chains, but method {name!r} drafts trees{grows}; choose a method "
                "that drafts chains, or acceptance_method 'rejection_sampler'"
            )


def _reject_branches(methods: Sequence[SpeculativeConfig], drafters: Sequence[Drafter]) -> None:
    """Block verification judges each drawn chain as a whole: nothing may be drafted beside a drawn token.

    Raises:
        ConfigError: a drafter that draws trees, or several drafters one of which draws.
    """
    why = "block_verification judges each chain of drawn drafts as a whole"
    way = "or use acceptance_method 'rejection_sampler'"
    drawing = [
        (str(method.method), drafter) for method, drafter in zip(methods, drafters, strict=True) if drafter.draws_tokens
    ]
    for name, drafter in drawing:
        if drafter.tree_policy != "chain":
            raise ConfigError(
                f"{why}, but method {name!r} draws trees (tree_policy {drafter.tree_policy!r}); leave tree_policy and "
                f"tree_width out, {way}"
            )
    if drawing and len(methods) > 1:
        names = ", ".join(repr(str(method.method)) for method in methods)
        raise ConfigError(
            f"{why}, but the methods {names} join their drafts and {drawing[0][0]!r} draws; name it alone, {way}"
        )


def check_methods(config: SpeculativeConfig | None) -> None:
    """Reject unknown methods, options and policies before a model is loaded for them.

    Raises:
        ConfigError: a name or an option that is not known, with near matches.
    """
    if config is None:
        return
    config, _ = split_options(with_published_number(config))
    for method in single_methods(config, None):
        _options(method, registry.load("drafters", str(method.method)))
    _verifier(config)
    if config.controller is not None:
        check_controller(config.controller)


def _has_module(runner: Runner, models: Models | None) -> bool:
    """Whether the target's own files hold a module for multi-token prediction that can run here."""
    if models is None or not all(has_ability(runner, name) for name in ("taps", "head", "input_embeddings")):
        return False
    try:
        return prediction_module(models.folder) is not None
    except (CheckpointError, UnsupportedModelError) as error:
        logger.debug("%s: auto drafts without a module of its own: %s", runner.info.name, error)
        return False


def single_methods(
    config: SpeculativeConfig, default_draft: str | None, *, own_module: bool = False
) -> list[SpeculativeConfig]:
    """The single methods that a configuration names.

    "auto" means every one that needs nothing more than what is at hand: a draft model that is named, or else the
    target's own module for multi-token prediction.

    Args:
        own_module: there is such a module.
    """
    if not isinstance(config.method, str):
        for key in config.options:
            raise ConfigError(
                f"{key!r} is given beside a list of methods; put it into the entry of its method, as a dict"
            )
        return _each_once([_with_draft(method, default_draft) for method in _with_model(config.method, config.model)])
    if config.method in INFERRED and config.model is not None:
        _reject_head(str(config.method), config.model)
    if config.method != "auto":
        return [_with_draft(config, default_draft)]
    draft = config.model or default_draft
    tables = {key: value for key, value in config.options.items() if key not in OF_THE_DRAFT}
    drafting = {key: value for key, value in config.options.items() if key in OF_THE_DRAFT}
    for key, value in drafting.items():
        need(draft is not None, key, "be given together with a draft model", value)
    methods = [
        SpeculativeConfig(method="prediction"),
        SpeculativeConfig(method="grammar"),
        SpeculativeConfig(method=auto_table(tables), options=tables),
    ]
    if draft:
        drafts = "encdec_draft" if is_source_draft(draft) else "draft_model"
        methods.append(_with_draft(SpeculativeConfig(method=drafts, model=draft, options=drafting), None))
    elif own_module:
        methods.append(SpeculativeConfig(method="mtp"))
    return methods


def _reject_head(method: str, model: str) -> None:
    """Reject a trained head where a draft model belongs.

    Raises:
        ConfigError: the folder holds one.
    """
    if heads := head_methods(model):
        how = {"method": heads[0], "model": model} | ({"controller": "auto"} if method == "auto" else {})
        others = f" (or {', '.join(map(repr, heads[1:]))})" if heads[1:] else ""
        raise ConfigError(
            f"model {model!r} of method {method!r} is a trained head and no draft model; write {how}{others}"
        )


def _each_once(methods: list[SpeculativeConfig]) -> list[SpeculativeConfig]:
    """The same methods; one that is there a second time, with the same options, drafts the same tokens again.

    Raises:
        ConfigError: there is such a one.
    """
    for i, method in enumerate(methods):
        rule = (
            f"be a list without repetition: {method.method!r} would draft the same twice; leave it out once, or vary "
            f"its options"
        )
        need(method not in methods[:i], "method", rule, [str(each.method) for each in methods])
    return methods


def _with_model(methods: Sequence[SpeculativeConfig], model: str | None) -> list[SpeculativeConfig]:
    """Give the model that is named beside a list of methods to those of them that take one and name none.

    Raises:
        ConfigError: there are none.
    """
    if model is None:
        return list(methods)
    takers = [method.model is not None or "model" in options_of(str(method.method)) for method in methods]
    names = ", ".join(repr(str(method.method)) for method in methods)
    need(any(takers), "model", f"be left out, since {names} use no draft model", model)
    return [
        replace(method, model=model) if takes and method.model is None else method
        for method, takes in zip(methods, takers, strict=True)
    ]


def _with_draft(config: SpeculativeConfig, draft: str | None) -> SpeculativeConfig:
    """The same method, with the target's own draft model where it needs one and names none; some of vLLM's options ask
    for a method of their own.
    """
    options, own = dict(config.options), str(config.method)
    for key, method in OTHER_METHODS.get(own, {}).items():
        if config.method == own and key in options:
            other = options.pop(key)
            need(isinstance(other, bool), key, "be True or False", other)
            config = replace(config, method=method if other else own, options=options)
    return (
        replace(config, model=draft) if config.method in ("draft_model", "pearl") and config.model is None else config
    )


def _kind(config: SpeculativeConfig) -> str:
    return registry.lookup("drafters", str(config.method)).kind


def _drafter(
    config: SpeculativeConfig,
    index: int,
    runner: Runner,
    load: Callable[[str], Runner],
    tokenizer: Tokenizer | None,
    *,
    models: Models | None = None,
    chains_only: bool = False,
) -> Drafter:
    name = str(config.method)
    entry, factory = registry.lookup("drafters", name), registry.load("drafters", name)
    options = _options(config, factory)
    for lack in entry.needs:
        if lack in registry.ABILITIES and not has_ability(runner, lack):
            raise _unable(name, lack, runner)
    args = DrafterArgs(
        vocab_size=runner.info.vocab_size,
        index=index,
        max_context=runner.info.max_context,
        target=runner,
        load_runner=load,
        models=models,
        nested=lambda config: _nested(config, name, runner, load, tokenizer, models=models, chains_only=chains_only),
        nested_for=lambda config, model: _nested(config, name, model, load, tokenizer, models=models),
        judge=ExactJudge(),
        chains_only=chains_only,
        fingerprint=str if tokenizer is None else tokenizer.fingerprint,
    )
    try:
        drafter: Drafter = factory(args, **options)
    except PacelineError:
        raise
    except Exception as error:  # a value of a wrong type, or a third party's constructor
        check_types(factory, options)
        raise ConfigError(f"speculative_config of {name!r}: {described(error)}") from error
    check_types(factory, options)
    if not drafter.name:
        raise DrafterError(f"{name!r} is not a drafter: it has no name; see paceline.drafters.base.Drafter")
    _check_taps(drafter, name, runner)
    for model in drafter.runners() if drafter.takes_back else ():
        if not model.capabilities.truncate:
            raise _unable(name, "truncate", model)
    return drafter


def _nested(
    config: Any,
    outer: str,
    runner: Runner,
    load: Callable[[str], Runner],
    tokenizer: Tokenizer | None,
    *,
    models: Models | None,
    chains_only: bool = False,
) -> Drafter:
    """A drafter that another one is built on.

    Raises:
        ConfigError: no single method.
    """
    config = {"method": config} if isinstance(config, str) else config
    parsed = SpeculativeConfig.parse(config) if isinstance(config, Mapping) else None
    if parsed is None or not isinstance(parsed.method, str) or parsed.method == "auto":
        raise ConfigError(f"the config inside method {outer!r} must be a dict with one method, got {shortened(config)}")
    for key in SHARED:
        need(key not in config, key, f"be given beside method {outer!r}, not in the config inside it", config.get(key))
    need(parsed.num_speculative_tokens != 0, f"num_speculative_tokens inside method {outer!r}", "be 1 or more", 0)
    return _drafter(parsed, 0, runner, load, tokenizer, models=models, chains_only=chains_only)


def _check_taps(drafter: Drafter, name: str, runner: Runner) -> None:
    """Reject taps that the runner cannot give."""
    taps, last = drafter.taps, runner.info.num_layers
    whole = isinstance(taps, Sequence) and all(isinstance(layer, int) and not isinstance(layer, bool) for layer in taps)
    if not whole or not all(-1 <= layer <= last for layer in taps):
        raise DrafterError(f"taps of drafter {name!r} must be a tuple of layers in -1..{last}, got {shortened(taps)}")
    for key in ("tap_window", "tap_reread"):
        window = getattr(drafter, key)
        if window is not None and not (isinstance(window, int) and not isinstance(window, bool) and window >= 0):
            raise DrafterError(f"{key} of drafter {name!r} must be None or 0 or more tokens, got {shortened(window)}")
    if taps and not runner.capabilities.taps:
        raise _unable(name, "taps", runner)


def _unable(method: str, capability: str, runner: Runner) -> CapabilityError:
    return CapabilityError(
        f"method {method!r} needs a model that {registry.ABILITIES[capability]}; {runner.info.name} is not one as it "
        "runs here; choose another method"
    )


def _options(config: SpeculativeConfig, factory: Any) -> dict[str, Any]:
    """The keyword arguments of a drafter's constructor."""
    name = str(config.method)
    registry.check_derives("drafters", name, factory, Drafter)
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name!r} is not a drafter class ({error}); give module:Class") from error
    options = dict(config.options)
    if config.model is not None:
        options["model"] = config.model
    if config.num_speculative_tokens is not None:
        options["num_speculative_tokens"] = config.num_speculative_tokens
    known = [key for key in parameters if key not in ("args", "self")]
    optional = {"num_speculative_tokens"} - set(known)
    options = {key: value for key, value in options.items() if key not in optional}
    reject_unknown_keys(f"speculative_config of {name!r}", options, known, SpeculativeConfig.general_keys())
    return options


class ExactJudge:
    """Verdicts of a model between draft and target on a tree; see `drafters.base.Judge`."""

    def __init__(self) -> None:
        self._greedy, self._sampled = GreedyVerifier(), RecursiveRejection()

    def verify(
        self, trees: Sequence[TokenTree], rows: Sequence[torch.Tensor], seeds: Sequence[int | None]
    ) -> list[Verdict]:
        """See `drafters.base.Judge.verify`."""
        return [self._one(*each) for each in zip(trees, rows, seeds, strict=True)]

    def _one(self, tree: TokenTree, rows_nv: torch.Tensor, seed: int | None) -> Verdict:
        if seed is None:
            (verdict,) = self._greedy.verify([tree], [rows_nv])
        else:
            (verdict,) = self._sampled.verify([tree], [rows_nv], [KeyedDraws(seed, 0)])
        if isinstance(verdict, NumericsError):
            raise DrafterError(f"the logits of the intermediate model are not valid: {verdict}")
        return verdict
