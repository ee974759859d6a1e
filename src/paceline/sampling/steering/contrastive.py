"""Contrastive decoding: what a good model knows beyond a small one, the amateur.

Sources: Contrastive Decoding: Open-ended Text Generation as Optimization (arXiv:2210.15097); in the form with beta,
Contrastive Decoding Improves Reasoning in Large Language Models (arXiv:2309.09117).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paceline.sampling.steering.base import Steering, need_alpha, need_model, only_plausible
from paceline.utils import number

MAX_BETA = 1e3


class ContrastiveDecoding(Steering):
    """log p - log a among plausible tokens: p is the model's distribution and a the amateur's. With `beta` it is
    z + beta * (log p - log a) for logits z, the form of the second paper: at beta 0, or with an amateur that is the
    model itself, that is the model. Tokens less than `alpha` times as likely as the likeliest are excluded.

    Args:
        model: folder or hub id of the amateur, a small model with the same tokenizer.
        alpha: in 0..1.
        beta: None is the first paper's form; the second takes 0.5.
        amateur_temperature: of a; the first paper takes 0.5 for GPT-2 and 1 for OPT.
    Raises:
        ConfigError: a value outside its range.
    """

    name = "contrastive"
    companions = ("model",)

    def __init__(
        self, model: str, alpha: float = 0.1, beta: float | None = None, amateur_temperature: float = 1.0
    ) -> None:
        need_model("model", model)
        need_alpha(alpha)
        if beta is not None:
            number("beta", beta, 0.0, MAX_BETA, f"be in 0..{MAX_BETA:g}")
        number("amateur_temperature", amateur_temperature, 1e-3, 1e3, "be in 0.001..1000")
        self.model, self.alpha, self.beta, self.temperature = model, alpha, beta, amateur_temperature

    def shape(self, rows_rv: torch.Tensor, others: Iterable[torch.Tensor]) -> torch.Tensor:
        """See `Steering.shape`."""
        (amateur_rv,) = others
        contrast_rv = rows_rv.log_softmax(-1) - (amateur_rv / self.temperature).log_softmax(-1)
        shaped_rv = contrast_rv if self.beta is None else rows_rv + self.beta * contrast_rv
        return only_plausible(shaped_rv, rows_rv, self.alpha)
