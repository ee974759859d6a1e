"""A greedy verifier that lets every chain stand: what a comparison of outputs must notice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.tree import Scores, TokenTree, Verdict
from paceline.verifiers import GreedyVerifier


def believe_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make greedy verification accept all of a tree that is a chain."""
    honest = GreedyVerifier.verify_scores

    def believing(self: GreedyVerifier, trees: Sequence[TokenTree], scores: Scores) -> list[Any]:
        verdicts = list(honest(self, trees, scores))
        for i, (tree, verdict) in enumerate(zip(trees, verdicts, strict=True)):
            if len(tree) and tree.is_chain and isinstance(verdict, Verdict):
                verdicts[i] = Verdict(tuple(range(len(tree))), tuple(tree.tokens.tolist()), verdict.next_token)
        return verdicts

    monkeypatch.setattr(GreedyVerifier, "verify_scores", believing)
