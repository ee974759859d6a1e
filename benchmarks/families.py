"""Families of models in bfloat16, int8 and int4: plain decoding at batch 1 beside llama.cpp on the same weights, in
turn, in one run.

usage: families.py [--families all] [--precisions bf16,int8,int4] [--tokens 64] [--repeats 3] [--threads 2] [--avx2]
                   [--rows 1,4,8,16] [--prefill 512,2048] [--only decoding,rows,prefill]

decoding  tokens/s of both behind a prompt of 16 tokens; their ratio; bytes of weights that we read per second, as a
          share of the measured speed of reading memory, and over those of the Llama shape (of mixtures: of
          `llama-large`, whose weights do not fit the processor's cache either)
rows      milliseconds of our pass over a chain of so many rows, SmolLM2
prefill   seconds of our pass over a prompt of so many tokens, SmolLM2

Models are SmolLM2-135M, the shape of Gemma 3 270M, and one of 100M to 270M parameters of every family that runs
natively (hidden size 1024, 8 layers, vocabulary 32,000) with random weights: attention models, made once in the user
cache, and those of `hybrid_shapes.SMALL`, whose layers are partly or all recurrent, each in a temporary folder.

llama.cpp reads BF16 (--half float16: F16), Q8_0 or Q4_0 files, in Q4_0 with a head of 8 bits, as in our int4, made by
its own converter and quantiser. llama-bench runs with flash attention and without, and without repacking, and the best
of them counts. Texts of random weights mean nothing: what must agree are the log-probabilities of both engines in
float32, or nothing is timed, and our tokens in every repeat. A family that llama.cpp does not read has the reason in
place of its figures. `--families hybrids` are those of `hybrid_shapes.SMALL`, `attention` all others.

A family takes a minute and a half, with `--avx2`, which keeps both engines to AVX2 alone, up to twice as long; models
and files of attention models take 18 GB of disk. Results: `results/families.json`, written family by family, those of
AVX2 under `AVX2 alone`; `families.png`; a table by `family_table.py`; what a run leaves out keeps its figures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import RESULTS, keep_to_avx2, kept, pyplot, ratio, read_bandwidth, save
from hybrid_shapes import MIXTURES as HYBRID_MIXTURES
from hybrid_shapes import SMALL, small
from llama_files import agreement, converted
from own_computers import PARTS, SETTINGS, samples
from real_models import LLAMA_SOURCE, LlamaCpp, llama_cpp, smollm2

from paceline import LLM, SamplingParams
from paceline.bench import BUNDLED_TARGET, model_folder
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
    "deepseek_v3": (256, 32, 4), "glm4_moe": (256, 32, 4), "glm4_moe_lite": (256, 32, 4), "minimax_m2": (256, 32, 4),
    "hunyuan_v1_moe": (256, 32, 4), "ernie4_5_moe": (256, 32, 4), "gpt_oss": (512, 16, 4),
}  # fmt: skip
GEMMA_270M = "gemma3:hidden=640,layers=18,heads=4,kv_heads=1,head_dim=256,mlp=2048,vocab=262144,context=32768"
UNTIED = {"minimax_m2": ",tie=0"}
"""What llama.cpp does not read with a head that is the embedding."""

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
    "ernie4_5",
    "hunyuan_v1_dense",
    "seed_oss",
)
SHAPES = {
    "smollm2": "",
    **{family: f"{family}:{DENSE}" for family in DENSE_FAMILIES},
    "starcoder2": f"starcoder2:{NO_GATE}",
    "apertus": f"apertus:{NO_GATE},tie=0",
    "olmo3": f"olmo3:{DENSE},tie=0",
    "gemma3-270m": GEMMA_270M,
    LARGE_LLAMA: f"llama:{DENSE.replace('layers=8', 'layers=22')}",
    **{
        family: f"{family}:{DENSE.replace('2816', str(inner))},experts={experts},top_k={top_k}{UNTIED.get(family, '')}"
        for family, (inner, experts, top_k) in MIXTURES.items()
    },
}

NAMES = (*SHAPES, *SMALL)
GROUPS = {"all": NAMES, "attention": tuple(SHAPES), "hybrids": tuple(SMALL)}

Run = Callable[[], tuple[list[int], float]]
"""Gives tokens, and seconds from the first to the last."""


@contextmanager
def folder_of(name: str) -> Iterator[Path]:
    """The checkpoint: made if it is not there yet, or for this once."""
    if name not in SMALL:
        yield model_folder(SHAPES[name]) if SHAPES[name] else smollm2()
        return
    with tempfile.TemporaryDirectory() as work:
        yield small(name, Path(work) / name)


def opened(folder: Path, precision: str, threads: int) -> LLM:
    """Our engine, plain, with a tokenizer that it does not need."""
    options = {"speculative_config": None, "enable_prefix_caching": False, "dtype": "bfloat16", "threads": threads}
    return LLM(folder, tokenizer=BUNDLED_TARGET, quantization=FORMS[precision], **options)


# ------------------------------------------------------------------------------------------------ decoding


def ours(llm: LLM, tokens: int) -> Run:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def run() -> tuple[list[int], float]:
        (found,) = llm.generate({"prompt_token_ids": PROMPT}, params)
        found.raise_for_error()
        return list(found.outputs[0].token_ids), found.metrics.time_to_first_token or 0.0

    return run


def theirs(llama: LlamaCpp, file: Path, words: tuple[str, ...], given: argparse.Namespace) -> Run:
    """llama.cpp's speed in one setting; it names no tokens."""
    command = [str(llama.bench), "-m", str(file), "-t", str(given.threads), "-o", "json", *words]
    command += ["-p", "0", "-n", str(given.tokens - 1), "-d", str(len(PROMPT)), "-r", "1"]

    def run() -> tuple[list[int], float]:
        return [], (given.tokens - 1) / samples(command)[0, given.tokens - 1]

    return run


def cell(
    folder: Path, precision: str, llama: LlamaCpp, agreed: Mapping[str, Any], given: argparse.Namespace
) -> dict[str, Any]:
    """A family in one precision: speeds of both, their ratio, and what share of reading memory ours is.

    Args:
        agreed: as `llama_files.agreement` says.

    Raises:
        SystemExit: our tokens change.
    """
    llm, found = opened(folder, precision, given.threads), dict(agreed)
    runs = {"paceline": ours(llm, given.tokens)}
    kind = given.half if precision == "bf16" else precision
    if "apart" in agreed:
        file = converted(llama, folder, kind, given.threads)
        runs |= {setting: theirs(llama, file, words, given) for setting, words in SETTINGS.items()}
    first = {which: run()[0] for which, run in runs.items()}
    taken: dict[str, list[float]] = {which: [] for which in runs}
    bandwidth = []
    for turn in in_turn({which: lambda *_, run=run: run() for which, run in runs.items()}, [None], given.repeats):
        bandwidth.append(read_bandwidth())
        for which, (tokens, seconds) in turn.outputs.items():
            if tokens != first[which]:
                sys.exit(f"{folder.name} in {precision}: {which} wrote other tokens this time, nothing is timed")
            taken[which].append(turn.seconds[which] - seconds if which == "paceline" else seconds)
    seconds = {"paceline": taken["paceline"]}
    if len(taken) > 1:
        setting = min(SETTINGS, key=lambda name: median(taken[name]))
        seconds["llama.cpp"] = taken[setting]
        found["llama.cpp"] = {"weights": file.stem, "setting": setting, "version": "==".join(LLAMA_SOURCE)}
        found["over_llama.cpp"] = ratio(seconds["llama.cpp"], seconds["paceline"])
    steps, weights = given.tokens - 1, llm.runner.info.weight_bytes
    rates = {which: steps / median(some) for which, some in seconds.items()}
    llm.close()
    return found | {
        "tokens_per_second": rates,
        "weight_bytes": weights,
        "bytes_per_second": rates["paceline"] * weights,
        "share_of_bandwidth": rates["paceline"] * weights / median(bandwidth),
        "read_bandwidth": median(bandwidth),
        "seconds": seconds,
    }


def against_llama(families: Mapping[str, Mapping[str, Any]]) -> None:
    """Bytes per second of every cell over those of the Llama shape in its precision; of mixtures, the large one."""
    for name, cells in families.items():
        beside = families.get(LARGE_LLAMA if name in (*MIXTURES, *HYBRID_MIXTURES) else "llama", {})
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
    return f"{name:14s} {precision:5s} {rates['paceline']:7.1f} {peer} tokens/s {duel} {speed} {beside}"


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
    runners = {precision: opened(smollm2(), precision, given.threads).runner for precision in given.precisions}
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
    names = [name for name in NAMES if name in families]
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
    parser.add_argument("--families", default="all", help=f"{', '.join(GROUPS)}, or some of {', '.join(NAMES)}")
    parser.add_argument("--precisions", default="bf16,int8,int4")
    parser.add_argument("--half", choices=("bfloat16", "float16"), default="bfloat16", help="llama.cpp's 16 bits")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--rows", default="1,4,8,16")
    parser.add_argument("--prefill", default="512,2048")
    parser.add_argument("--only", default="decoding,rows,prefill")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.families = GROUPS.get(given.families) or given.families.split(",")
    given.precisions, given.only = given.precisions.split(","), given.only.split(",")
    for name, values, known in (
        ("families", given.families, NAMES),
        ("precisions", given.precisions, FORMS),
        ("only", given.only, ("decoding", "rows", "prefill")),
    ):
        if unknown := [value for value in values if value not in known]:
            parser.error(f"--{name} must be of {', '.join(known)}, got {unknown[0]!r}")
    return given


def main() -> None:
    given = parsed()
    if given.avx2:
        keep_to_avx2()
    plt = pyplot()
    torch.set_num_threads(given.threads)
    whole = kept("families", given.folder)
    result = whole.setdefault(PARTS[True], {}) if given.avx2 else whole

    def store(part: str) -> None:
        save("families", whole, given.folder, parts=[f"{PARTS[True]}, {part}" if given.avx2 else part])

    for name in given.families if "decoding" in given.only else ():
        cells = result.setdefault("families", {}).setdefault(name, {})
        llama = llama_cpp(avx2=given.avx2)
        with folder_of(name) as folder:
            agreed = agreement(llama, folder, given.threads)
            for precision in given.precisions:
                cells[precision] = cell(folder, precision, llama, agreed, given)
                against_llama(result["families"])
                print(row(name, precision, cells[precision]), flush=True)
        store(name)
    for part, measure in (("rows", rows), ("prefill", prefill)):
        if part in given.only:
            counts = [int(count) for count in getattr(given, part).split(",")]
            result[part] = measure(counts, given)
            print(part, result[part])
            store(part)
    if families := whole.get("families"):
        plot(families, given.folder / "families.png", plt)


if __name__ == "__main__":
    main()
