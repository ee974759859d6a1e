"""PEARL: a draft model writes on while the target scores what it wrote before, instead of each waiting for the other.

With a window of g tokens. *Pre-verify*, where nothing is drafted yet: the target scores the last token of the text
alone, and g tokens are drafted behind it meanwhile; the target's row verifies the first of them. If it is accepted, the
other g - 1 are the chain of the next step. *Post-verify*: g more are drafted behind that chain while it is scored; the
rows verify its tokens, and the last row the first of the new ones. So a step in which all are accepted brings g tokens,
and none of the target's own, since drafting has gone on past it. Where something is rejected the rest is thrown away,
and the next step pre-verifies. A draft that outlives a verdict is drawn from the same distributions as if it had been
made after it.

No result depends on which thread was faster: verdicts wait for both. Two models at once share cores, caches and memory
bandwidth, so that what each costs alone says little of what they cost together. So nothing is modelled: whole steps of
both modes, overlapped and sequential, are timed in turns, tokens per second decide, and the decision is tried again
after some thousand steps. Where the two run on one GPU everything is drafted before it is scored, as by `draft_model`.

Source: PEARL, Parallel speculative decoding with adaptive draft length (arXiv:2408.11850), algorithm 2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from paceline.drafters.base import Ahead, Context, DraftedToken, DrafterArgs
from paceline.drafters.common.bases import UNLIMITED, SampleMethod
from paceline.drafters.common.chains import chain_tree
from paceline.drafters.common.draft_chain import ChainDraft, draft_chains
from paceline.drafters.common.draft_state import DraftState
from paceline.drafters.draft_model.drafter import DraftModelDrafter
from paceline.drafters.growth.options import GrowthOptions
from paceline.errors import CapabilityError
from paceline.tree import EMPTY_TREE, Budget, GoOn, Scores, TokenTree, Verdict, always_go_on
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.models import Runner, SequenceCache


class PearlDraft(NamedTuple):
    """A token, its chance, and the (v,) row that it was drawn from, None where it was taken as the likeliest."""

    token: int
    chance: float
    row: torch.Tensor | None


class PearlState(DraftState):
    """A `DraftState` whose draft may be longer than what was proposed.

    Where something is drafted, the cache holds the text and all drafted tokens but the last.

    Attributes:
        drafted: tokens behind the text that were not verified yet.
        rooted: length of the text behind which they were drafted.
        window: tokens that shall be drafted behind the chain of this step; 0 where none was asked for.
        go_on: of this step's budget.
    """

    __slots__ = ("drafted", "go_on", "rooted", "window")

    def __init__(self, context: Context, cache: SequenceCache, base: int = 0) -> None:
        super().__init__(context, cache, base)
        self.drafted: list[PearlDraft] = []
        self.rooted, self.window = len(context.tokens), 0
        self.go_on: GoOn = always_go_on

    @property
    def pending(self) -> list[int]:
        """What must be fed to get logits behind all that is drafted."""
        return [self.drafted[-1].token] if self.drafted else super().pending

    def ask(self, window: int, budget: Budget) -> None:
        """A step of so many tokens more."""
        self.window, self.go_on = window, budget.go_on

    def tree(self, nodes: int, source: int) -> TokenTree:
        """The first drafted tokens as a chain."""
        some = self.drafted[:nodes]
        return chain_tree(
            [draft.token for draft in some], [draft.chance for draft in some], source, [draft.row for draft in some]
        )

    def is_front(self, tree: TokenTree) -> bool:
        """Whether a tree is the beginning of what is drafted, and nothing else."""
        tokens = tree.tokens.tolist()
        fits = len(tokens) <= len(self.drafted) and all(
            draft.token == token for draft, token in zip(self.drafted, tokens, strict=False)
        )
        return fits and tree.is_chain and not tree.kinds.any()

    def tidy(self, runner: Runner) -> None:
        """Bring the cache to what is drafted, after work that may have broken off or a text that went its own way."""
        if self.rooted != len(self.context.tokens):
            self.drop(runner)
        elif not self.drafted:
            self.confirm(runner)
        else:
            self._hold()
            if self.cache.length > (length := self.base + len(self.ahead)):
                runner.truncate(self.cache, length)

    def add(self, drafts: Sequence[PearlDraft]) -> None:
        """So much was drafted behind the rest; the cache holds all of it but the last."""
        self.drafted += drafts
        self._hold()

    def _hold(self) -> None:
        self.base, self.ahead = self.rooted, [draft.token for draft in self.drafted[:-1]]

    def follow(self, tree: TokenTree, verdict: Verdict, runner: Runner) -> None:
        """Keep what was drafted behind the new text, which the context holds already. The window is over."""
        self.window, used = 0, len(tree) + 1
        whole = self.is_front(tree) and len(verdict.path) == len(tree) and len(self.drafted) >= used
        if not whole or self.context.tokens[self.rooted :] != [draft.token for draft in self.drafted[:used]]:
            self.drop(runner)
            return
        self.drafted, self.rooted = self.drafted[used:], len(self.context.tokens)
        if self.drafted:
            self._hold()
        else:
            self.confirm(runner)

    def drop(self, runner: Runner) -> None:
        """Forget the draft; the cache keeps what the text confirms."""
        self.drafted, self.rooted = [], len(self.context.tokens)
        self.confirm(runner)


logger = logging.getLogger("paceline.drafters")

STEPS: Final = 24
"""Of one mode at a time."""

TURNS: Final = 4
"""Before something is decided; the ways alternate."""

SKIP: Final = 3
"""First steps of a turn that do not count: caches are filled and threads woken."""

AGAIN: Final = 4096
"""Steps after which a decision is tried again."""

LONGEST: Final = 16


@dataclass(slots=True)
class Throughput:
    """Sums up what was seen of one mode."""

    seconds: float = 0.0
    tokens: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0.0 else 0.0


@dataclass(slots=True)
class OverlapChoice:
    """Chooses, for one size of batch, whether drafting overlaps with verification.

    Attributes:
        decided: whether steps draft beside the target; None while it is tried.
        draft, rest: seconds and tokens of drafting alone, seconds and steps of all else, as sequential steps show them.
    """

    decided: bool | None = None
    steps: int = 0
    modes: dict[bool, Throughput] = field(default_factory=lambda: {False: Throughput(), True: Throughput()})
    draft: Throughput = field(default_factory=Throughput)
    rest: Throughput = field(default_factory=Throughput)

    @property
    def overlapped(self) -> bool:
        """Whether the next step drafts beside the target; sequential steps come first."""
        return self.steps // STEPS % 2 == 1 if self.decided is None else self.decided

    @property
    def window(self) -> int:
        """As many tokens as are drafted while the target scores, by what both take alone."""
        if not (self.draft.seconds > 0.0 and self.rest.tokens):
            return LONGEST
        return min(max(round(self.draft.rate * self.rest.seconds / self.rest.tokens), 1), LONGEST)

    def step(self, seconds: float | None, tokens: int) -> bool | None:
        """A step took so long, None where that is not known; the decision, where there is a new one."""
        position, overlapped = self.steps % STEPS, self.overlapped
        self.steps += 1
        if self.decided is not None:
            if self.steps >= AGAIN:
                self.decided, self.steps, self.modes = None, 0, {False: Throughput(), True: Throughput()}
            return None
        if seconds is not None and position >= SKIP:
            mode = self.modes[overlapped]
            mode.seconds, mode.tokens = mode.seconds + seconds, mode.tokens + tokens
        if self.steps < STEPS * TURNS:
            return None
        self.decided, self.steps = self.modes[True].rate > self.modes[False].rate, 0
        return self.decided


class OverlapChoices:
    """Keeps an `OverlapChoice` for every size of batch.

    Args:
        name: of the method, for the log.
        always: the user's own choice; None decides by the clock.
    """

    def __init__(self, name: str, always: bool | None, clock: Callable[[], float] = perf_counter) -> None:
        self.name, self.always, self.clock = name, always, clock
        self._known: dict[int, OverlapChoice] = {}
        self._requested = 0  # sequences of the step that is under way
        self._last = 0  # of the step before, where it was one that counts
        self._since = self._from = 0.0  # ends of that step and of drafting
        self._told: set[bool] = set()

    def of(self, batch: int) -> OverlapChoice:
        """That of a batch; sizes count by doublings."""
        return self._known.setdefault(max(batch - 1, 0).bit_length(), OverlapChoice())

    def overlapped(self, batch: int) -> bool:
        """A step begins; whether it drafts beside the target."""
        self._requested, self._from = batch, self.clock()
        return self.of(batch).overlapped if self.always is None else self.always

    def drafted(self, tokens: int) -> None:
        """A sequential step has drafted so many tokens for each sequence."""
        now, draft = self.clock(), self.of(self._requested).draft
        draft.seconds, draft.tokens = draft.seconds + now - self._from, draft.tokens + tokens
        self._from = now

    def stepped(self, batch: int, tokens: int, *, alone: bool) -> None:
        """Note that the step is over.

        Args:
            batch: sequences that go on. tokens: that it brought. alone: whether it drafted before the target scored.
        """
        now, requested, last = self.clock(), self._requested, self._last
        self._requested, self._last = 0, batch if requested == batch else 0
        since, self._since = self._since, now
        if requested != batch:  # some have ended, or nobody was asked
            return
        choice = self.of(batch)
        if alone:
            choice.rest.seconds, choice.rest.tokens = choice.rest.seconds + now - self._from, choice.rest.tokens + 1
        if self.always is not None:
            return
        decision = choice.step(now - since if last == batch else None, tokens)
        if decision is not None and decision not in self._told:
            self._told.add(decision)
            self._say(decision, choice)

    def _say(self, overlapped: bool, choice: OverlapChoice) -> None:
        rates = f"{choice.modes[True].rate:.0f} tokens/s against {choice.modes[False].rate:.0f}"
        if overlapped:
            logger.info("%s drafts while the target scores, which gives %s sequentially", self.name, rates)
        else:
            logger.warning(
                "%s: drafting while the target scores gives %s sequentially; going on sequentially",
                self.name,
                rates,
            )


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
            the first steps and goes on with what was faster, which is logged.
        draft_sample_method, draft_vocab_size, draft_vocab_file, draft_device: as for `draft_model`.
    Raises:
        ConfigError: a value outside its range.
        CapabilityError: overlap on a GPU that is the target's too.
        DrafterError: another tokenizer.
    """

    name = "pearl"
    learns = ""
    takes_back = True
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
        draft_sample_method: SampleMethod | None = None,
        draft_vocab_size: int | str | None = None,
        draft_vocab_file: str | None = None,
        draft_device: str | None = None,
    ) -> None:
        need(overlap is None or isinstance(overlap, bool), "overlap", "be True, False or None", overlap)
        chains = GrowthOptions(num_speculative_tokens=num_speculative_tokens, draft_sample_method=draft_sample_method)
        self._configure(args, chains)
        self._open(args, model, draft_vocab_size, draft_vocab_file, draft_device)
        self.choices = OverlapChoices(self.name, self._allowed(args, overlap))

    def catch_up(self, states: Sequence[DraftState]) -> None:
        """It reads while it drafts, or while the target scores."""

    def _allowed(self, args: DrafterArgs, overlap: bool | None) -> bool | None:
        """What the user wants, as far as it can be."""
        device = self.runner.info.device
        other = device if args.target is None else args.target.info.device
        self.shared = device.type == other.type == "cpu"
        if self.shared or device != other:
            return overlap
        if overlap:
            raise CapabilityError(
                f"overlap of 'pearl' needs a draft model on another device than the target's {device}; leave it out"
            )
        if overlap is None:
            logger.warning(
                "pearl: draft and target share %s, which runs one after the other; going on sequentially", device
            )
        return False

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        """What was drafted while the last step was scored; where others drafted too, or sequentially, a new draft."""
        overlapped = self.choices.overlapped(len(states))
        longest = self.choices.of(len(states)).window if self.limit == UNLIMITED else self.limit
        trees = [EMPTY_TREE] * len(states)
        alone: list[int] = []
        for i, (state, budget, others) in enumerate(zip(states, budgets, so_far, strict=True)):
            state.tidy(self.runner)
            if overlapped and not len(others):
                state.ask(min(self._room(state, budget), longest), budget)
                trees[i] = state.tree(min(budget.nodes, budget.depth), self.index)
            else:
                state.drop(self.runner)
                alone.append(i)
        if alone:
            drafted = super().propose(
                [states[i] for i in alone], [budgets[i] for i in alone], [EMPTY_TREE] * len(alone)
            )
            self.choices.drafted(max(map(len, drafted)))
            for i, tree in zip(alone, drafted, strict=True):
                trees[i] = tree
        return trees

    def ahead(self, states: Sequence[PearlState], trees: Sequence[TokenTree]) -> Ahead | None:
        """Drafting behind the chains that are scored now, where they are this drafter's own."""
        requested = [state.window > 0 and state.is_front(tree) for state, tree in zip(states, trees, strict=True)]
        if not any(requested):
            return None
        threads = max(torch.get_num_threads() // SHARE, 1) if self.shared else 0

        def work() -> list[DraftedToken | None]:
            lacking = [
                (state, state.window + len(tree) - len(state.drafted))
                for state, tree, wanted in zip(states, trees, requested, strict=True)
                if wanted
            ]
            self._draft_on([(state, count) for state, count in lacking if count > 0])
            each = zip(states, trees, requested, strict=True)
            return [first_drafted(state, len(tree)) if wanted else None for state, tree, wanted in each]

        return Ahead(work, threads)

    def observe(
        self, states: Sequence[Any], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], scores: Scores | None
    ) -> None:
        alone = not any(state.window for state in states)
        for state, tree, verdict in zip(states, trees, verdicts, strict=True):
            state.follow(tree, verdict, self.runner)
        self.choices.stepped(len(states), sum(len(verdict.tokens) for verdict in verdicts), alone=alone)

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
                state.context, count, state.go_on, self._drawn(state), behind=[draft.token for draft in state.drafted]
            )
            for state, count in lacking
        ]
        draft_chains(self.runner, [state for state, _ in lacking], chains, self.vocab_size, self.index)
        for (state, _), chain in zip(lacking, chains, strict=True):
            state.add(
                [PearlDraft(*columns) for columns in zip(chain.tokens, chain.confidence, chain.rows, strict=True)]
            )


def first_drafted(state: PearlState, position: int) -> DraftedToken | None:
    """What was drafted behind so many tokens; points are found in the target's own token, and need no trial."""
    if position >= len(state.drafted):
        return None
    draft = state.drafted[position]
    return None if draft.row is None else DraftedToken(draft.token, draft.row)
