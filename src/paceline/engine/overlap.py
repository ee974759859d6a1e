"""What drafters do on a second thread while the target scores, and how the verdict of a step takes it in.

The work of drafters (`drafters.base.Ahead`) gives the trees that are being scored one more trial, the token drafted
behind each. The scoring pass and the work are both waited for, whatever comes, so that no thread works on caches that
somebody else has taken back. The token behind a tree has no row of its own: it is in a tree whose last row holds no
distribution, and where it is accepted every verifier ends the path before it and makes it the next token
(`verifiers.base.before_bad_row`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Final

import torch

from paceline.drafters import Ahead, DraftedToken, Drafter
from paceline.errors import DrafterError
from paceline.tree import TokenTree, Trial
from paceline.verifiers import Rows


class Helper:
    """A second thread, begun when it is first needed; it does one thing after the other."""

    def __init__(self) -> None:
        self.pool: ThreadPoolExecutor | None = None
        self._lent = 0  # how many threads PyTorch had before

    def start(self, work: Callable[[], Any], threads: int) -> Future[Any]:
        """Begin a piece of work that may use so many of this thread's PyTorch threads; 0 takes none of them."""
        if threads and not self._lent:
            self._lent = torch.get_num_threads()
            torch.set_num_threads(max(self._lent - threads, 1))
        if self.pool is None:
            self.pool = ThreadPoolExecutor(1, "paceline-ahead")
        return self.pool.submit(_with_threads, work, threads)

    def rest(self) -> None:
        """Wait until nothing is under way, also of what nobody knows of any more, and take the threads back."""
        self.join([] if self.pool is None else [self.pool.submit(int)])

    def join(self, running: Sequence[Future[Any]]) -> None:
        """Wait for all that was started, and take the threads back."""
        for future in running:
            future.exception()
        if self._lent:
            torch.set_num_threads(self._lent)
            self._lent = 0


def _with_threads(work: Callable[[], Any], threads: int) -> Any:
    """PyTorch keeps the number of threads for each thread that calls it."""
    if threads and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    return work()


class ScoringAlone(AbstractContextManager["ScoringAlone"]):
    """Around a scoring pass during which nobody drafts."""

    longer: Mapping[int, TokenTree] = MappingProxyType({})

    @property
    def waits_for(self) -> int | None:
        """Index of the drafter whose work the verdicts have to wait for; None where nobody works."""
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        return None


SCORING_ALONE: Final = ScoringAlone()


@dataclass(frozen=True, slots=True)
class AheadTask:
    """One drafter in one step.

    Attributes:
        index: of the drafter. states: position in the batch -> its state. drop: takes the drafter off the sequence at a
            position.
    """

    index: int
    drafter: Drafter
    states: Mapping[int, Any]
    drop: Callable[[int, Exception], None]

    def ask(self, positions: Sequence[int], trees: Sequence[TokenTree]) -> Ahead | None:
        """Its work for the sequences at some positions of the batch."""
        return self.drafter.ahead(
            [self.states[position] for position in positions], [trees[position] for position in positions]
        )


class DraftingAhead(ScoringAlone):
    """Runs the work of drafters on the helper, around a scoring pass.

    Attributes:
        longer: position in the batch -> its tree with one trial more, where that token was drawn; known at the end of
            the block.

    Args:
        trees: that are being scored. vocab_size: of the target.
    """

    def __init__(self, helper: Helper, tasks: Sequence[AheadTask], trees: Sequence[TokenTree], vocab_size: int) -> None:
        self._helper, self._tasks, self._trees, self._vocab_size = helper, tasks, trees, vocab_size
        self._running: list[tuple[AheadTask, Future[Any]]] = []
        self._longer: dict[int, TokenTree] = {}

    def __enter__(self) -> DraftingAhead:
        for task in self._tasks:
            try:
                work = task.ask(list(task.states), self._trees) if task.states else None
            except Exception:
                self._one_by_one(task)
                continue
            if work is not None:
                self._running.append((task, self._helper.start(work.run, work.threads)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._helper.rest()
            return
        self._helper.join([future for _, future in self._running])
        for task, future in self._running:
            self._collect(task, future)
        self.longer = self._longer

    @property
    def waits_for(self) -> int | None:
        """The drafter whose work was begun last; the helper does one thing after the other."""
        return self._running[-1][0].index if self._running else None

    def _collect(self, task: AheadTask, future: Future[Any]) -> None:
        try:
            self._add(list(task.states), future.result())
        except Exception:
            self._one_by_one(task)

    def _one_by_one(self, task: AheadTask) -> None:
        """The work of each sequence alone, on this thread; the drafter leaves those where it fails again."""
        for position in task.states:
            try:
                work = task.ask([position], self._trees)
                if work is not None:
                    self._add([position], work.run())
            except Exception as error:
                task.drop(position, error)

    def _add(self, positions: Sequence[int], drafted: Sequence[DraftedToken | None]) -> None:
        if len(drafted) != len(positions):
            raise DrafterError(f"drafted ahead for {len(drafted)} of {len(positions)} sequences")
        trees = {
            position: with_longer_draft(self._trees[position], token)
            for position, token in zip(positions, drafted, strict=True)
            if token is not None
        }
        for tree in trees.values():
            tree.check(self._vocab_size, len(tree))
        self._longer.update(trees)


def with_longer_draft(tree: TokenTree, drafted: DraftedToken) -> TokenTree:
    """A chain with one token more behind its last one.

    Raises:
        DrafterError: a tree with branches.
    """
    if not tree.is_chain:
        raise DrafterError("drafted ahead behind a tree with branches")
    count = len(tree)
    longer = TokenTree.chain([*tree.tokens.tolist(), drafted.token], confidence=[*tree.confidence.tolist(), 0.5])
    return longer.replace(trials={**tree.trials, count - 1: (Trial(count, drafted.row),)})


class RowsAndNone:
    """Rows, and behind them one that holds no distribution."""

    def __init__(self, rows: Rows, position: int, none_v: torch.Tensor) -> None:
        self._rows, self._position, self._none_v = rows, position, none_v

    def __getitem__(self, row: int, /) -> torch.Tensor:
        return self._none_v if row == self._position else self._rows[row]


def with_none(rows: Any, tree: TokenTree) -> Any:
    """The rows of a tree from `with_longer_draft`, whose last node was not scored.

    Args:
        rows: (n, v) tensor, or rows made when they are looked at. tree: of n nodes.
    """
    if isinstance(rows, torch.Tensor):
        return torch.cat((rows, torch.full_like(rows[:1], torch.nan)))
    (trial,) = tree.trials[len(tree) - 2]
    return RowsAndNone(rows, len(tree), torch.full_like(rows[0] if trial.row is None else trial.row, torch.nan))
