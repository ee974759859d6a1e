"""min-p, top-k and top-p: which tokens stay possible.

All three are thresholds, so tokens that tie are kept or dropped together, whatever their ids:
- min-p keeps x >= max + log(min_p), that is p(x) >= min_p * max p;
- top-k keeps everything that ties with the k-th largest logit, hence perhaps more than k tokens (vLLM's rule too);
- top-p keeps the most likely tokens until their mass reaches top_p, and everything that ties with the last one kept.
  (vLLM keeps of those ties whichever its sort puts last.) Ties are taken between float32 probabilities.

A row's outcome must not depend on the rows beside it, or drafting would change what is drawn. So the mass is counted
exactly: weights exp(x - max) are rounded to multiples of 2**-e and summed in float64 without any rounding, in whatever
order. With e = 52 - ceil(log2 v), 34 for 150 thousand tokens, a probability below 2**-35 of the largest counts as 0.
Rows with NaN, +inf or nothing but -inf pass through as they are; verifiers raise NumericsError on them.

Sources: min-p (arXiv:2407.01082); top-k (arXiv:1805.04833); top-p, nucleus sampling (arXiv:1904.09751).
Axes in this file: r = rows, v = vocabulary, m = tokens of a row that are still kept.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]

_EXACT_BITS = 52
_BELOW_ONE = 0.99
"""Keeps the bound on likely tokens clear of its own rounding."""

_USUAL = (1e-3, 1e-4)
"""Shares of the mass that the tokens of a nucleus usually have each; few tokens do."""


def filter_rows(logits_rv: torch.Tensor, *, top_k: int, top_p: float, min_p: float) -> None:
    """Set excluded tokens to -inf in place: min-p first, then top-k, then top-p of what is left.

    Args:
        logits_rv: (r, v) float32, contiguous, on any device.
        top_k: 0, -1 or at least v means all tokens.
        top_p: 1 means all tokens.
        min_p: 0 means all tokens.
    """
    if logits_rv.device.type == "cpu":
        _filter_on_host(logits_rv.numpy(), top_k, top_p, min_p)
    else:
        filter_on_device(logits_rv, top_k, top_p, min_p)


def _scale(vocabulary: int) -> float:
    """2**e such that the sum of `vocabulary` weights in 0..2**e is exact in float64."""
    return float(2.0 ** (_EXACT_BITS - math.ceil(math.log2(max(vocabulary, 2)))))


def _filter_on_host(logits_rv: Floats, top_k: int, top_p: float, min_p: float) -> None:
    """Row by row, each rule looking only at what the rules before it have left."""
    for logits_v in logits_rv:
        high = logits_v.max()
        if not np.isfinite(high):
            continue
        kept, values = np.empty(0, np.intp), logits_v
        if min_p > 0.0:
            kept = np.flatnonzero(logits_v >= high + np.float32(math.log(min_p)))
            values = logits_v[kept]
        if 0 < top_k < len(values):
            inner = _largest(values, top_k)
            kept, values = (kept[inner] if len(kept) else inner), values[inner]
        if top_p < 1.0:
            inner = _nucleus(values - high, top_p, _scale(len(logits_v)))
            kept, values = (kept[inner] if len(kept) else inner), values[inner]
        if len(values) < len(logits_v):
            values = values.copy()
            logits_v.fill(-np.inf)
            logits_v[kept] = values


def _largest(values_m: Floats, top_k: int) -> Indices:
    """Where the k largest values are, and all that tie with the k-th."""
    place = len(values_m) - top_k
    return np.flatnonzero(values_m >= np.partition(values_m, place)[place])


def _nucleus(below_m: Floats, top_p: float, scale: float) -> Indices:
    """Where the nucleus is, given logits less their maximum; `below_m` is overwritten.

    Only tokens above (1 - top_p) / m of the mass can be in it, since all others together hold less than 1 - top_p; so
    only these are sorted, or those above a larger share of it where they hold top_p already.
    """
    weights_m = np.exp(below_m, out=below_m)
    np.multiply(weights_m, np.float32(scale), out=weights_m)
    np.rint(weights_m, out=weights_m)
    total = float(weights_m.sum(dtype=np.float64))
    least = _BELOW_ONE * (1.0 - top_p) / len(weights_m)
    for share in (*(share for share in _USUAL if share > least), least):
        likely = np.flatnonzero(weights_m >= np.float32(share * total))
        weights = weights_m[likely]
        if float(weights.sum(dtype=np.float64)) >= top_p * total:
            break
    sorted_down = np.sort(weights)[::-1]
    last = int(np.searchsorted(np.cumsum(sorted_down, dtype=np.float64), top_p * total))
    inside: Indices = likely[weights >= sorted_down[min(last, len(weights) - 1)]]
    return inside


def filter_on_device(logits_rv: torch.Tensor, top_k: int, top_p: float, min_p: float) -> None:
    """The same for all rows at once, by a full sort for top-p, without waiting for the device."""
    vocabulary = logits_rv.shape[-1]
    high_r1 = logits_rv.amax(-1, keepdim=True)
    if min_p > 0.0:
        logits_rv.masked_fill_((logits_rv < high_r1 + math.log(min_p)) & high_r1.isfinite(), -math.inf)
    if 0 < top_k < vocabulary:
        floor_r1 = logits_rv.topk(top_k, dim=-1).values[:, -1:]
        logits_rv.masked_fill_((logits_rv < floor_r1) & high_r1.isfinite(), -math.inf)
    if top_p < 1.0:
        weights_rv = torch.exp(logits_rv - high_r1).mul_(_scale(vocabulary)).round_()
        sorted_rv = weights_rv.sort(-1, descending=True).values
        mass_rv = sorted_rv.cumsum(-1, dtype=torch.float64)
        last_r1 = (mass_rv < top_p * mass_rv[:, -1:]).sum(-1, keepdim=True).clamp_(max=vocabulary - 1)
        logits_rv.masked_fill_((weights_rv < sorted_rv.gather(-1, last_r1)) & high_r1.isfinite(), -math.inf)
