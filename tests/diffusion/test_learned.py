"""The learned filter of Learning to Parallel: its inference, and filters that are functions."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file as torch_file

from paceline.diffusion.base import Step
from paceline.diffusion.commit import BlockFilter
from paceline.diffusion.commit.learned import NAMES, block_confidences
from paceline.errors import CheckpointError, ConfigError
from paceline.models import Call
from tests.diffusion.decoding import fill, same
from tests.diffusion.toys import Independent, Joint, t4


def logit_of_confidence(step: Step) -> np.ndarray:
    c = np.clip(block_confidences(step), 1e-12, 1 - 1e-12)
    return np.log(c / (1 - c))


def random_filter(block: int = 4, hidden: int = 6) -> BlockFilter:
    rng = np.random.default_rng(0)
    shapes = [(hidden, block), (hidden,), (block, hidden), (block,)]
    return BlockFilter(tuple(rng.normal(size=shape).astype(np.float32).astype(float) for shape in shapes))  # type: ignore[arg-type]


@pytest.mark.parametrize("block", [6, 12])
def test_one_is_the_static_baseline(block: int) -> None:
    config = {"method": "learn2pd", "filter": lambda step: np.full(len(step.block), 900.0), "block_length": block}
    static = fill(t4(), {"method": "static", "block_length": block})
    assert same(fill(t4(), {**config, "filter_threshold": 1.0}), static)
    assert not same(fill(t4(), {**config, "filter_threshold": 0.99}), static)


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8])
def test_the_logit_of_confidence_is_the_threshold_rule(threshold: float) -> None:
    ours = {"method": "learn2pd", "filter": logit_of_confidence, "filter_threshold": threshold, "block_length": 6}
    theirs = {"method": "threshold", "confidence_threshold": threshold, "block_length": 6}
    assert same(fill(t4(), ours), fill(t4(), theirs))


def test_what_the_baseline_writes_is_always_written() -> None:
    """A filter that takes nothing leaves the quota, one that takes a slot beyond it adds to the quota."""
    toy, config = Independent([0.5, 0.9, 0.3, 0.7]), {"method": "learn2pd", "denoising_steps": 2}
    nothing = fill(toy, {**config, "filter": lambda step: np.full(4, -50.0)}, 4, ())
    assert same(nothing, fill(toy, {"method": "static", "denoising_steps": 2}, 4, ()))
    assert [r.slots.size for r in nothing.trajectory.rounds] == [2, 2]
    third = fill(toy, {**config, "filter": lambda step: np.array([-50.0, -50.0, 50.0, -50.0])}, 4, ())
    assert sorted(third.trajectory.rounds[0].slots.tolist()) == [1, 2, 3]


def greedy_rounds(toy: Joint, final: np.ndarray) -> int:
    """Passes of the greedy oracle, by hand: in every round all right predictions, and the surest one."""
    tokens, slots = np.full(final.size, toy.mask_token_id), np.arange(final.size)
    for passes in range(1, final.size + 1):
        [logits] = toy.forward([Call(tokens, slots)])
        p = logits.softmax(-1).numpy()
        open_ = tokens == toy.mask_token_id
        now = open_ & (p.argmax(-1) == final)
        now[slots[open_][p.max(-1)[open_].argmax()]] = True
        tokens = np.where(now, np.where(p.argmax(-1) == final, final, p.argmax(-1)), tokens)
        if not (tokens == toy.mask_token_id).any():
            return passes
    raise AssertionError("a pass writes a slot at least")


@pytest.mark.parametrize("seed", range(6))
def test_the_oracle_gives_the_final_text_in_fewest_rounds(seed: int) -> None:
    toy = Joint(np.random.default_rng(seed).dirichlet(np.full(64, 0.1)).reshape((2,) * 6))
    static = fill(toy, "static", 6, ())
    final = static.canvas.tokens

    def oracle(step: Step) -> np.ndarray:
        right = step.predictions.tokens[step.predictions.rows(np.arange(6))] == final
        return np.where(right, 50.0, -50.0)

    ours = fill(toy, {"method": "learn2pd", "filter": oracle, "filter_threshold": 0.5}, 6, ())
    assert (ours.canvas.tokens == final).all()
    assert ours.trajectory.calls == greedy_rounds(toy, final) < static.trajectory.calls
    wrong = fill(toy, {"method": "learn2pd", "filter": lambda s: -oracle(s), "filter_threshold": 0.5}, 6, ())
    assert not same(wrong, ours)


def test_a_filter_is_read_back(tmp_path) -> None:
    ours = random_filter()
    ours.save(tmp_path / "filter.safetensors")
    again = BlockFilter.load(tmp_path / "filter.safetensors")
    c = np.random.default_rng(1).random((3, 4))
    first, bias, second, last = ours.weights
    by_hand = np.array([second @ np.maximum(first @ row + bias, 0) + last for row in c])
    assert np.allclose(again.logits(c), by_hand, atol=1e-12)
    assert not np.allclose(by_hand, c @ first.T[:, :4])


def test_a_filter_from_a_file_decodes(tmp_path) -> None:
    path = str(tmp_path / "filter.safetensors")
    random_filter().save(path)
    config = {"method": "learn2pd", "filter_threshold": 0.3, "block_length": 4}
    by_path = fill(t4(), {**config, "filter": path})
    assert same(by_path, fill(t4(), {**config, "filter": random_filter()}))
    assert by_path.trajectory.calls < 12


def test_written_slots_are_seen_by_the_filter() -> None:
    seen = []

    def watch(step: Step) -> np.ndarray:
        seen.append(block_confidences(step))
        return np.full(4, -50.0)

    fill(Independent([0.5, 0.9, 0.3, 0.7]), {"method": "learn2pd", "filter": watch}, 4, ())
    assert all(np.allclose(row, [0.5, 0.9, 0.3, 0.7]) for row in seen)
    assert len(seen) == 4


def test_filters_in_bfloat16_are_read(tmp_path) -> None:
    rounded = [torch.from_numpy(layer).bfloat16() for layer in random_filter().weights]
    torch_file(dict(zip(NAMES, rounded, strict=True)), str(tmp_path / "f"))
    for layer, held in zip(rounded, BlockFilter.load(tmp_path / "f").weights, strict=True):
        assert np.array_equal(layer.double().numpy(), held)


def test_wrong_filters_are_one_line(tmp_path) -> None:
    toy = Independent([0.5] * 8)
    with pytest.raises(ConfigError, match="filter must be the path of a trained filter"):
        fill(toy, "learn2pd", 8, ())
    with pytest.raises(CheckpointError, match="no filter at"):
        fill(toy, {"method": "learn2pd", "filter": str(tmp_path / "none")}, 8, ())
    random_filter().save(tmp_path / "f.safetensors")
    with pytest.raises(ConfigError, match="block_length must be 4"):
        fill(toy, {"method": "learn2pd", "filter": str(tmp_path / "f.safetensors")}, 8, ())
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        BlockFilter.load(tmp_path / "junk")
    from safetensors.numpy import save_file

    save_file({NAMES[0]: np.ones((2, 4), np.float32)}, str(tmp_path / "part"))
    with pytest.raises(CheckpointError, match=r"lacks fc1.bias"):
        BlockFilter.load(tmp_path / "part")
    torch_file({"wte.weight": torch.ones(2, 4, dtype=torch.bfloat16)}, str(tmp_path / "model"))
    with pytest.raises(CheckpointError, match=r"lacks fc1.weight, fc1.bias"):
        BlockFilter.load(tmp_path / "model")
    save_file({name: np.ones((2, 4), np.float32) for name in NAMES}, str(tmp_path / "odd"))
    with pytest.raises(CheckpointError, match="do not fit each other"):
        BlockFilter.load(tmp_path / "odd")
