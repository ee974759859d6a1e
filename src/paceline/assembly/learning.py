"""Lets drafters learn from the requests that they draft for, where `speculative_config` says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import registry
from paceline.checkpoints import resolve
from paceline.config import LearnConfig, SpeculativeConfig
from paceline.drafters.learning import LearningDrafter
from paceline.errors import ConfigError
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.drafters import Drafter, Models
    from paceline.models import Runner

Make = Callable[[int, SpeculativeConfig], "Drafter"]
"""(index, method) -> its drafter."""


def learning(
    drafters: Sequence[Drafter],
    methods: Sequence[SpeculativeConfig],
    make: Make,
    *,
    learn: LearnConfig,
    runner: Runner,
    models: Models | None,
) -> list[Drafter]:
    """The same drafters, where those that can learn do.

    Args:
        methods: of the drafters. make: makes one of them anew. runner: the target's.
    Raises:
        ConfigError: none of them can learn; or what one of them drafts with cannot be trained.
    """
    names = [str(method.method) for method in methods]
    if not any(drafter.learns for drafter in drafters):
        can = ", ".join(name for name in registry.DRAFTERS if registry.load("drafters", name).learns)
        raise ConfigError(
            f"learn must be left out: {' and '.join(names) or 'plain decoding'} cannot learn from requests; drafters "
            f"that can are {can}"
        )
    need(runner.info.source == "", "learn", "be left out for a model with an encoder", runner.info.name)

    def rebuilt(index: int, folder: Path) -> Drafter:
        made = make(index, replace(methods[index], model=str(folder)))
        if models is not None:
            models.forget(str(folder))
        return made

    found = list(drafters)
    for index, drafter in enumerate(drafters):
        if drafter.learns:
            folder, rebuild = resolve(str(methods[index].model)), partial(rebuilt, index)
            found[index] = LearningDrafter(drafter, folder, rebuild, index=index, target=runner, learn=learn)
    return found


def reject_unsteady(config: SpeculativeConfig | None) -> None:
    """Reject learning where tokens depend on what is drafted, for strict mode.

    Raises:
        ConfigError: drafts are drawn for requests with a seed too, which would get others from each version.
    """
    if config is None or config.learn is None:
        return
    methods = (config, *(config.method if isinstance(config.method, tuple) else ()))
    for method in methods:
        if method.options.get("draft_sample_method") == "probabilistic":
            raise ConfigError(
                "learn must be left out in strict mode beside draft_sample_method 'probabilistic': a seed would give "
                "other tokens with each version of the drafter; leave draft_sample_method out"
            )
