"""One process of `own_computers.py`: starts a model, then measures it where it is asked to; a line of JSON.

usage: own_probe.py FILE [--threads 2] [--speeds]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import psutil
import torch
from common import instructions

from paceline.bench import BUNDLED_TARGET, machine
from paceline.models import load_runner
from paceline.tree import EMPTY_TREE, TokenTree

ROWS, PROMPTS = (1, 2, 4, 8, 16, 32), (512, 2048)
NEW, CONTEXT = 32, 2304


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return median(times[1:])


def text(length: int) -> list[int]:
    return [(7 * i) % 5000 + 100 for i in range(length)]


def started(file: str) -> tuple[Any, dict[str, Any]]:
    """The model, and seconds and bytes until its first token; libraries are there, kernels compiled and used before."""
    bundled = load_runner(BUNDLED_TARGET)
    bundled.extend([bundled.open()], [[1, 2, 3]])
    meter, before = machine.MemoryMeter(torch.device("cpu")), psutil.Process().memory_info().rss
    meter.start()
    start = perf_counter()
    runner = load_runner(file, max_context=CONTEXT)
    loaded = perf_counter() - start
    cache = runner.open(1)
    runner.extend([cache], [[100]])
    ready = perf_counter() - start
    runner.release(cache)
    peak, _ = meter.stop()
    assert peak is not None
    found = {"load": loaded, "ready": ready, "peak": peak - before, "bytes": runner.info.weight_bytes}
    return runner, found


def speeds(runner: Any) -> dict[str, Any]:
    """Tokens per second of prompts and of decoding; milliseconds of passes that score a chain."""
    return {
        "prefill": {length: length / seconds(lambda n=length: prefill(runner, n), 1) for length in PROMPTS},
        **decoding(runner),
    }


def prefill(runner: Any, length: int) -> None:
    cache = runner.open(length)
    runner.extend([cache], [text(length)])
    runner.release(cache)


def decoding(runner: Any) -> dict[str, Any]:
    cache = runner.open(64)
    runner.extend([cache], [text(64)])

    def decode() -> None:
        for token in range(NEW):
            runner.score([cache], [100 + token], [EMPTY_TREE])
            runner.commit([cache], [()])
        runner.truncate(cache, 64)

    rows = {}
    for count in ROWS:
        tree = TokenTree.chain(list(range(200, 199 + count))) if count > 1 else EMPTY_TREE
        rows[count] = 1e3 * seconds(lambda tree=tree: runner.score([cache], [5], [tree]), 5)
    return {"decode": NEW / seconds(decode, 3), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--speeds", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    runner, found = started(given.file)
    found["instructions"] = instructions()
    found["passes"] = type(runner.passes).__name__
    if given.speeds:
        found |= speeds(runner)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
