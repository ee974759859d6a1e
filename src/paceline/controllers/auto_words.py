"""What `auto` decided and believes, read off a controller and put into words.

In: an AutoController after a plan. Out: lines of plain English. Not here: the words themselves (`controllers.words`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.controllers.buckets import batch_bucket
from paceline.controllers.words import Decided, auto_words, beliefs, count, off_words

if TYPE_CHECKING:
    from paceline.controllers.auto import AutoController


def explain(auto: AutoController, index: int | None) -> str:
    """The last plan's decision on sequence `index` in words; without an index, what it believes at present."""
    size = max(auto._size, 1)
    plain = size / auto.now.table[min(size, len(auto.now.table) - 1)]
    if index is None:
        modes = [{one.modes[i].value for one in auto.batch} for i in range(len(auto.names))]
        rows = zip(auto.names, [source.level[1:] for source in auto.acceptance.sources], auto._yields, modes, strict=True)
        return "\n".join([*beliefs(auto.now.rate, plain, rows), auto.cost.describe()])
    if auto.idle:
        return off_words(size, auto.disable_by_batch_size, None if auto._never else auto._gates[batch_bucket(size)].wait)
    if auto.bursting:
        return "auto: nothing is drafted but what a table guesses now and then, and goes on guessing as long as it is right"
    one = auto.batch[index]
    decided = [
        Decided(auto.names[i], one.modes[i], depth, worth, one.watches[i], None if auto.cruising else one.voices[i])
        for (of, i), (worth, depth) in auto.worths.items()
        if of == index
    ]
    sizes = [len(trees[index]) if trees else 0 for trees in auto.drafts]
    words = auto_words(decided, rates=(auto.now.rate, plain), remaining=one.remaining, sizes=sizes)
    return f"This step goes as planned {count(auto.cruise.done, 'step')} ago:\n{words}" if auto.cruising else words
