"""Learn2PD's filter: labels along the greedy trajectory, calibration, the file that decoding reads, all stages on a
tiny model.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline import training
from paceline.diffusion.commit import BlockFilter
from paceline.models import Call
from recipes.bundled_diffusion import learn2pd
from tests.diffusion.decoding import fill
from tests.diffusion.toys import Independent, Joint, t4
from tests.recipes.test_denoisers import net_of


def joint(seed: int) -> Joint:
    return Joint(np.random.default_rng(seed).dirichlet(np.full(64, 0.1)).reshape((2,) * 6))


@pytest.mark.parametrize("seed", range(4))
def test_a_label_says_whether_the_prediction_is_the_final_token(seed: int) -> None:
    """By hand: at every step the toy is asked again, and exactly the right predictions are written."""
    toy = joint(seed)
    static = fill(toy, "static", 6, ())
    final = static.canvas.tokens
    [replay] = learn2pd.replayed(toy, [final], [0], 6)
    assert (replay.tokens == final).all()
    assert len(replay.rows) <= static.trajectory.calls
    tokens, before = np.full(6, toy.mask_token_id), None
    for sure, right in replay.rows:
        [logits] = toy.forward([Call(tokens, np.arange(6))])
        predicted = logits.argmax(-1).numpy()
        assert (right == (predicted == final)).all()
        assert np.allclose(sure, logits.softmax(-1).max(-1).values)
        again = before is not None and (predicted == before).all()
        tokens = final.copy() if again else np.where(right & (tokens == toy.mask_token_id), final, tokens)
        before = predicted
    assert (tokens == final).all()
    [other] = learn2pd.replayed(toy, [1 - final], [0], 6)  # negative control: another text has other labels
    assert (other.rows[0][1] != replay.rows[0][1]).all()


def test_a_text_that_the_model_never_predicts_is_written_for_it() -> None:
    toy = Independent([0.5, 0.9, 0.3, 0.7, 0.6, 0.8])  # predicts 0 1 2 0 1 2
    final = np.array([0, 1, 5, 0, 1, 2])
    [replay] = learn2pd.replayed(toy, [final], [0], 3)
    assert [right.tolist() for _, right in replay.rows] == [[True, True, False]] * 2 + [[True] * 3]
    assert (replay.tokens == final).all()


def test_whole_trajectories_are_dealt() -> None:
    of = torch.arange(50).repeat_interleave(3)
    records = learn2pd.Records(torch.rand(150, 4), torch.rand(150, 4).round(), of)
    shares = [set(part.trajectory.tolist()) for part in records.shares(0)]
    assert [len(part) for part in shares] == [40, 5, 5]
    assert set.union(*shares) == set(range(50))


def synthetic(count: int, seed: int) -> Any:
    """Confidences of which it is known how often each prediction is final."""
    generator = torch.Generator().manual_seed(seed)
    c = torch.rand(count, 4, generator=generator)
    chance = (5 * c - 3 + 2 * (c.mean(1, keepdim=True) - 0.5)).sigmoid()
    return learn2pd.Records(c, (torch.rand(count, 4, generator=generator) < chance).float(), torch.arange(count) // 4)


class Certain:
    """A filter that takes the confidence itself for the chance to be final, or one `sharper`."""

    def __init__(self, sharper: float) -> None:
        self.sharper = sharper

    def logits(self, c: np.ndarray) -> np.ndarray:
        return self.sharper * np.log(c / (1 - c))


def worst(filter_: Any, records: Any) -> float:
    rows = learn2pd.calibration(filter_, records)
    return max(abs(row["mean"] - row["observed"]) for row in rows if row["count"] >= 500)


def test_the_filter_is_calibrated(tmp_path: Path) -> None:
    """By bins of its output on fresh examples; the confidence itself is not, and fails the same check."""
    options = SimpleNamespace(seed=0, hidden=16, rate=1e-2, epochs=300, every=50, minutes=1.0, out=tmp_path)
    filter_ = learn2pd.fit(synthetic(3000, 0), options)
    fresh = synthetic(10_000, 1)
    assert worst(filter_, fresh) < 0.05
    for sharper in (1.0, 3.0):
        assert worst(Certain(sharper), fresh) > 0.1
    assert sum(row["count"] for row in learn2pd.calibration(filter_, fresh)) == 40_000
    rates = [learn2pd.false_positives(filter_, fresh, tau) for tau in (0.3, 0.6, 0.9)]
    assert rates[0] > rates[1] > rates[2]


def test_what_learns_is_what_decodes(tmp_path: Path) -> None:
    mlp, c = learn2pd.Mlp(4, 8), torch.rand(5, 4)
    mlp.filter().save(tmp_path / "filter.safetensors")
    with torch.no_grad():
        assert np.allclose(
            BlockFilter.load(tmp_path / "filter.safetensors").logits(c.double().numpy()), mlp(c), atol=1e-6
        )
    config = {
        "method": "learn2pd",
        "filter": str(tmp_path / "filter.safetensors"),
        "filter_threshold": 0.5,
        "block_length": 4,
    }
    assert not (fill(t4(), config).canvas.tokens == t4().mask_token_id).any()


def test_all_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Collect, learn, go on; the model stays as it is, and trajectories are made once."""
    net = net_of("plain", width=8, layers=1, mlp=8, vocab_size=6145)
    state = tmp_path / "state.safetensors"
    training.keep(state, net, torch.optim.AdamW(net.parameters()), training.Progress())
    before = state.read_bytes()
    given = [
        "--model",
        str(state),
        "--out",
        str(tmp_path / "out"),
        "--tasks",
        "copy",
        "--prompts",
        "10",
        "--length",
        "8",
    ]
    given += ["--block-length", "4", "--every", "10", "--hidden", "5"]
    learn2pd.main([*given, "--epochs", "20"])
    assert "10 of 10 trajectories" in capsys.readouterr().out
    learn2pd.main([*given, "--epochs", "40"])
    printed = capsys.readouterr().out
    assert "trajectories" not in printed
    assert "epoch 30" in printed
    assert "epoch 20" not in printed
    facts = json.loads((tmp_path / "out" / "facts.json").read_text())
    assert facts["parameters"] == 4 * 5 + 5 + 5 * 4 + 4
    assert facts["examples"] >= 20
    assert BlockFilter.load(tmp_path / "out" / "filter.safetensors").block_length == 4
    assert state.read_bytes() == before
