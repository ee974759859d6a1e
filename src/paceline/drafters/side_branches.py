"""A chain of likeliest tokens with other candidates beside each: trees for drafters that look at one token a level.

In: the likeliest tokens of every level of a chain. Out: trees in which only the chain of best tokens goes on. Not here: how many
candidates a level deserves (controller "swift").

Source: SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration (arXiv:2410.06916), where all side branches hang
off the main chain.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.tree.token_tree import TokenTree

Level = tuple[Sequence[int], Sequence[float]]


def branched(levels: Sequence[Level], nodes: int, source: int) -> TokenTree:
    """The chain of the best tokens, and of the others as many as there is room for, those with most chance of being reached first.

    Args:
        levels: per level tokens and their chances after the best tokens of the levels before. nodes: most nodes, at least as many
            as levels.
    """
    tokens = [own[0] for own, _ in levels]
    chances = [own[0] for _, own in levels]
    parents, reach = list(range(-1, len(levels) - 1)), 1.0
    beside: list[tuple[float, int, int, float]] = []
    for parent, (own, each) in enumerate(levels, -1):
        beside += [(reach * chance, parent, token, chance) for token, chance in zip(own[1:], each[1:], strict=True) if chance > 0.0]
        reach *= each[0]
    beside.sort(key=lambda one: (-one[0], one[1], one[2]))
    for _, parent, token, chance in beside[: nodes - len(levels)]:
        tokens.append(token)
        parents.append(parent)
        chances.append(chance)
    return TokenTree.build(tokens, parents, confidence=chances, sources=[source] * len(tokens))
