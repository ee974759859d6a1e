"""What passes of hybrid models cost: plain steps, chains and trees, in published shapes with random weights.

usage: hybrids.py [SHAPE...] [--kinds bfloat16 int8 int4] [--threads 2] [--repeats 15] [--avx2]

SHAPE is one of `SHAPES` (default: all): LFM2-350M, Qwen3.5-0.8B (its text part), Granite-4.0-H-350M, and
Phi-4-mini-flash with half of its layers and half of its width. Weights are random, since no real ones could be had: all
figures are costs, and say nothing of texts. Checkpoints are written to a temporary folder.

step, chain, tree  milliseconds of scoring 1 row, a chain of 4 and of 16 rows, and a binary tree of 16 rows; medians of
                   the repeats, taken in turn
commit             milliseconds of accepting one row behind a root: states of mixers are settled
pays               tokens a pass that a tree of 16 rows must give to be as fast as plain steps, drafting not counted
prompt             tokens per second of reading 512 tokens
state              bytes of the states of one sequence, keys and values not counted
transformers       milliseconds of one of its steps with its own cache, in bfloat16; it refuses drafts for these models,
                   and lacks Phi-4-mini-flash

Control: a tree's rows must be those of its paths as chains, within rounding, and not those of the tree fed as a chain.

Results: `results/hybrids.json`, by processor's instructions and shape. Needs `pip install '.[bench]'`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from common import keep_to_avx2, kept, save
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from paceline.checkpoints import spec_from_config, targets
from paceline.models import Runner, load_runner
from paceline.tree import EMPTY_TREE, TokenTree

SHAPES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "LFM2-350M": (
        "lfm2",
        {
            "vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 6656, "num_hidden_layers": 16,
            "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 128_000,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        },
    ),
    "Qwen3.5-0.8B": (
        "qwen3_5_text",
        {
            "vocab_size": 248_320, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
            "linear_num_value_heads": 16, "tie_word_embeddings": True, "max_position_embeddings": 262_144,
        },
    ),
    "Granite-4.0-H-350M": (
        "granitemoehybrid",
        {
            "vocab_size": 100_352, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 32,
            "num_attention_heads": 12, "num_key_value_heads": 4, "shared_intermediate_size": 2048,
            "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 48, "mamba_d_head": 32,
            "mamba_d_state": 128, "tie_word_embeddings": True, "max_position_embeddings": 32_768,
            "layer_types": ["attention" if layer in {10, 13, 17, 27} else "mamba" for layer in range(32)],
        },
    ),
    "Phi-4-mini-flash, halved": (
        "phi4flash",
        {
            "vocab_size": 200_064, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 16,
            "num_attention_heads": 20, "num_key_value_heads": 10, "sliding_window": 512, "mb_per_layer": 2,
            "max_position_embeddings": 262_144,
        },
    ),
}  # fmt: skip
KINDS: Mapping[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
IDS = torch.randint(5, 5000, (512,), generator=torch.Generator().manual_seed(0)).tolist()
PARENTS = [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
TREES: Mapping[str, TokenTree] = {
    "step": EMPTY_TREE,
    "chain of 4": TokenTree.chain(IDS[:3]),
    "chain of 16": TokenTree.chain(IDS[:15]),
    "tree of 16": TokenTree.build(IDS[:15], PARENTS),
}
TOLERANCE = 0.05
"""Of logits, as a share of their spread."""


def written(name: str, folder: Path) -> Path:
    """A checkpoint of a shape, with random weights in bfloat16."""
    kind, sizes = SHAPES[name]
    torch.manual_seed(0)
    if kind not in CONFIG_MAPPING:
        return written_by_name({"model_type": kind, "torch_dtype": "bfloat16", **sizes}, folder / name)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, dtype="bfloat16"))
    model.to(torch.bfloat16).save_pretrained(folder / name)
    return folder / name


def written_by_name(config: Mapping[str, Any], folder: Path) -> Path:
    """The same for a family that transformers lacks: all that is asked for, by the first names that it may have."""
    tensors = {}
    for target in targets(spec_from_config(config)):
        for piece in target.recipes[0]:
            weight = 0.02 * torch.randn(piece.shape)
            if piece.names[0].endswith(("norm.weight", "subln.weight")):
                weight += 1.0
            tensors[piece.names[0]] = weight.to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def timed(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def ours(runner: Any, repeats: int) -> dict[str, float]:
    """Milliseconds of each kind of pass, and tokens per second of a prompt."""
    state = runner.open()
    runner.extend([state], [IDS[:64]])
    check(runner, state)
    times: dict[str, list[float]] = {name: [] for name in (*TREES, "commit")}
    for _ in range(repeats):
        for name, tree in TREES.items():
            times[name].append(timed(lambda tree=tree: runner.score([state], [7], [tree])))  # type: ignore[misc]  # bound
        times["commit"].append(timed(lambda: runner.commit([state], [(0,)])))
    prompts = []
    for _ in range(3):
        fresh = runner.open()
        prompts.append(timed(lambda fresh=fresh: runner.extend([fresh], [IDS])))  # type: ignore[misc]  # bound
        runner.release(fresh)
    found = {name: 1000 * median(seconds) for name, seconds in times.items()}
    pays = (found["tree of 16"] + found["commit"]) / (found["step"] + found["commit"])
    return found | {"pays": pays, "prompt": len(IDS) / median(prompts), "state": state.others[0].nbytes}


def check(runner: Runner, state: Any) -> None:
    """A tree's rows against its paths as chains.

    Raises:
        SystemExit: they differ, or are those of the tree fed as a chain.
    """
    tree = TREES["tree of 16"]
    rows = runner.score([state], [7], [tree]).logits
    spread = float(rows.float().std())
    path = list(tree.path(14))
    chain = runner.score([state], [7], [TokenTree.chain(tree.tokens[path].tolist())]).logits
    wrong = runner.score([state], [7], [TokenTree.chain(tree.tokens.tolist())]).logits
    right = float((rows[[0, *(node + 1 for node in path)]] - chain).float().abs().max()) / spread
    if not right < TOLERANCE < float((rows - wrong).float().abs().max()) / spread:
        raise SystemExit(f"{runner.info.name}: a tree's rows are not those of its paths ({right:.3f} of the spread)")


@torch.inference_mode()
def theirs(folder: Path, repeats: int) -> float:
    """Milliseconds of a step of transformers behind 64 tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    cache = model(torch.tensor([IDS[:64]]), use_cache=True).past_key_values
    token = torch.tensor([[7]])
    return 1000 * median(timed(lambda: model(token, past_key_values=cache, use_cache=True)) for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=["bfloat16", "int8", "int4"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--avx2", action="store_true")
    given = parser.parse_args()
    if given.avx2:
        keep_to_avx2()
    torch.set_num_threads(given.threads)
    instructions = "AVX2 alone" if given.avx2 else "all instructions"
    for name in given.shapes:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = written(name, Path(folder))
            found: dict[str, Any] = {}
            if SHAPES[name][0] in CONFIG_MAPPING:
                found["transformers"] = theirs(checkpoint, given.repeats)
            for kind in given.kinds:
                found[kind] = ours(load_runner(checkpoint, **KINDS[kind]), given.repeats)
                print(f"{name}, {kind}: {found[kind]}")
        part = f"{instructions}, {name}"
        save("hybrids", kept("hybrids") | {part: found | {"threads": given.threads}}, parts=[part])


if __name__ == "__main__":
    main()
