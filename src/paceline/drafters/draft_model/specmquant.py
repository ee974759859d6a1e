"""A hierarchy of drafts: a small model's trees, which a rounded copy of the target turns into one chain for the target.

Rounds: the small model drafts a tree, the middle model verifies it in one pass and keeps what it would have generated
itself, and one token more, until `min_draft_length` tokens are there. Each token of the chain is then distributed as
the middle model's own, whatever was drafted below it, and its row is known from that pass; so it is a draft like any
other and the output keeps the target's distribution. Where a chain ends depends on what came before the token that it
lacks, not on that token. Both models go back to the text where the target rejects the chain.

Source: SpecMQuant, Speculative decoding meets quantization (arXiv:2505.22179): trees lose what rounding gains, so that
the target is given a chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from paceline.config import QUANTIZATIONS
from paceline.drafters.base import Context, Drafter, DrafterArgs
from paceline.drafters.common.bases import ModelDrafter, draws_for
from paceline.drafters.common.chains import chain_tree
from paceline.drafters.common.draft_rows import chances_of, fit_rows, rows_before_a_dead_end, uniform, weights
from paceline.drafters.common.draft_state import FEW, CacheFollower, agreed, catch_up
from paceline.drafters.draft_model.middle_head import MiddleHead
from paceline.drafters.growth.base import as_tree
from paceline.errors import CapabilityError, ConfigError, DrafterError
from paceline.models import Runner
from paceline.tree import EMPTY_TREE, Budget, TokenTree
from paceline.utils import integer, need

if TYPE_CHECKING:
    import torch

    from paceline.drafters.heads.cached_drafter import CachedHeadDrafter
    from paceline.models import SequenceCache
    from paceline.tree import Scores, Verdict

N = TypeVar("N")

_STEP: Final = 1 << 41
_ROUND: Final = 1 << 42
"""Numbers of draws that make seeds."""


class MiddleState(CacheFollower):
    """Keeps the chain of one sequence between the small model and the target (see the module).

    Attributes:
        context: the sequence as the target has it. extended: the same with the chain behind it, for the small model.
        cache: of the middle model, a prefix of that text without its last token. inner: the small model's state.
        tokens, chances, rows: of the chain: each token, its chance and (v,) probabilities where it was drawn.
        over: the rules allow none of the middle model's tokens behind the chain.
    """

    __slots__ = ("_drawn", "_levels", "_read", "chances", "extended", "inner", "over", "rows", "tokens")

    def __init__(self, context: Context, cache: SequenceCache, begin: Callable[[Context], Any]) -> None:
        super().__init__(context, cache)
        self.extended = replace(context, tokens=list(context.tokens), apply_rules=None, taps={}, prediction=())
        self.inner = begin(self.extended)
        self._read, self._drawn, self._levels, self.over = len(context.tokens), False, 1, False
        self.tokens, self.chances, self.rows = list[int](), list[float](), list[Any]()

    @property
    def pending(self) -> list[int]:
        """What the middle model is to be fed: the last token, and those before it that its cache lacks."""
        return self.extended.tokens[self.cache.length :]

    @property
    def seed(self) -> int | None:
        """Of the middle model's noise in this round, which it shares with no other.

        None where it takes likeliest tokens.
        """
        return int(uniform(self.extended.seed, len(self.extended.tokens), _ROUND) * 2**53) if self._drawn else None

    def follow(self, runner: Runner, inner: Any, *, drawn: bool) -> None:
        """Take the chain back but for what the target kept of it, and begin another behind the target's text."""
        text, extended, context = self.context.tokens, self.extended, self.context
        new, old = text[self._read :], extended.tokens[self._read :]
        same = agreed(old, new)
        kept = self._read + same
        extended.tokens[kept:] = new[same:]
        if (length := min(kept, len(text) - 1)) < self.cache.length:
            runner.truncate(self.cache, length)
        if inner is not None and not isinstance(inner, MiddleHead):
            inner.rewind(self.inner, kept)
        extended.seed = int(uniform(context.seed, len(text), _STEP) * 2**53)
        extended.temperature = context.temperature if drawn else 0.0
        extended.apply_rules = None if context.apply_rules is None else self._shape
        self._read, self._drawn, self._levels, self.over = len(text), drawn, 1, False
        self.tokens, self.chances, self.rows = [], [], []

    def _shape(self, logits: torch.Tensor, paths: Sequence[Sequence[int]]) -> torch.Tensor:
        """The request's rules at paths behind the chain."""
        assert self.context.apply_rules is not None
        return self.context.apply_rules(logits, [[*self.tokens, *path] for path in paths])

    def take(self, verdict: Verdict, rows_nv: torch.Tensor) -> None:
        """Append what the middle model generated to the chain."""
        rows = chances_of(rows_nv[[0, *(node + 1 for node in verdict.path)]])
        for token, row_v in zip(verdict.tokens, rows, strict=True):
            self.tokens.append(token)
            self.chances.append(min(float(row_v[token]), 1.0))
            self.rows.append(row_v)
        self.extended.tokens.extend(verdict.tokens)

    def ask_controller(self, budget: Budget, most: int, least: int) -> bool:
        """Cut the chain after `most` tokens, or where the controller stops it; whether another round is wanted.

        The next token is asked for before the round that would bring it; a token is cut for what comes before it alone.
        """
        count = min(len(self.tokens), most)
        wanted = count + 1 if count < min(least, most) and not self.over else count
        while self._levels < wanted:
            if not budget.go_on(self._levels + 1, math.prod(self.chances[: self._levels]), None):
                count = wanted = min(count, self._levels)
                break
            self._levels += 1
        del self.tokens[count:], self.chances[count:], self.rows[count:]
        return wanted > count

    def chain(self, source: int) -> TokenTree:
        """The chain as a tree."""
        return chain_tree(self.tokens, self.chances, source, self.rows if self._drawn else ())

    def fork(self, context: Context, runner: Runner, inner: Any) -> MiddleState:
        """A state for a copy of the sequence."""
        if isinstance(inner, MiddleHead):  # whose states are those of passes that it was told of
            return MiddleState(context, runner.open(), inner.begin)
        self.follow(runner, inner, drawn=self._drawn)
        shares = runner.capabilities.fork
        cache = runner.fork(self.cache) if shares else runner.open()
        return MiddleState(context, cache, lambda extended: None if inner is None else inner.fork(self.inner, extended))


def reroot(pending: Sequence[int], tree: TokenTree) -> TokenTree:
    """A tree behind the last of some tokens, as one behind the first of them."""
    more = len(pending) - 1
    if not more:
        return tree
    tokens, parents = [*pending[1:], *tree.tokens.tolist()], [*range(-1, more - 1), *(tree.parents + more).tolist()]
    return as_tree(tokens, parents)


def paths_of(tree: TokenTree) -> list[list[int]]:
    """Tokens behind the root that lead to each row of a tree, the root's first."""
    return [[], *([int(tree.tokens[i]) for i in tree.path(node)] for node in range(len(tree)))]


HEADS: Final = ("eagle", "eagle2", "eagle3")
"""Methods of heads that may draft for the middle model."""

LENGTH: Final = 4
NODES: Final = 12
DEPTH: Final = 6
"""Tokens of a chain, nodes and levels of a tree below it, by default; depth as EAGLE-2 has it."""


class SpecMQuantDrafter(ModelDrafter[MiddleState]):
    """Drafts chains with a model that is helped by a smaller one.

    Args:
        model: folder or hub id of the small model, which grows trees as `draft_model` with tree_policy "eagle2"; None
            without `draft` lets the middle model draft alone.
        draft: instead, the config of the small model's method: `draft_model` or `quantized_copy` with their options; or
            of a head that was trained for the middle model, `eagle2` as in the paper, or `eagle`, `eagle3`.
        quantization: the middle model is the target's copy so rounded, "int4" by default; see `quantized_copy`.
        intermediate_model: instead, folder or hub id of the middle model.
        min_draft_length: tokens of a chain from which on no further round is begun.
        draft_nodes, draft_depth: most nodes and levels of a tree.
        draft_sample_method: as for `draft_model`.
        num_speculative_tokens: most tokens of a chain; None leaves it to the budget.
    Raises:
        ConfigError: a value outside its range, two models in one place.
        DrafterError: a draft that cannot go back.
        OutOfMemoryError: no room for the copy.
    """

    name = "specmquant"

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        draft: Mapping[str, Any] | str | None = None,
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
        self.judge = args.judge
        if model is not None:
            draft = {"method": "draft_model", "model": model, "tree_policy": "eagle2"}
        with_head = draft is not None and _is_of_head(draft)
        inner = None if draft is None or with_head else _inner(args, draft)
        self.runner = _middle(args, quantization, intermediate_model)
        self.inner: Drafter | MiddleHead | None = inner
        if draft is not None and with_head:
            self.inner = MiddleHead(cast("CachedHeadDrafter[Any]", _nested(args.nested_for)(draft, self.runner)))

    def begin(self, contexts: Sequence[Context]) -> list[MiddleState]:
        return [MiddleState(context, self.runner.open(), self._begin_inner) for context in contexts]

    def propose(
        self, states: Sequence[MiddleState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]
    ) -> list[TokenTree]:
        requested = [
            (i, state, self._steps(state, budget))
            for i, (state, budget) in enumerate(zip(states, budgets, strict=True))
        ]
        active = [(state, budgets[i], most) for i, state, most in requested if most > 0]
        for state, _, _ in active:
            state.follow(self.runner, self.inner, drawn=draws_for(state.context, self.method))
        if active and isinstance(self.inner, MiddleHead):
            self.inner.read(
                self.runner, [state.inner for state, _, _ in active], [state.cache for state, _, _ in active]
            )
        elif active:
            catch_up(self.runner, [state for state, _, _ in active], FEW)
        while active:
            self._round([state for state, _, _ in active], [most for *_, most in active])
            active = [each for each in active if each[0].ask_controller(*each[1:], self.least)]
        return [state.chain(self.index) if most > 0 else EMPTY_TREE for _, state, most in requested]

    def runners(self) -> Sequence[Runner]:
        inner = self.inner.drafter if isinstance(self.inner, MiddleHead) else self.inner
        return (self.runner, *(() if inner is None else inner.runners()))

    def fork(self, state: MiddleState, context: Context) -> MiddleState:
        return state.fork(context, self.runner, self.inner)

    def end(self, states: Sequence[MiddleState]) -> None:
        super().end(states)
        if self.inner is not None:
            self.inner.end([state.inner for state in states])

    def _begin_inner(self, context: Context) -> Any:
        if isinstance(self.inner, MiddleHead):
            return self.inner.begin(context)
        return None if self.inner is None else self.inner.begin([context])[0]

    def _round(self, states: Sequence[MiddleState], most: Sequence[int]) -> None:
        """One tree of the small model each, and what the middle model says to it."""
        trees = self._trees(states, most)
        rooted = [reroot(state.pending, tree) for state, tree in zip(states, trees, strict=True)]
        taps = self.inner.taps if isinstance(self.inner, MiddleHead) else ()
        scores = self.runner.score([s.cache for s in states], [s.pending[0] for s in states], rooted, taps=taps)
        rows = [
            weights(state.extended, fit_rows(scores.of(i)[-1 - len(tree) :], self.vocab_size), paths_of(tree))
            for i, (state, tree) in enumerate(zip(states, trees, strict=True))
        ]
        going = [i for i, rows_nv in enumerate(rows) if rows_before_a_dead_end(rows_nv[:1])]
        for i in {*range(len(states))} - {*going}:
            states[i].over = True
        if going:
            self._judge(states, trees, rows, scores, going)

    def _judge(
        self, every: Sequence[MiddleState], grown: Sequence[TokenTree], weights_env: Sequence[torch.Tensor],
        scores: Scores, going: Sequence[int],
    ) -> None:  # fmt: skip
        """Append to the chains of those that are going what the middle model says to the trees, by its log-weights
        (1 + n, v) for each, of a pass over all.
        """
        states, trees = [every[i] for i in going], [grown[i] for i in going]
        rows = [weights_env[i] for i in going]
        verdicts = self.judge.verify(trees, rows, [state.seed for state in states])
        behind = [len(state.pending) - 1 for state in states]
        paths = [[*range(k), *(k + node for node in v.path)] for k, v in zip(behind, verdicts, strict=True)]
        self.runner.commit([state.cache for state in states], paths)
        for state, verdict, rows_nv in zip(states, verdicts, rows, strict=True):
            state.take(verdict, rows_nv)
        inner = [state.inner for state in states]
        if isinstance(self.inner, MiddleHead):
            self.inner.observe(inner, trees, verdicts, replace(scores, rows=tuple(scores.rows[i] for i in going)))
        elif self.inner is not None:
            self.inner.observe(inner, trees, verdicts, None)

    def _trees(self, states: Sequence[MiddleState], most: Sequence[int]) -> list[TokenTree]:
        """The small model's trees; no deeper than what the chain lacks but for the middle model's own token."""
        if self.inner is None:
            return [EMPTY_TREE] * len(states)
        left = [count - len(state.tokens) - 1 for state, count in zip(states, most, strict=True)]
        budgets = [Budget(self.inner_nodes if n > 0 else 0, min(self.inner_depth, max(n, 0))) for n in left]
        return self.inner.propose([state.inner for state in states], budgets, [EMPTY_TREE] * len(states))


def _is_of_head(config: Mapping[str, Any] | str) -> bool:
    """Whether it names the method of a head, which is made for the middle model.

    Raises:
        ConfigError: neither a dict nor a name.
    """
    need(isinstance(config, Mapping | str), "draft", "be a dict or the name of a method", config)
    return (config if isinstance(config, str) else config.get("method")) in HEADS


def _nested(make: N | None) -> N:
    """What makes drafters that this one is built on.

    Raises:
        ConfigError: the engine has none.
    """
    if make is None:
        raise ConfigError("method 'specmquant' needs an engine that makes its small model; leave model and draft out")
    return make


def _inner(args: DrafterArgs, config: Mapping[str, Any] | str) -> Drafter:
    """The small model's drafter, whose options are looked at before the middle model is opened.

    Raises:
        DrafterError: one that cannot go back.
        CapabilityError: a model that cannot.
    """
    drafter = _nested(args.nested)(config)
    for model in drafter.runners():
        if not model.capabilities.truncate:
            raise CapabilityError(
                f"the small model of 'specmquant' must be one that can take back tokens that it has read; "
                f"{model.info.name} is not one as it runs here"
            )
    if not drafter.rewinds:
        raise DrafterError(
            f"draft of 'specmquant' must be draft_model, quantized_copy or one of {', '.join(HEADS)}, got "
            f"{drafter.name!r}, which cannot go back"
        )
    return drafter


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
