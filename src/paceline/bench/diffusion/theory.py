"""What deciding all slots in one step can reach on tasks that leave a choice, from perfect marginals: closed forms.

In: the number of items. Out: probabilities, nats. Not here: the tasks (`bench.parallel_tasks`).

A denoiser that knows every slot's distribution exactly, but draws all slots apart from each other, is right only by
luck. The distance from the true law is at least the total correlation, `sum_i H(Y_i) - H(Y)`. Source: ParallelBench
(arXiv:2510.04767).
"""

from __future__ import annotations

from math import factorial, log, prod


def shuffle_success(n: int, *, may_repeat_input: bool = False) -> float:
    """Chance that n slots, each drawn uniformly from n items, form a permutation: n! / n^n, or (n! - 1) / n^n without
    the input.
    """
    return (factorial(n) - (0 if may_repeat_input else 1)) / float(n**n)


def shuffle_correlation(n: int) -> float:
    """Total correlation in nats of a uniform permutation of n items: n log n - log n!."""
    return n * log(n) - log(factorial(n))


def replace_success(n: int) -> float:
    """Chance that exactly one of n slots takes the new item, each with probability 1 / n: ((n - 1) / n)^(n - 1)."""
    return float(((n - 1) / n) ** (n - 1))


def remove_success(n: int) -> float:
    """Chance that n - 1 slots hold the n items but one, in order.

    With the removed place uniform, slot i holds item i with probability (n - i) / n, else item i + 1. The text is right
    if for some k the slots before k hold their own item and the others the next one: sum_k prod_{i<k} (n - i) / n *
    prod_{k<=i<n} i / n.
    """
    return sum(prod((n - i) / n for i in range(1, k)) * prod(i / n for i in range(k, n)) for k in range(1, n + 1))


def insert_success(n: int) -> float:
    """Chance that n + 1 slots hold the n items in order with a new one among them, at any of n + 1 places.

    With the place uniform over n + 1, slot i (from 1) holds item i with probability (n + 1 - i) / (n + 1), the new one
    with 1 / (n + 1), item i - 1 with (i - 1) / (n + 1).
    """
    m = n + 1
    return sum(
        prod((m - i) / m for i in range(1, k)) / m * prod((i - 1) / m for i in range(k + 1, m + 1))
        for k in range(1, m + 1)
    )
