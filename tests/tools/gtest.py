"""The G-test with a declared error: does a sample follow a distribution?

An assertion's chance of a false alarm is the declared error.
Seeds are fixed in the tests that use it, so an assertion that held once holds always; the error says how lucky that
was.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2

ERROR = 1e-6
SMALLEST_CELL = 5.0

Numbers = Sequence[float] | npt.NDArray[np.float64] | npt.NDArray[np.int64]


def g_test(counts: Numbers, probabilities: Numbers) -> float:
    """p-value of "these counts were drawn from this distribution" (likelihood ratio against chi-square).

    Cells with an expected count below 5 are pooled; anything seen in a cell of probability 0 gives 0.
    """
    counts_k, p_k = np.asarray(counts, np.float64), np.asarray(probabilities, np.float64)
    if counts_k.shape != p_k.shape or not np.isclose(p_k.sum(), 1.0, atol=1e-6):
        raise ValueError(f"need one probability per count, summing to 1, got {p_k.shape} that sum to {p_k.sum()}")
    if counts_k[p_k == 0].any():
        return 0.0
    expected_k = p_k * counts_k.sum()
    large_k = expected_k >= SMALLEST_CELL
    observed = np.append(counts_k[large_k], counts_k[~large_k].sum())
    expected = np.append(expected_k[large_k], expected_k[~large_k].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) < 2:
        raise ValueError("fewer than two cells are left; take more samples")
    seen = observed > 0
    statistic = 2.0 * float((observed[seen] * np.log(observed[seen] / expected[seen])).sum())
    return float(chi2.sf(statistic, len(expected) - 1))


def independence(table: npt.NDArray[np.int64]) -> float:
    """p-value of "rows and columns of this table of counts are independent"."""
    counts = np.asarray(table, np.float64)
    expected = counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / counts.sum()
    seen = counts > 0
    statistic = 2.0 * float((counts[seen] * np.log(counts[seen] / expected[seen])).sum())
    return float(chi2.sf(statistic, (counts.shape[0] - 1) * (counts.shape[1] - 1)))


def assert_follows(counts: Numbers, probabilities: Numbers, error: float = ERROR) -> None:
    """Fail if the counts are less likely than `error` under the distribution; a right sampler fails in that share of
    seeds."""
    p_value = g_test(counts, probabilities)
    assert p_value >= error, (
        f"G-test p-value {p_value:.2e} < declared error {error:.0e}: counts {counts} do not follow {probabilities}"
    )
