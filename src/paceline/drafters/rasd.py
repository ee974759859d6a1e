"""Retrieval beside a draft model: what a datastore says next, as far as the model finds it likely.

In: the text so far, the trees of the drafters before this one, a datastore. Out: trees of point proposals, which the engine joins
to those trees path by path (`tree.merge`). Not here: search and trie (`rest_trie`), the draft model.

The retrieved trie is pruned by the draft's distribution at the root: branches stay whose first token is among the draft's
`prune_top_k` likeliest, and are ranked by the mean of the draft's and the datastore's chances (the paper's cut-off is not known to
us; ranking by the draft alone would not see what the datastore knows). A drawn draft gives its whole distribution; of a draft of
points only the tokens that it proposed are known, and only branches that begin with one of them stay: give a draft model
`tree_width` to let more of them in. Where no drafter before this one had anything to say, nothing is cut.

Drawn tokens are not looked at, only the distribution that they were drawn from; retrieved nodes are points, tried after all drawn
ones. A drafter's caches never see them until they are accepted.

Source: RASD: Retrieval-Augmented Speculative Decoding (arXiv:2503.03434).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.checking import integer
from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.rest import RestState, Retriever
from paceline.tree.token_tree import ROOT, TokenTree
from paceline.tree.types import Budget, Scores, Verdict

MOST_KEPT: Final = 1024

FirstTokens = tuple[Sequence[int], Sequence[float]]


class RasdDrafter:
    """Adds to the trees of the drafters before it what a datastore continues with; runs after all of them.

    It gets the nodes that they leave: give them a `num_speculative_tokens` of their own that leaves some.

    Args:
        datastore: path of a file made by `paceline datastore build` with the target's tokenizer.
        prune_top_k: retrieved branches stay if their first token is among that many likeliest of the draft; 0 keeps all.
        max_match_length, min_match_length, max_matches: as for `rest`.
        num_speculative_tokens: most levels to retrieve; None leaves it to the budget.
    Raises:
        ConfigError: a value outside its range. DrafterError: no datastore, a damaged one, or one of another tokenizer.
    """

    name = "rasd"
    catches_up = True
    taps: Sequence[int] = ()

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
        self.kept, self.vocab_size = prune_top_k, args.vocab_size
        self.retriever = Retriever(
            args,
            datastore=datastore,
            max_match_length=max_match_length,
            min_match_length=min_match_length,
            max_matches=max_matches,
            num_speculative_tokens=num_speculative_tokens,
        )

    def begin(self, contexts: Sequence[Context]) -> list[RestState]:
        return [RestState(context) for context in contexts]

    def propose(self, states: Sequence[RestState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        rules = [self._likely(tree) for tree in so_far]
        return self.retriever.propose([state.context for state in states], budgets, rules)

    def observe(
        self, states: Sequence[RestState], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], scores: Scores | None
    ) -> None:
        """Nothing: `propose` reads the end of the text."""

    def fork(self, state: RestState, context: Context) -> RestState:
        return RestState(context)

    def end(self, states: Sequence[RestState]) -> None:
        """Nothing is held."""

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
