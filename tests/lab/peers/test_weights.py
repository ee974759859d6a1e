"""Reading the weights of a checkpoint with NumPy alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_llama import tiny_llama

from lab.peers.drivers.llama_weights import LlamaWeights
from lab.peers.drivers.openvino_graph import int8_rows
from lab.peers.drivers.weights import rope_factors


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16, torch.float16])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, torch.Tensor]]:
    model = tiny_llama().to(request.param)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder, model.state_dict()


def test_every_tensor_is_read_exactly(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, state = saved
    weights = LlamaWeights(str(folder))
    assert set(weights.names) == set(state)
    for name in state:
        assert np.array_equal(weights.f32(name), state[name].float().numpy()), name


def test_llama3_scaling_is_that_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=rope)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 5e5 ** (np.arange(0, 128, 2) / 128)
    ours = plain / np.array(rope_factors(rope, 5e5, 128))
    assert np.allclose(ours, theirs.numpy(), rtol=1e-5)
    assert not np.allclose(plain, theirs.numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM; this peer's converter takes"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope scaling 'yarn'"),
    ],
)
def test_other_layouts_are_rejected(
    saved: tuple[Path, object], tmp_path: Path, change: dict[str, object], message: str
) -> None:
    config = json.loads((saved[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        LlamaWeights(str(tmp_path))


def test_int8_rows_are_within_half_a_step() -> None:
    weight = np.random.default_rng(0).normal(size=(7, 33)).astype(np.float32)
    weight[3] = 0
    q, scale = int8_rows(weight)
    assert q.dtype == np.int8
    assert np.all(np.abs(q * scale - weight) <= scale * 0.5001)
    assert np.abs(q).max() == 127
