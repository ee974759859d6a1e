"""Token editing of LLaDA2.1: thresholds for writing and for editing, held blocks, the repetition guard."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from paceline.diffusion import PARTS, Canvas, ConfiguredMethod, Predictions, Status
from paceline.errors import ConfigError
from tests.diffusion.decoding import complete, fill, same
from tests.diffusion.toys import Independent
from tests.diffusion.toys_scripted import Copier, Oscillator, Scripted
from tests.diffusion.toys_t4 import t4

MODES = ["llada2.1_s", "llada2.1_q"]


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("block", [4, 6, 12])
def test_without_editing_it_is_the_threshold_rule(threshold: float, block: int) -> None:
    options = {"confidence_threshold": threshold, "block_length": block}
    ours = fill(t4(), {"method": "llada2.1_s", "edit_threshold": 1.0, **options})
    theirs = fill(t4(), {"method": "threshold", **options})
    assert same(ours, theirs)
    assert ours.trajectory.calls == theirs.trajectory.calls


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_a_model_that_copies_stops_a_round_after_the_last_mask(mode: str, blocks: int) -> None:
    c = np.linspace(0.2, 0.95, 8).tolist()
    outcome = fill(Copier(c), {"method": mode, "block_length": 8 // blocks}, 8, ())
    threshold = 0.5 if mode == "llada2.1_s" else 0.7
    plain = fill(
        Copier(c), {"method": "threshold", "confidence_threshold": threshold, "block_length": 8 // blocks}, 8, ()
    )
    assert (outcome.canvas.tokens == plain.canvas.tokens).all()
    assert not any(r.edited.size for r in outcome.trajectory.rounds)
    assert outcome.trajectory.calls == plain.trajectory.calls + blocks


@pytest.mark.parametrize("most", [1, 3, 16])
def test_an_oscillator_stops_when_its_rounds_are_spent(most: int) -> None:
    outcome = fill(Oscillator(), {"method": "llada2.1_s", "max_post_edit_steps": most}, 2, ())
    edits = [r for r in outcome.trajectory.rounds if r.edited.size]
    assert len(edits) == most
    assert outcome.trajectory.calls == 1 + most


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_calls_are_bounded(mode: str, seed: int) -> None:
    outcome = fill(t4(seed=seed), {"method": mode, "block_length": 4})
    assert outcome.trajectory.calls <= 3 * (4 + 16)
    assert not outcome.canvas.masked().size


def changing(filled: int, slot: int) -> tuple[int, float]:
    """Slot 0 is written as 1; once two slots are filled the model would rather have 2 there, with a probability of
    0.6.
    """
    if slot == 0:
        return (1, 0.95) if filled < 2 else (2, 0.6)
    return 3, 0.9 - 0.3 * slot


def test_a_written_token_is_replaced_when_the_model_is_sure_enough() -> None:
    edited = fill(Scripted(changing), {"method": "llada2.1_q", "edit_threshold": 0.5}, 3, ())
    assert edited.canvas.tokens[0] == 2
    assert edited.canvas.confidence[0] == pytest.approx(0.6)
    assert sum(r.edited.size for r in edited.trajectory.rounds) == 1
    kept = fill(Scripted(changing), {"method": "llada2.1_q", "edit_threshold": 0.7}, 3, ())
    assert kept.canvas.tokens[0] == 1


def test_an_edit_asks_for_more_than_its_threshold() -> None:
    """Once it is full, the only other token of slot 0 has a probability of exactly one half."""
    toy = Scripted(lambda filled, slot: (0, 0.5) if slot == 0 and filled == 2 else (1, 0.9), vocab_size=3)
    config = {"method": "llada2.1_s", "max_post_edit_steps": 1}
    assert fill(toy, {**config, "edit_threshold": 0.5}, 2, ()).canvas.output == [1, 1]
    assert fill(toy, {**config, "edit_threshold": 0.49}, 2, ()).canvas.output == [0, 1]


def test_calls_of_blocks_are_bounded_with_the_pass_that_stores() -> None:
    """A block takes at most B + 16 rounds and one pass more for its keys; every rewritten block is stored anew."""
    edits = 0
    for mode in MODES:
        toy = t4("block", seed=1)
        plain, cached = (fill(toy, {"method": mode, "cache": cache}, 13) for cache in ("none", "block"))
        assert same(plain, cached)
        assert cached.trajectory.calls <= 4 * (4 + 16 + 1)
        edits += sum(r.edited.size for r in cached.trajectory.rounds)
    assert edits > 0


def test_earlier_blocks_are_edited_only_if_the_scope_says_so() -> None:
    def script(filled: int, slot: int) -> tuple[int, float]:
        return (1 if filled < 3 else 2, 0.9) if slot == 0 else (3, 0.9)

    config = {"method": "llada2.1_s", "block_length": 2}
    assert fill(Scripted(script), config, 4, ()).canvas.tokens[0] == 1
    assert fill(Scripted(script), {**config, "edit_scope": "text"}, 4, ()).canvas.tokens[0] == 2


def test_prompt_and_priors_are_never_edited() -> None:
    toy = Scripted(lambda filled, slot: (2, 0.9))
    canvas = Canvas.of([5, 5], 4, mask_token_id=toy.mask_token_id, priors={1: 4})
    outcome = complete(toy, canvas, {"method": "llada2.1_s", "edit_scope": "text"})
    assert outcome.canvas.tokens.tolist() == [5, 5, 2, 4, 2, 2]
    assert outcome.canvas.status[3] == Status.PRIOR


def test_editing_needs_blocks_that_are_held() -> None:
    with pytest.raises(ConfigError, match="schedule must be 'held_blocks'"):
        fill(Independent([0.5] * 4), {"method": "threshold", "edit": "token_editing"}, 4, ())
    with pytest.raises(ConfigError, match="edit_scope must be"):
        fill(Independent([0.5] * 4), {"method": "llada2.1_s", "edit_scope": "all"}, 4, ())


def test_the_guard_lowers_the_left_neighbours_token() -> None:
    toy = Independent([0.5] * 4, tokens=[1, 1, 1, 1])
    canvas = Canvas.of([1], 4, mask_token_id=7)
    parts = ConfiguredMethod({"method": "static", "correction": "repetition_guard", "penalty_lambda": 3.0}).parts(
        toy, canvas
    )
    assert parts.transition.correction is not None
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 8)))
    logits[:, 7] = -torch.inf
    before = Predictions.of(logits, np.arange(5))
    after = parts.transition.correction.correct(before, canvas)
    expected = logits.clone()
    expected[1, 1] -= 3.0
    assert torch.equal(after.logits, expected)
    assert torch.equal(before.logits, logits)


def test_the_guard_ends_a_stutter() -> None:
    toy = Independent([0.6] * 5, tokens=[1] * 5)
    assert fill(toy, {"method": "leftmost"}, 5, ()).canvas.output == [1] * 5
    guarded = fill(
        toy, {"method": "leftmost", "correction": "repetition_guard", "penalty_lambda": 9.0}, 5, ()
    ).canvas.output
    assert all(a != b for a, b in pairwise(guarded))


def test_editing_and_a_constraint_are_refused_together() -> None:
    with pytest.raises(ConfigError, match="edit must be left out where a constraint is checked"):
        ConfiguredMethod({"method": "llada2.1_s", "check": next(iter(PARTS["check"]))})
