"""Kangaroo: the target's first layers and a small adapter draft; drafting ends behind the first token that is not sure.

Where verification resumes, as in the paper, the first layers run once for every token: a draft ends with a pass of them
over its last token, and scoring goes on with all these states, which are also what the adapter is told of the accepted
tokens. Otherwise scoring runs all layers, and is asked for the exit layer's states where something was drafted. What
neither gives (of the prompt, of steps without drafts, of other drafters' tokens) comes from a replay of the missing
tokens over the first layers.

Source: Kangaroo: lossless self-speculative decoding via double early exiting (arXiv:2404.18911).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.bases import SampleMethod
from paceline.drafters.common.draft_state import agreed
from paceline.drafters.self.base import ActiveDraft, DraftPlan, SelfDrafter, SelfState
from paceline.drafters.self.skip_replay import has_room, replayed
from paceline.models import LayerPlan, PassResult, SequenceCache
from paceline.models.runners import Adapter
from paceline.models.state import NativeCache
from paceline.tree import EMPTY_TREE, Budget, Scores, TokenTree, Verdict
from paceline.utils import integer, need, number


class KangarooState(SelfState):
    """Keeps one sequence, with the adapter's cache.

    Attributes:
        adapter_cache: of the text's first tokens. waiting: (n, hidden) states of the tokens behind these.
        requested: length of the text when drafts were last requested, 0 once the outcome is known.
    """

    __slots__ = ("adapter_cache", "requested", "waiting")

    def __init__(self, context: Context, adapter_cache: NativeCache, waiting: torch.Tensor) -> None:
        super().__init__(context)
        self.adapter_cache, self.waiting, self.requested = adapter_cache, waiting, 0

    @property
    def known(self) -> int:
        """Tokens of the text whose states are here."""
        return self.adapter_cache.length + len(self.waiting)


class KangarooDrafter(SelfDrafter[KangarooState]):
    """Drafts with the first `exit_layer` layers and an adapter.

    Args:
        model: folder or hub id of the adapter, safetensors with a config.json.
        exit_layer: layers that run before the adapter, from 1 to one less than the target has; what it was trained for.
        draft_stop_threshold: nothing is drafted behind a token that is less likely than this; the paper's eta.
        draft_max_length: most tokens of a draft; the paper's gamma.
        num_speculative_tokens: most tokens to draft, within `draft_max_length`; None leaves it to that.
        draft_sample_method: above temperature 0, "probabilistic" draws from the adapter's distribution, "greedy" takes
            its most likely tokens. By default it draws, but for requests with a seed of their own.
        resume_verification: let scoring go on behind the exit, with its states and the keys and values that are there
            already, as the paper does; by default where a measurement finds that faster.
    Raises:
        ConfigError: a value outside its range, no adapter.
        CheckpointError: an adapter of another width, or without its weights.
        CapabilityError: a target whose layers cannot be run alone.
    """

    name = "kangaroo"

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        exit_layer: int = 2,
        draft_stop_threshold: float = 0.6,
        draft_max_length: int = 6,
        num_speculative_tokens: int | None = None,
        draft_sample_method: SampleMethod | None = None,
        resume_verification: bool | None = None,
    ) -> None:
        super().__init__(
            args,
            num_speculative_tokens=num_speculative_tokens,
            draft_sample_method=draft_sample_method,
            resume_verification=resume_verification,
        )
        need(
            isinstance(model, str),
            "speculative_config model",
            "be the folder or hub id of an adapter for method 'kangaroo'",
            model,
        )
        integer("exit_layer", exit_layer, 1, self.target.info.num_layers - 1)
        number("draft_stop_threshold", draft_stop_threshold, 0.0, 1.0, "be in 0..1")
        integer("draft_max_length", draft_max_length, 1)
        self.adapter = Adapter.load(str(model), self.target.info)
        self._drafting = DraftPlan(LayerPlan(stop=exit_layer), draft_max_length, draft_stop_threshold)
        self._layer, self._wanted = exit_layer - 1, False
        info = self.target.info
        self._none = torch.empty(0, info.hidden_size, device=info.device, dtype=info.dtype)

    @property
    def score_taps(self) -> Sequence[int]:
        """The exit's last layer, where something was drafted and its states are not kept."""
        return (self._layer,) if self._wanted and not self.resumes else ()

    def propose(
        self, states: Sequence[KangarooState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]
    ) -> list[TokenTree]:
        fitting = [
            budget if self._has_room(state) else Budget(0, 0) for state, budget in zip(states, budgets, strict=True)
        ]
        trees = super().propose(states, fitting, so_far)
        self._wanted = any(tree is not EMPTY_TREE for tree in trees)
        for state, tree in zip(states, trees, strict=True):
            state.requested = len(state.context.tokens) if tree is not EMPTY_TREE else 0
        return trees

    def observe(
        self,
        states: Sequence[KangarooState],
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict],
        scores: Scores | None,
    ) -> None:
        """Keep the states of the accepted tokens, where drafting or the scoring pass gave them."""
        self._wanted = False
        for i, (state, tree, verdict) in enumerate(zip(states, trees, verdicts, strict=True)):
            requested, state.requested = state.requested, 0
            if state.known != requested or len(state.context.tokens) != requested + len(verdict.tokens):
                continue
            if verdict.path and state.kept is not None:
                accepted = [int(tree.tokens[node]) for node in verdict.path]
                state.waiting = state.kept.states[1 : 1 + agreed(accepted, state.kept.inputs[1:])]
            elif verdict.path and scores is not None and self._layer in scores.taps:
                first = scores.rows[i] + 1
                state.waiting = scores.taps[self._layer][[first + node for node in verdict.path]]

    def fork(self, state: KangarooState, context: Context) -> KangarooState:
        return KangarooState(context, self.adapter.fork(state.adapter_cache), state.waiting)

    def end(self, states: Sequence[KangarooState]) -> None:
        for state in states:
            self.adapter.release(state.adapter_cache)

    def _state(self, context: Context) -> KangarooState:
        return KangarooState(context, self.adapter.open(), self._none)

    def _usual(self) -> LayerPlan:
        return self._drafting.plan

    def draft_plan(self, state: KangarooState) -> DraftPlan:
        return self._drafting

    def _draft(self, drafts: Sequence[ActiveDraft]) -> list[TokenTree]:
        trees = super()._draft(drafts)
        if self.resumes:
            self._finish([cast(KangarooState, draft.state) for draft in drafts])
        return trees

    def _finish(self, states: Sequence[KangarooState]) -> None:
        """Take the last drafted tokens through the exit's layers too, for scoring and for the adapter."""
        left = [(state, kept) for state in states if (kept := state.kept) and len(kept.states) < len(kept.inputs)]
        if not left:
            return
        caches, inputs = [kept.cache for _, kept in left], [kept.inputs for _, kept in left]
        exits = self.drafts.step(caches, inputs, self._drafting.plan, states=True, logits=False).states
        for (state, kept), row in zip(left, exits.split(1), strict=True):
            state.kept = replace(kept, states=torch.cat((kept.states, row)))

    def _level(
        self,
        states: Sequence[KangarooState],
        caches: Sequence[SequenceCache],
        inputs: Sequence[Sequence[int]],
        plan: LayerPlan,
    ) -> PassResult:
        first = len(inputs[0]) == 1
        if first:
            for state, cache in zip(states, caches, strict=True):
                self._follow(state, cache)
        exits = self.drafts.step(caches, inputs, plan, states=True, logits=False).states
        adapter_caches = [state.adapter_cache for state in states]
        if first:
            adapted = self.adapter.extend(
                adapter_caches, [torch.cat((s.waiting, row[None])) for s, row in zip(states, exits, strict=True)]
            )
            for state in states:
                state.waiting = self._none
        else:
            adapted = self.adapter.ahead(adapter_caches, [len(tokens) - 1 for tokens in inputs], exits)
        return PassResult(self.drafts.head(adapted, norm=False), exits if self.resumes else self._none)

    def _has_room(self, state: KangarooState) -> bool:
        """Whether tokens whose states are missing can be replayed."""
        length = len(state.context.tokens)
        return state.known >= length - 1 or has_room(self.target, length)

    def _follow(self, state: KangarooState, cache: SequenceCache) -> None:
        """Forget what was drafted, and get the states of all tokens but the last."""
        text = state.context.tokens
        if state.adapter_cache.length >= len(text):
            state.waiting = self._none
        self.adapter.truncate(state.adapter_cache, min(state.adapter_cache.length, len(text) - 1))
        if state.known < len(text) - 1:
            missing = text[state.known : -1]
            states = replayed(self.drafts.runner, cache, state.known, missing, plan=self._drafting.plan)
            state.waiting = torch.cat((state.waiting, states))
