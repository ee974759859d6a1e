"""Files that people download, on the processor that they have: Paceline beside llama.cpp.

usage: own_computers.py [FILE...] [--avx2] [--everyday] [--repeats 3] [--threads 2] [--llama-bench PROGRAM]
                        [--folder FOLDER]

For each file, both engines in turn, each in processes of its own, medians of the repeats:

prefill   tokens per second of prompts of 512 and 2,048 tokens
decode    tokens per second of plain decoding, 32 tokens
rows      milliseconds of a pass over 1 to 32 rows; llama.cpp's are prompts of so many tokens
ready     seconds from imported libraries to the first token. Ours twice: the first start, with an empty cache folder,
          and the next one with what the first has kept there. Of llama.cpp the whole process, which keeps nothing
peak      bytes of memory until then, the mapped file included: beyond a process without a model, ours twice
everyday  tokens per second on the tasks of `paceline demo`, prompts included: plain, and as `auto` drafts. Ours only;
          nothing is kept where a text differs
limit     bytes per second of reading an array of the size of the matrices that a step reads, by as many threads, in the
          same run: a step reads its matrices once

llama.cpp runs with flash attention and without, and without repacking; the best median counts, each figure for itself.
`--everyday` times the everyday tasks alone, and keeps them under `everyday`, apart from the other figures, with the
processor's name: the two may be of different machines.

FILE is a name of `real_models.py` (default: all three), which makes file and llama.cpp, or a path. `--avx2` keeps both
engines to AVX2 alone. Files are in the system's memory and kernels are compiled: a first round does not count.

Results: `results/own_computers.json`, by processor and file; `own_table.py` makes tables and a plot of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from common import RESULTS, keep_to_avx2, kept, provenance, reading_limit, save
from own_probe import NEW, PROMPTS, ROWS
from real_models import FILES, gguf_file, llama_cpp

from paceline.utils import user_cache

PROBE = Path(__file__).parent / "own_probe.py"
SETTINGS = {
    "flash attention": ("-fa", "on"),
    "no flash attention": ("-fa", "off"),
    "no repacking": ("-fa", "on", "--repack", "0"),
}
PARTS = {True: "AVX2 alone", False: "all instructions"}


def paceline(file: Path, threads: int, cache: str, *words: str) -> dict[str, Any]:
    """A process of ours with its own cache folder, and one thread or many as it is told."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PACELINE_CACHE_DIR": cache, "NUMBA_NUM_THREADS": str(threads)}
    command = [sys.executable, str(PROBE), str(file), "--threads", str(threads), *words]
    found: dict[str, Any] = json.loads(output(command, environment).splitlines()[-1])
    return found


def both_starts(file: Path, threads: int) -> dict[str, Any]:
    """The first start, then the next one and all speeds."""
    with tempfile.TemporaryDirectory(dir=user_cache("models")) as cache:
        first = paceline(file, threads, cache)
        found = paceline(file, threads, cache, "--speeds")
    for name in ("ready", "load", "peak"):
        found[name] = {"first": first[name], "next": found[name]}
    return found


def everyday(file: Path, threads: int) -> dict[str, float]:
    """The demo's tasks, plain and with drafts.

    Raises:
        SystemExit: a text differs.
    """
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "paceline", "demo", "--json", "--model", str(file), "--threads", str(threads)]
    total = json.loads(output(command, environment))["totals"][-1]
    if total["identical"] != total["prompts"]:
        sys.exit(f"{file.name}: {total['prompts'] - total['identical']} texts differ with drafts; no speed is kept")
    return {"plain": total["plain_tokens_per_second"], "drafts": total["tokens_per_second"]}


def llama(program: Path, file: Path, threads: int) -> dict[str, Any]:
    """The same by llama-bench, by setting."""
    command = [str(program), "-m", str(file), "-t", str(threads), "-o", "json"]
    start = perf_counter()
    process = subprocess.Popen(
        [*command, "-p", "1", "-n", "0", "-r", "1", "--no-warmup"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{program.name} ended with {os.waitstatus_to_exitcode(status)} on {file.name}; try it alone")
    found = {"ready": perf_counter() - start, "peak": usage.ru_maxrss * 1024}
    return found | {name: llama_speeds([*command, *words]) for name, words in SETTINGS.items()}


def llama_speeds(command: Sequence[str]) -> dict[str, Any]:
    speed = samples([*command, "-p", ",".join(map(str, ROWS[1:])), "-n", str(NEW), "-r", "5"])
    speed |= samples([*command, "-p", ",".join(map(str, PROMPTS)), "-n", "0", "-r", "1"])
    rows = {1: 1e3 / speed[0, NEW]} | {count: 1e3 * count / speed[count, 0] for count in ROWS[1:]}
    return {"prefill": {length: speed[length, 0] for length in PROMPTS}, "decode": speed[0, NEW], "rows": rows}


def samples(command: Sequence[str]) -> dict[tuple[int, int], float]:
    """Median tokens per second of a llama-bench that answers in JSON, by tokens of the prompt and tokens decoded."""
    return {(row["n_prompt"], row["n_gen"]): median(row["samples_ts"]) for row in json.loads(output(command))}


def output(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """What a program prints.

    Raises:
        SystemExit: it failed; with its last line.
    """
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        sys.exit(f"{' '.join(command)} ended with {done.returncode} ({why})")
    return done.stdout


def middle(runs: Sequence[Any]) -> Any:
    """Medians of all figures; of words the first."""
    first = runs[0]
    if isinstance(first, dict):
        return {key: middle([one[key] for one in runs]) for key in first}
    return first if isinstance(first, str) else median(runs)


def best(found: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp's figures, each of the best setting."""
    settings = [found[name] for name in SETTINGS]
    return {
        "ready": {"next": found["ready"]},
        "peak": {"next": found["peak"]},
        "prefill": {length: max(one["prefill"][length] for one in settings) for length in PROMPTS},
        "decode": max(one["decode"] for one in settings),
        "rows": {count: min(one["rows"][count] for one in settings) for count in ROWS},
    }


def measured(file: Path, program: Path, given: argparse.Namespace) -> dict[str, Any]:
    ours, theirs, limits = [], [], []
    both_starts(file, given.threads)
    for turn in range(given.repeats):
        print(f"{file.stem}: round {turn + 1} of {given.repeats}", file=sys.stderr, flush=True)
        ours.append(both_starts(file, given.threads))
        limits.append(reading_limit(int(ours[-1]["bytes"]), given.threads))
        theirs.append(llama(program, file, given.threads))
    mine, limit = middle(ours), median(limits)
    return {
        "paceline": mine | {"everyday": everyday(file, given.threads)},
        "llama.cpp": best(middle(theirs)),
        "limit": limit,
        "of the limit": mine["decode"] * mine["bytes"] / limit,
    }


def tasks_alone(file: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Medians of the everyday tasks, and on what."""
    runs = [everyday(file, given.threads) for _ in range(given.repeats)]
    return middle(runs) | {"made": provenance()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=list(FILES), metavar="FILE")
    parser.add_argument("--llama-bench", type=Path, help="default: that of real_models.py")
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--everyday", action="store_true", help="the everyday tasks alone")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.avx2:
        keep_to_avx2()
    if given.everyday:
        for name in given.files:
            file = gguf_file(name) if name in FILES else Path(name)
            result = kept("own_computers", given.folder)
            tasks = result.get("everyday", {}) | {f"{PARTS[given.avx2]}, {file.stem}": tasks_alone(file, given)}
            print(file.stem, json.dumps(tasks), flush=True)
            save("own_computers", result | {"everyday": tasks}, given.folder, parts=["everyday"])
        return
    program = given.llama_bench or llama_cpp(avx2=given.avx2).bench
    for name in given.files:
        file = gguf_file(name) if name in FILES else Path(name)
        part = f"{PARTS[given.avx2]}, {file.stem}"
        result = kept("own_computers", given.folder) | {part: measured(file, program, given)}
        print(part, json.dumps(result[part]), flush=True)
        save("own_computers", result, given.folder, parts=[part])


if __name__ == "__main__":
    main()
