"""Joint distributions of two finite distributions that tell as much as possible of one another.

A coupling with little entropy has much mutual information, I(X;Y) = H(X) + H(Y) - H(X,Y), and does not care what the
values are called; the maximal coupling of speculative sampling is another thing: it makes equal values meet. A
bottleneck groups the values of X, so that no more than a given number of bits of it gets through.

Source: Minimum Entropy Coupling with Bottleneck (arXiv:2410.21666). Entropies are in bits.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

CRUMB: Final = 1e-12
"""Less mass than this is rounding, and is dropped."""


def entropy_bits(p: npt.NDArray[Any]) -> float:
    """Of probabilities of any shape."""
    some = p[p > 0]
    return float(-(some * np.log2(some)).sum())


def minimum_entropy_coupling(p: Floats, q: Floats) -> Floats:
    """A coupling of p (x,) and q (y,) by the greedy rule: the most probable values of both that are left meet with as
    much mass as both have.

    Its entropy is within log2(e)/e = 0.53 bits of the least there is.

    Returns:
        (x, y) whose rows sum to p and whose columns sum to q, up to `CRUMB`; at most x + y - 1 entries are above 0.
    """
    joint = np.zeros((len(p), len(q)))
    rows, columns = ([(-mass, i) for i, mass in enumerate(masses.tolist()) if mass > CRUMB] for masses in (p, q))
    heapify(rows)
    heapify(columns)
    while rows and columns:
        (a, i), (b, j) = heappop(rows), heappop(columns)
        mass = min(-a, -b)
        joint[i, j] += mass
        for heap, left, index in ((rows, a + mass, i), (columns, b + mass, j)):
            if left < -CRUMB:
                heappush(heap, (left, index))
    return joint


def bottleneck(p: Floats, rate: float) -> Ids:
    """Groups of the values of p (x,), whose entropy is `rate` bits at most: the most probable values form one group, as
    few as will do, and all others stay alone.

    The entropy of the groups falls short of `rate` by h(p2) at most, where p has more: h is the binary entropy, p2 the
    second largest probability.

    Returns:
        (x,) the group of each value; 0 is that of the most probable.
    """
    order = np.argsort(-p, kind="stable")
    falling = p[order]
    together = np.cumsum(falling)
    bits = -falling * np.log2(np.where(falling > 0, falling, 1.0))
    alone = bits.sum() - np.cumsum(bits)
    of_group = -together * np.log2(np.where(together > 0, together, 1.0))
    fits = of_group + alone <= rate + CRUMB
    size = int(fits.argmax()) if fits.any() else len(p) - 1
    groups = np.empty(len(p), np.int64)
    groups[order] = np.maximum(np.arange(len(p)) - size, 0)
    return groups
