"""int8 weights: plain decoding of the 291M model against its bfloat16 self and against other engines' int8, in one run.

usage: int8.py [--threads 2] [--repeats 5] [--tokens 96] [--model-dir DIR] [--peers llama.cpp,openvino-genai]

Engines round int8 weights differently, so their texts may part; the number of equal tokens is stored, nothing is withheld for it.
Our own int8 decoding is compared with itself under drafts (`ngram`), which must give equal tokens; otherwise nothing is timed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from common import random_llama, ratio, read_bandwidth, save

from paceline import LLM, SamplingParams
from paceline.bench import peers
from paceline.bench.demo import BUNDLED_TARGET

Run = Callable[[], tuple[float, list[int]]]


def ours(llm: LLM, prompt: list[int], tokens: int) -> Run:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def run() -> tuple[float, list[int]]:
        start = perf_counter()
        (found,) = llm.generate({"prompt_token_ids": prompt}, params)
        return perf_counter() - start, list(found.outputs[0].token_ids)

    return run


def theirs(peer: peers.Peer, prompt: list[int], tokens: int) -> Run:
    def run() -> tuple[float, list[int]]:
        found = peer.generate(prompt, tokens)
        return found.seconds, list(found.token_ids)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "paceline-291m")
    parser.add_argument("--peers", default="llama.cpp,openvino-genai")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    folder = random_llama(given.model_dir)
    prompt = torch.randint(0, 8192, (64,), generator=torch.Generator().manual_seed(3)).tolist()
    with ExitStack() as stack:
        runs: dict[str, Run] = {}
        for name in [name for name in given.peers.split(",") if name]:
            peer = stack.enter_context(peers.open(name, folder, dtype="int8", threads=given.threads, options={"method": "plain"}))
            runs[f"{name} int8"] = theirs(peer, prompt, given.tokens)
        for name, form in (("paceline int8", "int8"), ("paceline bfloat16", None)):
            llm = LLM(folder, tokenizer=BUNDLED_TARGET, speculative_config=None, dtype="bfloat16", quantization=form)
            runs[name] = ours(llm, prompt, given.tokens)
            if form and ours(llm.with_speculative_config({"method": "ngram"}), prompt, given.tokens)()[1] != runs[name]()[1]:
                sys.exit("int8 decoding with drafts differs from plain int8 decoding: nothing is timed")
        tokens = {name: run()[1] for name, run in runs.items()}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        bandwidth = []
        for _ in range(given.repeats):
            bandwidth.append(read_bandwidth(device="cpu"))
            for name, run in runs.items():
                seconds[name].append(run()[0])
    base = tokens["paceline int8"]
    found = {
        "tokens_per_second": {name: given.tokens / median(values) for name, values in seconds.items()},
        "paceline int8 over": {name: ratio(v, seconds["paceline int8"]) for name, v in seconds.items() if name != "paceline int8"},
        "tokens equal to paceline int8": {
            name: sum(a == b for a, b in zip(base, own, strict=True)) for name, own in tokens.items()
        },
        "read_bandwidth": bandwidth,
        "seconds": seconds,
    }
    for name, rate in found["tokens_per_second"].items():
        print(f"{name}: {rate:.1f} tokens/s")
    save("int8", found)


if __name__ == "__main__":
    main()
