"""Coupled-GRPO and CJ-GRPO: advantages, the objective, where log-probabilities are taken, gradients, both runs on a
tiny model.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline import training
from paceline.diffusion import Predictions
from recipes.bundled_diffusion import cj_grpo, coupled_grpo, grpo, model, write
from recipes.bundled_diffusion import rollouts as rollouts_module
from recipes.bundled_diffusion import run as run_module
from tests.diffusion.toys import Joint
from tests.recipes.test_denoisers import net_of

MASK, EOS = 19, 3
PROMPTS = [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9]]
METHODS = [
    {"method": "ass"},
    {"method": "threshold", "confidence_threshold": 0.3},
    {"method": "static", "denoising_steps": 3},
]


def rolled(net: Any, method: dict[str, Any], length: int = 8) -> tuple[Any, list[Any]]:
    """Two completions of two prompts, with rewards as they come; and the outcomes themselves."""
    generator = torch.Generator().manual_seed(0)
    outcomes = rollouts_module.sampled(net, PROMPTS, method, length=length, temperature=1.0, generator=generator)
    return rollouts_module.gathered(outcomes, [1.0, 0.0, 0.0, 1.0]), outcomes


def net64(seed: int = 0) -> Any:
    return net_of("plain", seed).double()


def advantages() -> torch.Tensor:
    return torch.tensor([1.0, -0.5, -2.0, 0.75], dtype=torch.float64)


def test_advantages_by_hand() -> None:
    reward = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    ours = grpo.leave_one_out(reward)
    by_hand = [[r - (sum(row) - r) / 3 for r in row] for row in reward.tolist()]
    assert torch.allclose(ours, torch.tensor(by_hand))
    relative = grpo.group_relative(reward)
    assert torch.allclose(relative.mean(1), torch.zeros(3), atol=1e-6)
    assert relative[:2].std(1).tolist() == pytest.approx([1, 1], abs=1e-3)
    assert relative[2].tolist() == ours[2].tolist() == [0, 0, 0, 0]


def test_the_objective_is_clipped_on_the_side_that_gains() -> None:
    ratio = torch.tensor([0.2, 1.0, 3.0])
    zero = torch.zeros(3)
    assert grpo.clipped(ratio.log(), zero, torch.tensor(2.0), 0.5).tolist() == pytest.approx([-0.4, -2, -3])
    assert grpo.clipped(ratio.log(), zero, torch.tensor(-2.0), 0.5).tolist() == pytest.approx([1, 2, 6])


def test_k3_is_the_divergence_in_expectation() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.05, 0.05, 0.9])
    each = grpo.k3(p.log(), q.log())
    divergence = (p * (p / q).log()).sum().item()
    assert bool((each >= 0).all())
    assert (p * each).sum().item() == pytest.approx(divergence, rel=1e-5)
    assert grpo.k3(p.log(), p.log()).abs().max().item() == 0
    assert abs((p * (p / q).log() ** 2 / 2).sum().item() - divergence) > 0.05  # negative control: the second estimate


@pytest.mark.parametrize("method", METHODS)
def test_the_log_probs_are_those_of_the_rollout(method: dict[str, Any]) -> None:
    """Every token once, in the state in which it was written; in shuffled states they are others."""
    net = net64()
    rollouts, outcomes = rolled(net, method)
    views = cj_grpo.trajectory_views(rollouts, MASK)
    assert torch.equal(views.rows.long().sum(), rollouts.written.long().sum())
    assert rollouts.written.sum(1).tolist() == [8] * 4
    assert rollouts.rounds.tolist() == [len(one.trajectory.rounds) for one in outcomes]
    with torch.no_grad():
        again = grpo.log_probs(net, rollouts, views)
    assert torch.allclose(again, rollouts.log_p, rtol=0, atol=1e-9)
    order = torch.randperm(len(views.noisy), generator=torch.Generator().manual_seed(0))
    wrong = torch.where(views.rows, MASK, views.noisy[order])  # the scored slots stay masked
    with torch.no_grad():
        shuffled = grpo.log_probs(net, rollouts, replace(views, noisy=wrong))
    assert (shuffled - rollouts.log_p).abs().max() > 1e-2


def direct(net: Any, outcomes: list[Any], advantage: torch.Tensor, wrong: bool = False) -> torch.Tensor:
    """-(1 / S) sum_s (1 / |U_s|) sum A log p, from the rounds of each trajectory, one canvas at a time; `wrong`: first
    states.
    """
    total = torch.zeros((), dtype=torch.float64)
    for outcome, own in zip(outcomes, advantage, strict=True):
        canvas, rounds = outcome.canvas, outcome.trajectory.rounds
        state = torch.from_numpy(canvas.tokens.copy())
        state[canvas.start :] = MASK
        for one in rounds:
            everything = torch.ones(1, state.numel(), dtype=torch.bool)
            logits = net(state[None], torch.arange(state.numel())[None], None, everything)
            logits = torch.cat((logits[:, :MASK], logits[:, MASK:] - torch.inf), 1)
            log_p = logits.log_softmax(-1)[torch.from_numpy(one.slots), torch.from_numpy(one.tokens)]
            total = total - own * log_p.mean() / len(rounds) / len(outcomes)
            if not wrong:
                state = state.clone()
                state[torch.from_numpy(one.slots)] = torch.from_numpy(one.tokens)
    return total


def gradient(net: Any, loss: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(net.parameters()))])


@pytest.mark.parametrize("method", METHODS)
def test_the_first_update_is_the_plain_policy_gradient(method: dict[str, Any]) -> None:
    """r = 1: the gradient is that of the rollouts' own log-probabilities, and the loss -mean A."""
    net, advantage = net64(), advantages()
    rollouts, outcomes = rolled(net, method)
    views = cj_grpo.trajectory_views(rollouts, MASK)
    with torch.no_grad():
        old = grpo.log_probs(net, rollouts, views)
    loss = grpo.Batch(rollouts, views, old, old, advantage).loss(net, epsilon=0.5, beta=0.04)
    assert loss.item() == pytest.approx(-advantage.mean().item(), abs=1e-9)
    ours, theirs = gradient(net, loss), gradient(net, direct(net, outcomes, advantage))
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-9)
    assert not torch.allclose(ours, gradient(net, direct(net, outcomes, advantage, wrong=True)), rtol=1e-2, atol=1e-4)


def test_the_divergence_from_the_reference_is_weighed_in() -> None:
    """In the first update the loss is -mean A + beta KL, k3 averaged over the tokens of each round; it has a
    gradient.
    """
    net, advantage = net64(), advantages()
    rollouts, outcomes = rolled(net, METHODS[2])
    views = cj_grpo.trajectory_views(rollouts, MASK)
    with torch.no_grad():
        old, reference = (grpo.log_probs(one, rollouts, views) for one in (net, net64(seed=1)))
    batch = grpo.Batch(rollouts, views, old, reference, advantage)
    by_hand = []
    for i, outcome in enumerate(outcomes):
        rounds = [(reference - old)[i, torch.from_numpy(one.slots)] for one in outcome.trajectory.rounds]
        by_hand.append(np.mean([float((d.exp() - d - 1).mean()) for d in rounds]))
    losses = {beta: batch.loss(net, epsilon=0.5, beta=beta) for beta in (0.0, 0.04)}
    assert losses[0.0].item() == pytest.approx(-advantage.mean().item(), abs=1e-9)
    assert (losses[0.04] - losses[0.0]).item() == pytest.approx(0.04 * np.mean(by_hand), rel=1e-9)
    assert np.mean(by_hand) > 1e-2
    assert not torch.allclose(gradient(net, losses[0.04]), gradient(net, losses[0.0]), rtol=1e-3, atol=1e-6)


def test_draws_follow_the_distribution() -> None:
    """Chi-square with 3 degrees of freedom, beyond 21.1 once in 10,000 seeds; another distribution fails. Measures as
    in decoding.
    """
    logits = torch.tensor([[0.3, -1.0, -torch.inf, 1.2, 0.5]]).repeat(20_000, 1)
    found = rollouts_module.drawn(logits, 1.0, torch.Generator().manual_seed(0))
    counts = np.bincount(found.tokens, minlength=5)
    assert counts[2] == 0

    def chi_square(temperature: float) -> float:
        wanted = 20_000 * (logits[0] / temperature).softmax(-1).numpy()[[0, 1, 3, 4]]
        return float(((counts[[0, 1, 3, 4]] - wanted) ** 2 / wanted).sum())

    assert chi_square(1.0) < 21.1 < chi_square(1.1)
    theirs = Predictions.of(logits, np.arange(len(logits)))
    for name in ("entropy", "margin", "gap"):
        assert np.allclose(getattr(found, name), getattr(theirs, name), atol=1e-5)
    best = found.tokens == theirs.tokens
    assert np.allclose(found.confidence[best], theirs.confidence[best], atol=1e-6)


def test_one_round_is_the_full_mask() -> None:
    net = net64()
    rollouts, _ = rolled(net, {"method": "static", "denoising_steps": 1})
    ours = cj_grpo.trajectory_views(rollouts, MASK)
    full = coupled_grpo.coupled_views(rollouts, MASK, torch.Generator(), pairs=0)
    with torch.no_grad():
        one, other = (grpo.log_probs(net, rollouts, views) for views in (ours, full))
    assert torch.allclose(one[rollouts.text], other[rollouts.text], atol=1e-12)


def with_end(rollouts: Any) -> Any:
    """The first completion ends after its third token."""
    ids = torch.where(rollouts.written & (rollouts.ids == EOS), 10, rollouts.ids)
    ids[0, 5] = EOS
    return replace(rollouts, ids=ids)


@pytest.mark.parametrize("pairs", [1, 3])
def test_coupled_masks_cover_each_slot_once_a_pair(pairs: int) -> None:
    net = net64()
    rollouts = with_end(rolled(net, {"method": "ass"})[0])
    views = coupled_grpo.coupled_views(rollouts, MASK, torch.Generator().manual_seed(0), pairs=pairs)
    masked = (views.noisy == MASK).view(2 * pairs + 1, 4, -1)
    assert torch.equal(masked[0], rollouts.written)
    for k in range(pairs):
        assert torch.equal(masked[1 + 2 * k] ^ masked[2 + 2 * k], rollouts.written)  # exactly one of the two
    assert rollouts.text.sum(1).tolist() == [3, 8, 8, 8]  # what is behind the end does not count
    total = torch.zeros(rollouts.ids.shape, dtype=torch.float64)
    total.index_add_(0, views.owner, torch.where(views.rows, views.share, 0.0))
    assert torch.allclose(total, rollouts.text.double())
    assert torch.allclose(views.weight.sum(1), torch.full((4,), 0.25, dtype=torch.float64))
    assert not bool((views.weight[~rollouts.text]).any())


def test_inverse_shares_are_one_over_the_rates() -> None:
    """t and 1 - t, so their inverses sum to one."""
    rollouts, _ = rolled(net64(), {"method": "ass"})
    views = coupled_grpo.coupled_views(rollouts, MASK, torch.Generator().manual_seed(0), inverse=True)
    full, first, second = views.share[:, 0].view(3, 4)
    assert full.tolist() == [0.5] * 4
    assert torch.allclose(1 / (2 * first) + 1 / (2 * second), torch.ones(4, dtype=torch.float64))
    assert first.std() > 0


def test_groups_that_are_all_alike_teach_nothing() -> None:
    net = net64()
    rollouts, _ = rolled(net, {"method": "ass"})
    run = SimpleNamespace(net=net, options=SimpleNamespace(group=2))
    policy = grpo.Policy(run, net, cj_grpo.trajectory_views, grpo.group_relative, False, None, [])
    mixed, alike = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.ones(4)
    made = list(policy.batches(replace(rollouts, reward=mixed), 3, torch.Generator()))
    assert [len(batch.rollouts.ids) for batch in made] == [2, 2, 2]
    assert not list(policy.batches(replace(rollouts, reward=alike), 3, torch.Generator()))


def test_a_coupled_log_prob_by_hand() -> None:
    """Half of that under the mask that covers the slot, half of that under the full mask."""
    net = net64()
    rollouts, _ = rolled(net, {"method": "ass"})
    views = coupled_grpo.coupled_views(rollouts, MASK, torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = grpo.log_probs(net, rollouts, views)
        for i in range(4):
            n = int(rollouts.length[i])
            states = views.noisy[views.owner == i][:, :n]
            logits = net(states, torch.arange(n).expand_as(states), None, torch.ones_like(states, dtype=torch.bool))
            logits = logits.view(3, n, -1)[..., :MASK].log_softmax(-1)
            for slot in rollouts.text[i].nonzero()[:, 0].tolist():
                seen = [logits[k, slot, rollouts.ids[i, slot]].item() for k in range(3) if states[k, slot] == MASK]
                assert len(seen) == 2
                assert ours[i, slot].item() == pytest.approx(sum(seen) / 2, abs=1e-9)


def test_the_same_masks_give_a_ratio_of_one() -> None:
    net = net64()
    rollouts, _ = rolled(net, {"method": "ass"})
    views, others = (coupled_grpo.coupled_views(rollouts, MASK, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    with torch.no_grad():
        new, old, elsewhere = (grpo.log_probs(net, rollouts, one) for one in (views, views, others))
    assert bool(((new - old).exp() == 1).all())
    assert ((new - elsewhere).exp() - 1).abs().max() > 1e-2  # negative control: other masks in the denominator


def log_prob_table() -> np.ndarray:
    """(32, 5) log-probability of each token of a string of five, given those that a mask (its bits) leaves, under a
    joint distribution.
    """
    rng = np.random.default_rng(0)
    toy = Joint(rng.dirichlet(np.full(3**5, 0.05)).reshape((3,) * 5) + 1e-6)
    text = np.array(np.unravel_index(toy.weights.argmax(), toy.weights.shape))
    table = np.zeros((32, 5))
    for bits in range(32):
        masked = (bits >> np.arange(5)) & 1 == 1
        rows = toy.rows(np.where(masked, toy.mask_token_id, text), np.arange(5))
        rows = rows - np.log(np.exp(rows[:, :-1]).sum(1))[:, None]
        table[bits] = np.where(masked, rows[np.arange(5), text], 0.0)
    return table


def test_complementary_masks_have_less_variance() -> None:
    """On an enumerated joint, against two independent masks of the same rates: the same mean; independent masks fail
    the check.
    """
    table, generator = log_prob_table(), torch.Generator().manual_seed(0)
    free = torch.ones(20_000, 5, dtype=torch.bool)

    def estimate(first: torch.Tensor, second: torch.Tensor) -> np.ndarray:
        pairs = [table[(mask.long() << torch.arange(5)).sum(1).numpy()].sum(1) for mask in (first, second)]
        return pairs[0] + pairs[1]

    def independent() -> np.ndarray:
        first, _, t = coupled_grpo.complementary(free, generator)
        second = torch.rand(free.shape, generator=generator) < (1 - t)[:, None]
        return estimate(first, second)

    first, second, t = coupled_grpo.complementary(free, generator)
    assert bool(((t >= 0.2) & (t <= 0.8)).all())
    coupled, apart, control = estimate(first, second), independent(), independent()
    assert coupled.mean() == pytest.approx(apart.mean(), abs=5 * apart.std() / np.sqrt(20_000))
    assert coupled.var() < 0.9 * apart.var()
    assert not control.var() < 0.9 * apart.var()


@pytest.mark.parametrize("name", ["coupled", "cj"])
def test_both_learn_what_is_rewarded(name: str) -> None:
    """Even tokens are rewarded; a few dozen updates on rollouts of a random model make them likely."""
    net, generator = net_of("plain", 3), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=6e-3)
    views_of = coupled_grpo.coupled_views if name == "coupled" else cj_grpo.trajectory_views
    shares, method = [], {"method": "static", "denoising_steps": 2}
    for _ in range(14):
        outcomes = rollouts_module.sampled(net, [[5, 6]] * 16, method, length=4, temperature=1.0, generator=generator)
        shares.append([float(np.mean([token % 2 == 0 for token in one.canvas.output])) for one in outcomes])
        rollouts = rollouts_module.gathered(outcomes, shares[-1])
        views = views_of(rollouts, MASK, generator)
        with torch.no_grad():
            old = grpo.log_probs(net, rollouts, views)
        advantage = grpo.group_relative(rollouts.reward[None])[0]
        grpo.Batch(rollouts, views, old, old, advantage).loss(net, epsilon=0.5, beta=0.0).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert np.mean(shares[-3:]) > np.mean(shares[:3]) + 0.2


def test_each_update_sees_the_weights_that_the_last_one_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only matrices of the layers learn, which autocast rounds: the ratio is 1 in the first update, and in no other."""
    net, moved = net_of("plain"), []
    rollouts, _ = rolled(net, {"method": "ass"})
    clipped = grpo.clipped

    def watched(new: torch.Tensor, old: torch.Tensor, *rest: Any) -> torch.Tensor:
        moved.append((new - old).detach().abs().max().item())
        return clipped(new, old, *rest)

    monkeypatch.setattr(grpo, "roll_out", lambda *_, **__: rollouts)
    monkeypatch.setattr(grpo, "clipped", watched)
    given = {"group": 2, "prompts": 0, "updates": 3, "sync": 64, "rate": 0.1, "clip": 1.0, "epsilon": 0.5, "beta": 0.0}
    options = SimpleNamespace(minutes=1.0, most_steps=9, seed=0, method={}, length=8, temperature=1.0, **given)
    optimizer = torch.optim.AdamW([part for part in net.layers.parameters() if part.ndim > 1], lr=0.1)
    views_of, relative = cj_grpo.trajectory_views, grpo.group_relative
    run = run_module.Run(net=net, optimizer=optimizer, options=options, progress=training.Progress(), warmup=10)
    policy = grpo.Policy(run, net_of("plain"), views_of, relative, False, None, [])
    run.step(policy.learn, torch.Generator())
    assert moved[0] == 0
    assert moved[1] > 1e-3
    assert abs(moved[2] - moved[1]) > 1e-3


@pytest.mark.parametrize("script", [coupled_grpo, cj_grpo], ids=lambda script: script.__name__)
def test_a_run_goes_on(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps, then a third; the state is one that write.py takes."""
    net = net_of("plain", width=8, layers=1, mlp=8, vocab_size=6145)
    state, out = tmp_path / "state.safetensors", tmp_path / "out"
    training.keep(state, net, torch.optim.AdamW(net.parameters()), training.Progress())
    rewarded = partial(rollouts_module.roll_out, reward=lambda item, text: float(len(text) % 2))
    monkeypatch.setattr(grpo, "roll_out", rewarded)
    monkeypatch.setattr(grpo, "POOL", 8)
    given = [
        "--model",
        str(state),
        "--out",
        str(out),
        "--tasks",
        "copy",
        "--length",
        "4",
        "--prompts",
        "2",
        "--count",
        "1",
    ]
    for steps in ("2", "3"):
        script.main([*given, "--most-steps", steps])
    history = json.loads((out / "history.json").read_text())
    assert [row["step"] for row in history] == [0, 2, 3]
    after = model.read_state(out / "state.safetensors")
    still = [key for key, value in net.state_dict().items() if torch.equal(after.state_dict()[key], value)]
    assert not still, f"these never learned: {still}"
    write.main([str(out / "state.safetensors"), str(tmp_path / "model")])
    again = model.read_net(tmp_path / "model")
    assert all(
        torch.allclose(a, b, atol=0.02, rtol=0.01) for a, b in zip(again.parameters(), after.parameters(), strict=True)
    )
