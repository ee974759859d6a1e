"""EasySpec: a draft model whose attention sub-layers read the state before their group of layers, so that none waits
for another.

*Fuzzy speculation*: while a draft grows, the attention sub-layers of a group all read the state before the group, so
that they need not wait for each other; MLPs stay in order. *Bonus calibration*: what they write into the draft's cache
was computed from the wrong inputs and is dropped when the verdict is there; the accepted tokens and the target's own go
through one exact pass, which gives the next draft its first token. So the cache of the text is always that of the draft
model itself, and only tokens behind the first of a draft are drafted by the fuzzy one.

The paper runs the layers of a group at once on several GPUs. Here they run one after the other, so that the method
shows what fuzzy drafts are worth, and a level takes no less time than one of `draft_model`.

Source: EasySpec: layer-parallel speculative decoding for efficient multi-GPU utilization (arXiv:2502.02493).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Unpack, cast

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.bases import model_of
from paceline.drafters.common.draft_state import DraftState
from paceline.drafters.draft_model.drafter import DraftModelDrafter
from paceline.drafters.growth.base import grow, model_scores
from paceline.drafters.growth.options import GrowthOptions, with_growth_options
from paceline.tree import ROOT, Budget, TokenTree
from paceline.utils import integer

if TYPE_CHECKING:
    from paceline.models import Runner
    from paceline.models.runners import GroupedRunner

SIZE: Final = 4
"""Layers of a group, the paper's."""


class GroupedState(DraftState):
    """A draft model's cache whose fuzzy part is never kept.

    Attributes:
        exact: how many of `fed_tokens` went through an exact pass; None for all of them.
    """

    __slots__ = ("exact",)

    def __init__(self, context: Context, cache: Any, base: int = 0) -> None:
        super().__init__(context, cache, base)
        self.exact: int | None = None

    def confirm(self, runner: Runner) -> None:
        """Keep what the text has confirmed of the exact part, drop all else."""
        if self.exact is not None:
            del self.fed_tokens[self.exact :], self.fed_parents[self.exact :]
            self.exact = None
        super().confirm(runner)


@with_growth_options
class EasySpecDrafter(DraftModelDrafter):
    """Drafts with a smaller model whose layers read the same state in groups.

    Args:
        model: folder or hub id of the draft model, of four layers or more.
        layer_group_size: layers of a group; 1 is the draft model as it is. The first and the last layer are in no
            group.
        draft_device: as for `draft_model`.
    Raises:
        ConfigError: a value outside its range, a model of fewer layers.
        UnsupportedModelError: a model without the native runner.
        DrafterError: another tokenizer.
    """

    name = "easyspec"
    learns = ""
    takes_back = True
    kind = GroupedState

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        layer_group_size: int = SIZE,
        draft_device: str | None = None,
        **growth: Unpack[GrowthOptions],
    ) -> None:
        integer("layer_group_size", layer_group_size, 1, 1024)
        self._configure(args, growth)
        model, models = model_of(args, self.name, model)
        self._use(models.open(model, group_size=layer_group_size, device=draft_device), repr(model))
        self._fuzzy = cast("GroupedRunner", self.runner).fuzzy = layer_group_size > 1

    def catch_up(self, states: Sequence[DraftState]) -> None:
        """It reads while it drafts, in passes of its own kind."""

    def _draft(self, states: Sequence[DraftState], budgets: Sequence[Budget], steps: Sequence[int]) -> list[TokenTree]:
        """Chains grow as trees of width 1 do: the text by one exact pass, then a pass a level behind it."""
        policy = replace(self.policy, name="levels") if self._chains else self.policy
        each = zip(states, budgets, steps, strict=True)
        growing = [policy.start(state, budget, count, drawn=self._drawn(state)) for state, budget, count in each]
        trees = grow(model_scores(self.runner, growing, self.vocab_size), growing, self.index)
        if self._fuzzy:
            for state, draft in zip(states, growing, strict=True):
                cast(GroupedState, state).exact = draft.fed[ROOT] + 1
        return trees
