"""Group-relative policy gradients on a denoiser: advantages, the clipped objective, the KL term, and the run around
them.

For a token with log-probability l, l_old before the update and l_ref under the reference, r = exp(l - l_old) and
advantage A:

    - min(r A, clip(r, 1 - epsilon, 1 + epsilon) A) + beta (exp(l_ref - l) - (l_ref - l) - 1)
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from lab.diffusion import Item, items
from paceline.training import update
from recipes.bundled_diffusion.answering import Batched, masked_logits
from recipes.bundled_diffusion.evaluate import exact_match
from recipes.bundled_diffusion.model import TOKENIZER, Net, read_net
from recipes.bundled_diffusion.rollouts import Rollouts, roll_out
from recipes.bundled_diffusion.run import Facts, Run, begin, set_up
from recipes.common.options import add_flags, new_parser

TASKS = ("sort", "sort", "sort", "insert_index", "insert_index", "shuffle", "insert_random", "replace_random")
"""Tasks that few calls make worse. Those with one right answer come more often: in equal shares they are unlearned
while the others, which only have to settle on one of many right answers, are learned.
"""
POOL = 3000
"""Different training items of each task."""


def leave_one_out(reward_pg: Tensor) -> Tensor:
    """(prompts, group) each reward less the mean of the others in its group."""
    size = reward_pg.shape[1]
    return (reward_pg - reward_pg.mean(1, keepdim=True)) * (size / (size - 1))


def group_relative(reward_pg: Tensor, tiny: float = 1e-4) -> Tensor:
    """(prompts, group) each reward less its group's mean, over the group's standard deviation."""
    return (reward_pg - reward_pg.mean(1, keepdim=True)) / (reward_pg.std(1, keepdim=True) + tiny)


def clipped(log_p: Tensor, old: Tensor, advantage: Tensor, epsilon: float) -> Tensor:
    """The clipped objective of each token, to be made small."""
    ratio = (log_p - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage)


def k3(log_p: Tensor, reference: Tensor) -> Tensor:
    """Schulman's third estimate of KL(policy | reference) for each token drawn from the policy; never negative."""
    more = reference - log_p
    return more.exp() - more - 1


@dataclass(frozen=True, slots=True)
class Views:
    """In which states the log-probability of each written token is taken, and what the token counts.

    Attributes:
        noisy: (k, n) states.
        rows: (k, n) masked slots of them whose tokens are scored.
        owner: (k,) the completion that each state is of.
        share: (k, n) what a row contributes to its token's log-probability, at `rows`.
        weight: (b, n) of each token in the loss.
    """

    noisy: Tensor
    rows: Tensor
    owner: Tensor
    share: Tensor
    weight: Tensor


def log_probs(net: Net, rollouts: Rollouts, views: Views) -> Tensor:
    """(b, n) of the written tokens, as `views` say; 0 elsewhere."""
    logits = masked_logits(net, views.noisy, rollouts.length[views.owner], views.rows)
    targets = rollouts.ids[views.owner][views.rows]
    found = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0] * views.share[views.rows].to(logits.dtype)
    view, slot = views.rows.nonzero(as_tuple=True)
    return found.new_zeros(rollouts.ids.shape).index_put((views.owner[view], slot), found, accumulate=True)


@dataclass(frozen=True, slots=True)
class Batch:
    """What an update needs of some completions: where log-probabilities are taken, what they were, advantages (b,)."""

    rollouts: Rollouts
    views: Views
    old: Tensor
    reference: Tensor
    advantage: Tensor

    def loss(self, net: Net, *, epsilon: float, beta: float) -> Tensor:
        """The clipped objective and the KL term, weighed."""
        log_p = log_probs(net, self.rollouts, self.views)
        each = clipped(log_p, self.old, self.advantage[:, None].to(log_p.dtype), epsilon) + beta * k3(
            log_p, self.reference
        )
        return (each * self.views.weight.to(log_p.dtype)).sum()


ViewsOf = Callable[[Rollouts, int, torch.Generator], Views]
Advantages = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Policy:
    """What a run learns by: the reference, how rewards become advantages, where log-probabilities are taken.

    Attributes:
        redrawn: views differ from update to update.
        pool: items of which each step draws its prompts.
    """

    run: Run
    reference: Net
    views_of: ViewsOf
    advantages: Advantages
    redrawn: bool
    tokenizer: Tokenizer
    pool: Sequence[Item]

    def rolled(self, generator: torch.Generator) -> Rollouts:
        """Completions of prompts drawn for this step."""
        given = self.run.options
        chosen = random.Random(f"{given.seed} {self.run.progress.step}").sample(self.pool, given.prompts)
        how = {"method": given.method, "length": given.length, "temperature": given.temperature}
        return roll_out(self.run.net, self.tokenizer, chosen, group=given.group, generator=generator, **how)

    def batches(self, rollouts: Rollouts, updates: int, generator: torch.Generator) -> Iterator[Batch]:
        """One for each update: completions of groups that are not all alike, old values of before all updates.

        Views are drawn anew for each update where the recipe draws any.
        """
        advantage = self.advantages(rollouts.reward.view(-1, self.run.options.group)).flatten()
        told = advantage != 0
        if not bool(told.any()):
            return
        net, kept = self.run.net, rollouts.take(told)
        made = []
        with torch.no_grad():
            for _ in range(updates if self.redrawn else 1):
                views = self.views_of(kept, net.spec.mask_token_id, generator)
                old, reference = (log_probs(one, kept, views) for one in (net, self.reference))
                made.append(Batch(kept, views, old, reference, advantage[told]))
        yield from (made[i % len(made)] for i in range(updates))

    def learn(self, generator: torch.Generator) -> dict[str, float]:
        """One step: roll out, then learn from it some times over."""
        given, net = self.run.options, self.run.net
        if self.run.progress.step % given.sync == 0:
            self.reference.load_state_dict(net.state_dict())
        # Without a cache: autocast would go on with the rounded weights of before an update.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            rollouts = self.rolled(generator)
            for batch in self.batches(rollouts, given.updates, generator):
                update(net, self.run.optimizer, batch.loss(net, epsilon=given.epsilon, beta=given.beta), given.clip)
        mixed = rollouts.reward.view(-1, given.group).std(1) > 0
        return {
            "reward": rollouts.reward.mean().item(),
            "mixed": mixed.double().mean().item(),
            "calls": rollouts.calls.double().mean().item(),
        }

    def measured(self) -> Facts:
        """Exact match at temperature 0 on a few test items, by the method of the rollouts."""
        given = self.run.options
        how = {
            "method": given.method,
            "count": given.count,
            "length": given.length,
            "tasks": list(dict.fromkeys(given.tasks)),
        }
        return {"exact": exact_match(Batched(self.run.net), self.tokenizer, **how)}


def train(options: argparse.Namespace, views_of: ViewsOf, advantages: Advantages, *, redrawn: bool) -> Facts:
    """Learn until minutes or steps are used up, from a model or from where OUT was left; the last report."""
    set_up(options)
    net, reference = (read_net(options.model) for _ in range(2))
    run = begin(options, net, warmup=10, decay=0.0, betas=(0.9, 0.99), beside={"reference": reference})
    pool = [item for task in options.tasks for item in items(task, split="train", count=POOL, seed=options.seed)]
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    policy = Policy(run, reference, views_of, advantages, redrawn, tokenizer, pool)
    return run.go(policy.learn, policy.measured, lines=10)


def arguments(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Options that both recipes take, with a recipe's own defaults."""
    parser = new_parser(description)
    add_flags(parser, "model", "out", "most_steps", minutes=10)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help="of the rollouts (%(default)s)")
    add_flags(parser, method=None, length=16, temperature=None)
    parser.add_argument("--prompts", type=int, default=16, help="of a step (%(default)s)")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt (%(default)s)")
    parser.add_argument("--updates", type=int, help="times that a step learns from its rollouts (%(default)s)")
    parser.add_argument("--epsilon", type=float, default=0.5, help="of the clipped ratio (%(default)s)")
    parser.add_argument("--beta", type=float, help="weight of the KL term (%(default)s)")
    parser.add_argument(
        "--sync", type=int, default=64, help="steps after which the reference becomes the policy (%(default)s)"
    )
    parser.add_argument("--clip", type=float, default=0.2, help="largest norm of a gradient (%(default)s)")
    add_flags(parser, "threads", "seed", rate=3e-4, count=12, report=2)
    parser.set_defaults(**defaults)
    return parser
