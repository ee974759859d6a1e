"""A hierarchy of drafts: a small model's trees, which a rounded copy of the target turns into one chain for the target.

In: contexts, a drafter of trees, a model between it and the target. Out: chains, point or drawn from the middle model's
distribution.
Not here: the trees (a drafter of its own, from a nested config), how a tree is verified (`base.Judge`), rounding
    (models.loading.quantization).

Rounds: the small model drafts a tree, the middle model verifies it in one pass and keeps what it would have said
itself, and one token more, until `min_draft_length` tokens are there. Each token of the chain is then distributed as
the middle model's own, whatever was drafted below it, and its row is known from that pass; so it is a draft like any
other and the target's distribution stays its own. Where a chain ends depends on what came before the token that it
lacks, not on that token. Both models go back to the text where the target takes another way.

Source: SpecMQuant, Speculative decoding meets quantization (arXiv:2505.22179): trees lose what rounding gains, so that
the target is given a chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from paceline.config import QUANTIZATIONS
from paceline.drafters.base import Context, Drafter, DrafterArgs
from paceline.drafters.common.draft_options import ModelDrafter, draws_for
from paceline.drafters.common.draft_rows import fit_rows, weights
from paceline.drafters.common.draft_state import FEW, catch_up
from paceline.drafters.draft_model.middle_state import MiddleState, paths_of, reroot
from paceline.errors import ConfigError, DrafterError
from paceline.models import Runner
from paceline.tree import EMPTY_TREE, Budget, TokenTree
from paceline.utils import integer, need

LENGTH: Final = 4
NODES: Final = 12
DEPTH: Final = 6
"""Tokens of a chain, nodes and levels of a tree below it, by default; depth as EAGLE-2 has it."""


class SpecMQuantDrafter(ModelDrafter[MiddleState]):
    """Drafts chains with a model that is helped by a smaller one.

    Args:
        model: folder or hub id of the small model, which grows trees as `draft_model` with tree_policy "eagle2"; None
            without `draft` lets the middle model draft alone.
        draft: instead, the config of the small model's method: `draft_model` or `quantized_copy` with their options.
        quantization: the middle model is the target's copy so rounded, "int4" by default; see `quantized_copy`.
        intermediate_model: instead, folder or hub id of the middle model.
        min_draft_length: tokens of a chain from which on no further round is begun.
        draft_nodes, draft_depth: most nodes and levels of a tree.
        draft_sample_method: as for `draft_model`.
        num_speculative_tokens: most tokens of a chain; None leaves it to the budget.
    Raises:
        ConfigError: a value outside its range, two models in one place. DrafterError: a draft that cannot go back.
        OutOfMemoryError: no room for the copy.
    """

    name = "specmquant"

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        draft: Mapping[str, Any] | None = None,
        quantization: str | None = None,
        intermediate_model: str | None = None,
        min_draft_length: int = LENGTH,
        draft_nodes: int = NODES,
        draft_depth: int = DEPTH,
        draft_sample_method: str | None = None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        for key, value in (
            ("min_draft_length", min_draft_length),
            ("draft_nodes", draft_nodes),
            ("draft_depth", draft_depth),
        ):
            integer(key, value, 1, 1024)
        self._keep(args, num_speculative_tokens, draft_sample_method)
        need(model is None or draft is None, "draft", "be left out where model is given", draft)
        self.least, self.inner_nodes, self.inner_depth = min_draft_length, draft_nodes, draft_depth
        if args.judge is None:
            raise ConfigError("method 'specmquant' needs an engine that verifies its small model's drafts")
        self._judge = args.judge
        if model is not None:
            draft = {"method": "draft_model", "model": model, "tree_policy": "eagle2"}
        self.inner = None if draft is None else _inner(args, draft)
        self.runner = _middle(args, quantization, intermediate_model)

    def begin(self, contexts: Sequence[Context]) -> list[MiddleState]:
        return [MiddleState(context, self.runner.open(), self._begin_inner) for context in contexts]

    def propose(
        self, states: Sequence[MiddleState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]
    ) -> list[TokenTree]:
        asked = [
            (i, state, self._steps(state, budget))
            for i, (state, budget) in enumerate(zip(states, budgets, strict=True))
        ]
        active = [(state, budgets[i], most) for i, state, most in asked if most > 0]
        for state, _, _ in active:
            state.follow(self.runner, self.inner, drawn=draws_for(state.context, self.method))
        if active:
            catch_up(self.runner, [state for state, _, _ in active], FEW)
        while active:
            self._round([state for state, _, _ in active], [most for *_, most in active])
            active = [each for each in active if self._goes_on(*each)]
        return [state.chain(self.index) if most > 0 else EMPTY_TREE for _, state, most in asked]

    def runners(self) -> Sequence[Runner]:
        return (self.runner, *(() if self.inner is None else self.inner.runners()))

    def fork(self, state: MiddleState, context: Context) -> MiddleState:
        return state.fork(context, self.runner, self.inner)

    def end(self, states: Sequence[MiddleState]) -> None:
        super().end(states)
        if self.inner is not None:
            self.inner.end([state.inner for state in states])

    def _begin_inner(self, context: Context) -> Any:
        return None if self.inner is None else self.inner.begin([context])[0]

    def _goes_on(self, state: MiddleState, budget: Budget, most: int) -> bool:
        """Hear the controller on every new level; whether another round is wanted."""
        return state.heard(budget, most, self.least)

    def _round(self, states: Sequence[MiddleState], most: Sequence[int]) -> None:
        """One tree of the small model each, and what the middle model says to it."""
        trees = self._trees(states, most)
        rooted = [reroot(state.pending, tree) for state, tree in zip(states, trees, strict=True)]
        scores = self.runner.score([s.cache for s in states], [s.pending[0] for s in states], rooted)
        rows = [
            weights(state.asked, fit_rows(scores.of(i)[-1 - len(tree) :], self.vocab_size), paths_of(tree))
            for i, (state, tree) in enumerate(zip(states, trees, strict=True))
        ]
        verdicts = self._judge.verify(trees, rows, [state.seed for state in states])
        behind = [len(state.pending) - 1 for state in states]
        paths = [[*range(k), *(k + node for node in v.path)] for k, v in zip(behind, verdicts, strict=True)]
        self.runner.commit([state.cache for state in states], paths)
        for state, verdict, rows_nv in zip(states, verdicts, rows, strict=True):
            state.take(verdict, rows_nv)
        if self.inner is not None:
            self.inner.observe([state.inner for state in states], trees, verdicts, None)

    def _trees(self, states: Sequence[MiddleState], most: Sequence[int]) -> list[TokenTree]:
        """The small model's trees; no deeper than what the chain lacks but for the middle model's own token."""
        if self.inner is None:
            return [EMPTY_TREE] * len(states)
        left = [count - len(state.tokens) - 1 for state, count in zip(states, most, strict=True)]
        budgets = [Budget(self.inner_nodes if n > 0 else 0, min(self.inner_depth, max(n, 0))) for n in left]
        return self.inner.propose([state.inner for state in states], budgets, [EMPTY_TREE] * len(states))


def _inner(args: DrafterArgs, config: Mapping[str, Any]) -> Drafter:
    """The small model's drafter.

    Raises:
        DrafterError: one that cannot go back.
    """
    need(isinstance(config, Mapping), "draft", "be a dict", config)
    if args.nested is None:
        raise ConfigError("method 'specmquant' needs an engine that makes its small model; leave model and draft out")
    made = args.nested(config)
    if not made.rewinds:
        raise DrafterError(
            f"draft of 'specmquant' must be draft_model or quantized_copy, got {made.name!r}, which cannot go back"
        )
    return made


def _middle(args: DrafterArgs, quantization: str | None, model: str | None) -> Runner:
    """The model between."""
    need(
        quantization is None or model is None,
        "quantization",
        "be left out where intermediate_model is given",
        quantization,
    )
    known = quantization is None or (isinstance(quantization, str) and quantization in QUANTIZATIONS)
    need(known, "quantization of 'specmquant'", f"be one of {', '.join(QUANTIZATIONS)}", quantization)
    need(model is None or isinstance(model, str), "intermediate_model", "be a folder or hub id", model)
    if args.models is None:
        raise ConfigError("method 'specmquant' needs a target that was loaded from files")
    return args.models.copy_of_target(quantization or "int4") if model is None else args.models.open(model)
