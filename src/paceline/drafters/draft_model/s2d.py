"""Sorted speculative decoding: one draft model with several exits, of which every token takes the first that is sure
enough.

A token is drafted from the first exit whose most likely token has at least the exit's threshold; the last exit, the
whole model, always serves. So one draft model serves targets of several sizes, each with thresholds of its own: 0 for
all is a small model, above 1 the whole one. `paceline train s2d` chooses them on held-out texts and keeps them, by
target, in the checkpoint. Which exit serves depends on what came before the token, so q is that exit's distribution.
All exits share the final norm and the head, as the sub-models of sorted fine-tuning do.

Trees are as wide as the exit that serves is unsure: a node has as many children as its likeliest tokens must be to have
`tree_mass` together, and no more than `tree_width`; how many that are follows from the row that they are drawn from.

Tokens behind the cache lie in its scratch slots, the first ones known to all layers, later ones perhaps to the first
few only. A pass to a deeper exit takes all that is missing there along in one batch, so that keys and values are those
of the whole model; what has gone through all layers is committed. Until then a token's state behind its last layer is
kept. Of a tree stays what the text confirms without a gap, and what has gone through all layers.

Source: S2D: sorted speculative decoding for more efficient deployment of nested large language models
(arXiv:2407.01955).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import torch

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.bases import ModelDrafter, SampleMethod, draft_where, draws_for, model_of
from paceline.drafters.common.draft_rows import best_tokens, fit_rows
from paceline.drafters.common.draft_state import CacheFollower, along, catch_up
from paceline.drafters.growth.base import Growth, as_tree, grow, inputs_of, siblings_of
from paceline.drafters.growth.levels import TreeDraft
from paceline.drafters.growth.policies import MAX_WIDTH
from paceline.errors import CapabilityError
from paceline.models import LayeredRunner, LayerPlan
from paceline.models.heads import usual_exits
from paceline.tree import Budget, TokenTree
from paceline.utils import integer, need, number

if TYPE_CHECKING:
    from paceline.models import SequenceCache
    from paceline.models.heads import DraftExits

MAX_WAITING: Final = 48
"""Tokens of a text that may wait for deeper layers."""

THRESHOLD: Final = 0.9
"""Of every exit, where none was chosen for the target."""

MASS: Final = 0.9
"""Of a node's children together, by default."""


class ExitState(CacheFollower):
    """What a draft model with exits knows of one sequence.

    Attributes:
        fed_tokens, fed_parents: inputs behind the cache, the text's first, then drafted ones, and places of their
            parents.
        done: per exit, how many of them its layers have seen; never more than at the exit before.
        states: per exit but the last, (n, hidden) states of the inputs that the next exit has not seen.
    """

    __slots__ = ("done", "fed_parents", "fed_tokens", "states")

    def __init__(self, context: Context, cache: SequenceCache, exits: int) -> None:
        super().__init__(context, cache)
        self.fed_tokens: list[int] = []
        self.fed_parents: list[int] = []
        self._forget(exits)

    def follow(self, runner: LayeredRunner) -> None:
        """Take drafts back, put the text behind what stays, and commit what has gone through all layers.

        Where too much of the text waits, give up what waits for deeper ones.
        """
        text, exits = self.pending, len(self.done)
        path = along(self.fed_tokens, self.fed_parents, text)[: len(text) - 1]
        straight = next((i for i, place in enumerate(path) if i != place), len(path))
        whole = [place for place in path if place < self.done[-1]]
        if len(whole) > straight:
            self._commit(runner, whole)
        else:
            self._cut(straight)
            if self.done[-1] and self.done[-1] == self.done[0]:
                self._commit(runner, range(self.done[-1]))
        text = self.pending
        self.fed_tokens, self.fed_parents = text, list(range(-1, len(text) - 1))
        if len(text) > MAX_WAITING:
            runner.truncate(self.cache, self.cache.length)
            self._forget(exits)

    def fed(self) -> None:
        text = self.pending
        self.fed_tokens, self.fed_parents = text, list(range(-1, len(text) - 1))

    def _commit(self, runner: LayeredRunner, places: Sequence[int]) -> None:
        """Keep these inputs, a path from the first on that all layers have seen, and nothing else."""
        runner.commit([self.cache], [[place - 1 for place in places[1:]]])
        self._forget(len(self.done))

    def _forget(self, exits: int) -> None:
        self.done: list[int] = [0] * exits
        self.states: list[torch.Tensor | None] = [None] * exits

    def _cut(self, kept: int) -> None:
        """Forget all but the first inputs."""
        for i, done in enumerate(self.done):
            deeper = self.done[i + 1] if i + 1 < len(self.done) else done
            self.done[i] = min(done, kept)
            if (states := self.states[i]) is not None:
                self.states[i] = states[: max(0, self.done[i] - deeper)]


def deepen(
    runner: LayeredRunner, states: Sequence[ExitState], index: int, exits: Sequence[int], counts: Sequence[int]
) -> list[torch.Tensor]:
    """Take all inputs of some sequences from exit `index` - 1 to exit `index`.

    Every sequence has an input that exit `index` has not seen.

    Args:
        counts: of each sequence's last inputs, of which the logits are wanted.
    Returns:
        Of each sequence (count, v) logits there.
    """
    first = exits[index - 1] if index else 0
    hidden = None
    if index:
        hidden = torch.cat([part for state in states if (part := state.states[index - 1]) is not None])
    trees = [as_tree(state.fed_tokens[1:], [parent - 1 for parent in state.fed_parents[1:]]) for state in states]
    computed = [state.done[index] for state in states]
    roots = [state.fed_tokens[0] for state in states]
    plan = LayerPlan(first=first, stop=exits[index])
    after = runner.run_layers([s.cache for s in states], roots, trees, plan=plan, hidden=hidden, computed=computed)
    parts = after.states.split([len(state.fed_tokens) - done for state, done in zip(states, computed, strict=True)])
    for state, part in zip(states, parts, strict=True):
        if index:
            state.states[index - 1] = None
        if index + 1 < len(exits):
            before = state.states[index]
            state.states[index] = part if before is None or not len(before) else torch.cat((before, part))
        state.done[index] = len(state.fed_tokens)
    wanted = [part[-count:] for part, count in zip(parts, counts, strict=True)]
    return list(runner.head(torch.cat(wanted)).split(list(counts)))


@dataclass(slots=True)
class ExitTree(TreeDraft):
    """Gives a node the more children the less sure its row is.

    Attributes:
        mass: of a node's children together, where `width` allows it.
    """

    mass: float = MASS

    def expand(self, weights_fv: torch.Tensor) -> None:
        """Give the front its children and choose the next front."""
        first = len(self.tokens)
        families = siblings_of(self.state.context, weights_fv, drawn=self.drawn, most=self.width)
        for parent, family, count in zip(self.front, families, self._children(weights_fv), strict=True):
            for _ in range(count):
                if (self.drawn and len(self.tokens) >= self.nodes) or self.take(parent, family) is None:
                    break
        self.level += 1
        self.front = self._next_front(first)

    def _children(self, weights_fv: torch.Tensor) -> list[int]:
        """Of each node of the front."""
        if self.width == 1:
            return [1] * len(self.front)
        found = []
        for chances in best_tokens(weights_fv, self.width)[1]:
            together, count = 0.0, 0
            while count < len(chances) and together < self.mass:
                together, count = together + chances[count], count + 1
            found.append(count)
        return found


class S2dDrafter(ModelDrafter[ExitState]):
    """Drafts with as many layers of a draft model as each token needs.

    Args:
        model: folder or hub id of the draft model, of two layers or more.
        draft_exits: layers after which a token may leave, ascending; None is those that it was trained for (`paceline
            train s2d`), else a half and three quarters of them, as in the paper.
        draft_exit_thresholds: least chance of the likeliest token at each of these exits, one for all or one each; None
            is those that were chosen for the target, else 0.9.
        tree_width: most children of a node, and nodes expanded on a level; 1 drafts chains.
        tree_mass: of trees: a node has as many of its likeliest tokens as children as must be to have this chance
            together.
        num_speculative_tokens: most levels to draft; None leaves it to the budget.
        draft_sample_method, draft_device: as for `draft_model`.
    Raises:
        ConfigError: a value outside its range, layers that the draft does not have.
        CapabilityError: a tree from a draft model whose runner scores chains only.
        CheckpointError: exits in its config.json that are none.
        DrafterError: another tokenizer, or a draft whose layers cannot be run apart.
    """

    name = "s2d"
    runner: LayeredRunner

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        draft_exits: Sequence[int] | None = None,
        draft_exit_thresholds: float | Sequence[float] | None = None,
        tree_width: int = 1,
        tree_mass: float = MASS,
        num_speculative_tokens: int | None = None,
        draft_sample_method: SampleMethod | None = None,
        draft_device: str | None = None,
    ) -> None:
        self._keep(args, num_speculative_tokens, draft_sample_method)
        integer("tree_width", tree_width, 1, MAX_WIDTH)
        number("tree_mass", tree_mass, 0.0, 1.0, "be above 0 and at most 1", open_low=True)
        model, models = model_of(args, self.name, model)
        self.runner = cast(LayeredRunner, models.open(model, layers=True, device=draft_device))
        if tree_width > 1 and not self.runner.capabilities.trees:
            raise CapabilityError(
                f"tree_width must be 1 for a draft model that scores chains only, as {self.runner.info.name} does here"
            )
        self.width, self.mass = tree_width, tree_mass
        self.tree_policy = "chain" if tree_width == 1 else "levels"
        trained = models.exits_of(model)
        layers = self.runner.info.num_layers
        self.exits = _exits(draft_exits if draft_exits is not None or trained is None else trained.layers, layers)
        if draft_exit_thresholds is None:
            draft_exit_thresholds = _chosen(trained, self.exits, args)
        self.thresholds = _thresholds(draft_exit_thresholds, len(self.exits) - 1)

    def begin(self, contexts: Sequence[Context]) -> list[ExitState]:
        return [ExitState(context, self.runner.open(), len(self.exits)) for context in contexts]

    def propose(
        self, states: Sequence[ExitState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]
    ) -> list[TokenTree]:
        steps = [self._steps(state, budget) for state, budget in zip(states, budgets, strict=True)]
        return draft_where(steps, self._draft, states, budgets, steps)

    def fork(self, state: ExitState, context: Context) -> ExitState:
        return ExitState(context, self.runner.fork(state.cache), len(self.exits))

    def _draft(self, states: Sequence[ExitState], budgets: Sequence[Budget], steps: Sequence[int]) -> list[TokenTree]:
        for state in states:
            state.follow(self.runner)
        catch_up(self.runner, states, 1, MAX_WAITING)
        growing = [
            ExitTree(
                state, budget.nodes, count, budget.go_on, draws_for(state.context, self.method),
                width=self.width, mass=self.mass,
            )
            for state, budget, count in zip(states, budgets, steps, strict=True)
        ]  # fmt: skip
        return grow(self._scores, growing, self.index)

    def _scores(self, drafts: Sequence[Growth]) -> list[torch.Tensor]:
        """(front, v) logits of each draft's front, each node's from the first exit that is sure enough of it."""
        states = [cast(ExitState, draft.state) for draft in drafts]
        for draft, state in zip(drafts, states, strict=True):
            state.fed_tokens, state.fed_parents = inputs_of(draft, state)
        counts = [len(draft.front) for draft in drafts]
        found = [list[torch.Tensor | None]([None] * count) for count in counts]
        left = list(range(len(drafts)))
        for index in range(len(self.exits)):
            each = deepen(self.runner, [states[i] for i in left], index, self.exits, [counts[i] for i in left])
            for i, rows in zip(left, each, strict=True):
                self._take(found[i], rows, index)
            left = [i for i in left if any(row is None for row in found[i])]
            if not left:
                break
        served = [torch.stack([row for row in each if row is not None]) for each in found]
        return [fit_rows(rows, self.vocab_size) for rows in served]

    def _take(self, found: list[torch.Tensor | None], rows: torch.Tensor, index: int) -> None:
        """Take those rows of an exit that are the first sure enough ones of their nodes."""
        last = index + 1 == len(self.exits)
        sure = [True] * len(rows) if last else self._sure(rows, self.thresholds[index])
        for node, (row, enough) in enumerate(zip(rows, sure, strict=True)):
            if found[node] is None and enough:
                found[node] = row

    @staticmethod
    def _sure(rows: torch.Tensor, threshold: float) -> list[bool]:
        """Whether each row's likeliest token reaches the threshold."""
        enough: list[bool] = (rows.float().softmax(-1).amax(-1) >= threshold).tolist()
        return enough


def _exits(chosen: Sequence[int] | None, layers: int) -> tuple[int, ...]:
    """All exits, the whole model last.

    Raises:
        ConfigError: a model of one layer, exits that are not layers in ascending order.
    """
    need(layers > 1, "the draft model of method 's2d'", "have two layers or more", layers)
    if chosen is None:
        chosen = usual_exits(layers)
    plain = isinstance(chosen, Sequence) and not isinstance(chosen, str) and len(chosen) > 0
    whole = plain and all(
        isinstance(layer, int) and not isinstance(layer, bool) and 1 <= layer < layers for layer in chosen
    )
    rule = f"be layers in 1..{layers - 1} in ascending order"
    need(whole and list(chosen) == sorted(set(chosen)), "draft_exits", rule, chosen)
    return (*chosen, layers)


def _chosen(trained: DraftExits | None, exits: Sequence[int], args: DrafterArgs) -> float | Sequence[float]:
    """The thresholds that were chosen for the target, at these exits."""
    if trained is None or args.target is None or tuple(trained.layers) != tuple(exits[:-1]):
        return THRESHOLD
    return trained.thresholds_for(args.target.info.fingerprint) or THRESHOLD


def _thresholds(thresholds: float | Sequence[float], count: int) -> list[float]:
    """One for each exit but the last."""
    each = [thresholds] * count if isinstance(thresholds, int | float) else thresholds
    fine = isinstance(each, Sequence) and not isinstance(each, str) and len(each) == count
    need(fine, "draft_exit_thresholds", f"be one number, or one for each of {count} exits", thresholds)
    for threshold in each:
        number("draft_exit_thresholds", threshold, 0.0, 2.0, "be in 0..2 (above 1: never leave there)")
    return [float(threshold) for threshold in each]
