"""Does accelerated sampling follow the model's own distribution? A test with a declared error, on any model.

Every sampled token is scored again by one plain pass, which gives its whole conditional distribution p. With tokens
ordered from likely to unlikely, u = P(tokens before it) + U p(token), U uniform: under exact sampling all u are
independent and uniform on (0, 1), whatever the model (the randomised Rosenblatt transform). A sampler that favours
drafted tokens, which tend to be likely ones, pushes u down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from paceline.models import NO_INPUTS, Inputs, Runner
from paceline.verify.tokens import rescore

if TYPE_CHECKING:
    import torch

BINS = 20
ERROR = 1e-4
"""Chance of a false alarm of one test."""


@dataclass(frozen=True, slots=True)
class SamplingTest:
    """Outcome of the test.

    Attributes:
        tokens: number of sampled tokens.
        statistic: chi-square over the bins, with bins - 1 degrees of freedom.
        p_value: chance of a larger statistic if the distribution is the model's own.
        error: p-values below it fail.
    """

    tokens: int
    statistic: float
    p_value: float
    error: float = ERROR

    @property
    def holds(self) -> bool:
        return self.p_value >= self.error

    def to_dict(self) -> dict[str, float | int | bool]:
        """JSON-ready."""
        return asdict(self) | {"holds": self.holds}


def integral_values(
    runner: Runner,
    prompt: Sequence[int],
    output: Sequence[int],
    temperature: float,
    noise: torch.Generator,
    *,
    inputs: Inputs = NO_INPUTS,
) -> torch.Tensor:
    """(t,) float64 values of a sampled output, uniform under exact sampling at this temperature without other rules.

    Args:
        inputs: what the prompt has beside its tokens.
    """
    import torch

    logits = rescore(runner, [*prompt, *output][:-1], inputs, prompt_length=len(prompt))[len(prompt) - 1 :]
    p = (logits.double() / temperature).softmax(-1)
    chosen = p.gather(1, torch.tensor(list(output), device=p.device)[:, None])
    before = torch.where(p > chosen, p, 0.0).sum(-1)
    tied = torch.where(p == chosen, p, 0.0).sum(-1)
    uniform = torch.rand(len(output), generator=noise, dtype=torch.float64)
    return before.cpu() + tied.cpu() * uniform


def uniform_test(values: torch.Tensor) -> SamplingTest:
    """Chi-square of (t,) values against the uniform distribution on (0, 1), in equal bins."""
    import torch

    counts = torch.histc(values.clamp(0.0, 1.0), bins=BINS, min=0.0, max=1.0)
    expected = len(values) / BINS
    statistic = float(((counts - expected) ** 2 / expected).sum())
    p_value = float(
        torch.special.gammaincc(torch.tensor((BINS - 1) / 2, dtype=torch.float64), torch.tensor(statistic / 2).double())
    )
    return SamplingTest(len(values), statistic, p_value)
