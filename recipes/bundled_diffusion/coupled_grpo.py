"""Coupled-GRPO: log-probabilities under pairs of complementary masks and one full mask.

Reads a model folder or training state, tasks with a reward. Writes OUT/state.safetensors, from which write.py makes a
folder.

For each completion, lambda pairs of times (t, T - t) are drawn with complementary masks: each slot of the completion is
masked in exactly one of the two. One more pass has all of them masked. The log-probability of a token is

    1 / (lambda + 1) * [ sum over pairs (that in whichever of the two masks it) + that under the full mask ]

so an update takes 2 lambda + 1 passes. Policy, old policy and reference are asked under the same masks; a new set is
drawn for each update. Tokens behind the end of a text do not count. Advantages leave one out.

Source: DiffuCoder: Understanding and Improving Masked Diffusion Models for Code Generation (arXiv:2506.20639). Its
settings: 10 completions, 2 updates, epsilon 0.5, beta 0.01, clip 0.2, temperature 1 to 1.2, t / T within 0.2..0.8,
reference taken anew every 64 steps. Its released code multiplies the partial passes by 1 / t and 1 / (1 - t), after
which the sum is no log-probability any more; `--inverse` does the same.

    python -m recipes.bundled_diffusion.coupled_grpo --out build/coupled --minutes 10
    python -m recipes.bundled_diffusion.write build/coupled/state.safetensors build/coupled/model
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from recipes.bundled_diffusion.grpo import Views, arguments, leave_one_out, train
from recipes.bundled_diffusion.rollouts import Rollouts

LOW, HIGH = 0.2, 0.8


def complementary(free: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """A pair of masks for each row of `free` (b, n): each free slot in exactly one of them; and t (b,), the chance of
    the first.
    """
    t = LOW + (HIGH - LOW) * torch.rand(len(free), generator=generator)
    first = free & (torch.rand(free.shape, generator=generator) < t[:, None])
    return first, free & ~first, t


def coupled_views(
    rollouts: Rollouts, mask: int, generator: torch.Generator, *, pairs: int = 1, inverse: bool = False
) -> Views:
    """2 `pairs` + 1 states for each completion; the share of a row is 1 / (pairs + 1), with `inverse` over its mask's
    rate.
    """
    free, text = rollouts.written, rollouts.text
    masks, shares = [free], [torch.ones(len(free))]
    for _ in range(pairs):
        first, second, t = complementary(free, generator)
        masks += [first, second]
        shares += [1 / t, 1 / (1 - t)] if inverse else [torch.ones(len(free))] * 2
    masked, owner = torch.cat(masks), torch.arange(len(free)).repeat(len(masks))
    share = (torch.cat(shares)[:, None] / (pairs + 1)).expand_as(masked)
    noisy = rollouts.ids[owner].masked_fill(masked, mask)
    weight = text / (text.sum(1, keepdim=True) * len(text))
    return Views(noisy, masked & text[owner], owner, share.double(), weight.double())


def main(given: list[str] | None = None) -> None:
    parser = arguments(__doc__, method={"method": "eoser_ass"}, temperature=1.0, beta=0.01, updates=4)
    parser.add_argument("--pairs", type=int, default=1, help="pairs of masks an update, lambda (%(default)s)")
    parser.add_argument(
        "--inverse", action="store_true", help="divide partial passes by their rate of masks, as the released code"
    )
    options = parser.parse_args(given)
    views_of = partial(coupled_views, pairs=options.pairs, inverse=options.inverse)
    train(options, views_of, leave_one_out, redrawn=True)


if __name__ == "__main__":
    main()
