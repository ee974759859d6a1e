"""A draft model with exits: which layers have seen which tokens of a sequence, and passes that go deeper only where
that is wanted.

In: a runner that resumes at any layer, texts. Out: logits of an exit. Not here: which exit serves (`s2d`), drafting.

Tokens behind the cache lie in its scratch slots, the first ones known to all layers, later ones perhaps to the first
few only. A pass to a deeper exit takes all that is missing there along in one batch, so that keys and values are those
of the whole model; what has gone through all layers is committed. Until then a token's state behind its last layer is
kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from paceline.drafters.common.chains import chain_tree
from paceline.drafters.common.draft_state import Follower, agreed
from paceline.models.decoder import LayerPlan

if TYPE_CHECKING:
    from paceline.drafters.base import Context
    from paceline.models import LayeredRunner, SequenceCache

MOST: Final = 48
"""Tokens of a text that may wait for deeper layers."""


class ExitState(Follower):
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
        """Take drafts back, put the text behind what stays, and commit what has gone through all layers; where too much
        of the text waits, give up what waits for deeper ones.
        """
        text = self.pending
        self._cut(min(agreed(self.inputs, text), len(text) - 1))
        whole = self.done[-1]
        if whole and whole == self.done[0]:
            runner.commit([self.cache], [range(whole - 1)])
            self.inputs, self.done, self.states = [], [0] * exits, [None] * exits
            text = text[whole:]
        self.inputs = text
        if len(text) > MOST:
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
    """Take all inputs of some sequences from exit `index` - 1 to exit `index`; (r, v) logits there after each one's
    last.

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
    found, _ = runner.run_layers([s.cache for s in states], roots, trees, plan=plan, hidden=hidden, computed=computed)
    counts = [len(state.inputs) - done for state, done in zip(states, computed, strict=True)]
    parts = found.split(counts)
    for state, part in zip(states, parts, strict=True):
        if index:
            state.states[index - 1] = None
        if index + 1 < len(exits):
            before = state.states[index]
            state.states[index] = part if before is None or not len(before) else torch.cat((before, part))
        state.done[index] = len(state.inputs)
    return runner.head(torch.stack([part[-1] for part in parts]))
