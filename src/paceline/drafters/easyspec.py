"""EasySpec: a draft model that runs the attention of neighbouring layers at once, where there are several devices to run it on.

In: contexts, a draft model of four layers or more. Out: chains or trees, as of any draft model, whose q is the law that the fuzzy
passes gave. Not here: the passes and who computes what of them (models.layer_parallel), whether they pay (`pearl_pace`).

*Fuzzy speculation*: while a draft grows, the attention sub-layers of a group all read the state before the group, so that they need
not wait for each other; MLPs stay in order. *Bonus calibration*: what they write into the draft's cache was computed from the wrong
inputs and is dropped when the verdict is there; the accepted tokens and the target's own go through one exact pass, which gives the
next draft its first token. So the cache of the text is always that of the draft model itself, and only tokens behind the first of a
draft are guesses of the fuzzy one.

On one device nothing is gained, since its layers share it: there, and where it does not pay, the model drafts layer by layer.

Source: EasySpec: layer-parallel speculative decoding for efficient multi-GPU utilization (arXiv:2502.02493).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import torch

from paceline.checking import integer, need
from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.draft_state import DraftState
from paceline.drafters.grow import grow
from paceline.drafters.pearl_pace import Paces
from paceline.drafters.tree_policies import PolicyName
from paceline.errors import CapabilityError, ConfigError
from paceline.models.layer_parallel import LayerGroups
from paceline.models.load import resolve_device
from paceline.tree.token_tree import ROOT, TokenTree
from paceline.tree.types import Budget, Scores, Verdict

if TYPE_CHECKING:
    from paceline.models.base import Runner
    from paceline.models.layer_parallel import LayerParallelRunner

logger = logging.getLogger("paceline.drafters")

SIZE: Final = 4
"""Layers of a group, the paper's."""

DOING: Final = ("runs the attention of its layers at once", "running the attention of layers at once")


class GroupedState(DraftState):
    """A draft model's cache whose fuzzy part is never kept.

    Attributes:
        exact: how many of `fed_tokens` went through an exact pass; None for all of them.
    """

    __slots__ = ("exact",)

    def __init__(self, context: Context, cache: Any, base: int = 0) -> None:
        super().__init__(context, cache, base)
        self.exact: int | None = None

    def settle(self, runner: Runner) -> None:
        """Keep what the text has confirmed of the exact part, drop all else."""
        if self.exact is not None:
            del self.fed_tokens[self.exact :], self.fed_parents[self.exact :]
            self.exact = None
        super().settle(runner)


class EasySpecDrafter(DraftModelDrafter):
    """Drafts with a smaller model whose layers run at once.

    Args:
        model: folder or hub id of the draft model, of four layers or more.
        layer_group_size: layers that run at once; 1 is the draft model as it is. The first and the last layer stand alone.
        draft_devices: of the workers that share the layers of a group, as ["cuda:0", "cuda:1"]; the first also has all but
            attention. None is every CUDA device where the target is on one, else two workers that share the CPU's threads.
        overlap: True always runs layers at once, False never; None, the default, tries both on the first steps and goes on with
            what was faster, which the log says.
        num_speculative_tokens, draft_sample_method, tree_policy, tree_width, tree_threshold, speculative_token_tree: as for
            `draft_model`.
    Raises:
        ConfigError: a value outside its range, a device that this machine does not have, a model of fewer layers.
        CapabilityError: overlap on a single device. UnsupportedModelError: a model without the native runner.
        DrafterError: another tokenizer.
    """

    name = "easyspec"
    catches_up = False
    rewinds = False  # not inside a hierarchy, whose steps are not timed

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        layer_group_size: int = SIZE,
        draft_devices: Sequence[str] | None = None,
        overlap: bool | None = None,
        num_speculative_tokens: int | None = None,
        draft_sample_method: Literal["probabilistic", "greedy"] | None = None,
        tree_policy: PolicyName | None = None,
        tree_width: int | Sequence[int] | None = None,
        tree_threshold: float | None = None,
        speculative_token_tree: str | Sequence[Sequence[int]] | None = None,
    ) -> None:
        integer("layer_group_size", layer_group_size, 1, 1024)
        need(overlap is None or isinstance(overlap, bool), "overlap", "be True, False or None", overlap)
        self._configure(
            args, limit=num_speculative_tokens, method=draft_sample_method, policy=tree_policy, width=tree_width,
            threshold=tree_threshold, paths=speculative_token_tree,
        )  # fmt: skip
        if not isinstance(model, str) or args.models is None:
            raise ConfigError(f"speculative_config model must be a folder or hub id for method 'easyspec', got {model!r}")
        devices = _devices(draft_devices, args)
        self.paces = Paces(self.name, _way(devices, layer_group_size, overlap), doing=DOING)
        self._use(args.models.open(model, layer_groups=LayerGroups(layer_group_size, devices)), repr(model))

    def begin(self, contexts: Sequence[Context]) -> list[DraftState]:
        return [GroupedState(context, self.runner.open()) for context in contexts]

    def propose(self, states: Sequence[DraftState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        cast("LayerParallelRunner", self.runner).fuzzy = self.paces.beside(len(states))
        return super().propose(states, budgets, so_far)

    def observe(
        self, states: Sequence[DraftState], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], scores: Scores | None
    ) -> None:
        super().observe(states, trees, verdicts, scores)
        self.paces.stepped(len(states), sum(len(verdict.tokens) for verdict in verdicts), alone=False)

    def fork(self, state: DraftState, context: Context) -> DraftState:
        state.settle(self.runner)
        return GroupedState(context, self.runner.fork(state.cache), state.base)

    def _draft(self, states: Sequence[DraftState], budgets: Sequence[Budget], steps: Sequence[int]) -> list[TokenTree]:
        """Chains grow as trees of width 1 do: the text by one exact pass, then a pass a level behind it."""
        policy = replace(self.policy, name="levels") if self._chains else self.policy
        each = zip(states, budgets, steps, strict=True)
        growing = [policy.start(state, budget, count, drawn=self._drawn(state)) for state, budget, count in each]
        trees = grow(self.runner, growing, self.vocab_size, self.index)
        if cast("LayerParallelRunner", self.runner).fuzzy:
            for state, draft in zip(states, growing, strict=True):
                cast(GroupedState, state).exact = draft.fed[ROOT] + 1
        return trees


def _devices(given: Sequence[str] | None, args: DrafterArgs) -> tuple[str, ...]:
    """Of the workers, each checked.

    Raises:
        ConfigError: no list of devices of this machine, or a mixture that shares nothing.
    """
    if given is None:
        own = torch.device("cpu") if args.target is None else args.target.info.device
        if own.type != "cuda":
            return ("cpu", "cpu")
        others = [f"cuda:{i}" for i in range(torch.cuda.device_count()) if i != (own.index or 0)]
        return (str(own), *others)
    fine = isinstance(given, list | tuple) and len(given) > 0 and all(isinstance(one, str) and one != "auto" for one in given)
    need(fine, "draft_devices", 'be a list of devices, as ["cuda:0", "cuda:1"]', given)
    return tuple(str(resolve_device(one, name="draft_devices")) for one in given)


def _way(devices: Sequence[str], size: int, overlap: bool | None) -> bool | None:
    """What the user wants, as far as it can be.

    Raises:
        CapabilityError: overlap where there is nothing to overlap on.
    """
    if size == 1:
        return False
    alone = len(set(devices)) == 1 and (len(devices) == 1 or not devices[0].startswith("cpu"))
    if alone and overlap:
        raise CapabilityError(f"overlap of 'easyspec' needs several devices, got {devices[0]} alone; name more in draft_devices")
    if alone and overlap is None:
        logger.warning("easyspec: there is no device beside %s to run layers on; going on sequentially", devices[0])
    elif overlap is None and torch.get_num_threads() < len(devices) and devices[0] == "cpu":
        logger.warning("easyspec: %d workers share %d CPU thread; going on sequentially", len(devices), torch.get_num_threads())
    else:
        return overlap
    return False
