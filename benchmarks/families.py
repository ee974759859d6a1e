"""Families of models in bfloat16, int8 and int4: plain decoding at batch 1 beside llama.cpp on the same weights, in
turn, in one run.

usage: families.py [--families all] [--precisions bf16,int8,int4] [--tokens 64] [--repeats 3] [--threads 2]
                   [--rows 1,4,8,16] [--prefill 512,2048] [--only decoding,rows,prefill]

decoding  tokens/s of both, without the prompt of 16 tokens; their ratio; bytes of weights that we read per second, as a
          share of the measured speed of reading memory, and over those of the Llama shape (of mixtures: of
          `llama-large`, whose weights do not fit the processor's cache either)
rows      milliseconds of our pass over a chain of so many rows, SmolLM2
prefill   seconds of our pass over a prompt of so many tokens, SmolLM2

Models are SmolLM2-135M, the shape of Gemma 3 270M, and one of 100M to 270M parameters of every family that runs
natively (hidden size 1024, 8 layers, vocabulary 32,000) with random weights, made once in the user cache. Their texts
mean nothing and are not compared between engines (tests/lab/peers/test_gguf_weights.py compares logits); ours must be
the same in every repeat. llama.cpp reads BF16 (--half float16: F16), Q8_0 or Q4_0 files, in Q4_0 with a head of 8 bits,
as in our int4. Where it has 8 or 4 bits it reads the prompt token by token: its products of several rows, made for AMX,
end the process on virtual machines without it. It runs through llama-cpp-python, in its own environment:
`python -m lab peers install llama.cpp`. A family that is not converted has the reason in place of its figures.

A run of all takes about 6 minutes, the first one 3 more for models, conversions (13 GB of disk) and compiled passes.
Results: `results/families.json`, written family by family, and `families.png`; what a run leaves out keeps its figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import RESULTS, kept, pyplot, ratio, read_bandwidth, save
from real_models import smollm2

from lab.peers import Peer, PeerError, open_peer
from paceline import LLM, SamplingParams
from paceline.bench import model_folder
from paceline.tree import TokenTree
from paceline.utils import in_turn, time_in_turn

PROMPT = [(37 * i) % 5000 + 100 for i in range(16)]
CONTEXT = 64
"""Tokens before the rows of a pass."""

FORMS = {"bf16": None, "int8": "int8", "int4": "int4"}
COLOURS = {"bf16": "#4878a8", "int8": "#d98c3f", "int4": "#6aa56a"}
DENSE = "hidden=1024,layers=8,heads=16,kv_heads=8,mlp=2816,vocab=32000"
NO_GATE = DENSE.replace("2816", "4096")
MIXTURES = {
    "mixtral": (1024, 8, 2), "qwen2_moe": (256, 32, 4), "qwen3_moe": (256, 32, 4), "deepseek_v2": (256, 32, 4),
    "gpt_oss": (512, 16, 4),
}  # fmt: skip
GEMMA_270M = "gemma3:hidden=640,layers=18,heads=4,kv_heads=1,head_dim=256,mlp=2048,vocab=262144,context=32768"
LARGE_LLAMA = "llama-large"
"""The Llama shape with more layers: its weights lie in memory, as a mixture's experts do, and not in the processor's
cache.
"""

DENSE_FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "olmo2",
    "granite",
    "phi3",
    "smollm3",
    "glm4",
    "cohere2",
)
SHAPES = {
    "smollm2": "",
    **{family: f"{family}:{DENSE}" for family in DENSE_FAMILIES},
    "starcoder2": f"starcoder2:{NO_GATE}",
    "gemma3-270m": GEMMA_270M,
    LARGE_LLAMA: f"llama:{DENSE.replace('layers=8', 'layers=22')}",
    **{
        family: f"{family}:{DENSE.replace('2816', str(inner))},experts={experts},top_k={top_k}"
        for family, (inner, experts, top_k) in MIXTURES.items()
    },
}

Run = Callable[[], tuple[list[int], float]]
"""Gives tokens, and seconds from the first to the last."""


def folder_of(name: str) -> Path:
    """The checkpoint, made if it is not there yet."""
    return model_folder(SHAPES[name]) if SHAPES[name] else smollm2()


def opened(name: str, precision: str, threads: int) -> LLM:
    """Our engine, plain."""
    options = {"speculative_config": None, "enable_prefix_caching": False, "dtype": "bfloat16", "threads": threads}
    return LLM(folder_of(name), quantization=FORMS[precision], **options)


# ------------------------------------------------------------------------------------------------ decoding


def ours(llm: LLM, tokens: int) -> Run:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def run() -> tuple[list[int], float]:
        (found,) = llm.generate({"prompt_token_ids": PROMPT}, params)
        found.raise_for_error()
        return list(found.outputs[0].token_ids), found.metrics.time_to_first_token or 0.0

    return run


def theirs(peer: Peer, tokens: int) -> Run:
    def run() -> tuple[list[int], float]:
        found = peer.generate(PROMPT, tokens)
        return found.token_ids, found.seconds - (found.ttft or 0.0)

    return run


def peer_of(name: str, precision: str, given: argparse.Namespace) -> Peer:
    """llama.cpp on the model's converted weights.

    Raises:
        PeerError: it is not installed, or the family is not converted.
    """
    dtype = given.half if precision == "bf16" else precision
    options = {"method": "plain", "context": 512, **({} if precision == "bf16" else {"batch": 1})}
    return open_peer("llama.cpp", folder_of(name), dtype=dtype, threads=given.threads, options=options)


def cell(name: str, precision: str, given: argparse.Namespace) -> dict[str, Any]:
    """A family in one precision: speeds of both, their ratio, and what share of reading memory ours is."""
    llm, found = opened(name, precision, given.threads), dict[str, Any]()
    with ExitStack() as stack:
        runs = {"paceline": ours(llm, given.tokens)}
        try:
            peer = stack.enter_context(peer_of(name, precision, given))
            runs["llama.cpp"] = theirs(peer, given.tokens)
            found["llama.cpp"] = dict(peer.settings) | {"version": peer.version}
        except PeerError as error:
            found["llama.cpp"] = str(error).splitlines()[0][:300]
        first = {which: run()[0] for which, run in runs.items()}
        seconds: dict[str, list[float]] = {which: [] for which in runs}
        bandwidth = []
        for turn in in_turn({which: lambda *_, run=run: run() for which, run in runs.items()}, [None], given.repeats):
            bandwidth.append(read_bandwidth())
            for which, (tokens, taken) in turn.outputs.items():
                if tokens != first[which]:
                    sys.exit(f"{name} in {precision}: {which} wrote other tokens this time, nothing is timed")
                seconds[which].append(turn.seconds[which] - taken if which == "paceline" else taken)
    steps, weights = given.tokens - 1, llm.runner.info.weight_bytes
    rates = {which: steps / median(taken) for which, taken in seconds.items()}
    found |= {
        "tokens_per_second": rates,
        "weight_bytes": weights,
        "bytes_per_second": rates["paceline"] * weights,
        "share_of_bandwidth": rates["paceline"] * weights / median(bandwidth),
        "read_bandwidth": median(bandwidth),
        "seconds": seconds,
    }
    if "llama.cpp" in seconds:
        found["over_llama.cpp"] = ratio(seconds["llama.cpp"], seconds["paceline"])
    llm.close()
    return found


def against_llama(families: Mapping[str, Mapping[str, Any]]) -> None:
    """Bytes per second of every cell over those of the Llama shape in its precision; of mixtures, the large one."""
    for name, cells in families.items():
        beside = families.get(LARGE_LLAMA if name in MIXTURES else "llama", {})
        for precision, one in cells.items():
            if (llama := beside.get(precision)) is not None:
                one["bytes_over_llama"] = one["bytes_per_second"] / llama["bytes_per_second"]


def row(name: str, precision: str, one: Mapping[str, Any]) -> str:
    """A line of the table."""
    rates, over = one["tokens_per_second"], one.get("over_llama.cpp")
    peer = f"{rates['llama.cpp']:7.1f}" if over else "      -"
    duel = f"{over['median']:5.2f} ({over['low']:.2f} to {over['high']:.2f})" if over else "    - " + " " * 14
    speed = f"{one['bytes_per_second'] / 1e9:6.1f} GB/s, {one['share_of_bandwidth']:.2f} of reading"
    beside = f"{one['bytes_over_llama']:5.2f} of llama" if "bytes_over_llama" in one else ""
    return f"{name:12s} {precision:5s} {rates['paceline']:7.1f} {peer} tokens/s {duel} {speed} {beside}"


# ------------------------------------------------------------------------------------------------ passes


def rows(counts: list[int], given: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Milliseconds of a pass by precision and rows, in turn."""

    def call(runner: Any, count: int) -> Callable[[Any], None]:
        cache, tree = runner.open(), TokenTree.chain(repeated_prompt(count - 1))
        runner.extend([cache], [repeated_prompt(CONTEXT)])
        return lambda _: runner.score([cache], [1], [tree]).logits[-1, 0].item()

    return {
        precision: {count: 1e3 * seconds for count, seconds in found.items()}
        for precision, found in passes(call, counts, 10 * given.repeats, given).items()
    }


def prefill(lengths: list[int], given: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Seconds of reading a prompt by precision and length, in turn."""

    def call(runner: Any, length: int) -> Callable[[Any], None]:
        def run(_: Any) -> None:
            cache = runner.open()
            runner.extend([cache], [repeated_prompt(length)])
            runner.release(cache)

        return run

    return passes(call, lengths, given.repeats, given)


def passes(
    call: Callable[[Any, int], Callable[[Any], None]], sizes: list[int], repeats: int, given: argparse.Namespace
) -> dict[str, dict[int, float]]:
    """Median seconds by precision and size of what `call` makes of a runner and a size."""
    runners = {precision: opened("smollm2", precision, given.threads).runner for precision in given.precisions}
    runs = {f"{precision} {size}": call(runner, size) for precision, runner in runners.items() for size in sizes}
    seconds = time_in_turn(runs, [None], repeats)
    return {
        precision: {size: float(median(seconds[f"{precision} {size}"][0])) for size in sizes} for precision in runners
    }


def repeated_prompt(tokens: int) -> list[int]:
    """So many tokens."""
    return [PROMPT[i % len(PROMPT)] for i in range(tokens)]


# ------------------------------------------------------------------------------------------------ plot


def plot(families: Mapping[str, Mapping[str, Any]], path: Path, plt: Any) -> None:
    """Ratios to llama.cpp with their intervals, and shares of the speed of reading memory."""
    names = [name for name in SHAPES if name in families]
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.42 * len(names) + 1.6), layout="constrained", sharey=True)
    for number, (precision, colour) in enumerate(COLOURS.items()):
        places = [(at, families[name][precision]) for at, name in enumerate(names) if precision in families[name]]
        height = {at: at + 0.25 * (number - 1) for at, _ in places}
        share = [one["share_of_bandwidth"] for _, one in places]
        axes[1].barh([height[at] for at, _ in places], share, 0.22, color=colour, label=precision)
        duels = [(height[at], one["over_llama.cpp"]) for at, one in places if "over_llama.cpp" in one]
        middle = [duel["median"] for _, duel in duels]
        around = [
            [duel["median"] - duel["low"] for _, duel in duels],
            [duel["high"] - duel["median"] for _, duel in duels],
        ]
        axes[0].errorbar(middle, [at for at, _ in duels], xerr=around, fmt="o", markersize=4, color=colour)
    axes[0].axvline(1, color="#000000", linestyle=":")
    axes[0].set(yticks=range(len(names)), yticklabels=names, xlabel="our tokens/s over llama.cpp's")
    axes[0].invert_yaxis()
    axes[1].set(xlabel="bytes of weights a second over the speed of reading memory")
    for axis in axes:
        axis.grid(color="#eeeeee")
        axis.set_axisbelow(True)
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default="all", help=f"all, or some of {', '.join(SHAPES)}")
    parser.add_argument("--precisions", default="bf16,int8,int4")
    parser.add_argument("--half", choices=("bfloat16", "float16"), default="bfloat16", help="llama.cpp's 16 bits")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="1,4,8,16")
    parser.add_argument("--prefill", default="512,2048")
    parser.add_argument("--only", default="decoding,rows,prefill")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.families = list(SHAPES) if given.families == "all" else given.families.split(",")
    given.precisions, given.only = given.precisions.split(","), given.only.split(",")
    for name, values, known in (
        ("families", given.families, SHAPES),
        ("precisions", given.precisions, FORMS),
        ("only", given.only, ("decoding", "rows", "prefill")),
    ):
        if unknown := [value for value in values if value not in known]:
            parser.error(f"--{name} must be of {', '.join(known)}, got {unknown[0]!r}")
    return given


def main() -> None:
    given, plt = parsed(), pyplot()
    torch.set_num_threads(given.threads)
    result = kept("families", given.folder)
    for name in given.families if "decoding" in given.only else ():
        cells = result.setdefault("families", {}).setdefault(name, {})
        for precision in given.precisions:
            cells[precision] = cell(name, precision, given)
            against_llama(result["families"])
            print(row(name, precision, cells[precision]), flush=True)
        save("families", result, given.folder, parts=[name])
    for part, measure in (("rows", rows), ("prefill", prefill)):
        if part in given.only:
            counts = [int(count) for count in getattr(given, part).split(",")]
            result[part] = measure(counts, given)
            print(part, result[part])
            save("families", result, given.folder, parts=[part])
    if families := result.get("families"):
        plot(families, given.folder / "families.png", plt)


if __name__ == "__main__":
    main()
