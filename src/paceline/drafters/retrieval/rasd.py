"""Retrieval beside a draft model: what a datastore says next, as far as the model finds it likely.

The retrieved trie is pruned by the draft's distribution at the root: branches stay whose first token is among the
draft's `prune_top_k` likeliest, and are ranked by the mean of the draft's and the datastore's chances (the paper's
cut-off is not known to us; ranking by the draft alone would not see what the datastore knows). A drawn draft gives its
whole distribution; of a draft of points only the tokens that it proposed are known, and only branches that begin with
one of them stay: give a draft model `tree_width` to let more of them in. Where no drafter before this one had anything
to say, nothing is cut.

Drawn tokens are not looked at, only the distribution that they were drawn from; retrieved nodes are points, tried after
all drawn ones. A drafter's caches never see them until they are accepted.

Source: RASD: Retrieval-Augmented Speculative Decoding (arXiv:2503.03434).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.drafters.base import DrafterArgs
from paceline.drafters.retrieval.rest import RetrievalDrafter, TextState
from paceline.drafters.retrieval.trie import FirstTokens
from paceline.tree import ROOT, Budget, TokenTree
from paceline.utils import integer

MOST_KEPT: Final = 1024


class RasdDrafter(RetrievalDrafter):
    """Adds to the trees of the drafters before it what a datastore continues with; runs after all of them.

    With a fixed number of tokens it may retrieve as many whatever the others drafted, and of the joined tree the nodes
    stay that are most likely reached: those of drafts that were drawn, which must not be chosen by what they are, keep
    the number less what was retrieved, and at least half of it. `auto` decides node by node. Under other controllers it
    gets the nodes that the others leave: give them a `num_speculative_tokens` of their own there.

    Args:
        datastore: path of a file made by `paceline datastore build` with the target's tokenizer.
        prune_top_k: retrieved branches stay if their first token is among that many likeliest of the draft; 0 keeps
            all.
        max_match_length, min_match_length, max_matches: as for `rest`.
        num_speculative_tokens: most levels to retrieve; None leaves it to the budget.
    Raises:
        ConfigError: a value outside its range.
        DrafterError: no datastore, a damaged one, or one of another tokenizer.
    """

    name = "rasd"

    def __init__(
        self,
        args: DrafterArgs,
        *,
        datastore: str | None = None,
        prune_top_k: int = 8,
        max_match_length: int = 32,
        min_match_length: int | None = None,
        max_matches: int = 128,
        num_speculative_tokens: int | None = None,
    ) -> None:
        integer("prune_top_k", prune_top_k, 0, MOST_KEPT)
        self.kept = prune_top_k
        super().__init__(
            args,
            datastore=datastore,
            max_match_length=max_match_length,
            min_match_length=min_match_length,
            max_matches=max_matches,
            num_speculative_tokens=num_speculative_tokens,
        )

    def propose(
        self, states: Sequence[TextState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]
    ) -> list[TokenTree]:
        return self._retrieve(states, budgets, [self._likely(tree) for tree in so_far])

    def _likely(self, tree: TokenTree) -> FirstTokens | None:
        """The likeliest first tokens of the drafters before, with their chances; None where nothing is to be cut."""
        if not self.kept or not len(tree):
            return None
        drawn = next((trial.row for trial in tree.trials.get(ROOT, ()) if trial.row is not None), None)
        if drawn is not None:
            chances, tokens = drawn.topk(min(self.kept, len(drawn)))
            return tokens.tolist(), chances.tolist()
        first = [(float(tree.confidence[node]), int(tree.tokens[node])) for node in tree.children(ROOT)]
        first.sort(key=lambda pair: -pair[0])
        return [token for _, token in first[: self.kept]], [chance for chance, _ in first[: self.kept]]
