"""The shape of a masked diffusion language model: that of its transformer, and what makes it a denoiser.

In: nothing. Out: DenoiserSpec, which `models.denoiser.layouts` fills from a `config.json` and `models.denoiser.native`
runs.
Not here: reading files, tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSpec:
    """How a mixture of experts chooses, where it is not by a plain softmax; `ModelSpec.moe` says how many there are.

    Scores are sigmoids. A bias of each expert is added for choosing, not for weighing; experts stand in groups, of
    which those with the highest sums of two best scores may be chosen from. Source: Ling 2.0 and LLaDA2.0
    (arXiv:2512.15745).

    Attributes:
        groups, top_groups: groups of experts, and how many of them a token may use.
        scale: factor on the weights of the chosen experts.
        shared: inner width of an MLP that every token goes through besides; 0 for none.
        bias: the router has a bias of each expert.
    """

    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    shared: int = 0
    bias: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoiserSpec:
    """A bidirectional or block-causal transformer over slots.

    Attributes:
        model: the transformer: pre-norm, without windows and soft-caps.
        mask_token_id: what stands at a masked slot.
        eos_token_ids: tokens that end a text.
        block_length: slots of a block where attention is block-causal; None where every slot sees every other.
        shifted: the logits of a slot come from the pass at the slot left of it.
        routing: of the mixture of experts; None is a softmax over all of them.
    """

    model: ModelSpec
    mask_token_id: int
    eos_token_ids: tuple[int, ...] = ()
    block_length: int | None = None
    shifted: bool = False
    routing: RoutingSpec | None = None

    @property
    def attention(self) -> Literal["full", "block"]:
        return "full" if self.block_length is None else "block"
