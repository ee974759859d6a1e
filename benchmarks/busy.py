"""What other programs on the machine cost: plain decoding beside busy processes, on all threads and on as many as pay.

usage: busy.py [--model smollm2] [--busy 0,2,5] [--tokens 96] [--repeats 6] [--threads 2] [--peer] [--folder FOLDER]

Beside so many processes that do nothing but compute, one prompt is decoded in turn with passes that always run on all
threads, with passes that go over to fewer while these hold each other up (`models.cpu.threads.TeamSize`), and with
`--peer` by llama.cpp, of the same weights (`python -m lab peers install llama.cpp`). Our outputs must be equal.
Results: `results/busy.json`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common import RESULTS, alternate, ratio, save
from decoding import add_model, model_of

from lab.peers import open_peer
from paceline import LLM, SamplingParams
from paceline.models.cpu import threads

PROMPT = "The history of the sea"
ALL = "all threads"


@contextmanager
def beside(processes: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()


@contextmanager
def all_threads() -> Iterator[None]:
    """Passes learn nothing of the time that they took."""
    kept = threads.TeamSize.took
    threads.TeamSize.took = lambda self, kind, seconds: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        threads.TeamSize.took = kept  # type: ignore[method-assign]


def measured(given: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    model = model_of(given.model)
    llms: list[LLM] = [model.open(threads=given.threads) for _ in range(2)]
    params, texts = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True), set[str]()

    def run(llm: LLM) -> None:
        (found,) = llm.generate(PROMPT, params, use_tqdm=False)
        texts.add(found.outputs[0].text)

    def fixed() -> None:
        with all_threads():
            run(llms[0])

    runs = {ALL: fixed, "as many as pay": lambda: run(llms[1])}
    if given.peer:
        peer = stack.enter_context(open_peer("llama.cpp", model.folder, threads=given.threads))
        prompt = llms[0].tokenizer.encode(PROMPT)
        runs["llama.cpp"] = lambda: peer.generate(prompt, given.tokens)
    found = {}
    for processes in map(int, given.busy.split(",")):
        with beside(processes):
            seconds = alternate(runs, given.repeats)
        if len(texts) != 1:
            raise SystemExit("the texts differ, nothing is timed")
        rates = {name: given.tokens * len(times) / sum(times) for name, times in seconds.items()}
        over = {name: ratio(seconds[ALL], times) for name, times in seconds.items() if name != ALL}
        found[f"{processes} busy processes"] = {"tokens_per_second": rates, "over_all_threads": over}
        print(processes, {name: round(rate, 1) for name, rate in rates.items()}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--busy", default="0,2,5")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    fields = {key: getattr(given, key) for key in ("tokens", "repeats", "threads")}
    with ExitStack() as stack:
        save("busy", {"model": model_of(given.model).name, **fields, "beside": measured(given, stack)}, given.folder)


if __name__ == "__main__":
    main()
