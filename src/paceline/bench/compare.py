"""Plain against accelerated decoding at temperature 0: where outputs differ first, and whether that was a near tie.

In: token ids of both, and the runner that made them. Out: differences with the gap between the two best logits there.
Not here: sampling above temperature 0 (`bench.law`), timing (`bench.demo`).

A *near tie* is a position whose two best logits are closer than `epsilon`, a bound on what rounding can change (`epsilon_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.models.base import Runner

if TYPE_CHECKING:
    import torch

CHUNK = 256


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position at which two outputs differ.

    Attributes:
        position: index into the output.
        plain, fast: the tokens there; None where an output ended before.
        gap: best logit minus second best, of the model at that position.
        epsilon: gaps below it count as near ties.
        tied: whether both tokens' logits lie within epsilon of the best.
    """

    position: int
    plain: int | None
    fast: int | None
    gap: float
    epsilon: float
    tied: bool

    @property
    def near_tie(self) -> bool:
        return self.tied


UNITS = 2.0
"""Units in the last place of the best logit within which two logits count as tied: one of rounding for each of them."""


def epsilon_of(dtype: torch.dtype, top_logit: float, units: float = UNITS) -> float:
    """What rounding may change of a difference of logits: `units` times dtype's epsilon times the best logit, at least 1e-3.

    Another engine sums in another order at every layer, not only in a few; compare with it at more units.
    """
    import torch

    return max(1e-3, units * torch.finfo(dtype).eps * abs(top_logit))


def rescore(runner: Runner, tokens: Sequence[int]) -> torch.Tensor:
    """(t, v) float32 logits after each of the given tokens, from one fresh prefill."""
    import torch

    cache = runner.open()
    try:
        parts = [
            runner.extend([cache], [list(tokens[start : start + CHUNK])], all_logits=True).logits.float()
            for start in range(0, len(tokens), CHUNK)
        ]
        return torch.cat(parts)
    finally:
        runner.release(cache)


def gaps(runner: Runner, prompt: Sequence[int], output: Sequence[int], units: float = UNITS) -> list[tuple[float, float]]:
    """Per output token: the gap between the two best logits there, and the epsilon of a near tie."""
    logits = rescore(runner, [*prompt, *output][:-1])[len(prompt) - 1 :]
    best = logits.topk(2, dim=-1).values
    return [(first - second, epsilon_of(runner.info.dtype, first, units)) for first, second in best.tolist()]


def first_difference(
    runner: Runner, prompt: Sequence[int], plain: Sequence[int], fast: Sequence[int], units: float = UNITS
) -> Difference | None:
    """The first difference of two outputs of one prompt, or None."""
    if list(plain) == list(fast):
        return None
    position = next((i for i, (a, b) in enumerate(zip(plain, fast, strict=False)) if a != b), min(len(plain), len(fast)))
    here = [tokens[position] if position < len(tokens) else None for tokens in (plain, fast)]
    row_v = rescore(runner, [*prompt, *plain[:position]])[-1]
    best, second = row_v.topk(2).values.tolist()
    epsilon = epsilon_of(runner.info.dtype, best, units)
    tied = all(token is not None and best - float(row_v[token]) < epsilon for token in here)
    return Difference(position, here[0], here[1], best - second, epsilon, tied)
