"""How far SVDecode is to go: its `mu` from examples, in closed form.

Along the answers the model's logits are moved by mu * delta (`sampling.steering.svdecode`), and mu is where that comes
closest to the tokens that stand there, e for each: the least-squares fit of delta to e - q, or the step of Newton's
method for the cross-entropy. Both share the slope, sum(<e - q, delta>), and divide it by sum(<delta, delta>) or by
sum(<delta, (diag(q) - q q^T) delta>).

Source: Distribution-Aligned Decoding for Efficient LLM Task Adaptation (arXiv:2509.15888); which of the two is the
paper's is not known to us. Both are judged, and the better one is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from paceline.errors import CapabilityError
from paceline.models import has_ability
from paceline.sampling.steering import MAX_MU, steering_vector
from paceline.training.batches import Document
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.models import Runner

TOGETHER = 128
"""Rows of logits at once."""

ROUNDING = 1e-10
"""Mean square of deltas up to which they are errors of rounding."""


@dataclass(frozen=True, slots=True)
class Strength:
    """Says which mu fits examples, and how well it does on others.

    Attributes:
        mu: of `candidates` the one with the least loss on other examples; 0 where none has less than without steering.
        candidates: by "least squares" and "newton".
        losses: cross-entropy in nats of a token of those other examples, by mu, 0 among them, without `alpha`.
        tokens: that mu was made of, and those it was judged by.
    """

    mu: float
    candidates: Mapping[str, float]
    losses: Mapping[float, float]
    tokens: tuple[int, int]

    @property
    def steering(self) -> dict[str, Any]:
        """Give the setting as `SamplingParams.steering` takes it."""
        return {"method": "svdecode", "mu": self.mu}


def svdecode_strength(tuned: Runner, base: Runner, examples: Sequence[Document]) -> Strength:
    """The `mu` of SVDecode for a model that was fine-tuned: every fifth example judges what the others say.

    Args:
        tuned, base: the model after and before it, with states and head.
        examples: two at least, of which the tokens behind `first` count.
    Raises:
        ConfigError: fewer examples. CapabilityError: a model that does not give its states.
    """
    need(len(examples) > 1, "examples", "be at least two", len(examples))
    for runner in (tuned, base):
        if not (runner.capabilities.taps and has_ability(runner, "head")):
            raise CapabilityError(f"{runner.info.name} does not give its states as it runs here; use a native family")
    judging, fitting = examples[::5], [document for i, document in enumerate(examples) if i % 5]
    count = sum(len(document.tokens) - document.first for document in fitting)
    candidates = candidate_strengths(_steps(tuned, base, fitting, "fitting mu"))
    losses = dict.fromkeys((0.0, *candidates.values()), 0.0)
    judged = 0
    for q_rv, tokens_r, delta_rv in _steps(tuned, base, judging, "judging it"):
        judged += len(tokens_r)
        for mu in losses:
            losses[mu] += float(F.cross_entropy(q_rv + mu * delta_rv, tokens_r, reduction="sum"))
    mean = {mu: total / max(1, judged) for mu, total in losses.items()}
    return Strength(min(mean, key=lambda mu: mean[mu]), candidates, mean, (count, judged))


def candidate_strengths(steps: Iterable[tuple[Tensor, Tensor, Tensor]]) -> dict[str, float]:
    """`mu` by "least squares" and "newton"; 0 where delta is 0 everywhere but for rounding.

    Args:
        steps: (r, v) logits of the model, (r,) int64 the tokens that follow, and (r, v) delta.
    """
    slope = squares = curved = count = 0.0
    for q_rv, tokens_r, delta_rv in steps:
        chances_rv, towards_rv = q_rv.softmax(-1).double(), delta_rv.double()
        mean_r = (chances_rv * towards_rv).sum(-1)
        count += len(tokens_r)
        slope += float((towards_rv.gather(1, tokens_r[:, None])[:, 0] - mean_r).sum())
        squares += float(towards_rv.square().sum())
        curved += float((chances_rv * towards_rv.square()).sum() - mean_r.square().sum())
    return {
        name: max(-MAX_MU, min(MAX_MU, slope / by)) if squares > ROUNDING * count else 0.0
        for name, by in (("least squares", squares), ("newton", curved))
    }


def _steps(
    tuned: Runner, base: Runner, examples: Sequence[Document], what: str
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(r, v) logits of the model, (r,) the tokens that follow, and (r, v) delta, of all that is to be learned."""
    for document in tqdm(examples, desc=what, disable=None):
        tokens = torch.tensor(document.tokens[document.first :])
        states = [_states(runner, document).split(TOGETHER) for runner in (tuned, base)]
        for q, p, wanted in zip(*states, tokens.split(TOGETHER), strict=True):
            q_rv, p_rv = (_logits(runner, part) for runner, part in ((tuned, q), (base, p)))
            yield q_rv, wanted.to(q_rv.device), steering_vector(q_rv, p_rv.to(q_rv.device))


def _states(runner: Runner, document: Document) -> Tensor:
    """(r, hidden) states behind the final norm from which the learned tokens are predicted."""
    last, cache = runner.info.num_layers, runner.open()
    try:
        states = runner.extend([cache], [document.tokens], taps=(last,)).taps[last]
    finally:
        runner.release(cache)
    return states[document.first - 1 : -1]


def _logits(runner: Runner, states: Tensor) -> Tensor:
    logits: Tensor = cast(Any, runner).head(states, norm=False).float()
    return logits
