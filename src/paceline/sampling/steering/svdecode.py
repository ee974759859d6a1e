"""SVDecode: further in the direction in which a brief fine-tuning has moved a model.

Source: Distribution-Aligned Decoding for Efficient LLM Task Adaptation (arXiv:2509.15888).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paceline.sampling.steering.base import Steering, exact_sums, need_alpha, need_model, only_plausible
from paceline.utils import number

FLOOR = -60.0
"""Log-probabilities below this count as this."""

MAX_MU = 1e4


class SVDecode(Steering):
    """z + mu * delta for the logits z and distribution q of the model, which was fine-tuned, and the distribution p of
    its base. delta is the gradient of KL(q || p) as a change of logits: q * (s - sum(q * s)) with s = log(q / p) + 1.
    It is 0 where the model is its base, and sums to 0. Tokens less than `alpha` times as likely as the likeliest are
    excluded. At mu 0 and alpha 0 that is the model.

    Args:
        mu: strength.
        alpha: in 0..1.
        model: folder or hub id of the base, with the same tokenizer; None is the model without its LoRA adapter, where
            it was loaded with one (`LLM(lora=...)`).
    Raises:
        ConfigError: a value outside its range.
    """

    name = "svdecode"
    companions = ("model",)

    def __init__(self, mu: float = 1.0, alpha: float = 0.1, model: str | None = None) -> None:
        number("mu", mu, -MAX_MU, MAX_MU, f"be in -{MAX_MU:g}..{MAX_MU:g}")
        need_alpha(alpha)
        if model is not None:
            need_model("model", model)
        self.mu, self.alpha, self.model = mu, alpha, model

    def shape(self, rows_rv: torch.Tensor, others: Iterable[torch.Tensor]) -> torch.Tensor:
        """See `Steering.shape`."""
        (base_rv,) = others
        return only_plausible(rows_rv + self.mu * steering_vector(rows_rv, base_rv), rows_rv, self.alpha)


def steering_vector(tuned_rv: torch.Tensor, base_rv: torch.Tensor) -> torch.Tensor:
    """(r, v) delta from the logits of the fine-tuned model and of its base; the rows sum to 0."""
    tuned_rv = tuned_rv.log_softmax(-1)
    q_rv = tuned_rv.exp()
    s_rv = tuned_rv.clamp(min=FLOOR) - base_rv.log_softmax(-1).clamp(min=FLOOR) + 1.0
    mean_r1 = exact_sums(q_rv * s_rv).to(torch.float32)[:, None]
    return q_rv * (s_rv - mean_r1)
