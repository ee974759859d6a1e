"""The static tree of one drafter: its shape by what the target takes at each depth and rank, its size by what is
fastest on this machine.

Prompts are decoded with large trees, which are counted: how often is the candidate of a rank right where its parent is?
The best tree of every size is made of the nodes most likely reached (`tree.best_shapes`); what a pass of so many rows
and a draft of so many levels take says which size promises the most tokens per second. That one and a few smaller and
larger ones are then raced as `tune` races settings, `auto` among them, since that is what a profile would replace.

Sources: the greedy choice of nodes by calibrated accuracy in Medusa (arXiv:2401.10774); Hydra (arXiv:2402.05109), which
takes the size with the best measured throughput of those that the choice passes through.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from paceline import registry
from paceline.assembly import limited
from paceline.config import SamplingParams, SpeculativeConfig
from paceline.controllers import Outcome, Plan, Signal
from paceline.controllers.auto import Costs
from paceline.controllers.policies import CHOICE_STEPS, EXPLORATION_STEPS, PPDController
from paceline.engine import Probe
from paceline.errors import ConfigError
from paceline.tree import PRIOR, RankAcceptance, Shape, StaticTreeSize, best_shapes, expected_rates
from paceline.tune.candidates import TREE, Arm, Candidates, auto_configs
from paceline.tune.tuning import APART, Progress, Tuning, groups_of, tune
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.config import GivenConfig
    from paceline.llm import LLM
    from paceline.tree import TokenTree

MOST_NODES: Final = 63
"""Of a tree: with its root as many rows as Medusa's."""

MOST_LEVELS: Final = 8

USUAL_WIDTH: Final = 3
"""Nodes of a level of a usual tree."""

CALIBRATION: Final = 0.3
"""Share of the budget that is for counting."""

SIZES: Final = (1.0, 0.5, 2.0, 0.25, 4.0)
"""Raced trees, as shares of the nodes that promise most."""

PLAIN_STEPS: Final = 16
"""One step in so many is plain while it counts, so that the time of such a step is known."""

DECIDED: Final = (
    "tree_policy", "tree_width", "tree_threshold", "speculative_token_tree", "num_speculative_tokens", "controller",
    "disable_by_batch_size", "draft_sample_method",
)  # fmt: skip
"""Keys of a speculative_config that follow from the tree."""


class Calibration(PPDController):
    """Drafts the largest tree in most steps, of the ranks that promise most so far, and forgets nothing.

    Some steps have trees of a usual size and of every depth, by which drafting is timed, and some steps none.

    Args:
        cost: measured times.
    Attributes:
        deepest: levels of the deepest tree so far. counted: trees so far.
        drafting: levels -> seconds that usual trees of so many took to draft.
    """

    name = "calibration"

    def __init__(self, cost: Costs) -> None:
        super().__init__(cost, ["draft"], max_nodes=MOST_NODES, max_depth=MOST_LEVELS)
        self.acceptance = RankAcceptance(decay=1.0)
        self.deepest = self.counted = 0
        self.drafting: dict[int, list[float]] = {}

    def plan(self, signals: Sequence[Signal]) -> Plan:
        """The largest tree for everybody, or none."""
        plan = super().plan(signals)
        return Plan.nothing(len(signals)) if self.steps % PLAIN_STEPS == PLAIN_STEPS // 2 + 1 else plan

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """All of them; how deep the drafter gets is seen here."""
        self.counted += sum(len(tree) > 0 for tree in trees)
        self.deepest = max([self.deepest, *(tree.max_depth for tree in trees)])
        return super().select(trees)

    def observe(self, outcome: Outcome) -> None:
        """Count, and keep the time of drafting a usual tree."""
        super().observe(outcome)
        levels = max((tree.max_depth for tree in outcome.trees), default=0)
        if levels and self.steps % EXPLORATION_STEPS == 0:
            self.drafting.setdefault(levels, []).append(outcome.times.draft[0])

    def costs(self, size: int, context: int) -> tuple[list[float], list[float]]:
        """Passes are timed anew, since small ones between large ones are slower than they will be. Drafting is by the
        medians of usual trees, which the first drafts, slow ones, do not move.
        """
        self.cost.curves.clear()
        table, drafting = super().costs(size, context)
        if self.drafting:
            levels = sorted(self.drafting)
            seconds = np.maximum.accumulate([np.median(self.drafting[level]) for level in levels])
            drafting[1:] = np.interp(range(1, len(drafting)), levels, seconds).tolist()
        return table, drafting

    def choose(self, size: int, context: int) -> tuple[StaticTreeSize, Shape, Shape]:
        """The largest tree whatever it costs, and one of a usual size."""
        levels = self.deepest or self.max_depth
        shape = best_shapes(np.maximum(self.acceptance.chances(), PRIOR), self.max_nodes, max_depth=levels)
        few = 1 + (self.steps // CHOICE_STEPS) % levels
        return StaticTreeSize(len(shape), levels, 0.0, 0.0), shape, shape.cut(USUAL_WIDTH * few, few)

    def trees(self, size: int) -> list[StaticTree]:
        """The tree that promises the most tokens per second for so many sequences at once, and others of SIZES."""
        context = max(signal.length for signal in self._signals)
        shape = best_shapes(self.acceptance.chances(), self.max_nodes, max_depth=self.deepest)
        table, drafting = self.costs(size, context)
        gains_dn = expected_rates(shape, table, level_seconds=drafting, size=size) * (table[size] / size)
        best_n, levels_n = gains_dn.max(axis=0), 1 + gains_dn.argmax(axis=0)
        most = 1 + int(best_n.argmax())
        sizes = dict.fromkeys(min(max(1, round(share * most)), len(shape)) for share in SIZES)
        return [
            StaticTree(shape.cut(nodes, int(levels_n[nodes - 1])), expected_gain=float(best_n[nodes - 1]))
            for nodes in sizes
        ]


@dataclass(slots=True)
class StaticTree:
    """Holds the best static tree of one size, what is expected of it and what was measured.

    Attributes:
        shape: nodes, with the chances that they are reached.
        expected_gain: speed over plain decoding by these chances and measured costs.
        tokens_per_pass, gain, pairs: in the race: tokens a pass of the target, median speed over plain decoding, and
            paired runs; None, None and 0 where it was not measured.
    """

    shape: Shape
    expected_gain: float
    tokens_per_pass: float | None = None
    gain: float | None = None
    pairs: int = 0

    @property
    def by_level(self) -> list[int]:
        """Nodes of each level."""
        counts: list[int] = np.bincount(self.shape.depths_n)[1:].tolist()
        return counts

    @property
    def levels(self) -> int:
        return len(self.by_level)

    @property
    def expected_tokens(self) -> float:
        """Of a pass, the target's own among them."""
        return 1.0 + float(self.shape.reach_n.sum())

    def config(self, drafter: Mapping[str, Any]) -> dict[str, Any]:
        """The speculative_config that drafts it."""
        return {**drafter, TREE: str(self.shape.paths()), "num_speculative_tokens": len(self.shape)}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "nodes": len(self.shape),
            "levels": self.levels,
            "expected_tokens_per_pass": self.expected_tokens,
            "expected_gain": self.expected_gain,
            "tokens_per_pass": self.tokens_per_pass,
            "gain": self.gain,
            "pairs": self.pairs,
            TREE: str(self.shape.paths()),
        }


@dataclass(slots=True)
class TreeTuning:
    """Reports the search for a static tree: counts, trees, and the race between them.

    Attributes:
        drafter: its speculative_config, without the tree.
        steps: drafting steps that were counted.
        chances: by depth, by rank: how often the target takes the candidate, given that it took the parent.
        trees: raced sizes, smallest first.
        best: the fastest of them.
        tuning: the race. `chosen` is the tree only where it is shown to be faster than plain decoding, and where
            `auto` was not preferred; `profile` is None otherwise.
    """

    drafter: dict[str, Any]
    steps: int
    chances: list[list[float]]
    trees: list[StaticTree]
    best: StaticTree
    tuning: Tuning

    @property
    def speculative_config(self) -> dict[str, Any]:
        """What drafts the best tree."""
        return self.best.config(self.drafter)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "speculative_config": self.speculative_config,
            "steps": self.steps,
            "chances": self.chances,
            "trees": [tree.to_dict() for tree in self.trees],
            **self.tuning.to_dict(),
        }


def drafter_of(speculative_config: GivenConfig) -> dict[str, Any]:
    """The speculative_config of a drafter whose tree is to be found, as a dict.

    Raises:
        ConfigError: no single method, one that drafts no static trees, or a key that follows from the tree.
    """
    config = SpeculativeConfig.parse(speculative_config)
    method = None if config is None else config.method
    known = isinstance(method, str) and (method in registry.table("drafters") or ":" in method)
    rule = f"be a method that drafts static trees, {', '.join(static_methods())}"
    need(known and _drafts_static(str(method)), "the method whose tree is searched for", rule, method)
    general = {
        field.name: getattr(config, field.name) for field in fields(SpeculativeConfig) if field.name != "options"
    }
    usual = {field.name: field.default for field in fields(SpeculativeConfig)}
    assert config is not None
    drafter = {key: value for key, value in general.items() if value != usual[key]} | dict(config.options)
    clash = [key for key in DECIDED if key in drafter]
    need(not clash, ", ".join(clash), "be left out, since it follows from the tree", [drafter[key] for key in clash])
    return drafter


def static_methods() -> list[str]:
    """Methods of the registry that draft static trees."""
    return [name for name in registry.table("drafters") if _drafts_static(name)]


def _drafts_static(name: str) -> bool:
    return TREE in inspect.signature(registry.load("drafters", name)).parameters


def tune_tree(
    llm: LLM,
    folder: Path,
    prompts: Sequence[Any],
    drafter: Mapping[str, Any],
    *,
    budget: float = 120.0,
    max_tokens: int = 128,
    batch_size: int = 1,
    clock: Callable[[], float] = perf_counter,
    progress: Progress = lambda what, seconds: None,
) -> TreeTuning:
    """Count, find the best trees, race some of them.

    Args:
        llm: loaded; its own speculative_config plays no part. folder: of the checkpoint.
        prompts: as for `LLM.generate`; from APART groups on, the gain is measured on prompts that were not counted.
        drafter: from `drafter_of`.
        budget, max_tokens, batch_size, clock, progress: as of `tune`; one group of prompts is counted in any case.
    Raises:
        ConfigError, CheckpointError, CapabilityError: the drafter cannot be built, fails, or drafts nothing.
    """
    start = clock()
    groups = groups_of(prompts, batch_size)
    counted = calibrate(
        llm,
        drafter,
        groups[::2] if len(groups) >= APART else groups,
        SamplingParams(temperature=0.0, max_tokens=max_tokens),
        late=lambda: clock() - start >= CALIBRATION * budget,
        progress=lambda done: progress(f"counting what is accepted, {done} prompts", clock() - start),
    )
    trees = counted.trees(len(groups[0]))
    first, *others = (Arm(tree.config(drafter), torch.get_num_threads()) for tree in trees)
    auto = [Arm(config, first.threads) for config in auto_configs(())]
    spent = clock() - start
    tuning = tune(
        llm,
        folder,
        prompts,
        tried=Candidates([first, *auto, *others], {}),
        cores=0,
        budget=max(0.0, budget - spent),
        max_tokens=max_tokens,
        batch_size=batch_size,
        clock=clock,
        progress=lambda what, seconds: progress(what, spent + seconds),
    )
    tuning.seconds, tuning.budget = clock() - start, budget
    words = (arm.words(tuning.threads) for arm in (first, *others))
    return _found(dict(drafter), counted, dict(zip(words, trees, strict=True)), tuning)


def calibrate(
    llm: LLM,
    drafter: Mapping[str, Any],
    groups: Sequence[Sequence[Any]],
    params: SamplingParams,
    *,
    late: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda done: None,
) -> Calibration:
    """Count what the target takes of large trees, group after group until it is late.

    Args:
        groups: prompts that are decoded at once. progress: told how many prompts are done.
    Raises:
        ConfigError: the drafter fails, or drafts nothing.
    """
    counted = Calibration(Costs(probe=Probe(llm.runner)))
    wide = {**drafter, "tree_policy": "ppd", "controller": "fixed", "num_speculative_tokens": MOST_NODES}
    drafting, done = llm.with_speculative_config(wide), 0
    parts, most = drafting.engine.parts, llm.config.speculative_memory_bytes
    drafting.engine.use_controller(limited(counted, parts.runner, parts.drafter_set.drafters, most))
    for group in groups:
        progress(done)
        for output in drafting.generate(group, params, use_tqdm=False):
            output.raise_for_error()
            for name, why in output.metrics.dropped_drafters.items():
                raise ConfigError(f"the drafter {name} failed: {why}")
        done += len(group)
        if late():
            break
    need(counted.deepest > 0, "the drafter", "draft something on these prompts", "nothing; give longer ones, or others")
    return counted


def _found(
    drafter: dict[str, Any], counted: Calibration, trees: Mapping[str, StaticTree], tuning: Tuning
) -> TreeTuning:
    """Fill in what was measured, and keep a profile of a tree only.

    Args:
        trees: by the words of their settings, the one that promises most first.
    """
    raced = [words for words in tuning.settings if words in trees]
    for words in raced:
        tree = trees[words]
        (tree.gain, tree.pairs), tree.tokens_per_pass = tuning.settings[words], tuning.tokens_per_pass[words]
    best, chosen = (None if arm is None else arm.words(tuning.threads) for arm in (tuning.best, tuning.chosen))
    if chosen not in trees:
        tuning.profile = None
    return TreeTuning(
        drafter=drafter,
        steps=counted.counted,
        chances=counted.acceptance.chances()[: counted.deepest].tolist(),
        trees=sorted(trees.values(), key=lambda tree: len(tree.shape)),
        best=trees[next(words for words in (*([best] if best else []), *raced, *trees) if words in trees)],
        tuning=tuning,
    )
