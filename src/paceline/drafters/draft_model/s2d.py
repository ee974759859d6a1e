"""Sorted speculative decoding: one draft model with several exits, of which every token takes the first that is sure
enough.

In: contexts, a draft model of more than one layer. Out: chains, point or drawn, each token from the distribution of the
exit it took.
Not here: passes and their upkeep (`exit_state`), the training that makes exits good.

A token is drafted from the first exit whose most likely token has at least the exit's threshold; the last exit, the
whole model, always serves. So one draft serves targets of several sizes, each with thresholds of its own: 0 for all is
a small model, above 1 the whole one. Which exit serves depends on what came before the token, so that q is the
distribution of that exit. All exits share the final norm and the head, as the sub-models of sorted fine-tuning do.

Source: S2D: sorted speculative decoding for more efficient deployment of nested large language models
(arXiv:2407.01955).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, cast

import torch

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.draft_chain import ChainDraft, add_level
from paceline.drafters.common.draft_options import ModelDrafter, draws_for
from paceline.drafters.common.draft_rows import fit_rows
from paceline.drafters.common.draft_state import catch_up
from paceline.drafters.draft_model.exit_state import MOST, ExitState, deepen
from paceline.errors import ConfigError
from paceline.models import LayeredRunner
from paceline.tree import EMPTY_TREE, Budget, TokenTree
from paceline.utils import need, number

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
        ConfigError: a value outside its range, layers that the draft does not have. DrafterError: another tokenizer, or
            a draft whose layers cannot be run apart.
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
        draft_sample_method: Literal["probabilistic", "greedy"] | None = None,
        draft_device: str | None = None,
    ) -> None:
        self._keep(args, num_speculative_tokens, draft_sample_method)
        if not isinstance(model, str) or args.models is None:
            raise ConfigError(f"speculative_config model must be a folder or hub id for method 's2d', got {model!r}")
        self.runner = cast(LayeredRunner, args.models.open(model, layers=True, device=draft_device))
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
            catch_up(self.runner, [state for state, _ in chains.values()], 1, MOST)
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
        found: dict[int, torch.Tensor] = {}
        left = list(range(len(states)))
        for index in range(len(self.exits)):
            rows = deepen(self.runner, [states[i] for i in left], index, self.exits)
            sure = [True] * len(left) if index + 1 == len(self.exits) else self._sure(rows, self.thresholds[index])
            found |= {i: row for i, row, enough in zip(left, rows, sure, strict=True) if enough}
            left = [i for i, enough in zip(left, sure, strict=True) if not enough]
            if not left:
                break
        return torch.stack([found[i] for i in range(len(states))])

    @staticmethod
    def _sure(rows: torch.Tensor, threshold: float) -> list[bool]:
        """Whether each row's likeliest token reaches the threshold."""
        enough: list[bool] = (rows.float().softmax(-1).amax(-1) >= threshold).tolist()
        return enough


def _exits(given: Sequence[int] | None, layers: int) -> tuple[int, ...]:
    """All exits, the whole model last.

    Raises:
        ConfigError: a model of one layer, exits that are not layers in ascending order.
    """
    need(layers > 1, "the draft model of method 's2d'", "have two layers or more", layers)
    if given is None:
        given = sorted({max(1, layers // 2), max(1, 3 * layers // 4)} - {layers})
    plain = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    whole = plain and all(isinstance(one, int) and not isinstance(one, bool) and 1 <= one < layers for one in given)
    rule = f"be layers in 1..{layers - 1} in ascending order"
    need(whole and list(given) == sorted(set(given)), "draft_exits", rule, given)
    return (*given, layers)


def _thresholds(given: float | Sequence[float], count: int) -> list[float]:
    """One for each exit but the last."""
    each = [given] * count if isinstance(given, int | float) else given
    fine = isinstance(each, Sequence) and not isinstance(each, str) and len(each) == count
    need(fine, "draft_exit_thresholds", f"be one number, or one for each of {count} exits", given)
    for one in each:
        number("draft_exit_thresholds", one, 0.0, 2.0, "be in 0..2 (above 1: never leave there)")
    return [float(one) for one in each]
