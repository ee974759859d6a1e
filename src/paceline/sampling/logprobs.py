"""Raw logprobs in vLLM's shape: the most likely tokens and the chosen one, before any sampling rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Logprob:
    """What the model thought of one token.

    Attributes:
        logprob: natural logarithm of its probability under the raw logits.
        rank: 1 for the most likely token; among equals the smaller id comes first.
        decoded_token: its text, once a tokenizer has filled it in.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


def top_logprobs(logits: torch.Tensor, chosen: Sequence[int], k: int) -> list[dict[int, Logprob]]:
    """The k most likely tokens of each row, most likely first, then the chosen one if it is not among them.

    Args:
        logits: (r, v) raw logits of any float dtype; not written to.
        chosen: r token ids.
        k: 0 or more; more than v, or -1, means v.
    Returns:
        r dicts token id -> Logprob of k or k + 1 entries. Ties are broken by the smaller id, so the outcome does not
        depend on the device or on the rows beside.
    Raises:
        ValueError: another number of rows than of chosen tokens.
    """
    if logits.ndim != 2 or len(logits) != len(chosen):
        raise ValueError(
            f"logits must have shape ({len(chosen)}, v), one row per chosen token, got {tuple(logits.shape)}"
        )
    if not len(chosen):
        return []
    logprobs_rv = torch.log_softmax(logits.detach(), dim=-1, dtype=torch.float32)
    found = _most_likely(logprobs_rv, min(k, logits.shape[-1]) if k >= 0 else logits.shape[-1])
    for entry, token, logprobs_v in zip(found, chosen, logprobs_rv, strict=True):
        if token not in entry:
            before = int((logprobs_v > logprobs_v[token]).sum()) + int((logprobs_v[:token] == logprobs_v[token]).sum())
            entry[token] = Logprob(float(logprobs_v[token]), 1 + before)
    return found


def _most_likely(logprobs_rv: torch.Tensor, k: int) -> list[dict[int, Logprob]]:
    """Ranks 1 to k of each row. Everything that ties with the k-th is looked at, so that the smaller ids win."""
    found: list[dict[int, Logprob]] = [{} for _ in range(len(logprobs_rv))]
    if not k:
        return found
    floor_r1 = logprobs_rv.topk(k, dim=-1).values[:, -1:]
    at = (logprobs_rv >= floor_r1).nonzero(as_tuple=True)
    candidates: list[list[tuple[float, int]]] = [[] for _ in found]
    for row, token, logprob in zip(at[0].tolist(), at[1].tolist(), logprobs_rv[at].tolist(), strict=True):
        candidates[row].append((-logprob, token))
    for entry, pairs in zip(found, candidates, strict=True):
        for rank, (negative, token) in enumerate(sorted(pairs)[:k], start=1):
            entry[token] = Logprob(-negative, rank)
    return found
