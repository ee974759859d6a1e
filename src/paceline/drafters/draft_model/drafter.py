"""A smaller model with the same tokenizer drafts for the target.

The draft's cache keeps what the text confirms of its own drafts; whatever else was committed (the target's own tokens,
other drafters' ones, steps without drafts) is fed together with the next first level, a long gap in chunks.

A model that cannot forget tokens that it has read, since it keeps a state of them, drafts chains as it drafts trees:
they are scored as they grow, and only what the text confirms is read.

Source: Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318); trees as in `growth.policies`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Unpack

import torch

from paceline.drafters.base import DrafterArgs
from paceline.drafters.common.bases import FollowingDrafter, draws_for
from paceline.drafters.common.draft_chain import ChainDraft, draft_chains
from paceline.drafters.common.draft_state import DraftState
from paceline.drafters.growth.base import grow, model_scores
from paceline.drafters.growth.options import GrowthOptions, growth_policy, with_growth_options
from paceline.drafters.growth.policies import TreePolicy
from paceline.drafters.vocab import trimmed_head
from paceline.errors import CapabilityError, ConfigError
from paceline.models import MappedRunner, Runner
from paceline.models.heads import AcceptanceHead
from paceline.tree import Budget, TokenTree
from paceline.utils import need

logger = logging.getLogger("paceline")


@with_growth_options
class DraftModelDrafter(FollowingDrafter):
    """Drafts with a smaller model.

    Args:
        model: folder or hub id of the draft model.
        draft_vocab_size: tokens that the draft's head keeps, the most frequent ones; the others are never drafted,
            which saves the time of their rows. None, the default, keeps as many as pay where the target's tokens were
            counted (`paceline count-tokens`), else all; "all" keeps all in any case.
        draft_vocab_file: what tells which: a file of `paceline count-tokens`, JSON counts by token id, JSON ids by
            frequency, or a text; None takes what was counted of this target, else the lowest ids.
        acceptance_head: folder or hub id of what `paceline train specdec_pp` has written for this draft model;
            controller "specdec_pp", which is then the default, stops chains where it foretells a rejection.
        draft_device: where the draft model runs: "cpu", "cuda" or "cuda:N", or "auto" for the device of this machine on
            which its levels take the least time, which is measured and logged; None is the target's.
    Raises:
        ConfigError: a value outside its range, an option that the policy does not have.
        CapabilityError: a tree from a draft model whose runner scores chains only, an acceptance head for one that does
            not give its states or cannot take back tokens.
        CheckpointError: an acceptance head of other models.
        DrafterError: another tokenizer.
    """

    name = "draft_model"
    learns = "draft_model"
    rewinds = True
    policy: TreePolicy
    head: AcceptanceHead | None = None

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        draft_vocab_size: int | str | None = None,
        draft_vocab_file: str | None = None,
        draft_device: str | None = None,
        acceptance_head: str | None = None,
        **growth: Unpack[GrowthOptions],
    ) -> None:
        self._configure(args, growth)
        self._open(args, model, draft_vocab_size, draft_vocab_file, draft_device)
        if acceptance_head is not None:
            self._foretell(args, acceptance_head)

    def _open(
        self, args: DrafterArgs, model: str | None, size: int | str | None, file: str | None, device: str | None
    ) -> None:
        """Draft with this model, with so many rows of its head, on this device."""
        trimmed_head.check(size, file)
        if not isinstance(model, str) or args.load_runner is None:
            raise ConfigError(
                f"speculative_config model must be a folder or hub id for method {self.name!r}, got {model!r}"
            )
        rows = self._rows(args, size, file, model)
        if device is None and (rows is None or args.models is None):
            runner = args.load_runner(model)
        elif args.models is None:
            raise ConfigError(f"draft_device must be left out where models are not loaded from files, got {device!r}")
        else:
            runner = args.models.open(model, head_rows=rows, device=device)
        self._use(runner, repr(model))

    def _foretell(self, args: DrafterArgs, head: str) -> None:
        """Pass on what a head foretells of each drafted token.

        Raises:
            ConfigError: no name of one, or trees.
            CapabilityError: a draft model that does not give its states, or cannot take back tokens.
            CheckpointError: no such head, or one of other models.
        """
        need(isinstance(head, str), "acceptance_head", "be a folder or hub id", head)
        name = self.policy.name
        need(name == "chain", "acceptance_head", f"be left out with tree_policy {name!r}: it reads chains", head)
        if not self._chains:
            raise CapabilityError(
                f"acceptance_head needs a draft model that can take back tokens, which {self.runner.info.name} cannot "
                "as it runs here; leave it out"
            )
        target = None if args.target is None else args.target.info
        self.head = AcceptanceHead.read(head, self.runner, target, tokenizer=args.fingerprint)
        self.foretells = True

    def _configure(self, args: DrafterArgs, growth: GrowthOptions) -> None:
        """Check and keep what needs no model."""
        self._keep(args, growth.get("num_speculative_tokens"), growth.get("draft_sample_method"))
        self.policy = growth_policy(growth)
        self.tree_policy = self.policy.name

    def _rows(
        self, args: DrafterArgs, size: int | str | None, file: str | None, model: str | None = None
    ) -> list[int] | None:
        """Tokens that the head keeps, None for all; `model`: as of `cut_head`."""
        if args.models is None:
            need(
                size is None and file is None,
                "draft_vocab_size",
                "be left out where models are not loaded from files",
                size,
            )
            return None
        cut = trimmed_head.cut_head(size, file, args.models, args.vocab_size, model=model)
        if cut.words:
            self.note = cut.words
            logger.info("%s: %s", self.name, cut.words)
        return cut.tokens

    def _use(self, runner: Runner, name: str) -> None:
        """Draft with this model."""
        self.runner = runner
        chains = self.policy.name == "chain"
        self._chains = chains and runner.capabilities.truncate
        self.rewinds = self.rewinds and runner.capabilities.truncate
        if not chains and not runner.capabilities.trees:
            raise CapabilityError(
                f"tree_policy {self.policy.name!r} needs a draft model that scores trees, {name} cannot; leave it out "
                f"and use "
                "tree_width=1"
            )

    @property
    def draws_tokens(self) -> bool:
        return super().draws_tokens and not self.policy.points

    @property
    def learned_tokens(self) -> torch.Tensor | None:
        return torch.from_numpy(self.runner.tokens) if isinstance(self.runner, MappedRunner) else None

    def rewind(self, state: DraftState, kept: int) -> None:
        """The text behind its first `kept` tokens was taken back, as drafts of a hierarchy are.

        The context holds the new one.
        """
        state.forget(self.runner, kept)

    def _drawn(self, state: DraftState) -> bool:
        return not self.policy.points and draws_for(state.context, self.method)

    def _draft(self, states: Sequence[DraftState], budgets: Sequence[Budget], steps: Sequence[int]) -> list[TokenTree]:
        each = list(zip(states, budgets, steps, strict=True))
        if self._chains:
            chains = [
                ChainDraft(state.context, count, budget.go_on, self._drawn(state)) for state, budget, count in each
            ]
            return draft_chains(self.runner, states, chains, self.vocab_size, self.index, head=self.head)
        growing = [self.policy.start(state, budget, count, drawn=self._drawn(state)) for state, budget, count in each]
        return grow(model_scores(self.runner, growing, self.vocab_size), growing, self.index)
