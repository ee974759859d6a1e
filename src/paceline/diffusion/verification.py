"""Several canvases computed in one pass, to keep rounds that were drafted ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from paceline.diffusion.base import NONE, Commit, Setting, Step, Transition, Verification
from paceline.diffusion.canvas import Canvas, Status
from paceline.diffusion.commit.thresholds import ExploreCommit
from paceline.diffusion.layout import TreeLayout
from paceline.diffusion.predictions import Predictions
from paceline.errors import ConfigError
from paceline.models import Ints
from paceline.utils import need


class NoVerification(Verification):
    """The plain method's next canvas, and no other."""

    def __init__(self, setting: Setting) -> None:
        assert setting.transition is not None
        self.transition = setting.transition

    def drafts(self, canvas: Canvas, predictions: Predictions) -> list[Canvas]:
        return [self.transition(canvas, predictions)]

    def choose(self, drafts: Sequence[Canvas], predictions: Sequence[Predictions]) -> int:
        return 0


class FreeDave(Verification):
    """Keeps the furthest draft that the plain method reaches: the same canvases in fewer passes.

    A draft is the plain method's transition applied again and again to predictions that grow stale. The pass over all
    drafts gives each its own predictions; while the transition by these leads to the next draft, the next draft is
    kept. So the canvases are the plain method's own, whatever its rules are, as long as they have no memory, and
    whatever its cache is, as long as each draft is computed as the plain method would have (`Cache.ahead`); sampled
    tokens too, since noise is tied to (round, slot). A block's n masked slots, written one a round, take between
    1 + ceil((n - 1) / drafts) passes and n.

    The authors' scripts take the tree layout and the dual cache. Here neither is taken unasked: the one rounds
    otherwise, the other writes another text than decoding without a cache.

    Args:
        drafts: canvases computed in one pass; 1 is the plain method.
        layout: "batch" computes each draft in a call of its own, as the plain method would, to the bit; "tree" lays
            them along one call, equal up to rounding.
        blocks_ahead: blocks after the current one that drafts may reach into, earlier blocks always being filled first.
            A block-causal model computes them in every pass.
    Raises:
        ConfigError: a rule with a memory, drafts across blocks under a cache that is renewed between them.
    Source: Free Draft-and-Verification: Toward Lossless Parallel Decoding for Diffusion Large Language Models
        (arXiv:2510.00294).
    """

    def __init__(
        self, setting: Setting, *, drafts: int = 4, layout: Literal["batch", "tree"] = "batch", blocks_ahead: int = 0
    ) -> None:
        assert setting.transition is not None
        assert setting.cache is not None
        self.transition = setting.transition
        need(drafts >= 1, "drafts", "be at least 1", drafts)
        need(layout in ("batch", "tree"), "layout", "be batch or tree", layout)
        rule = "be 0 with this cache policy, which computes everything anew between blocks (none and block do not)"
        need(blocks_ahead == 0 or (blocks_ahead > 0 and setting.cache.exact), "blocks_ahead", rule, blocks_ahead)
        _check_stateless(self.transition)
        self.count, self.more = drafts, blocks_ahead
        if layout == "tree":
            self.layout = TreeLayout(setting.denoiser)
        self.temperature, self.seed = setting.temperature, setting.seed

    def drafts(self, canvas: Canvas, predictions: Predictions) -> list[Canvas]:
        drafts = [self.transition(canvas, predictions)]
        block = self.transition.schedule.block(canvas)
        end = block.stop + self.more * len(block)
        while len(drafts) < self.count and self._worth(drafts[-1], canvas, end):
            draft = drafts[-1]
            eligible = self.transition.schedule.eligible(draft)
            if not predictions.known(eligible).any():
                break
            after = self.further(draft, self._drawn(predictions, draft.round))
            if not self._worth(after, canvas, end):
                break
            drafts.append(after)
        return drafts

    def choose(self, drafts: Sequence[Canvas], predictions: Sequence[Predictions]) -> int:
        best = 0
        while best + 1 < len(predictions):
            target = self.transition.what_if(drafts[best], predictions[best])
            reached = [j for j in range(best + 1, len(predictions)) if self.agree(drafts[j], target)]
            if not reached:
                break
            best = reached[-1]
            written = drafts[best].status == Status.COMMITTED
            drafts[best].confidence[written] = target.confidence[written]
        return best

    def further(self, draft: Canvas, predictions: Predictions) -> Canvas:
        """The next draft, by predictions that are not its own."""
        return self.transition.what_if(draft, predictions)

    def agree(self, draft: Canvas, target: Canvas) -> bool:
        """Whether a draft is where the plain method goes."""
        same = ((draft.tokens, target.tokens), (draft.status, target.status), (draft.born, target.born))
        return draft.round == target.round and all(np.array_equal(ours, theirs) for ours, theirs in same)

    def _worth(self, draft: Canvas, canvas: Canvas, end: int) -> bool:
        """Whether it is of use what the model says of a draft: it goes on, within the same blocks."""
        if self.transition.finished(draft) or draft.length != canvas.length:
            return False
        return self.transition.schedule.block(draft).start < end

    def _drawn(self, predictions: Predictions, round_: int) -> Predictions:
        """The same logits with the noise of a later round."""
        if self.temperature == 0:
            return predictions
        logits, slots = predictions.logits, predictions.slots
        return Predictions.of(logits, slots, temperature=self.temperature, seed=self.seed, round_=round_)


class FreeDavePlus(FreeDave):
    """FreeDave++ for rules that write several slots a round: not lossless.

    The first draft is the plain method's, each further one has one slot more, and a draft is kept when the plain method
    would have written what it holds, and perhaps more. So rounds may be split, and the canvas may differ from the plain
    method's. With a rule that writes one slot a round it is FreeDave.
    """

    def __init__(
        self, setting: Setting, *, drafts: int = 4, layout: Literal["batch", "tree"] = "batch", blocks_ahead: int = 0
    ) -> None:
        super().__init__(setting, drafts=drafts, layout=layout, blocks_ahead=blocks_ahead)
        self.one = replace(self.transition, commit=_BestOnly(setting), edit=None, stop=None)

    def further(self, draft: Canvas, predictions: Predictions) -> Canvas:
        return self.one.what_if(draft, predictions)

    def agree(self, draft: Canvas, target: Canvas) -> bool:
        if draft.length != target.length:
            return False
        held = draft.status != Status.MASKED
        return bool((target.status[held] != Status.MASKED).all()) and np.array_equal(
            draft.tokens[held], target.tokens[held]
        )


class _BestOnly(Commit):
    """Chooses nothing, so that the transition writes the best slot."""

    def choose(self, step: Step) -> Ints:
        return NONE


def _check_stateless(transition: Transition) -> None:
    for part in transition.parts:
        if not part.stateless:
            name = type(part).__name__
            raise ConfigError(f"verification freedave needs rules without memory, and {name} has one; use none")


class ExploreTokens(Verification):
    """Tries the `explore_tokens` most probable tokens of the first explored slot, each on a canvas of its own.

    The one after which most slots pass the threshold stays. All are computed in one pass; drafts cost slots, not calls.

    Raises:
        ConfigError: a commit rule that does not explore, or rules with a memory.
    Source: From Bits to Rounds (arXiv:2511.21103); the choice by the number of slots that pass the threshold is this
        library's reading.
    """

    def __init__(self, setting: Setting, *, explore_tokens: int = 2) -> None:
        assert setting.transition is not None
        need(explore_tokens >= 1, "explore_tokens", "be at least 1", explore_tokens)
        rule = setting.transition.commit
        explores = "be 'explore' for verification 'explore_tokens'"
        need(isinstance(rule, ExploreCommit), "commit", explores, type(rule).__name__)
        name, memory = "verification 'explore_tokens'", "go with rules without a memory"
        need(setting.transition.stateless, name, memory, "one with a memory")
        assert isinstance(rule, ExploreCommit)
        unchecked = "be left out where a constraint is checked (the tokens it tries are not)"
        need(setting.transition.check is None, name, unchecked, "a constraint")
        self.rule, self.transition, self.number = rule, setting.transition, explore_tokens

    def drafts(self, canvas: Canvas, predictions: Predictions) -> list[Canvas]:
        first = self.transition(canvas, predictions)
        step = self.transition.step(canvas, predictions)
        explored = self.rule.explored(step) if step.eligible.size else step.eligible
        if not explored.size or explored[0] >= first.length:
            return [first]
        slot = int(explored[0])
        row = predictions.logits[int(predictions.rows(explored[:1])[0])].double().softmax(-1)
        values, tokens = row.topk(min(self.number, row.numel() - 1))
        others = [
            (int(t), float(p)) for t, p in zip(tokens, values, strict=True) if int(t) != first.tokens[slot] and p > 0
        ]
        return [first, *(_with(first, slot, token, p) for token, p in others[: self.number - 1])]

    def choose(self, drafts: Sequence[Canvas], predictions: Sequence[Predictions]) -> int:
        return int(np.argmax([self._exploited(d, p) for d, p in zip(drafts, predictions, strict=False)]))

    def _exploited(self, canvas: Canvas, predictions: Predictions) -> int:
        return int(self.rule.exploited(self.transition.step(canvas, predictions)).size)


def _with(canvas: Canvas, slot: int, token: int, probability: float) -> Canvas:
    """A copy with another token at a slot that was just written."""
    copy = canvas.copy()
    copy.tokens[slot], copy.confidence[slot] = token, probability
    return copy
