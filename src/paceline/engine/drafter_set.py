"""All drafters of an engine behind one call: one merged, checked tree for each sequence.

No drafter can harm a request: one that raises or proposes an invalid tree is dropped for that request, which goes on
without it, with a warning; other requests keep it. Each drafter reads its own copy of the text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from traceback import walk_tb
from typing import Any, TypeVar

from paceline.controllers import Plan
from paceline.drafters import Context, Drafter
from paceline.drafters.common import tables_of
from paceline.drafters.learning import LearningDrafter, LearningStatus
from paceline.engine.overlap import SCORING_ALONE, AheadTask, DraftingAhead, Helper, ScoringAlone
from paceline.engine.request import Request
from paceline.engine.sequence import DecodingSequence
from paceline.errors import DrafterError
from paceline.models import SequenceCache
from paceline.tree import EMPTY_TREE, Budget, Scores, TokenTree, Verdict, chain_sources, is_sound_chain, merge
from paceline.utils import described, need

logger = logging.getLogger("paceline.engine")
T = TypeVar("T")


@dataclass(slots=True)
class Proposals:
    """What the drafters have proposed in a step.

    Attributes:
        trees: one merged tree per sequence.
        draft_seconds: in which each drafter drafted.
        reading_seconds: in which each drafter first read what it had not seen of the texts.
        plan_error: what a function of the plan's budgets raised last; None where none did.
    """

    trees: list[TokenTree]
    draft_seconds: tuple[float, ...]
    reading_seconds: tuple[float, ...]
    plan_error: Exception | None = None


class DrafterSet:
    """All drafters of an engine, cheap ones first.

    Args:
        drafters: in the order of their source index.
        vocab_size: of the target.
        chains_only: the target's runner scores no branches, or the rule of acceptance takes none; then the first
            drafter that proposes anything is the only one used.

    Attributes:
        adding: index of the drafter that adds rows to scoring passes; None where none does.
        granted: ids of the sequences for which it had a budget in this step.
    """

    def __init__(self, drafters: Sequence[Drafter], vocab_size: int, *, chains_only: bool = False) -> None:
        self.chains_only = chains_only
        self.drafters = list(drafters)
        self.names = [drafter.name for drafter in drafters]
        self.vocab_size = vocab_size
        self.taps = tuple(sorted({layer for drafter in drafters for layer in drafter.taps}))
        readers = [drafter for drafter in drafters if drafter.taps]
        self.tap_window = _most([drafter.tap_window for drafter in readers])
        self.tap_reread = _most(
            [drafter.tap_window if drafter.tap_reread is None else drafter.tap_reread for drafter in readers]
        )
        self._listeners = [drafter for drafter in drafters if not drafter.catches_up]
        self._unheard = 0  # steps without drafts since the last one that was told
        self._ahead = [i for i, drafter in enumerate(drafters) if drafter.works_ahead]
        self.helper = Helper()
        resuming = [i for i, drafter in enumerate(drafters) if drafter.runs_target]
        # two that draft in the same scratch slots leave nothing to go on from
        self._resuming = resuming if len(resuming) == 1 else []
        adding = [i for i, drafter in enumerate(drafters) if drafter.adds_rows]
        rule = "name one method at most that adds rows to the model's passes"
        need(len(adding) <= 1, "method", rule, [self.names[i] for i in adding])
        self.adding = adding[0] if adding else None
        self.granted: Collection[int] = ()
        self._reading = {i for i, drafter in enumerate(drafters) if type(drafter).catch_up is not Drafter.catch_up}
        self._no_seconds = (0.0,) * len(drafters)
        self._reading_seconds = list(self._no_seconds)
        self._plan_error: Exception | None = None  # in this step
        self._observing = [i for i, drafter in enumerate(drafters) if type(drafter).observe is not Drafter.observe]

    @property
    def score_taps(self) -> Sequence[int]:
        """Layers whose states the drafters want of the next scoring pass."""
        more = [layer for drafter in self.drafters for layer in drafter.score_taps]
        return tuple(sorted({*self.taps, *more})) if more else self.taps

    def save_tables(self, folder: str | Path | None = None) -> list[Path]:
        """Write what the drafters have learned from text; see `TenantTables.save`.

        Raises:
            ConfigError: a folder that is neither a text nor a path, or in which two drafters would save one file.
        """
        need(
            folder is None or (isinstance(folder, str | Path) and folder != ""),
            "folder",
            "be the path of a folder",
            folder,
        )
        return [tables.save(folder) for tables in tables_of(self.drafters, folder)]

    def close(self) -> None:
        """Nothing is drafted any more."""
        for drafter in self.drafters:
            drafter.close()

    def learning(self, counts: Callable[[str], bool] = lambda tenant: True) -> list[LearningStatus]:
        """How far each drafter that learns from requests has learned, by those of the tenants that count."""
        return [drafter.status(counts) for drafter in self.drafters if isinstance(drafter, LearningDrafter)]

    def begin(self, sequence: DecodingSequence) -> None:
        """Give a sequence its drafter states, right after prefill."""
        self._hand_out(sequence)
        for index, drafter in self._chosen(sequence):
            context = self._context(sequence, index)
            with self._guarded(index, sequence):
                (sequence.states[index],) = drafter.begin([context])
            context.taps = {}

    def check(self, request: Request) -> None:
        """Reject a choice of drafters that are not here.

        Raises:
            ConfigError: it names one.
        """
        names = request.drafts.methods
        for name in names or ():
            known = ", ".join(dict.fromkeys(self.names)) or "none"
            need(name in self.names, "speculative_config method", f"name methods that this engine has ({known})", name)
        if request.prediction and names is not None:
            read = any(drafter.reads_prediction and drafter.name in names for drafter in self.drafters)
            need(read, "prediction", "be left out where speculative_config names no method that reads it", names)

    def _chosen(self, sequence: DecodingSequence) -> Iterator[tuple[int, Drafter]]:
        """The drafters that draft for a sequence, by index; others have no state for it."""
        wanted = sequence.request.drafts.methods
        numbered = enumerate(self.drafters)
        return ((i, drafter) for i, drafter in numbered if wanted is None or drafter.name in wanted)

    def fork(self, sequence: DecodingSequence, other: DecodingSequence) -> None:
        """Give `other`, a copy of `sequence`, its own states."""
        self._hand_out(other)
        for index, drafter in enumerate(self.drafters):
            if sequence.states[index] is not None:
                context = self._context(other, index)
                with self._guarded(index, other):
                    other.states[index] = drafter.fork(sequence.states[index], context)
                context.taps = {}

    def _hand_out(self, sequence: DecodingSequence) -> None:
        """Give every drafter a text of its own: whatever it does to it harms nobody else."""
        tokens = sequence.context.tokens
        sequence.states = [None] * len(self.drafters)
        sequence.texts = [list(tokens) for _ in self.drafters]
        sequence.known_length = len(tokens)

    def _context(self, sequence: DecodingSequence, index: int) -> Context:
        drafter = self.drafters[index]
        cache = (lambda: sequence.cache) if drafter.runs_target or drafter.reads_target else None
        return replace(sequence.context, tokens=sequence.texts[index], taps=dict(sequence.context.taps), cache=cache)

    def _tell(self, sequence: DecodingSequence) -> None:
        """Add the new tokens to the drafters' texts; a drafter that wrote into its own is dropped."""
        tokens, known = sequence.context.tokens, sequence.known_length
        if len(tokens) == known:
            return
        new = tokens[known:]
        for index, text in enumerate(sequence.texts):
            if sequence.states[index] is not None:
                if len(text) != known or text[-1] != tokens[known - 1]:
                    self.drop(index, sequence, DrafterError("it changed context.tokens, which drafters may only read"))
                text.extend(new)
        sequence.known_length = len(tokens)

    def propose(self, batch: Sequence[DecodingSequence], plan: Plan) -> Proposals:
        """Let every drafter propose what the plan grants it."""
        trees: list[TokenTree] = [EMPTY_TREE] * len(batch)
        self.granted = ()
        if not plan.drafts:
            return Proposals(trees, self._no_seconds, self._no_seconds)
        for sequence in batch:
            self._tell(sequence)
        self._reading_seconds, self._plan_error = list(self._no_seconds), None
        seconds = [self._ask(index, batch, plan.budgets, trees) for index in range(len(self.drafters))]
        trees = [sequence.rules.possible(tree) for sequence, tree in zip(batch, trees, strict=True)]
        return Proposals(trees, tuple(seconds), tuple(self._reading_seconds), self._plan_error)

    def _ask(
        self, index: int, batch: Sequence[DecodingSequence], planned: Sequence[Sequence[Budget]], trees: list[TokenTree]
    ) -> float:
        """Join what one drafter proposes to `trees`; returns the seconds that it took, 0 where it had no budget."""
        start = perf_counter()
        active: list[int] = []
        budgets: list[Budget] = []
        for i, sequence in enumerate(batch):
            if sequence.states[index] is None or not planned[i]:
                continue
            budget, first = planned[i][index], not len(trees[i])
            depth = min(budget.depth, sequence.remaining - 1)
            if budget.nodes > 0 and depth > 0 and (first or not self.chains_only) and self._needed(budget, trees[i]):
                if (most := sequence.request.drafts.most) is not None:
                    if (room := most - len(trees[i])) < 1:
                        continue
                    budget, depth = _within(budget, room), min(depth, room)
                active.append(i)
                budgets.append(budget if depth == budget.depth else replace(budget, depth=depth))
        if index == self.adding:
            self.granted = {id(batch[i]) for i in active}
        if not active:
            return 0.0
        proposed = self.propose_one(index, [batch[i] for i in active], budgets, [trees[i] for i in active])
        for i, tree in zip(active, proposed, strict=True):
            if len(tree.tokens):
                trees[i] = tree if trees[i] is EMPTY_TREE else merge([trees[i], tree])
        return perf_counter() - start - self._reading_seconds[index]

    def _needed(self, budget: Budget, tree: TokenTree) -> bool:
        """Whether a drafter is needed beside this tree; where the controller cannot say, it is not."""
        try:
            return budget.needed(tree)
        except Exception as error:
            self._plan_error = error
            return False

    def propose_one(
        self, index: int, batch: Sequence[DecodingSequence], budgets: Sequence[Budget], so_far: Sequence[TokenTree]
    ) -> list[TokenTree]:
        """The checked trees of one drafter, empty where it fails, or where `go_on` of a budget does."""
        drafter = self.drafters[index]
        shown = [EMPTY_TREE if tree is EMPTY_TREE else tree.read_only() for tree in so_far]

        def call(first: int, stop: int) -> list[TokenTree]:
            states = [sequence.states[index] for sequence in batch[first:stop]]
            if index in self._reading:
                start = perf_counter()
                drafter.catch_up(states)
                self._reading_seconds[index] += perf_counter() - start
            try:
                trees = drafter.propose(states, budgets[first:stop], shown[first:stop])
            except Exception as error:
                if not any(_raised_in(error, budget.go_on) for budget in budgets[first:stop]):
                    raise
                self._plan_error = error
                return [EMPTY_TREE] * len(states)
            if len(trees) != len(states):
                raise DrafterError(f"proposed {len(trees)} trees for {len(states)} sequences")
            return [self._checked(tree, index, budget) for tree, budget in zip(trees, budgets[first:stop], strict=True)]

        return self._each(index, batch, call, EMPTY_TREE)

    def _checked(self, tree: TokenTree, index: int, budget: Budget) -> TokenTree:
        if not (nodes := len(tree)):
            return EMPTY_TREE
        if nodes <= budget.nodes and nodes <= budget.depth and is_sound_chain(tree, self.vocab_size, index):
            return tree
        tree.check(self.vocab_size, budget.nodes)
        if tree.max_depth > budget.depth:
            raise DrafterError(f"a tree of depth {tree.max_depth} exceeds the budget of {budget.depth}")
        if self.chains_only and not tree.is_chain:
            raise DrafterError(
                "proposed a tree with branches, but the runner of this model scores chains only or the "
                "acceptance_method judges chains alone; draft chains"
            )
        sources = tree.sources
        if sources is chain_sources(len(tree), index) or bool((sources == index).all()):
            return tree
        return tree.replace(sources=sources * 0 + index)

    def resume(
        self,
        batch: Sequence[DecodingSequence],
        caches: Sequence[SequenceCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
    ) -> Scores | None:
        """The scores of these trees, where a drafter has computed a part of them while it drafted; None leaves them to
        the target.
        """
        for index in self._resuming:
            states = [sequence.states[index] for sequence in batch]
            try:
                scores = self.drafters[index].resume(states, caches, roots, trees)
            except Exception as error:
                for sequence in batch:
                    self.drop(index, sequence, error)
                continue
            if scores is not None:
                return scores
        return None

    def ahead(self, batch: Sequence[DecodingSequence], trees: Sequence[TokenTree]) -> ScoringAlone:
        """What drafters do while these trees are scored, around the scoring pass."""
        if not self._ahead:
            return SCORING_ALONE
        tasks = [self._task(index, batch, trees) for index in self._ahead]
        return DraftingAhead(self.helper, tasks, trees, self.vocab_size)

    def _task(self, index: int, batch: Sequence[DecodingSequence], trees: Sequence[TokenTree]) -> AheadTask:
        states = {
            i: sequence.states[index]
            for i, sequence in enumerate(batch)
            if sequence.states[index] is not None and _has_room(sequence, trees[i])
        }
        return AheadTask(
            index, self.drafters[index], states, lambda position, error: self.drop(index, batch[position], error)
        )

    def observe(
        self,
        batch: Sequence[DecodingSequence],
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict],
        scores: Scores,
        numbers: Sequence[int],
    ) -> None:
        """Tell every drafter the new tokens and what became of the trees.

        Where nothing was drafted, those that catch up by themselves are told when they next draft, or now and then.
        `numbers`: of these sequences in `scores`.
        """
        if not any(map(len, trees)):
            self._unheard += 1
            if not self._listeners or self._unheard < min(drafter.plain_every for drafter in self._listeners):
                return
        self._unheard = 0
        for sequence in batch:
            self._tell(sequence)
        for index in self._observing:
            at = [i for i, sequence in enumerate(batch) if sequence.states[index] is not None]
            if not at:
                continue

            def call(first: int, stop: int, index: int = index, at: Sequence[int] = at) -> list[None]:
                some = at[first:stop]
                rows = scores if len(some) == len(scores.rows) - 1 else scores.pick([numbers[i] for i in some])
                states = [batch[i].states[index] for i in some]
                self.drafters[index].observe(states, [trees[i] for i in some], [verdicts[i] for i in some], rows)
                return [None] * len(some)

            self._each(index, [batch[i] for i in at], call, None)

    def end(self, sequence: DecodingSequence) -> None:
        """The sequence is over; its states are freed."""
        if sequence.states:
            self._tell(sequence)
        for index, drafter in enumerate(self.drafters):
            if sequence.states and sequence.states[index] is not None:
                with self._guarded(index, sequence):
                    drafter.end([sequence.states[index]])
                sequence.states[index] = None

    def _each(
        self, index: int, batch: Sequence[DecodingSequence], call: Callable[[int, int], list[T]], missing: T
    ) -> list[T]:
        """`call(first, stop)` for the whole batch; if it raises, one by one, dropping the drafter where it raises
        again.
        """
        try:
            return call(0, len(batch))
        except Exception as error:
            if len(batch) == 1:
                self.drop(index, batch[0], error)
                return [missing]
        results = []
        for i in range(len(batch)):
            try:
                results += call(i, i + 1)
            except Exception as error:
                self.drop(index, batch[i], error)
                results.append(missing)
        return results

    @contextmanager
    def _guarded(self, index: int, sequence: DecodingSequence) -> Iterator[None]:
        """What the drafter raises drops it for this sequence."""
        try:
            yield
        except Exception as error:
            self.drop(index, sequence, error)

    def drop(self, index: int, sequence: DecodingSequence, error: Exception) -> None:
        """Take drafter `index` off this sequence, with a log line and a note in its metrics."""
        name, why = self.names[index], described(error)
        logger.warning("request %s goes on without drafter %s (%s)", sequence.request.id, name, why)
        sequence.request.metrics.dropped_drafters[name] = why
        state, sequence.states[index] = sequence.states[index], None
        if state is not None:
            try:
                self.drafters[index].end([state])
            except Exception as second:
                logger.debug("drafter %s also failed to end: %s", name, described(second))


def _raised_in(error: Exception, function: Callable[..., Any]) -> bool:
    """Whether a Python function or callable object was running when an error was raised."""
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return any(frame.f_code is code for frame, _ in walk_tb(error.__traceback__))


def _has_room(sequence: DecodingSequence, tree: TokenTree) -> bool:
    """Whether one more token may be drafted for it in this step."""
    most = sequence.request.drafts.most
    return most is None or len(tree) < most


def _within(budget: Budget, most: int) -> Budget:
    """The budget, with at most so many nodes."""
    if budget.nodes <= most:
        return budget
    depth = min(budget.depth, most)
    shape = None if budget.shape is None else budget.shape.cut(most, depth)
    return replace(budget, nodes=most, depth=depth, shape=shape)


def _most(windows: Sequence[int | None]) -> int | None:
    """The largest of some numbers of tokens, where None is all; 0 where there are none."""
    known = [window for window in windows if window is not None]
    return max(known, default=0) if len(known) == len(windows) else None
