"""PEARL: a draft model writes on while the target scores what it wrote before, instead of each waiting for the other.

In: contexts, a draft model, the chains that are scored. Out: chains, and work for a second thread (`base.Ahead`). Not
here: threads (the engine), what stands of a draft (`pearl_state`), which way is faster (`pearl_pace`).

With a window of g tokens. *Pre-verify*, where nothing is drafted yet: the target scores the last token of the text
alone, and g tokens are drafted behind it meanwhile; the target's row judges the first of them. Where it stands the
other g - 1 are the chain of the next step. *Post-verify*: g more are drafted behind that chain while it is scored; the
rows judge its tokens, and the last row the first of the new ones. So a step in which all stands brings g tokens, and
none of the target's own, since drafting has gone on past it. Where something is rejected the rest is thrown away, and
the next step pre-verifies.

No result depends on which thread was faster: verdicts wait for both, and what was drafted is used or thrown away by
what they say. Where the two run on one GPU, or where it does not pay, everything is drafted before it is scored, as by
`draft_model`.

Source: PEARL, Parallel speculative decoding with adaptive draft length (arXiv:2408.11850), algorithm 2.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final, Literal

import torch

from paceline.drafters.base import Ahead, Context, DrafterArgs, Guess
from paceline.drafters.common.draft_chain import ChainDraft, draft_chains
from paceline.drafters.common.draft_options import UNLIMITED
from paceline.drafters.draft_model.drafter import DraftModelDrafter
from paceline.drafters.draft_model.pearl_pace import Paces
from paceline.drafters.draft_model.pearl_state import Drafted, PearlState
from paceline.errors import CapabilityError
from paceline.tree import EMPTY_TREE, Budget, Scores, TokenTree, Verdict
from paceline.utils import need

logger = logging.getLogger("paceline.drafters")

SHARE: Final = 4
"""The draft takes one of so many of the target's threads, and at least one."""


class PearlDrafter(DraftModelDrafter):
    """Drafts with a smaller model while the target scores.

    Args:
        model: folder or hub id of the draft model.
        num_speculative_tokens: the window, in tokens; None takes as many as are drafted in the time that the target
            needs, within the budget.
        overlap: True always drafts while the target scores, False always before it; None, the default, tries both on
            the first steps and goes on with what was faster, which the log says.
        draft_sample_method, draft_vocab_size, draft_vocab_file, draft_device: as for `draft_model`.
    Raises:
        ConfigError: a value outside its range. CapabilityError: overlap on a GPU that is the target's too.
        DrafterError: another tokenizer.
    """

    name = "pearl"
    catches_up = False
    rewinds = False  # not inside a hierarchy, where nobody scores what it could draft beside
    works_ahead = True
    kind = PearlState

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        num_speculative_tokens: int | None = None,
        overlap: bool | None = None,
        draft_sample_method: Literal["probabilistic", "greedy"] | None = None,
        draft_vocab_size: int | None = None,
        draft_vocab_file: str | None = None,
        draft_device: str | None = None,
    ) -> None:
        need(overlap is None or isinstance(overlap, bool), "overlap", "be True, False or None", overlap)
        self._configure(
            args,
            limit=num_speculative_tokens,
            method=draft_sample_method,
            policy=None,
            width=None,
            threshold=None,
            paths=None,
        )
        self._open(args, model, draft_vocab_size, draft_vocab_file, draft_device)
        self.paces = Paces(self.name, self._way(args, overlap))

    def _way(self, args: DrafterArgs, overlap: bool | None) -> bool | None:
        """What the user wants, as far as it can be."""
        device = self.runner.info.device
        other = device if args.target is None else args.target.info.device
        self.shared = device.type == other.type == "cpu"
        if self.shared or device != other:
            return overlap
        if overlap:
            raise CapabilityError(
                f"overlap of 'pearl' needs a draft on another device than the target's {device}; leave it out"
            )
        if overlap is None:
            logger.warning(
                "pearl: draft and target share %s, which runs one after the other; going on sequentially", device
            )
        return False

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        """What was drafted while the last step was scored; where others drafted too, or sequentially, a new draft."""
        beside = self.paces.beside(len(states))
        longest = self.paces.of(len(states)).window if self.limit == UNLIMITED else self.limit
        trees = [EMPTY_TREE] * len(states)
        alone: list[int] = []
        for i, (state, budget, others) in enumerate(zip(states, budgets, so_far, strict=True)):
            state.tidy(self.runner)
            if beside and not len(others):
                state.ask(min(self._room(state, budget), longest), budget)
                trees[i] = state.tree(min(budget.nodes, budget.depth), self.index)
            else:
                state.drop(self.runner)
                alone.append(i)
        if alone:
            found = super().propose([states[i] for i in alone], [budgets[i] for i in alone], [EMPTY_TREE] * len(alone))
            self.paces.drafted(max(map(len, found)))
            for i, tree in zip(alone, found, strict=True):
                trees[i] = tree
        return trees

    def ahead(self, states: Sequence[PearlState], trees: Sequence[TokenTree]) -> Ahead | None:
        """Drafting behind the chains that are scored now, where they are this drafter's own."""
        asked = [state.window > 0 and state.is_front(tree) for state, tree in zip(states, trees, strict=True)]
        if not any(asked):
            return None
        threads = max(torch.get_num_threads() // SHARE, 1) if self.shared else 0

        def work() -> list[Guess | None]:
            lacking = [
                (state, state.window + len(tree) - len(state.drafted))
                for state, tree, own in zip(states, trees, asked, strict=True)
                if own
            ]
            self._draft_on([(state, count) for state, count in lacking if count > 0])
            each = zip(states, trees, asked, strict=True)
            return [_first(state, len(tree)) if own else None for state, tree, own in each]

        return Ahead(work, threads)

    def observe(
        self, states: Sequence[Any], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], scores: Scores | None
    ) -> None:
        alone = not any(state.window for state in states)
        for state, tree, verdict in zip(states, trees, verdicts, strict=True):
            state.follow(tree, verdict, self.runner)
        self.paces.stepped(len(states), sum(len(verdict.tokens) for verdict in verdicts), alone=alone)

    def fork(self, state: Any, context: Context) -> Any:
        state.drop(self.runner)
        return super().fork(state, context)

    def _room(self, state: PearlState, budget: Budget) -> int:
        """Most tokens that may be drafted behind the chain: within the budget, the option and the draft model's
        context.
        """
        return min(
            self._steps(state, budget),
            self.runner.info.max_context - len(state.context.tokens) - len(state.drafted) + 1,
        )

    def _draft_on(self, lacking: Sequence[tuple[PearlState, int]]) -> None:
        """Draft so many tokens more behind what each has."""
        if not lacking:
            return
        for state, _ in lacking:
            state.tidy(self.runner)
        chains = [
            ChainDraft(
                state.context, count, state.go_on, self._drawn(state), behind=[one.token for one in state.drafted]
            )
            for state, count in lacking
        ]
        draft_chains(self.runner, [state for state, _ in lacking], chains, self.vocab_size, self.index)
        for (state, _), chain in zip(lacking, chains, strict=True):
            state.add([Drafted(*one) for one in zip(chain.tokens, chain.confidence, chain.rows, strict=True)])


def _first(state: PearlState, place: int) -> Guess | None:
    """What was drafted behind so many tokens; points are found in the target's own token, and need no trial."""
    if place >= len(state.drafted):
        return None
    guess = state.drafted[place]
    return None if guess.row is None else Guess(guess.token, guess.row)
