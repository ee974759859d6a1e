"""Reading Llama weights, and their conversions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_llama import tiny_llama

from paceline.bench.peers.drivers.gguf_weights import pair_neighbours, tensor_names, write_gguf
from paceline.bench.peers.drivers.llama_weights import LlamaWeights, rope_factors
from paceline.bench.peers.drivers.openvino_graph import int8_rows


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
    names = tensor_names(weights.shape.layers, weights.shape.tied)
    assert set(names) == set(state)
    for name in names:
        assert np.array_equal(weights.f32(name), state[name].float().numpy()), name


def scores(query: np.ndarray, key: np.ndarray, angle: np.ndarray, neighbours: bool) -> np.ndarray:
    """q . k of one head after rotating q by `angle` (d / 2,), in pairs of neighbours or of halves."""
    half = len(query) // 2
    pairs = [(2 * i, 2 * i + 1) if neighbours else (i, i + half) for i in range(half)]
    turned = query.copy()
    for (a, b), t in zip(pairs, angle, strict=True):
        turned[a] = query[a] * np.cos(t) - query[b] * np.sin(t)
        turned[b] = query[a] * np.sin(t) + query[b] * np.cos(t)
    return turned @ key


@pytest.mark.parametrize("permuted", [True, False])
def test_the_permutation_keeps_rotated_scores(permuted: bool) -> None:
    """By a rotation written out pair by pair; without the permutation the scores must differ."""
    rng = np.random.default_rng(0)
    heads, dim, inputs = 3, 8, 5
    wq, wk, x, y = (rng.normal(size=s) for s in ((heads * dim, inputs), (heads * dim, inputs), inputs, inputs))
    angle = rng.normal(size=dim // 2)
    change = pair_neighbours if permuted else lambda w, _heads: w
    q, k = change(wq, heads) @ x, change(wk, heads) @ y
    same = []
    for head in range(heads):
        cut = slice(head * dim, (head + 1) * dim)
        same.append(
            np.allclose(scores((wq @ x)[cut], (wk @ y)[cut], angle, False), scores(q[cut], k[cut], angle, True))
        )
    assert all(same) if permuted else not any(same)


def test_the_gguf_file_holds_the_weights(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    folder, state = saved
    write_gguf(LlamaWeights(str(folder)), tmp_path / "x.gguf", "f32")
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    value = state["model.layers.1.self_attn.v_proj.weight"].float().numpy()
    assert np.array_equal(found["blk.1.attn_v.weight"], value)
    query = state["model.layers.1.self_attn.q_proj.weight"].float().numpy().reshape(4, 16, -1)
    written = found["blk.1.attn_q.weight"].reshape(4, 16, -1)
    assert np.array_equal(written[:, 0::2], query[:, :8])
    assert np.array_equal(written[:, 1::2], query[:, 8:])


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
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM; the peers' converters take"),
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
