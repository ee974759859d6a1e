"""Sorted speculative decoding: one draft model with several exits, of which every token takes the first that is sure
enough.

A token is drafted from the first exit whose most likely token has at least the exit's threshold; the last exit, the
whole model, always serves. So one draft model serves targets of several sizes, each with thresholds of its own: 0 for
all is a small model, above 1 the whole one. Which exit serves depends on what came before the token, so q is that
exit's distribution. All exits share the final norm and the head, as the sub-models of sorted fine-tuning do.

Tokens behind the cache lie in its scratch slots, the first ones known to all layers, later ones perhaps to the first
few only. A pass to a deeper exit takes all that is missing there along in one batch, so that keys and values are those
of the whole model; what has gone through all layers is committed. Until then a token's state behind its last layer is
kept.

Source: S2D: sorted speculative decoding for more efficient deployment of nested large language models
(arXiv:2407.01955).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

import torch

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.bases import ModelDrafter, SampleMethod, draws_for, model_of
from paceline.drafters.common.chains import chain_tree
from paceline.drafters.common.draft_chain import ChainDraft, add_level
from paceline.drafters.common.draft_rows import fit_rows
from paceline.drafters.common.draft_state import CacheFollower, agreed, catch_up
from paceline.models import LayeredRunner, LayerPlan
from paceline.tree import EMPTY_TREE, Budget, TokenTree
from paceline.utils import need, number

if TYPE_CHECKING:
    from paceline.models import SequenceCache

MAX_WAITING: Final = 48
"""Tokens of a text that may wait for deeper layers."""


class ExitState(CacheFollower):
    """What a draft model with exits knows of one sequence.

    Attributes:
        inputs: tokens behind the cache: the text's, then drafted ones.
        done: per exit, how many of them its layers have seen; never more than at the exit before.
        states: per exit but the last, (n, hidden) states of the inputs that the next exit has not seen.
    """

    __slots__ = ("done", "inputs", "states")

    def __init__(self, context: Context, cache: SequenceCache, exits: int) -> None:
        super().__init__(context, cache)
        self.inputs: list[int] = []
        self.done = [0] * exits
        self.states: list[torch.Tensor | None] = [None] * exits

    def follow(self, runner: LayeredRunner, exits: int) -> None:
        """Take drafts back, put the text behind what stays, and commit what has gone through all layers.

        Where too much of the text waits, give up what waits for deeper ones.
        """
        text = self.pending
        self._cut(min(agreed(self.inputs, text), len(text) - 1))
        whole = self.done[-1]
        if whole and whole == self.done[0]:
            runner.commit([self.cache], [range(whole - 1)])
            self.inputs, self.done, self.states = [], [0] * exits, [None] * exits
            text = text[whole:]
        self.inputs = text
        if len(text) > MAX_WAITING:
            runner.truncate(self.cache, self.cache.length)
            self.done, self.states = [0] * exits, [None] * exits

    def fed(self) -> None:
        self.inputs = self.pending

    def _cut(self, kept: int) -> None:
        """Forget all but the first inputs."""
        for i, done in enumerate(self.done):
            deeper = self.done[i + 1] if i + 1 < len(self.done) else done
            self.done[i] = min(done, kept)
            if (states := self.states[i]) is not None:
                self.states[i] = states[: max(0, self.done[i] - deeper)]
        del self.inputs[kept:]


def deepen(runner: LayeredRunner, states: Sequence[ExitState], index: int, exits: Sequence[int]) -> torch.Tensor:
    """Take all inputs of some sequences from exit `index` - 1 to exit `index`.

    (r, v) logits there after each one's last.

    Every sequence has an input that exit `index` has not seen.
    """
    first = exits[index - 1] if index else 0
    hidden = None
    if index:
        hidden = torch.cat([part for state in states if (part := state.states[index - 1]) is not None])
    trees = [chain_tree(state.inputs[1:], [0.5] * (len(state.inputs) - 1), 0) for state in states]
    computed = [state.done[index] for state in states]
    roots = [state.inputs[0] for state in states]
    plan = LayerPlan(first=first, stop=exits[index])
    after = runner.run_layers([s.cache for s in states], roots, trees, plan=plan, hidden=hidden, computed=computed)
    counts = [len(state.inputs) - done for state, done in zip(states, computed, strict=True)]
    parts = after.states.split(counts)
    for state, part in zip(states, parts, strict=True):
        if index:
            state.states[index - 1] = None
        if index + 1 < len(exits):
            before = state.states[index]
            state.states[index] = part if before is None or not len(before) else torch.cat((before, part))
        state.done[index] = len(state.inputs)
    return runner.head(torch.stack([part[-1] for part in parts]))


THRESHOLD: Final = 0.9


class S2dDrafter(ModelDrafter[ExitState]):
    """Drafts with as many layers of a draft model as each token needs.

    Args:
        model: folder or hub id of the draft model, of two layers or more.
        draft_exits: layers after which a token may leave, ascending; None is a half and three quarters of them, as in
            the paper.
        draft_exit_thresholds: least chance of the likeliest token at each of these exits, one for all or one each.
        num_speculative_tokens: most tokens to draft; None leaves it to the budget.
        draft_sample_method, draft_device: as for `draft_model`.
    Raises:
        ConfigError: a value outside its range, layers that the draft does not have.
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
        draft_exit_thresholds: float | Sequence[float] = THRESHOLD,
        num_speculative_tokens: int | None = None,
        draft_sample_method: SampleMethod | None = None,
        draft_device: str | None = None,
    ) -> None:
        self._keep(args, num_speculative_tokens, draft_sample_method)
        model, models = model_of(args, self.name, model)
        self.runner = cast(LayeredRunner, models.open(model, layers=True, device=draft_device))
        self.exits = _exits(draft_exits, self.runner.info.num_layers)
        self.thresholds = _thresholds(draft_exit_thresholds, len(self.exits) - 1)

    def begin(self, contexts: Sequence[Context]) -> list[ExitState]:
        return [ExitState(context, self.runner.open(), len(self.exits)) for context in contexts]

    def propose(
        self, states: Sequence[ExitState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]
    ) -> list[TokenTree]:
        trees = [EMPTY_TREE] * len(states)
        chains: dict[int, tuple[ExitState, ChainDraft]] = {}
        for i, (state, budget) in enumerate(zip(states, budgets, strict=True)):
            if (steps := self._steps(state, budget)) > 0:
                state.follow(self.runner, len(self.exits))
                chains[i] = state, ChainDraft(state.context, steps, budget.go_on, draws_for(state.context, self.method))
        if chains:
            catch_up(self.runner, [state for state, _ in chains.values()], 1, MAX_WAITING)
        active = list(chains.values())
        while active:
            add_level(
                [chain for _, chain in active], fit_rows(self._logits([state for state, _ in active]), self.vocab_size)
            )
            active = [(state, chain) for state, chain in active if chain.wants_more]
            for state, chain in active:
                state.inputs = [*state.inputs, chain.tokens[-1]]
        for i, (_, chain) in chains.items():
            trees[i] = chain.tree(self.index)
        return trees

    def fork(self, state: ExitState, context: Context) -> ExitState:
        return ExitState(context, self.runner.fork(state.cache), len(self.exits))

    def _logits(self, states: Sequence[ExitState]) -> torch.Tensor:
        """(r, v) logits after each sequence's last input, from the first exit that is sure enough."""
        row_of: dict[int, torch.Tensor] = {}
        left = list(range(len(states)))
        for index in range(len(self.exits)):
            rows = deepen(self.runner, [states[i] for i in left], index, self.exits)
            sure = [True] * len(left) if index + 1 == len(self.exits) else self._sure(rows, self.thresholds[index])
            row_of |= {i: row for i, row, enough in zip(left, rows, sure, strict=True) if enough}
            left = [i for i, enough in zip(left, sure, strict=True) if not enough]
            if not left:
                break
        return torch.stack([row_of[i] for i in range(len(states))])

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
        chosen = sorted({max(1, layers // 2), max(1, 3 * layers // 4)} - {layers})
    plain = isinstance(chosen, Sequence) and not isinstance(chosen, str) and len(chosen) > 0
    whole = plain and all(
        isinstance(layer, int) and not isinstance(layer, bool) and 1 <= layer < layers for layer in chosen
    )
    rule = f"be layers in 1..{layers - 1} in ascending order"
    need(whole and list(chosen) == sorted(set(chosen)), "draft_exits", rule, chosen)
    return (*chosen, layers)


def _thresholds(thresholds: float | Sequence[float], count: int) -> list[float]:
    """One for each exit but the last."""
    each = [thresholds] * count if isinstance(thresholds, int | float) else thresholds
    fine = isinstance(each, Sequence) and not isinstance(each, str) and len(each) == count
    need(fine, "draft_exit_thresholds", f"be one number, or one for each of {count} exits", thresholds)
    for threshold in each:
        number("draft_exit_thresholds", threshold, 0.0, 2.0, "be in 0..2 (above 1: never leave there)")
    return [float(threshold) for threshold in each]
