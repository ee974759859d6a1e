"""Whether the caches of the sequences fit into the memory they may have, now and in the step to come.

Where there is plenty, nothing is counted: as long as no block changes hands, a step costs one comparison. A tree counts
as the largest one scored so far; a larger one is cut to its share of the room that is left. How much that is does not
depend on any drawn token, so that the cut keeps the output distribution (`tree.select_nodes`). Engines around the same
weights share the limit; each may always go on with one sequence, so that none waits for another. Layers with a sliding
window have room of their own, for so many windows, which is counted beside the blocks. A second sequence that steers a
first one (`companion`) in the same memory counts with it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.companion import Companion, Second
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.request import Request
from paceline.engine.sequence import DecodingSequence
from paceline.errors import PromptError
from paceline.models import CacheMemory, SequenceCache, memory_of
from paceline.tree import PROBE, TokenTree, select_nodes


class Room:
    """Keeps the sequences within the memory for their caches: says who fits, trims caches, and cuts trees.

    Args:
        memory: of the runner, limited.
        prefixes: what sequences share does not count twice; None where they share nothing.
    """

    def __init__(self, memory: CacheMemory, prefixes: PrefixCache | None) -> None:
        self._memory, self._prefixes = memory, prefixes
        self._seen = -1  # changes of hands when plenty was found
        self._short = False  # not even the next step of those that cannot make way fits

    @property
    def plenty(self) -> bool:
        """The running sequences have room for their next step, for certain."""
        return self._memory.changes == self._seen

    def check(self, request: Request) -> None:
        """Reject a request that would not fit even alone.

        Raises:
            PromptError: prompt and new tokens of one output need more blocks than there are.
        """
        memory, prompt = self._memory, len(request.prompt_ids)
        longest = prompt + request.max_tokens - 2 + memory.widest
        needed = memory.blocks_for(longest) + memory.blocks_to_come(request.inputs)
        for second in self._seconds(request.companion):
            length = len(second.prompt) + request.max_tokens - 2 + memory.widest
            longest, needed = longest + length, needed + memory.blocks_for(length)
        if needed > memory.capacity:
            raise PromptError(
                f"a prompt of {prompt} tokens with up to {request.max_tokens} new ones needs a cache for {longest} "
                f"tokens{' beside its source' if request.inputs else ''}, but {memory.capacity * memory.block_size} "
                f"fit; lower max_tokens, shorten the prompt or raise kv_cache_memory_bytes"
            )

    def enough(self, active: Sequence[DecodingSequence]) -> bool:
        """Whether all of these can be filled and make their next step.

        Decides how generously they take blocks meanwhile.
        """
        memory = self._memory
        self._seen, self._short = -1, False
        # a sequence may take what is kept of its beginning, then move to a run of twice its size
        lengths = self._lengths(active)
        whole = sum(3 * memory.blocks_for(length + memory.widest) for length in lengths)
        if memory.sequences_fit(3 * length for length in lengths) and (
            whole <= memory.spare() or whole <= memory.left()
        ):
            memory.allocate_single_blocks(False)
            self._seen = memory.changes
            return True
        memory.allocate_single_blocks(True)
        sequences_fit = memory.sequences_fit(lengths)
        if sequences_fit and self._demand(active) <= memory.left():
            return True
        for sequence in active:
            for cache, rows in self._rows_to_come(sequence):
                if cache is not None:
                    memory.trim(cache, rows)
        self._short = not sequences_fit or self._demand(active) > memory.left()
        return not self._short

    def fit(
        self, batch: Sequence[DecodingSequence], trees: Sequence[TokenTree], active: Sequence[DecodingSequence]
    ) -> Sequence[TokenTree]:
        """The trees of a step, those that are larger than any so far cut to what there is room for.

        Args:
            active: all sequences with a cache, those of the batch among them.
        """
        memory = self._memory
        if not self._short and all(_bound(tree) < memory.widest for tree in trees):
            return trees
        left = memory.left()
        share, fitting = (left - self._demand(active)) // len(self._lengths(batch)), []
        for sequence, tree in zip(batch, trees, strict=True):
            lengths = [length - 1 for length in self._lengths([sequence])]
            most = min((memory.blocks_for(n + memory.widest) + share) * memory.block_size - n - 1 for n in lengths)
            probes = int((tree.kinds == PROBE).sum()) if len(tree) else 0
            fitting.append(tree if _bound(tree) <= most else select_nodes(tree, most - probes))
        pairs = zip(batch, fitting, strict=True)
        whole = sum(3 * memory.blocks_for(n + len(tree)) for sequence, tree in pairs for n in self._lengths([sequence]))
        if whole > left:
            self._seen = -1
            memory.allocate_single_blocks(True)
        return fitting

    def admits(self, request: Request, tokens: int, active: Sequence[DecodingSequence]) -> bool:
        """Whether `tokens` tokens of a request can join these, with a block to grow for all.

        Always, where nobody is active.
        """
        if not active:
            return True
        behind = tokens - len(request.prompt_ids)
        lengths = [tokens, *(behind + len(second.prompt) for second in self._seconds(request.companion))]
        need = sum(self._memory.blocks_for(length + self._memory.widest) for length in lengths)
        need += self._memory.blocks_to_come(request.inputs) - self._shared(request, active)
        lengths += self._lengths(active)
        return self._demand(active) + len(active) + need + 1 <= self._memory.left() and self._memory.sequences_fit(
            lengths
        )

    def _seconds(self, companion: Companion | None) -> list[Second]:
        """The second sequences in this memory."""
        seconds = () if companion is None else companion.seconds
        return [second for second in seconds if memory_of(second.runner) is self._memory]

    def _lengths(self, sequences: Sequence[DecodingSequence]) -> list[int]:
        """Tokens of the texts in this memory."""
        lengths = []
        for sequence in sequences:
            lengths.append(len(sequence.context.tokens))
            lengths += [second.length(sequence.context) for second in self._seconds(sequence.companion)]
        return lengths

    def _rows_to_come(self, sequence: DecodingSequence) -> list[tuple[SequenceCache | None, int]]:
        """Its caches in this memory, None for one to be made, with rows to come: what is to be filled, and the next
        step.
        """
        caches: list[SequenceCache | None] = [sequence.cache]
        caches += [second.held for second in self._seconds(sequence.companion)]
        lengths = [0 if cache is None else cache.length for cache in caches]
        return [
            (cache, length - 1 - filled + self._memory.widest)
            for cache, length, filled in zip(caches, self._lengths([sequence]), lengths, strict=True)
        ]

    def _demand(self, active: Sequence[DecodingSequence]) -> int:
        blocks = 0
        for index, sequence in enumerate(active):
            for cache, rows in self._rows_to_come(sequence):
                blocks += self._memory.blocks_for(rows) if cache is None else self._memory.need(cache, rows)
            if not sequence.cache.length:
                blocks += self._memory.blocks_to_come(sequence.request.inputs)
                blocks -= self._shared(sequence.request, active[:index])
        return blocks

    def _shared(self, request: Request, active: Sequence[DecodingSequence]) -> int:
        return 0 if self._prefixes is None else self._prefixes.expected(request, active)


def _bound(tree: TokenTree) -> int:
    """So many nodes `select` must be told to keep to keep all: it counts a draw before it looks for its node."""
    if not tree.trials:
        return len(tree.tokens)
    named = [trial.node for trials in tree.trials.values() for trial in trials]
    return len(tree) + (len(named) > len(set(named)))
