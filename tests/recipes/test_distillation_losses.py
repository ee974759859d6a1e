"""Certainty-forcing and consistency: masks and losses against plain computations in float64, with negative controls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipes.bundled_diffusion import distillation_losses
from recipes.bundled_diffusion import losses as losses_module
from tests.recipes.test_denoisers import net_of

MASK = 19
RELAXED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch_of(*rows: tuple[int, int], seed: int = 0) -> Any:
    """Random texts with prompts and answers of given lengths, in a batch wider than all of them."""
    width = max(map(sum, rows)) + 3
    ids = torch.randint(0, MASK, (len(rows), width), generator=seeded(seed))
    start = torch.tensor([row[0] for row in rows])
    return losses_module.Batch(ids, start, start + torch.tensor([row[1] for row in rows]))


LENGTHS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 40)), min_size=1, max_size=5)


@RELAXED
@given(rows=LENGTHS, size=st.integers(1, 20), seed=st.integers(0, 10**6))
def test_views_are_complementary_in_one_block(rows: list[tuple[int, int]], size: int, seed: int) -> None:
    """Check (a) of dParallel, text by text: disjoint, together one block; all after it is masked, all before it
    clean.
    """
    batch = batch_of(*rows)
    views = distillation_losses.block_views(batch, size, seeded(seed))
    for row, (start, length) in enumerate(rows):
        first, second, later = (
            {int(i) for i in np.flatnonzero(mask[row])} for mask in (views.first, views.second, views.later)
        )
        assert not first & second
        block = first | second
        low = min(block)
        assert (low - start) % size == 0
        assert block == set(range(low, min(low + size, start + length)))
        assert later == set(range(max(block) + 1, start + length))


def test_blocks_are_drawn_evenly_and_half_of_each_is_masked() -> None:
    batch = batch_of(*[(2, 10)] * 3000)
    views = distillation_losses.block_views(batch, 4, seeded(0))
    chosen = ((views.first | views.second).float().argmax(1) - 2) // 4
    assert all(abs(int((chosen == k).sum()) - 1000) < 120 for k in range(3))
    share = views.first.sum() / (views.first | views.second).sum()
    assert abs(float(share) - 0.5) < 0.02
    anything = distillation_losses.block_views(batch, 4, seeded(0), None)
    assert (anything.first.sum(1) == 0).float().mean() > 0.15  # 1/5 of blocks of four; at rate 1/2 it would be 1/16
    fewer = distillation_losses.block_views(batch, 4, seeded(0), 0.2)
    assert abs(float(fewer.first.sum() / (fewer.first | fewer.second).sum()) - 0.2) < 0.02


@RELAXED
@given(rows=LENGTHS, seed=st.integers(0, 10**6))
def test_the_teachers_masks_lie_in_the_students(rows: list[tuple[int, int]], seed: int) -> None:
    """Check (a) of CD4LM, with its guards; the prompt and what is beyond the text are untouched."""
    batch = batch_of(*rows)
    student, teacher = distillation_losses.nested_masks(batch.answer, seeded(seed))
    assert not (teacher & ~student).any()
    assert not (student & ~batch.answer).any()
    for (_, length), hidden, deeper in zip(rows, student.sum(1).tolist(), teacher.sum(1).tolist(), strict=True):
        if length <= 10:
            assert (hidden, deeper) == (min(2, length), 1)
            continue
        assert hidden >= max(2, -(-length // 10))
        assert hidden <= int(length * (0.5 if length < 20 else 0.9))
        assert int(0.1 * length) <= deeper <= int(0.6 * length)


def counts_by_hand(length: int, student: float, ratio: float) -> tuple[int, int]:
    """The card, one text at a time."""
    teacher = min(max(student * ratio, 0.10), 0.60)
    if length < 20:
        student = min(student, 0.5)
    if length <= 10:
        return min(2, length), min(1, length)
    hidden = max(int(length * student), 2, -(-length // 10))
    return hidden, min(int(length * teacher), hidden)


@RELAXED
@given(length=st.integers(1, 400), student=st.floats(0.4, 0.9), ratio=st.floats(0.3, 0.7))
def test_mask_counts_are_those_of_the_card(length: int, student: float, ratio: float) -> None:
    given_ = (
        torch.tensor([length]),
        torch.tensor([student], dtype=torch.float64),
        torch.tensor([ratio], dtype=torch.float64),
    )
    found = tuple(int(count) for count in distillation_losses.mask_counts(*given_))
    assert found == counts_by_hand(length, student, ratio)


def test_masks_go_by_one_order() -> None:
    """Every slot is as likely as any other to be hidden, and, of the hidden ones, to be hidden from the teacher."""
    free = torch.zeros(4000, 14, dtype=torch.bool)
    free[:, 2:] = True
    student, teacher = distillation_losses.nested_masks(free, seeded(0))
    for mask in (student, teacher):
        share = mask[:, 2:].float().mean(0)
        assert float(share.max() - share.min()) < 0.05


def certainty_by_hand(
    logits: np.ndarray, targets: np.ndarray, beta: float, temperature: float, of: str = "right"
) -> float:
    """Slot by slot in float64; `of` says whose entropies count."""

    def distribution(row: np.ndarray) -> np.ndarray:
        e = np.exp(row - row.max())
        return e / e.sum()

    losses = [-np.log(distribution(row)[target]) for row, target in zip(logits, targets, strict=True)]
    right = [row.argmax() == target for row, target in zip(logits, targets, strict=True)]
    sharp = [distribution(row / temperature) for row, fine in zip(logits, right, strict=True) if fine or of == "all"]
    entropies = [-(p * np.log(p)).sum() for p in sharp]
    return float(np.mean(losses) + (beta * np.mean(entropies) if entropies else 0.0))


@pytest.mark.parametrize(("beta", "temperature"), [(2.0, 0.5), (0.0, 0.5), (0.7, 1.3)])
def test_certainty_is_the_mean_worked_out_by_hand(beta: float, temperature: float) -> None:
    rng = np.random.default_rng(0)
    logits, targets = 2 * rng.normal(size=(12, 5)), rng.integers(0, 5, 12)
    targets[:6] = logits[:6].argmax(1)
    ours = distillation_losses.certainty(
        torch.from_numpy(logits), torch.from_numpy(targets), beta=beta, temperature=temperature
    )
    assert ours.item() == pytest.approx(certainty_by_hand(logits, targets, beta, temperature), abs=1e-12)
    if beta:  # negative controls: entropies of wrong predictions, another temperature
        assert abs(ours.item() - certainty_by_hand(logits, targets, beta, temperature, "all")) > 1e-3
        assert abs(ours.item() - certainty_by_hand(logits, targets, beta, temperature + 0.5)) > 1e-3


def test_no_entropy_pulls_at_wrong_predictions() -> None:
    """Check (c): the gradient of the entropy term is exactly zero there, and not where the prediction is right."""
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.5, 1.5, 0.0]], dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 2])  # right, wrong
    both = [distillation_losses.certainty(logits, targets, beta=beta) for beta in (2.0, 0.0)]
    [pull] = torch.autograd.grad(both[0] - both[1], logits)
    assert (pull[1] == 0).all()
    assert pull[0].abs().max() > 0.1
    assert pull[0][0] < 0  # down the gradient, what is right becomes likelier


def dparallel_by_hand(net: Any, batch: Any, views: Any, beta: float, *, later: bool = True) -> float:
    """Text by text, view by view; the mean is over the masked slots of all texts."""
    total = 0.0
    for view in (views.first, views.second):
        logits, targets = [], []
        for row in range(len(batch.ids)):
            n = int(batch.length[row])
            hidden = (view | views.later if later else view)[row, :n]
            ids = batch.ids[row, :n].masked_fill(hidden, MASK)[None]
            everything = torch.ones_like(ids, dtype=torch.bool)
            with torch.no_grad():
                out = net(ids, torch.arange(n)[None], everything[:, None, None, :], everything)
            logits.append(out[view[row, :n]].numpy())
            targets.append(batch.ids[row, :n][view[row, :n]].numpy())
        total += certainty_by_hand(np.concatenate(logits), np.concatenate(targets), beta, 0.5)
    return total


@pytest.mark.parametrize("beta", [2.0, 0.0])
def test_dparallel_sums_both_views(beta: float) -> None:
    """Texts of different lengths in one pass cost what each costs alone; with beta 0 it is masked cross-entropy (check
    (b)).
    """
    net, batch = net_of("plain", width=16).double(), batch_of((3, 10), (5, 4), (2, 17))
    with torch.no_grad():
        ours = distillation_losses.dparallel_loss(net, batch, seeded(1), block_length=5, beta=beta).item()
    views = distillation_losses.block_views(batch, 5, seeded(1))
    assert ours == pytest.approx(dparallel_by_hand(net, batch, views, beta), abs=1e-5)  # angles are float32
    assert abs(ours - dparallel_by_hand(net, batch, views, beta, later=False)) > 1e-3  # control: later blocks seen


def consistency_by_hand(
    student: np.ndarray, teacher: np.ndarray, targets: np.ndarray, weight: float, t: float
) -> float:
    kl, ce = [], []
    for s, p, target in zip(student, teacher, targets, strict=True):
        log_q = s / t - np.log(np.exp(s / t).sum())
        kl.append(sum(p_v * (np.log(p_v) - q_v) for p_v, q_v in zip(p, log_q, strict=True) if p_v > 0))
        ce.append(np.log(np.exp(s).sum()) - s[target])
    return float(weight * min(5.0, t * t * np.mean(kl)) + (1 - weight) * min(5.0, np.mean(ce)))


@pytest.mark.parametrize(("scale", "weight"), [(1.0, 0.9), (1.0, 0.5), (12.0, 0.7)])
def test_consistency_is_the_mean_worked_out_by_hand(scale: float, weight: float) -> None:
    """At scale 12 both terms are cut."""
    rng = np.random.default_rng(1)
    student, teacher, targets = scale * rng.normal(size=(9, 6)), scale * rng.normal(size=(9, 6)), rng.integers(0, 6, 9)
    taught = torch.from_numpy(teacher / 2).softmax(-1)
    ours = distillation_losses.consistency(
        torch.from_numpy(student), taught, torch.from_numpy(targets), weight=weight, temperature=2.0
    ).item()
    assert ours == pytest.approx(consistency_by_hand(student, taught.numpy(), targets, weight, 2.0), abs=1e-12)
    if scale == 1.0:  # negative controls: the other direction of the divergence, no factor T^2
        turned = torch.from_numpy(student / 2).softmax(-1).numpy()
        assert abs(ours - consistency_by_hand(teacher, turned, targets, weight, 2.0)) > 1e-3
        assert abs(ours - consistency_by_hand(student, taught.numpy(), targets, weight, 1.0)) > 1e-3
    else:
        assert ours == pytest.approx(5.0)


def test_a_teacher_that_sees_the_same_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check (b): equal models under equal masks have no divergence; under nested ones they do."""
    losses, batch = distillation_losses, batch_of((3, 24), (4, 30))
    net = net_of("plain", width=16).double()
    with torch.no_grad():
        apart = losses.dscd_loss(net, net, batch, seeded(0), weight=1.0)
        nested = losses.nested_masks
        monkeypatch.setattr(losses, "nested_masks", lambda free, generator: (nested(free, generator)[0],) * 2)
        same = losses.dscd_loss(net, net, batch, seeded(0), weight=1.0)
    assert abs(same.item()) < 1e-9
    assert apart.item() > 1e-3


@pytest.mark.parametrize("visible", ["teacher", "data", "skip"])
def test_dscd_text_by_text(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three ways to count what the teacher sees, against one text at a time; nothing is cut."""
    monkeypatch.setattr(distillation_losses, "MOST", 1e9)
    losses, batch = distillation_losses, batch_of((3, 24), (5, 8), (2, 31))
    net, teacher = (net_of("plain", width=16, seed=seed).double() for seed in (0, 1))
    with torch.no_grad():
        for model in (net, teacher):
            model.head.weight.mul_(10)
        ours = {
            way: losses.dscd_loss(net, teacher, batch, seeded(2), weight=0.6, visible=way).item()
            for way in ("teacher", "data", "skip")
        }
    student_masks, teacher_masks = losses.nested_masks(batch.answer, seeded(2))
    kl, ce = [], []
    for row in range(len(batch.ids)):
        n = int(batch.length[row])
        ids, hidden, deeper = batch.ids[row, :n], student_masks[row, :n], teacher_masks[row, :n]
        z, taught = (alone(model, ids, mask) for model, mask in ((net, hidden), (teacher, deeper)))
        for slot in np.flatnonzero(hidden):
            p = (taught[slot] / 2).softmax(-1)
            if not deeper[slot] and visible != "teacher":
                p = torch.nn.functional.one_hot(ids[slot], MASK + 1).double()
            if deeper[slot] or visible != "skip":
                kl.append(float((torch.xlogy(p, p) - p * (z[slot] / 2).log_softmax(-1)).sum()))
            ce.append(float(-z[slot].log_softmax(-1)[ids[slot]]))
    wanted = 0.6 * 4 * np.mean(kl) + 0.4 * np.mean(ce)
    assert ours[visible] == pytest.approx(wanted, abs=1e-5)
    assert all(abs(ours[way] - wanted) > 1e-3 for way in ours if way != visible)  # negative controls


def alone(net: Any, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """(n, v) of one text."""
    everything = torch.ones(1, ids.numel(), dtype=torch.bool)
    with torch.no_grad():
        found: torch.Tensor = net(
            ids.masked_fill(hidden, MASK)[None], torch.arange(ids.numel())[None], None, everything
        )
    return found


def test_the_weight_falls_as_published() -> None:
    """Check (c)."""
    weight = distillation_losses.consistency_weight
    assert [weight(done) for done in (0.0, 0.0999, 0.1, 0.55, 1.0)] == pytest.approx([0.9, 0.9, 0.9, 0.7, 0.5])
    assert weight(0.3) > weight(0.4)


def test_copies_are_counted_at_visible_slots() -> None:
    losses, batch = distillation_losses, batch_of((3, 24), (4, 30))

    def net(ids: torch.Tensor, positions: torch.Tensor, mask: Any, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(ids[rows], MASK + 1).float()  # says what it sees

    net.spec = SimpleNamespace(mask_token_id=MASK)  # type: ignore[attr-defined]
    assert losses.copied(net, batch, seeded(0)) == 1.0
    assert losses.copied(net_of("plain", width=16), batch, seeded(0)) < 0.9


def test_certainty_is_forced() -> None:
    """Check (d): where 7 of 10 texts say one thing, cross-entropy leaves 0.61 nats, and the entropy term half of
    that.
    """
    losses, left = distillation_losses, {}
    for beta in (2.0, 0.0):
        net, draws = net_of("plain", width=16), seeded(0)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        for _ in range(80):
            taught = 4 + (torch.rand(64, 1, generator=draws) < 0.3).long()
            ids = torch.cat((torch.full_like(taught, 9), taught), 1)
            batch = losses_module.Batch(ids, torch.full((64,), 1), torch.full((64,), 2))
            loss = losses.dparallel_loss(net, batch, draws, block_length=1, beta=beta)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            logits = net(torch.tensor([[9, MASK]]), torch.arange(2)[None], None, torch.tensor([[False, True]]))
        assert int(logits.argmax()) == 4
        left[beta] = float(losses.entropy(logits))
    assert left[0.0] == pytest.approx(0.61, abs=0.1)
    assert left[2.0] < 0.4
