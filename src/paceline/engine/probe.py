"""Measures what scoring costs, for the cost model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

from paceline.controllers.auto import PASSES
from paceline.models import Runner, SequenceCache, memory_of
from paceline.tree import TokenTree


class Probe:
    """Times `runner.score` on a scratch sequence of arbitrary tokens.

    Args:
        runner: whose passes are timed; its caches of real sequences are not touched.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def __call__(self, counts: Sequence[int], context: int) -> Iterator[float]:
        """Least seconds of scoring a root and a chain, for each number of rows of the two together.

        Args:
            counts: numbers of rows, at least 1.
            context: cached tokens before them; fewer where no more fit.
        Raises:
            RuntimeError: after those that could be timed, the model's context, or what the caches of the running
                sequences leave, has no room for so many rows.
        """
        fitting, error = self._fit(counts, context)
        if fitting:
            cache, memory = self.runner.open(), memory_of(self.runner)
            if memory is not None:
                memory.forget_behind_windows(cache)
            try:
                self._fill(cache, min(fitting))
                yield from (self._least(cache, count) for count in counts[: len(fitting)])
            finally:
                self.runner.release(cache)
        if error is not None:
            raise error

    def _fit(self, counts: Sequence[int], context: int) -> tuple[list[int], RuntimeError | None]:
        """The context before each number of rows, up to the first for which there is no room; why there is none."""
        most, contexts = self.runner.info.max_context, list[int]()
        try:
            for count in counts:
                if (room := most - count - PASSES) < 1:  # a pass of a root alone adds a token
                    raise RuntimeError(
                        f"the context of {most} tokens has no room for {count} rows and the steps that time them"
                    )
                contexts.append(self.fitting(count, max(1, min(context, room))))
        except RuntimeError as error:
            return contexts, error
        return contexts, None

    def fitting(self, rows: int, context: int) -> int:
        """The context, halved until the cache has room for it; a sequence that grows holds three times its size while
        it moves.
        """
        memory = memory_of(self.runner)
        if memory is None:
            return context
        left = memory.left()
        while 3 * memory.blocks_for(context + rows) > left:
            if context == 1:
                raise RuntimeError(
                    f"the cache has room for {left * memory.block_size} more tokens, {rows} rows need three times "
                    f"theirs"
                )
            context //= 2
        return context

    def _fill(self, cache: SequenceCache, context: int) -> None:
        """Cache so many tokens."""
        vocabulary = self.runner.info.vocab_size
        for start in range(0, context, 512):
            self.runner.extend([cache], [[(7 * i) % vocabulary for i in range(start, min(context, start + 512))]])

    def _least(self, cache: SequenceCache, rows: int) -> float:
        """Of several passes, after one that warms up."""
        tree = TokenTree.chain([(11 * i) % self.runner.info.vocab_size for i in range(rows - 1)])
        self._once(cache, tree)
        return min(self._once(cache, tree) for _ in range(PASSES - 1))

    def _once(self, cache: SequenceCache, tree: TokenTree) -> float:
        """A root alone is kept, as plain decoding keeps it: runners that cannot go back make no copy for it."""
        start = perf_counter()
        scores = self.runner.score([cache], [0], [tree])
        scores.logits[-1, 0].item()
        seconds = perf_counter() - start
        if not len(tree):
            self.runner.commit([cache], [()])
        return seconds
