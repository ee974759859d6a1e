"""Checkpoints as GGUF files: read back and run by llama.cpp they are the models that transformers wrote; a wrong
conversion is not.

llama.cpp runs where PACELINE_HOME names the folder above `peers` in which its environment is installed
(`python -m lab peers install llama.cpp`); its logits are then compared as well.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.checkpoints import perturb
from transformers import AutoConfig, AutoModelForCausalLM

from lab.peers.drivers.gguf_weights import family_of, pair_neighbours, write_gguf
from lab.peers.drivers.weights import Weights
from paceline.models import load_runner

gguf = pytest.importorskip("gguf")

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
TYPES = ["sliding_attention"] * 5 + ["full_attention"]
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "llama3": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, "head_dim": 32}),
    "linear": ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 10.0}),
    "gemma3": ("gemma3_text", GEMMA | {"num_hidden_layers": 6, "layer_types": TYPES, "rope_parameters": ROPES}),
    "phi3": ("phi3", {"sliding_window": None}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4, "use_sliding_window": False}),
    "olmo2": ("olmo2", {"tie_word_embeddings": True}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1, "logits_scaling": 0.5},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "head_dim": 32,
            "norm_topk_prob": True,
        },
    ),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "glm4": ("glm4", {"head_dim": 32, "attention_bias": True}),
    "cohere2": ("cohere2", {"sliding_window": 8, "logit_scale": 0.5}),
}
TEXT = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(1)).tolist()
TOLERANCE = 1e-2
"""Of logits, which differ by several units; llama.cpp's gelu is a table in float16."""

LOGITS = """
import json, sys
import numpy as np
from llama_cpp import Llama
given = json.load(sys.stdin)
float32 = {"type_k": 0, "type_v": 0}  # of the cache
model = Llama(given["file"], n_ctx=256, logits_all=True, n_threads=1, verbose=False, **float32)
model.eval(given["tokens"])
np.save(given["to"], model.scores[: len(given["tokens"])])
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def folder(name: str) -> Path:
        kind, changes = CASES[name]
        config = AutoConfig.for_model(kind, **{**SIZES, **changes})
        torch.manual_seed(0)
        model = perturb(AutoModelForCausalLM.from_config(config).float().eval())
        model.save_pretrained(made := tmp_path_factory.mktemp(name))
        return made

    return folder


def converted(folder: Path, to: Path, **changes: Any) -> Path:
    """A float32 file, with parts of the family changed."""
    weights = Weights(folder)
    write_gguf(weights, to, "f32", replace(family_of(weights.config), **changes))
    return to


def wrong(folder: Path) -> dict[str, Any]:
    """What makes the conversion wrong."""
    family = family_of(Weights(folder).config)
    return {"turned": False} if family.turned else {"norms_plus_one": not family.norms_plus_one}


def theirs(file: Path) -> torch.Tensor:
    """llama.cpp's logits of TEXT."""
    if not (home := os.environ.get("PACELINE_HOME")):
        pytest.skip("PACELINE_HOME names no folder with llama.cpp's environment")
    given = {"file": str(file), "tokens": TEXT, "to": str(file.with_suffix(".npy"))}
    python = Path(home) / "peers" / "llama.cpp" / "bin" / "python"
    subprocess.run([python, "-c", LOGITS], input=json.dumps(given), text=True, check=True)
    return torch.from_numpy(np.load(given["to"]))


def ours(path: Path) -> torch.Tensor:
    runner = load_runner(path, dtype="float32", quantization="none")
    return runner.extend([runner.open()], [TEXT], all_logits=True).logits.float()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("name", CASES)
def test_a_file_read_back_is_the_model(written: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    folder = written(name)
    wanted = ours(folder)
    assert distance(wanted, ours(converted(folder, tmp_path / "right.gguf"))) < TOLERANCE
    assert distance(wanted, ours(converted(folder, tmp_path / "wrong.gguf", **wrong(folder)))) > 30 * TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_has_our_logits(written: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    folder = written(name)
    wanted = ours(folder)
    assert distance(wanted, theirs(converted(folder, tmp_path / "right.gguf"))) < TOLERANCE
    assert distance(wanted, theirs(converted(folder, tmp_path / "wrong.gguf", **wrong(folder)))) > 30 * TOLERANCE


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


def changed(folder: Path, to: Path, **changes: Any) -> Weights:
    """Another configuration over no weights."""
    config = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return Weights(to)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"model_type": "gpt2"}, "is a gpt2; the converter takes llama, mistral"),
        ("llama", {"hidden_act": "gelu"}, "the activation is gelu"),
        ("mistral", {"sliding_window": 8}, "sliding_window is 8; llama.cpp attends to everything in a mistral"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope scaling 'yarn'"),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3}},
            "no place in GGUF's qwen3",
        ),
        ("gemma2", {"query_pre_attn_scalar": 20}, "query_pre_attn_scalar is 20"),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, "every fourth layer"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is False; llama.cpp takes True"),
    ],
)
def test_what_llama_cpp_would_do_differently_is_an_error(
    written: Callable[[str], Path], name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        write_gguf(changed(written(name), tmp_path, **changes), tmp_path / "x.gguf", "f32")


@pytest.mark.parametrize(
    ("precision", "kinds"),
    [("bf16", {"F32", "BF16"}), ("q8_0", {"F32", "Q8_0"}), ("q4_0", {"F32", "Q8_0", "Q4_0"})],
)
def test_matrices_are_rounded_and_nothing_else(
    written: Callable[[str], Path], precision: str, kinds: set[str], tmp_path: Path
) -> None:
    write_gguf(Weights(written("mixtral")), tmp_path / "x.gguf", precision)
    found = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    assert set(found.values()) == kinds
    assert found["blk.0.ffn_gate_inp.weight"] == found["output_norm.weight"] == "F32"
    assert found["output.weight"] == ("Q8_0" if precision == "q4_0" else precision.upper())
    with pytest.raises(ValueError, match="'q5' is not one of"):
        write_gguf(Weights(written("mixtral")), tmp_path / "y.gguf", "q5")
