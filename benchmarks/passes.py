"""What a pass costs on the CPU, compiled and by PyTorch's operators: layers of random weights, in all kinds of weights.

usage: passes.py [--avx2]

CPU time of one thread, which other programs on the machine change little, for 1, 8 and 128 rows, in turn; the least of
several passes. Shapes: SmolLM2-135M's, Qwen2.5 1.5B's and Llama 2 7B's, and the second as a mixture of 16 experts of
which 4 run; as many layers as hold 16 million weights. `--avx2` lets PyTorch, oneDNN and numba see a processor with
AVX2 alone.

Results: `results/passes.json`, by instructions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import torch
from common import AVX2, kept, save

from paceline.doctor import passes
from paceline.models import LayerSpec, ModelSpec, MoeSpec, RopeSpec

ROWS = (1, 8, 128)
SIZES = {"135M": (576, 9, 3, 64, 1536), "1.5B": (1536, 12, 2, 128, 8960), "7B": (4096, 32, 32, 128, 11008)}
KINDS = {
    "float32": (torch.float32, None), "bfloat16": (torch.bfloat16, None), "int8": (torch.bfloat16, "int8"),
    "int4": (torch.bfloat16, "int4"),
}  # fmt: skip


def shape(name: str, *, experts: bool = False) -> ModelSpec:
    hidden, heads, kv_heads, dim, inner = SIZES[name]
    mixture = MoeSpec(experts=16, top_k=4, intermediate=inner // 4, norm_top_k=True) if experts else None
    return ModelSpec(
        family="llama", vocab_size=64, hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        intermediate_size=inner, layers=(LayerSpec(moe=experts),) * 30, max_context=1024, tied=False, moe=mixture,
        ropes={"default": RopeSpec(theta=10000.0, dims=dim)},
    )  # fmt: skip


SHAPES = {name: shape(name) for name in SIZES} | {"1.5B, experts": shape("1.5B", experts=True)}


def measure() -> dict[str, Any]:
    """Shape -> kind of weights -> milliseconds of compiled passes and of operators, by rows."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, spec in SHAPES.items():
        for kind, (dtype, form) in KINDS.items():
            part = passes.measured_part(spec)
            made = [passes.part_pass(part, dtype, form, compiled=compiled) for compiled in (True, False)]
            seconds, _ = passes.least_seconds([run for _, run in made], ROWS)
            cell = {who: [1e3 * own[rows] for rows in ROWS] for (who, _), own in zip(made, seconds, strict=True)}
            found.setdefault(name, {})[kind] = cell
            times = " / ".join(f"{theirs / ours:.2f}" for ours, theirs in zip(*cell.values(), strict=True))
            print(f"{name}, {kind}: operators take {times} times as long", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps([passes.instructions(), measure()]))
        return
    command = [sys.executable, __file__, "--child"]
    made = subprocess.run(
        command, env=os.environ | (AVX2 if given.avx2 else {}), stdout=subprocess.PIPE, text=True, check=True
    )
    part, found = json.loads(made.stdout.splitlines()[-1])
    if given.avx2 and part != "AVX2":
        sys.exit(f"the switch to AVX2 did not take hold: {part}")
    save("passes", kept("passes") | {"rows": ROWS, part: found}, parts=[part])


if __name__ == "__main__":
    main()
