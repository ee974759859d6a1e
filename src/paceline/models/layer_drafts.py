"""Drafting with part of the target's own layers over its own caches: the seam of every method of self-speculation.

In: caches of running sequences, their roots, what was drafted behind them, a `LayerPlan`. Out: logits, hidden states, greedy
chains. Not here: what is drafted from them (drafters), compiled chains (models.kernels.exit_drafts).

The text's keys and values are those of the cache, which every layer of the plan shares with the target. Drafted positions go to the
scratch slots behind it, where the next scoring pass writes again all that it reads: nothing of a draft is visible to verification.
A sequence's cache lacks its last token, the root; so a draft begins by feeding that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch

from paceline.errors import CapabilityError, DrafterError
from paceline.models.decoder import LayerPlan
from paceline.tree.token_tree import EMPTY_TREE, TokenTree
from paceline.tree.types import Scores

if TYPE_CHECKING:
    from paceline.models.base import Runner, SequenceCache
    from paceline.models.native import NativeRunner

Found = tuple[list[int], list[float]]
Stop = Callable[[int, float], bool]

TURNS = 4
MOST_PLANS = 256
"""Plans that things are kept for: methods that go from plan to plan must not grow without end."""


class LayerDrafts(Protocol):
    """Drafts by part of a model's layers."""

    def head(self, hidden: torch.Tensor, *, norm: bool = True) -> torch.Tensor:
        """(r, v) logits of the states (r, hidden) behind any layer, by the final norm, unless `norm` is False, and the head."""

    def best(self, hidden: torch.Tensor) -> list[int]:
        """The likeliest tokens of the states (r, hidden) behind any layer; -1 where some logit is not finite."""

    def step(
        self,
        caches: Sequence[SequenceCache],
        inputs: Sequence[Sequence[int]],
        plan: LayerPlan,
        *,
        states: bool = False,
        logits: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One more token of every draft.

        Args:
            inputs: per sequence the root and what was drafted behind it; all but the last were fed by earlier calls with this plan
                since the last scoring pass.
            plan: which layers run; it begins at layer 0.
            states, logits: whether the hidden states, and whether the logits are wanted.
        Returns:
            (r, v) logits after each sequence's last input, by the final norm and the head; (r, hidden) states behind the last layer
            of the plan, before that norm. Each empty unless wanted, in the model's dtype.
        """

    def chains(
        self,
        caches: Sequence[SequenceCache],
        roots: Sequence[int],
        steps: Sequence[int],
        stops: Sequence[Stop | None],
        *,
        plan: LayerPlan,
        least: Sequence[float],
        states: list[torch.Tensor] | None = None,
    ) -> list[Found]:
        """Greedy chains of up to `steps` tokens behind each root; the drafted tokens and the probability of each.

        `stop(depth, reach)` is asked before level `depth` (from 2 on) with the chance of the path so far; None never stops. Nothing
        is drafted behind a token whose own probability is below `least`. To `states`, where given, is added for each chain
        (n, hidden), behind the plan's last layer, for its first n inputs: the root, and all drafted tokens but the last at least.

        Raises:
            DrafterError: logits that are not finite.
        """

    def score(
        self,
        caches: Sequence[SequenceCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        known: Sequence[torch.Tensor],
        plan: LayerPlan,
    ) -> Scores:
        """`Runner.score` of chains whose first inputs have been through the plan: only the layers behind it run for those.

        Args:
            plan: the first layers, all sub-layers of each.
            known: per sequence (n, hidden) the states of its first n inputs behind the plan's last layer, n from 0 to all; their
                keys and values are in scratch since `step` or `chains`.
        """


@dataclass(slots=True)
class Chain:
    """One chain under construction.

    Attributes:
        inputs: the root and the tokens drafted so far. reach: chance of the path so far.
        states: what was kept of the states behind the plan, input by input, in parts.
    """

    cache: SequenceCache
    inputs: list[int]
    steps: int
    stop: Stop | None
    least: float
    chances: list[float] = field(default_factory=list)
    reach: float = 1.0
    states: list[torch.Tensor] = field(default_factory=list)

    def add(self, token: int, chance: float) -> bool:
        """Add a token; whether another one is wanted behind it."""
        if not chance > 0.0:
            raise DrafterError("the target's early layers gave logits that are not finite; check its checkpoint")
        self.inputs.append(token)
        self.chances.append(chance)
        self.reach *= chance
        depth = len(self.inputs)
        return depth <= self.steps and chance >= self.least and (self.stop is None or not self.stop(depth, self.reach))

    @property
    def found(self) -> Found:
        return self.inputs[1:], self.chances


class SteppedDrafts:
    """The readable form, for every way in which a native runner computes: a pass by `run_layers` for each level of a batch."""

    def __init__(self, runner: NativeRunner) -> None:
        self._runner = runner
        self._rests: dict[int, LayerPlan] = {}  # what follows an exit

    def head(self, hidden: torch.Tensor, *, norm: bool = True) -> torch.Tensor:
        """See `LayerDrafts.head`."""
        return self._runner.head(hidden, norm=norm)

    def best(self, hidden: torch.Tensor) -> list[int]:
        """See `LayerDrafts.best`."""
        return best_of(self._runner.head(hidden))

    def step(
        self,
        caches: Sequence[SequenceCache],
        inputs: Sequence[Sequence[int]],
        plan: LayerPlan,
        *,
        states: bool = False,
        logits: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerDrafts.step`."""
        trees = [TokenTree.chain(own[1:]) if len(own) > 1 else EMPTY_TREE for own in inputs]
        done = [len(own) - 1 for own in inputs]
        found, _ = self._runner.run_layers(caches, [own[0] for own in inputs], trees, plan=plan, computed=done)  # type: ignore[arg-type]  # caches are this runner's own
        rows = self._runner.head(found) if logits else found.new_empty(0, self._runner.info.vocab_size)
        return rows, found if states else found[:0]

    def chains(
        self,
        caches: Sequence[SequenceCache],
        roots: Sequence[int],
        steps: Sequence[int],
        stops: Sequence[Stop | None],
        *,
        plan: LayerPlan,
        least: Sequence[float],
        states: list[torch.Tensor] | None = None,
    ) -> list[Found]:
        """See `LayerDrafts.chains`."""
        return chains_by_steps(self, begun(caches, roots, steps, stops, least), plan, states)

    def score(
        self,
        caches: Sequence[SequenceCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        known: Sequence[torch.Tensor],
        plan: LayerPlan,
    ) -> Scores:
        """See `LayerDrafts.score`."""
        late, whole = [i for i, (tree, own) in enumerate(zip(trees, known, strict=True)) if len(own) <= len(tree)], list(known)
        if late:
            left = [1 + len(trees[i]) - len(known[i]) for i in late]
            own = [caches[i] for i in late], [roots[i] for i in late], [trees[i] for i in late]
            found, _ = self._runner.run_layers(*own, plan=plan, computed=[len(known[i]) for i in late])  # type: ignore[arg-type]  # caches are this runner's own
            for i, part in zip(late, found.split(left), strict=True):
                whole[i] = torch.cat((known[i], part))
        rest, runner = self._rests.setdefault(plan.stop or 0, LayerPlan(first=plan.stop or 0)), self._runner
        states, _ = runner.run_layers(caches, roots, trees, plan=rest, hidden=torch.cat(whole))  # type: ignore[arg-type]  # as above
        rows = tuple(accumulate((1 + len(tree) for tree in trees), initial=0))
        return Scores(runner.head(states), rows, {}, getattr(runner.passes, "best", None))


def best_of(logits: torch.Tensor) -> list[int]:
    """Per row of (r, v) the token with the largest logit, -1 where some is not finite."""
    best = torch.where(logits.isfinite().all(-1), logits.argmax(-1), -1)
    found: list[int] = best.tolist()
    return found


def begun(
    caches: Sequence[SequenceCache],
    roots: Sequence[int],
    steps: Sequence[int],
    stops: Sequence[Stop | None],
    least: Sequence[float],
) -> list[Chain]:
    """Chains without a token."""
    each = zip(caches, roots, steps, stops, least, strict=True)
    return [Chain(cache, [root], most, stop, low) for cache, root, most, stop, low in each]


def states_of(chain: Chain) -> torch.Tensor:
    """(n, hidden) what was kept of a chain's states, of its own inputs alone: others may have gone on beside it."""
    return torch.cat(chain.states)[: len(chain.inputs)] if chain.states else torch.empty(0)


def chains_by_steps(
    drafts: LayerDrafts, made: Sequence[Chain], plan: LayerPlan, states: list[torch.Tensor] | None = None
) -> list[Found]:
    """`LayerDrafts.chains` by `LayerDrafts.step`, a level of all sequences at a time."""
    active = [chain for chain in made if chain.steps > 0]
    while active:
        caches, inputs = [one.cache for one in active], [one.inputs for one in active]
        logits, hidden = drafts.step(caches, inputs, plan, states=states is not None)
        for one, row in zip(active, hidden.split(1), strict=False):
            one.states.append(row)
        chances, tokens = torch.softmax(logits.float(), -1).max(-1)
        found = zip(active, tokens.tolist(), chances.tolist(), strict=True)
        active = [one for one, token, chance in found if one.add(token, chance)]
    if states is not None:
        states += map(states_of, made)
    return [chain.found for chain in made]


def resuming_pays(runner: Runner, drafts: LayerDrafts, plan: LayerPlan) -> bool:
    """Whether scoring a chain takes less time where it goes on behind the layers that drafted; a few passes tell.

    A pass in two parts costs the host more, and layers whose weights must be read for one row are hardly dearer for many. In a
    context that is too short to tell, it does not.
    """
    nodes = 4
    length = min(128, runner.info.max_context - nodes - 2)
    if length < 1:
        return False
    cache = runner.open()
    try:
        runner.extend([cache], [[i % runner.info.vocab_size for i in range(length)]])
        whole, rest = [], []
        for _ in range(TURNS):
            states: list[torch.Tensor] = []
            ((tokens, _),) = drafts.chains([cache], [0], [nodes], [None], plan=plan, least=[0.0], states=states)
            trees, start = [TokenTree.chain(tokens)], perf_counter()
            drafts.score([cache], [0], trees, [states[0][: len(tokens)]], plan)
            middle = perf_counter()
            runner.score([cache], [0], trees)
            rest.append(middle - start)
            whole.append(perf_counter() - middle)
        return min(rest) < min(whole)
    finally:
        runner.release(cache)


def layer_drafts_of(runner: Runner, method: str) -> LayerDrafts:
    """How a runner drafts with part of its layers.

    Raises:
        CapabilityError: it cannot.
    """
    made = getattr(runner, "layer_drafts", None)
    if made is not None:
        own: LayerDrafts = made
        return own
    from paceline.models.native import NativeRunner

    if not isinstance(runner, NativeRunner):
        raise CapabilityError(
            f"method {method!r} drafts with some of the target's own layers, which the runner of {runner.info.name} cannot run "
            "alone; use another method"
        )
    if runner.quick is None:
        return SteppedDrafts(runner)
    from paceline.models.kernels.exit_drafts import CompiledDrafts

    return CompiledDrafts(runner)
