"""Classifier-free guidance: away from what the model would say without the prompt, or behind a negative one.

Source: Stay on topic with Classifier-Free Guidance (arXiv:2306.17806).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from paceline.sampling.steering.base import Steering
from paceline.utils import need, number, tokens

MAX_SCALE = 1e3


class ClassifierFreeGuidance(Steering):
    """z + (guidance_scale - 1) * (log p - log u): z and p are the model's logits and distribution, u is its
    distribution behind another prompt with the same output so far. At scale 1 that is the model itself, at 0 what it
    says behind the other prompt.

    Costs a second row in the same pass for every row, and a second cache.

    Args:
        guidance_scale: above 1 the prompt counts more.
        negative_prompt: text or token ids; None is the last token of the prompt, as in the paper and in transformers.
    Raises:
        ConfigError: a value outside its range.
    """

    name = "cfg"
    companions = ("prompt",)

    def __init__(self, guidance_scale: float = 1.5, negative_prompt: str | Sequence[int] | None = None) -> None:
        number("guidance_scale", guidance_scale, -MAX_SCALE, MAX_SCALE, f"be in -{MAX_SCALE:g}..{MAX_SCALE:g}")
        if negative_prompt is not None and not isinstance(negative_prompt, str):
            negative_prompt = tokens("negative_prompt", negative_prompt)
        need(negative_prompt is None or len(negative_prompt) > 0, "negative_prompt", "not be empty", negative_prompt)
        self.scale, self.prompt = guidance_scale, negative_prompt

    def shape(self, rows_rv: torch.Tensor, others: Iterable[torch.Tensor]) -> torch.Tensor:
        """See `Steering.shape`."""
        (other_rv,) = others
        return rows_rv + (self.scale - 1.0) * (rows_rv.log_softmax(-1) - other_rv.log_softmax(-1))
