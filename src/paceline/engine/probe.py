"""Measures what scoring costs, for the cost model.

In: a runner. Out: seconds of one scoring pass for a number of rows and a context. Not here: what the figures are used for.
"""

from __future__ import annotations

from time import perf_counter

from paceline.models.base import Runner, memory_of
from paceline.tree.token_tree import TokenTree

REPEATS = 5


class Probe:
    """Times `runner.score` on a scratch sequence of arbitrary tokens.

    Args:
        runner: whose passes are timed; its caches of real sequences are not touched.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def __call__(self, rows: int, context: int) -> float:
        """Least seconds of scoring a root and a chain of rows - 1 nodes after `context` cached tokens, fewer where no more fit.

        Raises:
            RuntimeError: the caches of the running sequences leave no room for so many rows.
        """
        info = self.runner.info
        context = self._fitting(rows, max(1, min(context, info.max_context - rows - 1)))
        cache = self.runner.open()
        try:
            for start in range(0, context, 512):
                self.runner.extend([cache], [[(7 * i) % info.vocab_size for i in range(start, min(context, start + 512))]])
            tree = TokenTree.chain([(11 * i) % info.vocab_size for i in range(rows - 1)])
            self._once(cache, tree)
            return min(self._once(cache, tree) for _ in range(REPEATS))
        finally:
            self.runner.release(cache)

    def _fitting(self, rows: int, context: int) -> int:
        """The context, halved until the cache has room for it; a sequence that grows holds three times its size while it moves."""
        memory = memory_of(self.runner)
        if memory is None:
            return context
        left = memory.left()
        while 3 * memory.blocks_for(context + rows) > left:
            if context == 1:
                raise RuntimeError(
                    f"the cache has room for {left * memory.block_size} more tokens, {rows} rows need three times theirs"
                )
            context //= 2
        return context

    def _once(self, cache: object, tree: TokenTree) -> float:
        start = perf_counter()
        scores = self.runner.score([cache], [0], [tree])  # type: ignore[list-item]  # the runner's own handle
        scores.logits[-1, 0].item()
        return perf_counter() - start
