"""Files that people download, on the processor that they have: Paceline beside llama.cpp.

usage: own_computers.py FILE.gguf... --llama-bench PROGRAM [--avx2] [--repeats 3]

For each file, both engines in turn, in processes of their own: tokens per second of a prompt of 512 tokens and of plain
decoding, milliseconds of a pass over 1 to 32 rows, and for Paceline seconds of loading and the peak of its memory. The
reading limit is the bytes of the matrices that a step reads, at the speed of summing memory in the same run. `--avx2`
lets PyTorch, oneDNN and numba see a processor with AVX2 alone; llama-bench must be built so (GGML_NATIVE=OFF,
GGML_AVX2=ON, GGML_FMA=ON, GGML_F16C=ON, GGML_BMI2=ON, GGML_AVX512=OFF).

Results: `results/own_computers.json`, by processor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from common import AVX2, kept, read_bandwidth, save

ROWS = (1, 2, 4, 8, 16, 32)
PROMPT, NEW, THREADS = 512, 32, 2

ONE = """
import json, resource, sys
from time import perf_counter
import torch
from paceline.models import load_runner
from paceline.models.cpu.processor import features
from paceline.tree import EMPTY_TREE, TokenTree

file, avx2, rows, prompt, new, threads = json.loads(sys.argv[1])
torch.set_num_threads(threads)
assert not avx2 or not features().get("avx512f"), "the switch to AVX2 did not take hold"
start = perf_counter()
runner = load_runner(file, max_context=1024)
found = {"load": perf_counter() - start, "bytes": runner.info.weight_bytes}
text = [(7 * i) % 5000 + 100 for i in range(prompt)]

def timed(work, least=3):
    times = []
    for _ in range(least):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return sorted(times)[len(times) // 2]

def prefill():
    cache = runner.open(prompt)
    runner.extend([cache], [text])
    runner.release(cache)

prefill()
found["prefill"] = prompt / timed(prefill)
cache = runner.open(64)
runner.extend([cache], [text[:64]])

def decode():
    for token in range(new):
        runner.score([cache], [100 + token], [EMPTY_TREE])
        runner.commit([cache], [()])
    runner.truncate(cache, 64)

decode()
found["decode"] = new / timed(decode)
found["rows"] = {}
for count in rows:
    tree = TokenTree.chain(list(range(200, 199 + count))) if count > 1 else EMPTY_TREE
    found["rows"][count] = 1e3 * timed(lambda: runner.score([cache], [5], [tree]), 5)
found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps(found))
"""


def paceline(file: Path, *, avx2: bool) -> dict[str, Any]:
    request = json.dumps([str(file), avx2, ROWS, PROMPT, NEW, THREADS])
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | (AVX2 if avx2 else {})
    done = subprocess.run([sys.executable, "-c", ONE, request], env=env, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def llama(program: Path, file: Path) -> dict[str, Any]:
    """The same by llama-bench, whose prompts of n tokens are passes over n rows."""
    prompts = ",".join(map(str, (*ROWS[1:], PROMPT)))
    command = [
        str(program),
        "-m",
        str(file),
        "-p",
        prompts,
        "-n",
        str(NEW),
        "-t",
        str(THREADS),
        "-o",
        "json",
        "-r",
        "3",
    ]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    speed = {(row["n_prompt"], row["n_gen"]): row["avg_ts"] for row in rows}
    times = {count: 1e3 * count / speed[count, 0] for count in ROWS[1:]} | {1: 1e3 / speed[0, NEW]}
    return {"prefill": speed[PROMPT, 0], "decode": speed[0, NEW], "rows": dict(sorted(times.items()))}


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of all figures."""
    first = runs[0]
    return {
        key: {row: median(one[key][row] for one in runs) for row in first[key]}
        if isinstance(first[key], dict)
        else median(one[key] for one in runs)
        for key in first
    }


def measured(file: Path, given: argparse.Namespace) -> dict[str, Any]:
    paceline(file, avx2=given.avx2)  # kernels are compiled, the file is in memory
    ours, theirs, bandwidth = [], [], []
    for _ in range(given.repeats):
        ours.append(paceline(file, avx2=given.avx2))
        bandwidth.append(read_bandwidth())
        theirs.append(llama(given.llama_bench, file))
    found = {"paceline": middle(ours), "llama.cpp": middle(theirs), "bandwidth": median(bandwidth)}
    found["of the reading limit"] = found["paceline"]["decode"] * found["paceline"]["bytes"] / found["bandwidth"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    part = "AVX2 alone" if given.avx2 else "all instructions"
    result = kept("own_computers")
    result[part] = {}
    for file in given.files:
        result[part][file.stem] = measured(file, given)
        print(file.stem, json.dumps(result[part][file.stem]), flush=True)
        save("own_computers", result, parts=[part])


if __name__ == "__main__":
    main()
