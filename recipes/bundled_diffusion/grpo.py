"""Group-relative policy gradients on a denoiser: advantages, the clipped objective, the KL term, and the run around them.

In:  rollouts of a group of completions for each prompt, Views: in which states the log-probability of each written token is taken.
Out: a loss; OUT/state.safetensors (weights, optimizer, how far), OUT/reference.safetensors, OUT/history.json.
Not here: the views (coupled_grpo.py, cj_grpo.py), the decoding (rollouts.py).

For a token with log-probability l, l_old before the update and l_ref under the reference, r = exp(l - l_old) and advantage A:

    - min(r A, clip(r, 1 - epsilon, 1 + epsilon) A) + beta (exp(l_ref - l) - (l_ref - l) - 1)
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from evaluate import exact_match
from model import Net, read_state
from rollouts import BUNDLED, Batched, Rollouts, masked_logits, read_model, roll_out
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from train import TOKENIZER, groups, keep, learning_rate, take_up

from paceline.bench.parallel_tasks import Item, items

TASKS = ("sort", "sort", "sort", "insert_index", "insert_index", "shuffle", "insert_random", "replace_random")
"""Tasks that few calls make worse. Those with one right answer come more often: in equal shares they are unlearned while the
others, which only have to settle on one of many right answers, are learned."""
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
        each = clipped(log_p, self.old, self.advantage[:, None].to(log_p.dtype), epsilon) + beta * k3(log_p, self.reference)
        return (each * self.views.weight.to(log_p.dtype)).sum()


ViewsOf = Callable[[Rollouts, int, torch.Generator], Views]
Advantages = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Run:
    """A run and where it stands."""

    net: Net
    reference: Net
    optimizer: torch.optim.Optimizer
    options: argparse.Namespace
    views_of: ViewsOf
    advantages: Advantages
    redrawn: bool
    tokenizer: Tokenizer
    pool: list[Item]
    progress: Any
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def on(self) -> bool:
        return bool(self.progress.minutes < self.options.minutes and self.progress.step < self.options.most_steps)

    def rolled(self, generator: torch.Generator) -> Rollouts:
        """Completions of prompts drawn for this step."""
        given = self.options
        chosen = random.Random(f"{given.seed} {self.progress.step}").sample(self.pool, given.prompts)
        how = {"method": given.method, "length": given.length, "temperature": given.temperature}
        return roll_out(self.net, self.tokenizer, chosen, group=given.group, generator=generator, **how)

    def batches(self, rollouts: Rollouts, updates: int, generator: torch.Generator) -> Iterator[Batch]:
        """One for each update: completions of groups that are not all alike, old values of before all updates.

        Views are drawn anew for each update where the recipe draws any.
        """
        advantage = self.advantages(rollouts.reward.view(-1, self.options.group)).flatten()
        told = advantage != 0
        if not bool(told.any()):
            return
        kept, mask = rollouts.take(told), self.net.spec.mask_token_id
        made = []
        with torch.no_grad():
            for _ in range(updates if self.redrawn else 1):
                views = self.views_of(kept, mask, generator)
                old, reference = (log_probs(net, kept, views) for net in (self.net, self.reference))
                made.append(Batch(kept, views, old, reference, advantage[told]))
        yield from (made[i % len(made)] for i in range(updates))

    def step(self, generator: torch.Generator) -> dict[str, float]:
        """Roll out, then learn from it some times over; the rate falls with the clock."""
        started, given, progress = time.process_time(), self.options, self.progress
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(progress.minutes / given.minutes, progress.step, given.rate, warmup=10)
        if progress.step % given.sync == 0:
            self.reference.load_state_dict(self.net.state_dict())
        # Without a cache: autocast would go on with the rounded weights of before an update.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            rollouts = self.rolled(generator)
            for batch in self.batches(rollouts, given.updates, generator):
                batch.loss(self.net, epsilon=given.epsilon, beta=given.beta).backward()
                nn.utils.clip_grad_norm_(self.net.parameters(), given.clip)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.minutes += (time.process_time() - started) / 60
        mixed = rollouts.reward.view(-1, given.group).std(1) > 0
        return {
            "reward": rollouts.reward.mean().item(),
            "mixed": mixed.double().mean().item(),
            "calls": rollouts.calls.double().mean().item(),
        }

    def keep(self) -> None:
        fresh = self.options.out / "reference.new"
        save_file(self.reference.state_dict(), fresh)
        fresh.replace(self.options.out / "reference.safetensors")
        keep(self.options.out / "state.safetensors", self.net, self.optimizer, self.progress)

    def report(self, reward: float) -> None:
        """Exact match at temperature 0 on a few test items, by the method of the rollouts."""
        facts: dict[str, Any] = {"step": self.progress.step, "minutes": round(self.progress.minutes, 1), "reward": round(reward, 3)}
        given = {"count": self.options.count, "length": self.options.length, "tasks": list(dict.fromkeys(self.options.tasks))}
        facts["exact"] = exact_match(Batched(self.net), self.tokenizer, method=self.options.method, **given)
        self.history.append(facts)
        (self.options.out / "history.json").write_text(json.dumps(self.history, indent=1))
        print(json.dumps(facts), flush=True)


def begin(options: argparse.Namespace, views_of: ViewsOf, advantages: Advantages, *, redrawn: bool) -> Run:
    """A new run from a model folder or a training state, or the run that OUT holds."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    net, reference = (read_model(options.model) if options.model.is_dir() else read_state(options.model) for _ in range(2))
    optimizer = torch.optim.AdamW(groups(net, 0.0), lr=options.rate, betas=(0.9, 0.99), fused=True)
    options.out.mkdir(parents=True, exist_ok=True)
    progress = take_up(options.out / "state.safetensors", net, optimizer)
    pool = [item for task in options.tasks for item in items(task, split="train", count=POOL, seed=options.seed)]
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    run = Run(net, reference, optimizer, options, views_of, advantages, redrawn, tokenizer, pool, progress)
    if progress.step:
        reference.load_state_dict(load_file(options.out / "reference.safetensors"))
        history = options.out / "history.json"
        run.history = json.loads(history.read_text()) if history.is_file() else []
    print(f"{sum(p.numel() for p in net.parameters()):,} parameters, from step {progress.step}", flush=True)
    return run


def train(options: argparse.Namespace, views_of: ViewsOf, advantages: Advantages, *, redrawn: bool) -> list[dict[str, Any]]:
    """Learn until minutes or steps are used up; returns the history. `redrawn`: views differ from update to update."""
    run = begin(options, views_of, advantages, redrawn=redrawn)
    generator = torch.Generator().manual_seed(options.seed + run.progress.step)
    rewards: list[float] = []
    kept = reported = time.perf_counter()
    if not run.progress.step:
        run.report(0.0)
    while run.on:
        facts = run.step(generator)
        rewards.append(facts["reward"])
        if run.progress.step % 10 == 0:
            line = "  ".join(f"{name} {value:.2f}" for name, value in facts.items())
            print(f"step {run.progress.step}  {line}  {run.progress.minutes:.1f} min", flush=True)
        if time.perf_counter() - kept > 60:
            run.keep()
            kept = time.perf_counter()
        if time.perf_counter() - reported > 60 * options.report or not run.on:
            run.report(sum(rewards[-20:]) / len(rewards[-20:]))
            reported = time.perf_counter()
    run.keep()
    return run.history


def arguments(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Options that both recipes take, with a recipe's own defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=BUNDLED, help="a model folder or state.safetensors (the bundled model)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10, help="minutes of processor time to train for (%(default)s)")
    parser.add_argument("--most-steps", type=int, default=1_000_000, help="steps to train for at most (%(default)s)")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help="of the rollouts (%(default)s)")
    parser.add_argument("--method", type=json.loads, help="of the rollouts, as JSON (%(default)s)")
    parser.add_argument("--length", type=int, default=16, help="slots of a canvas after the prompt (%(default)s)")
    parser.add_argument("--temperature", type=float, help="of the rollouts (%(default)s)")
    parser.add_argument("--prompts", type=int, default=16, help="of a step (%(default)s)")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt (%(default)s)")
    parser.add_argument("--updates", type=int, help="times that a step learns from its rollouts (%(default)s)")
    parser.add_argument("--rate", type=float, default=3e-4, help="peak of the learning rate (%(default)s)")
    parser.add_argument("--epsilon", type=float, default=0.5, help="of the clipped ratio (%(default)s)")
    parser.add_argument("--beta", type=float, help="weight of the KL term (%(default)s)")
    parser.add_argument("--sync", type=int, default=64, help="steps after which the reference becomes the policy (%(default)s)")
    parser.add_argument("--clip", type=float, default=0.2, help="largest norm of a gradient (%(default)s)")
    parser.add_argument("--count", type=int, default=12, help="test items of each task in a report (%(default)s)")
    parser.add_argument("--report", type=float, default=2, help="minutes between reports (%(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(**defaults)
    return parser
