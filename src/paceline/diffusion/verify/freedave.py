"""FreeDave: the method drafts its own next rounds from what it knows now, and one pass tells how many of them it would
have taken.

In: a canvas with predictions. Out: nested drafts, the furthest that the plain method would have reached. Not here: how
drafts are laid out in a pass (`loop.Layout`, `tree_layout`), which slots a pass computes (caches).
Source: Free Draft-and-Verification: Toward Lossless Parallel Decoding for Diffusion Large Language Models
(arXiv:2510.00294).

A draft is the plain method's transition applied again and again to predictions that grow stale. The pass over all
drafts gives each its own predictions; while the transition by these leads to the next draft, the next draft is kept. So
the canvases are the plain method's own, whatever its rules are, as long as they have no memory, and whatever its cache
is, as long as each draft is computed as the plain method would have (`Cache.ahead`); sampled tokens too, since noise is
tied to (round, slot). A block's n masked slots, written one a round, take between 1 + ceil((n - 1) / drafts) passes and
n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from paceline.diffusion.base import NONE, Step
from paceline.diffusion.canvas import Canvas, Status
from paceline.diffusion.predictions import Predictions
from paceline.diffusion.setting import Setting
from paceline.diffusion.transition import Transition
from paceline.diffusion.verify.tree_layout import Tree
from paceline.errors import ConfigError
from paceline.models.denoiser import Ints
from paceline.utils import need


class FreeDave:
    """Keeps the furthest draft that the plain method reaches: the same canvases in fewer passes.

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
        _refuse_memory(self.transition)
        self.count, self.more = drafts, blocks_ahead
        self.layout = Tree(setting.denoiser) if layout == "tree" else None
        self.temperature, self.seed = setting.temperature, setting.seed

    def drafts(self, canvas: Canvas, predictions: Predictions) -> list[Canvas]:
        """See `base.Verification`."""
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
        """See `base.Verification`."""
        best = 0
        while best + 1 < len(predictions):
            target = _what_if(self.transition, drafts[best], predictions[best])
            reached = [j for j in range(best + 1, len(predictions)) if self.agree(drafts[j], target)]
            if not reached:
                break
            best = reached[-1]
            written = drafts[best].status == Status.COMMITTED
            drafts[best].confidence[written] = target.confidence[written]
        return best

    def further(self, draft: Canvas, predictions: Predictions) -> Canvas:
        """The next draft, by predictions that are not its own."""
        return _what_if(self.transition, draft, predictions)

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
        self.one = replace(self.transition, commit=_BestOnly(), edit=None, stop=None)

    def further(self, draft: Canvas, predictions: Predictions) -> Canvas:
        """See `FreeDave`."""
        return _what_if(self.one, draft, predictions)

    def agree(self, draft: Canvas, target: Canvas) -> bool:
        """See `FreeDave`."""
        if draft.length != target.length:
            return False
        held = draft.status != Status.MASKED
        return bool((target.status[held] != Status.MASKED).all()) and np.array_equal(
            draft.tokens[held], target.tokens[held]
        )


class _BestOnly:
    """Chooses nothing, so that the transition writes the best slot."""

    stateless = True

    def choose(self, step: Step) -> Ints:
        del step
        return NONE


def _what_if(transition: Transition, canvas: Canvas, predictions: Predictions) -> Canvas:
    """One round that ends nothing, even where a stop rule speaks."""
    ended = transition.ended
    after = transition(canvas, predictions)
    transition.ended = ended
    return after


def _refuse_memory(transition: Transition) -> None:
    t = transition
    parts: tuple[object, ...] = (t.schedule, t.score, *t.modifiers, t.commit, t.edit, t.check, t.stop, t.correction)
    for part in parts:
        if part is not None and not getattr(part, "stateless", False):
            name = type(part).__name__
            raise ConfigError(f"verification freedave asks rules what they would do, and {name} has a memory; use none")
