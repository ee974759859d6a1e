"""The log-probabilities of several candidates behind one context, in one pass.

The candidates are the chains of a token tree: each sees the context and itself, none sees another, and all begin at the
position behind the context. That is the one-pass ranking of Uni-Encoder, for models that read from left to right, where
the scores of a candidate do not depend on the others. Sources: Uni-Encoder: A Fast and Accurate Response Selection
Paradigm for Generation-Based Dialogue Systems (arXiv:2106.01263); SpecInfer (arXiv:2305.09781), of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from paceline.tree import EMPTY_TREE, TokenTree

if TYPE_CHECKING:
    from paceline.models import Runner, SequenceCache

MOST_NODES: Final = 512
"""Of a pass; more candidates than that take several."""
CHUNK: Final = 512
"""Tokens of a pass that fills a cache."""


def candidate_logprobs(
    runner: Runner, context: Sequence[int], candidates: Sequence[Sequence[int]], *, cache: SequenceCache | None = None
) -> list[torch.Tensor]:
    """Log-probabilities of the tokens of each candidate, (length,) float32 on the CPU.

    Args:
        context: one token or more. cache: holds some of it, and is left as it is; None computes it here.
    Raises:
        ConfigError: context and candidate are longer than the model's context.
    """
    cache_of_context = runner.open(len(context)) if cache is None else runner.fork(cache)
    try:
        if cache_of_context.length >= len(context):
            runner.truncate(cache_of_context, len(context) - 1)
        for start in range(cache_of_context.length, len(context) - 1, CHUNK):
            runner.extend([cache_of_context], [context[start : min(start + CHUNK, len(context) - 1)]])
        logprobs: list[torch.Tensor] = []
        for part in _parts(candidates):
            logprobs += (_as_tree if runner.capabilities.trees else _as_chains)(
                runner, cache_of_context, context[-1], part
            )
        return logprobs
    finally:
        runner.release(cache_of_context)


def _parts(candidates: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Candidates that fit into a pass together; one that is too long for it has a pass of its own."""
    parts: list[list[Sequence[int]]] = []
    room = 0
    for candidate in candidates:
        if not parts or len(candidate) > room:
            parts.append([])
            room = MOST_NODES
        parts[-1].append(candidate)
        room -= len(candidate)
    return parts


def _as_tree(
    runner: Runner, cache: SequenceCache, root: int, candidates: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """One pass over a tree, in which candidates share the nodes that they begin with."""
    nodes: dict[tuple[int, int], int] = {}
    paths: list[list[int]] = []
    for candidate in candidates:
        path = [-1]
        for token in candidate[:-1]:  # the last token is predicted, and predicts nothing
            path.append(nodes.setdefault((path[-1], token), len(nodes)))
        paths.append(path[: len(candidate)])
    tree = TokenTree.build([token for _, token in nodes], [parent for parent, _ in nodes]) if nodes else EMPTY_TREE
    logits = runner.score([cache], [root], [tree]).of(0)
    runner.truncate(cache, cache.length)
    return [
        _picked(logits[[node + 1 for node in path]], candidate)
        for path, candidate in zip(paths, candidates, strict=True)
    ]


def _as_chains(
    runner: Runner, cache: SequenceCache, root: int, candidates: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """The same for a runner that scores no trees: a sequence for each candidate."""
    forks = [runner.fork(cache) for _ in candidates]
    try:
        scores = runner.score(
            forks, [root] * len(forks), [TokenTree.chain(list(candidate[:-1])) for candidate in candidates]
        )
        return [_picked(scores.of(i)[: len(candidate)], candidate) for i, candidate in enumerate(candidates)]
    finally:
        for fork in forks:
            runner.release(fork)


def _picked(logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    rows = logits.float()
    chosen = torch.tensor(list(tokens), dtype=torch.long, device=rows.device)
    return (rows.gather(-1, chosen[:, None])[:, 0] - rows.logsumexp(-1)).cpu()
