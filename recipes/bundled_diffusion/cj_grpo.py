"""CJ-GRPO: what is learned is the rollout's own trajectory, each token in the very state in which it was written.

Reads a model folder or training state, tasks with a reward. Writes OUT/state.safetensors, from which write.py makes a
folder.

A rollout of S rounds writes the slots U_s in round s, out of state x_s. The log-probability of a token is log
p(x_{s+1}^i | x_s), i in U_s, and the loss is (1 / S) sum_s (1 / |U_s|) sum_{i in U_s} of the clipped objective with the
KL term, its mean taken over completions. States are constants: no gradient flows through which slots were written. It
costs S passes an update, hence the ascending schedule, whose S is log2 of the length.

Source: Taming Masked Diffusion Language Models via Consistency Trajectory Reinforcement Learning with Fewer Decoding
Step (arXiv:2509.23924). Its settings: temperature 1, 6 completions, epsilon 0.5, beta 0.04, 8 to 12 updates, clip 0.2,
reference taken anew every 64 steps. Ours where a model of 2.4 million parameters on one core asks for it: all weights
learn, the rate is higher, fewer updates of a rollout.

    python -m recipes.bundled_diffusion.cj_grpo --out build/cj --minutes 10
    python -m recipes.bundled_diffusion.write build/cj/state.safetensors build/cj/model
"""

from __future__ import annotations

import torch

from recipes.bundled_diffusion.grpo import Views, arguments, group_relative, train
from recipes.bundled_diffusion.rollouts import Rollouts


def trajectory_views(rollouts: Rollouts, mask: int, generator: torch.Generator | None = None) -> Views:
    """One state for each round of each completion; nothing is drawn."""
    del generator
    rounds = int(rollouts.rounds.max())
    every = torch.arange(rounds).repeat_interleave(len(rollouts.ids))
    owner = torch.arange(len(rollouts.ids)).repeat(rounds)
    rows = rollouts.born[owner] == every[:, None]
    told = rows.any(1)  # completions that took fewer rounds than others have no state there
    noisy = torch.cat([rollouts.state(s, mask) for s in range(rounds)])
    size = (rollouts.born[:, None, :] == torch.arange(rounds)[:, None]).sum(-1)  # (b, rounds) |U_s|
    each = size.gather(1, rollouts.born.clamp(min=0)).double()
    steps = (size > 0).sum(1, keepdim=True)
    weight = torch.where(rollouts.written, 1 / (each * steps * len(size)), 0.0)
    return Views(noisy[told], rows[told], owner[told], rows[told].double(), weight)


def main(given: list[str] | None = None) -> None:
    parser = arguments(__doc__, method={"method": "eoser_ass"}, temperature=1.0, beta=0.04, updates=6)
    train(parser.parse_args(given), trajectory_views, group_relative, redrawn=False)


if __name__ == "__main__":
    main()
