"""What passes of hybrid models cost beside llama.cpp and transformers: plain steps, chains and trees, in published
shapes with random weights.

usage: hybrids.py [SHAPE...] [--kinds bfloat16 int8 int4] [--threads 2] [--rounds 2] [--repeats 8] [--avx2]
                  [--folder FOLDER]

SHAPE is one of `hybrid_shapes.PUBLISHED` (default: all): LFM2-350M, Qwen3.5-0.8B (its text part), Granite-4.0-H-350M,
and Phi-4-mini-flash with half of its layers and half of its width, which neither of the others has.
Weights are random, since no real ones could be had: all figures are costs, and say nothing of texts. Checkpoints are
written to a temporary folder, and there, by llama.cpp's own converter and quantiser, its BF16, Q8_0 and Q4_0 files of
the same weights, the last with table and head in 8 bits, as in our int4. The files of 8 and of 4 bits are read by
both engines: rows Q8_0 and Q4_0 are ours of them, in 8-bit arithmetic as theirs, where int8 and int4 take activations
of 16 bits.

step, chain, tree  milliseconds of scoring 1 row, a chain of 4 and of 16 rows, and a binary tree of 16 rows; medians of
                   the repeats, taken in turn
commit             milliseconds of accepting one row behind a root: states of mixers are settled
pays               tokens a pass that a tree of 16 rows must give to be as fast as plain steps, drafting not counted
prompt             tokens per second of reading 512 tokens
state              bytes of the states of one sequence, keys and values not counted
llama.cpp          by llama-bench: a step of decoding 32 tokens, prompts of 1, 4 and 16 tokens (what its chains
                   of drafts cost), and of 512. Its rounds alternate with ours; it runs with flash attention, without,
                   and without repacking, and the best median counts, each figure for itself
apart              how far its log-probabilities are from ours in float32, as a share of their spread: nothing is timed
                   where that is too far, or where another position's are as near
transformers       milliseconds of one of its steps with its own cache, in bfloat16; it refuses drafts for these models

Control: a tree's rows must be those of its paths as chains, within rounding, and not those of the tree fed as a chain.

A shape takes about 5 minutes, with `--avx2`, which keeps all engines to AVX2 alone, up to 9: ask for one at a time.
Results: `results/hybrids.json`, by processor's instructions and shape; `family_table.py` makes tables of them. Needs
`pip install '.[bench]'`; llama.cpp is compiled when it is not there yet (`real_models.py llama.cpp [--avx2]`).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from common import RESULTS, keep_to_avx2, kept, save
from hybrid_shapes import PUBLISHED, written
from llama_files import agreement, converted
from own_computers import PARTS, SETTINGS, middle, samples
from real_models import LlamaCpp, llama_cpp
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from paceline.models import Runner, load_runner
from paceline.tree import EMPTY_TREE, TokenTree

KINDS: Mapping[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
FILES = {"int8": "Q8_0", "int4": "Q4_0"}
"""Kinds whose files of llama.cpp are read here, too, and their names."""

IDS = torch.randint(5, 5000, (512,), generator=torch.Generator().manual_seed(0)).tolist()
PARENTS = [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
TREES: Mapping[str, TokenTree] = {
    "step": EMPTY_TREE,
    "chain of 4": TokenTree.chain(IDS[:3]),
    "chain of 16": TokenTree.chain(IDS[:15]),
    "tree of 16": TokenTree.build(IDS[:15], PARENTS),
}
DECODED = 32
TOLERANCE = 0.05
"""Of logits, as a share of their spread."""


def timed(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def ours(runner: Any, repeats: int) -> dict[str, float]:
    """Milliseconds of each kind of pass, and tokens per second of a prompt."""
    state = runner.open()
    runner.extend([state], [IDS[:64]])
    times: dict[str, list[float]] = {name: [] for name in (*TREES, "commit")}
    for _ in range(repeats):
        for name, tree in TREES.items():
            times[name].append(timed(lambda tree=tree: runner.score([state], [7], [tree])))  # type: ignore[misc]  # bound
        times["commit"].append(timed(lambda: runner.commit([state], [(0,)])))
    fresh = runner.open()
    prompt = timed(lambda: runner.extend([fresh], [IDS]))
    found = {name: 1000 * median(seconds) for name, seconds in times.items()}
    found |= {"prompt": len(IDS) / prompt, "state": state.others[0].nbytes}
    runner.release(fresh)
    runner.release(state)
    return found


def check(runner: Runner) -> None:
    """A tree's rows against its paths as chains.

    Raises:
        SystemExit: they differ, or are those of the tree fed as a chain.
    """
    state, tree = runner.open(), TREES["tree of 16"]
    runner.extend([state], [IDS[:64]])
    rows = runner.score([state], [7], [tree]).logits
    spread = float(rows.float().std())
    path = list(tree.path(14))
    chain = runner.score([state], [7], [TokenTree.chain(tree.tokens[path].tolist())]).logits
    wrong = runner.score([state], [7], [TokenTree.chain(tree.tokens.tolist())]).logits
    runner.release(state)
    right = float((rows[[0, *(node + 1 for node in path)]] - chain).float().abs().max()) / spread
    if not right < TOLERANCE < float((rows - wrong).float().abs().max()) / spread:
        raise SystemExit(f"{runner.info.name}: a tree's rows are not those of its paths ({right:.3f} of the spread)")


def theirs(llama: LlamaCpp, file: Path, threads: int) -> dict[str, dict[str, float]]:
    """Of llama.cpp by setting: milliseconds of passes, and tokens per second of a prompt."""
    found = {}
    for name, words in SETTINGS.items():
        command = [str(llama.bench), "-m", str(file), "-t", str(threads), "-o", "json", *words]
        speed = samples([*command, "-p", "1,4,16", "-n", str(DECODED), "-r", "3"])
        speed |= samples([*command, "-p", str(len(IDS)), "-n", "0", "-r", "1"])
        passes = {f"prompt of {rows}": 1e3 * rows / speed[rows, 0] for rows in (1, 4, 16)}
        found[name] = {"step": 1e3 / speed[0, DECODED], **passes, "prompt": speed[len(IDS), 0]}
    return found


def best(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Each figure of the best setting."""
    first, *_ = found.values()
    return {key: (max if key == "prompt" else min)(one[key] for one in found.values()) for key in first}


def measured(
    checkpoint: Path, kind: str, llama: LlamaCpp, agreed: Mapping[str, Any], given: argparse.Namespace
) -> dict[str, Any]:
    """A kind of weights, and the file of it, in both engines, in turn; `agreed` as `llama_files.agreement` says."""
    runners: dict[str, Any] = {kind: load_runner(checkpoint, **KINDS[kind])}
    file = converted(llama, checkpoint, kind, given.threads) if "apart" in agreed else None
    if file and kind in FILES:
        runners[FILES[kind]] = load_runner(file)
    mine, others = dict[str, list[dict[str, float]]](), list[dict[str, dict[str, float]]]()
    for runner in runners.values():
        check(runner)
        ours(runner, 1)
    for _ in range(given.rounds):
        for name, runner in runners.items():
            mine.setdefault(name, []).append(ours(runner, given.repeats))
        others += [theirs(llama, file, given.threads)] if file else []
    peer = {"llama.cpp": best(middle(others))} if others else {}
    return {name: {**agreed, **with_pays(middle(some)), **peer} for name, some in mine.items()}


def with_pays(found: Mapping[str, float]) -> dict[str, float]:
    """The figures, and the tokens a pass from which a tree is faster than plain steps."""
    settled = found["commit"]
    return {**found, "pays": (found["tree of 16"] + settled) / (found["step"] + settled)}


@torch.inference_mode()
def of_transformers(folder: Path, repeats: int) -> float:
    """Milliseconds of a step of transformers behind 64 tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    cache = model(torch.tensor([IDS[:64]]), use_cache=True).past_key_values
    token = torch.tensor([[7]])
    return 1000 * median(timed(lambda: model(token, past_key_values=cache, use_cache=True)) for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=list(PUBLISHED), metavar="SHAPE")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=["bfloat16", "int8", "int4"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.avx2:
        keep_to_avx2()
    if unknown := [name for name in given.shapes if name not in PUBLISHED]:
        parser.error(f"a shape must be one of {', '.join(PUBLISHED)}, got {unknown[0]!r}")
    torch.set_num_threads(given.threads)
    llama = llama_cpp(avx2=given.avx2)
    for name in given.shapes:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = written(PUBLISHED[name], Path(folder) / name)
            agreed = agreement(llama, checkpoint, given.threads)
            found: dict[str, Any] = {}
            if PUBLISHED[name][0] in CONFIG_MAPPING:
                found["transformers"] = of_transformers(checkpoint, given.repeats)
            for kind in given.kinds:
                found |= measured(checkpoint, kind, llama, agreed, given)
                print(f"{name}, {kind}: {found[kind]}", flush=True)
        part = f"{PARTS[given.avx2]}, {name}"
        result = kept("hybrids", given.folder) | {part: found | {"threads": given.threads}}
        save("hybrids", result, given.folder, parts=[part])


if __name__ == "__main__":
    main()
