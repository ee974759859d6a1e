"""LOL: what the model knows beyond an amateur that makes things up, at the last layer and at a lower one.

Source: Lower Layer Matters: Alleviating Hallucination via Multi-Layer Fusion Contrastive Decoding with Truthfulness
Refocused (arXiv:2408.08769). The authors have published no code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from paceline.sampling.steering.base import Steering, need_alpha, need_model, only_plausible
from paceline.utils import integer, need, number, tokens

MAX_WEIGHT = 1e3

INSTRUCTION = "Answer truthfully, and state only facts that you are sure of.\n\n"


class LowerLayerMatters(Steering):
    """F + omega * G + refocus * (log t - log p). F = z + beta * (log p - log a) contrasts the model, with logits z and
    distribution p, with the amateur's a. G is the same of a lower layer of both, log p' + beta * (log p' - log a'),
    read through the final norm and the head. t is the model's distribution behind an instruction to tell the truth and
    the same prompt. Tokens less than `alpha` times as likely as the likeliest are excluded. With omega and refocus 0
    that is contrastive decoding with beta; with beta 0 besides, the model.

    Costs a pass of the amateur, and with refocus a second row in the model's pass for every row, and a second cache.

    Args:
        model: folder or hub id of the amateur, the model after a fine-tuning on texts that are not true; or folder of a
            LoRA adapter that makes it of the model (`paceline train lora`).
        beta: strength of both contrasts. Its default, and those of the next two, are not the paper's.
        omega: weight of the lower layer; 0 leaves it out.
        refocus: weight of the instruction; 0 leaves it out.
        layer: 1 is the output of the first layer; None is the middle one.
        instruction: text or token ids, put before the prompt.
        alpha: in 0..1.
    Raises:
        ConfigError: a value outside its range.
    """

    name = "lol"
    norm = True
    prepended = True

    def __init__(
        self,
        model: str,
        *,
        beta: float = 0.5,
        omega: float = 0.3,
        refocus: float = 0.3,
        layer: int | None = None,
        instruction: str | Sequence[int] = INSTRUCTION,
        alpha: float = 0.1,
    ) -> None:
        need_model("model", model)
        need_alpha(alpha)
        for name, weight in (("beta", beta), ("omega", omega), ("refocus", refocus)):
            number(name, weight, 0.0, MAX_WEIGHT, f"be in 0..{MAX_WEIGHT:g}")
        if layer is not None:
            integer("layer", layer, 1)
        if not isinstance(instruction, str):
            instruction = tokens("instruction", instruction)
        need(len(instruction) > 0, "instruction", "not be empty", instruction)
        self.model, self.beta, self.omega, self.refocus = model, beta, omega, refocus
        self.layer, self.prompt, self.alpha = layer, instruction, alpha
        self.companions = ("model", "prompt") if refocus else ("model",)

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """See `Steering.taps`."""
        if not self.omega:
            return ()
        layer = max(1, num_layers // 2) if self.layer is None else self.layer
        need(layer <= num_layers, "layer", f"be at most {num_layers}, the layers of this model", layer)
        return (layer - 1,)

    def shape(self, rows_rv: torch.Tensor, others: Iterable[torch.Tensor]) -> torch.Tensor:
        """See `Steering.shape`."""
        given = iter(others)
        final_rv = rows_rv.log_softmax(-1)
        lower_rv = next(given).log_softmax(-1) if self.omega else None
        shaped_rv = rows_rv + self.beta * (final_rv - next(given).log_softmax(-1))
        if lower_rv is not None:
            shaped_rv = shaped_rv + self.omega * (lower_rv + self.beta * (lower_rv - next(given).log_softmax(-1)))
        if self.refocus:
            shaped_rv = shaped_rv + self.refocus * (next(given).log_softmax(-1) - final_rv)
        return only_plausible(shaped_rv, rows_rv, self.alpha)
