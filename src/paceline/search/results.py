"""What a search made of a prompt, beside its texts: the branches that were scored, as a tree."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from paceline.search.branch import Branch

MOST_NODES: Final = 100_000
"""Of a tree; branches beyond are not noted."""


@dataclass(slots=True)
class RetrievalReport:
    """What retrieving for a text took.

    Attributes:
        passages: (token of the text, number in the index) where another passage came before the prompt; None is none.
        searches: of the index; queries: in them, together. seconds: that the text waited for them.
        strides: of the rounds, in guesses. speculated: guesses that were made; taken_back: of these, wrong ones and
            those behind them; tokens_lost: in them.
    """

    passages: list[tuple[int, int | None]] = field(default_factory=list)
    searches: int = 0
    queries: int = 0
    seconds: float = 0.0
    strides: list[int] = field(default_factory=list)
    speculated: int = 0
    taken_back: int = 0
    tokens_lost: int = 0

    def note_passage(self, token: int, passage: int | None) -> None:
        """Another passage, or the same, from a token on."""
        if not self.passages or self.passages[-1][1] != passage:
            self.passages.append((token, passage))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "seconds": round(self.seconds, 4)}


@dataclass(slots=True)
class SearchTree:
    """The branches that a search has scored or found, parents before children.

    Attributes:
        parents: of each branch, -1 for the prompt alone; one that joins on several tokens further is a child of the
            last noted one. tokens: its last token. logprobs: sums of the log-probabilities of its tokens.
        outputs: the branches that became outputs, best first; scores: theirs.
        num_tokens: rows that were computed for it, `num_passes` passes of the model.
        seconds: from its beginning to its end, other searches of the call beside it.
        budget_spent: whether it was ended early.
        retrieval: of a method that retrieves.
    """

    method: str = ""
    parents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_passes: int = 0
    seconds: float = 0.0
    budget_spent: bool = False
    retrieval: RetrievalReport | None = None

    def note(self, branch: Branch) -> int:
        """Number of a branch, which is added if it is new; -1 where there is no room."""
        if branch.number < 0 and len(self.tokens) < MOST_NODES:
            parent = next((ancestor.number for ancestor in branch.ancestors() if ancestor.number >= 0), -1)
            branch.number = len(self.tokens)
            self.parents.append(parent)
            self.tokens.append(branch.token)
            self.logprobs.append(branch.logprob)
        return branch.number

    def runs(self) -> list[tuple[int, list[int], int]]:
        """The tree with what does not branch put together, parents before children: for each run of tokens the run that
        it goes on from (-1: the prompt), its tokens, and which output it leads to, -1 for none.
        """
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        rank = {node: i for i, node in reversed(list(enumerate(self.outputs)))}
        rows: list[tuple[int, list[int], int]] = []
        waiting = [(-1, child) for root in children.get(-1, []) for child in reversed(children.get(root, []))]
        while waiting:
            above, node = waiting.pop()
            tokens = [self.tokens[node]]
            while node not in rank and len(children.get(node, ())) == 1:
                (node,) = children[node]
                tokens.append(self.tokens[node])
            rows.append((above, tokens, rank.get(node, -1)))
            waiting += [(len(rows) - 1, child) for child in reversed(children.get(node, []))]
        return rows

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "method": self.method,
            "parents": list(self.parents),
            "tokens": list(self.tokens),
            "logprobs": [round(logprob, 5) for logprob in self.logprobs],
            "outputs": list(self.outputs),
            "scores": list(self.scores),
            "num_tokens": self.num_tokens,
            "num_passes": self.num_passes,
            "seconds": round(self.seconds, 4),
            "budget_spent": self.budget_spent,
            **({} if self.retrieval is None else {"retrieval": self.retrieval.to_dict()}),
        }
