"""int8 and int4 weights: plain decoding of the 291M model against bfloat16 and other engines' int8, and what rounding costs.

usage: quantized.py [--device cpu] [--threads 2] [--repeats 5] [--tokens 96] [--model-dir DIR] [--peers llama.cpp,openvino-genai]

Engines round weights differently, so their texts may part; the number of equal tokens is stored, nothing is withheld for it. Our
own decoding on the CPU is compared with itself under drafts (`ngram`), which must give equal tokens; otherwise nothing is timed.
Share of the limit: bytes of weights read per second over the speed of reading memory. Errors are those of logits on 512 tokens of
the bundled prompts for the bundled target, on the random prompt for the random model, in standard deviations of bfloat16's logits.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from common import random_llama, ratio, read_bandwidth, save

from paceline import LLM, SamplingParams
from paceline.bench import peers
from paceline.bench.demo import BUNDLED_TARGET

Run = Callable[[], tuple[float, list[int]]]

FORMS = {"paceline int4": "int4", "paceline int8": "int8", "paceline bfloat16": None}


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


def errors(llms: Mapping[str | None, LLM], ids: list[int]) -> dict[str, dict[str, float]]:
    """Of each form: error of logits, divergence of distributions in nats, share of positions with the same most likely token."""

    def logits(form: str | None) -> torch.Tensor:
        runner = llms[form].runner
        return runner.extend([runner.open()], [ids], all_logits=True).logits.float()

    wanted, found = logits(None), {}
    law = wanted.log_softmax(-1)
    for form in ("int8", "int4"):
        own = logits(form)
        found[form] = {
            "logit_error": float((own - wanted).square().mean().sqrt() / wanted.std()),
            "divergence": float((law.exp() * (law - own.log_softmax(-1))).sum(-1).mean()),
            "same_token": float((own.argmax(-1) == wanted.argmax(-1)).float().mean()),
        }
    return found


def bundled_errors(device: str) -> dict[str, dict[str, float]]:
    """`errors` of the bundled target on 512 tokens of the bundled prompts."""
    llms = {form: LLM(speculative_config=None, dtype="bfloat16", quantization=form, device=device) for form in FORMS.values()}
    lines = (Path(BUNDLED_TARGET).parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    text = "\n".join(str(json.loads(line)["prompt"]) for line in lines)
    return errors(llms, llms[None].tokenizer.encode(text)[:512])


def timed(runs: dict[str, Run], repeats: int, device: str) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of each run, in turn, and the speed of reading memory beside them."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    bandwidth = []
    for _ in range(repeats):
        bandwidth.append(read_bandwidth(device=device))
        for name, run in runs.items():
            seconds[name].append(run()[0])
    return seconds, bandwidth


def checked(llms: Mapping[str | None, LLM], prompt: list[int], given: argparse.Namespace) -> dict[str, Run]:
    """Our own decoding in each form; exits where drafts change its tokens."""
    runs: dict[str, Run] = {}
    for name, form in FORMS.items():
        runs[name] = ours(llms[form], prompt, given.tokens)
        if given.device == "cpu" and form:
            drafted = ours(llms[form].with_speculative_config({"method": "ngram"}), prompt, given.tokens)
            if drafted()[1] != runs[name]()[1]:
                sys.exit(f"{form} decoding with drafts differs from plain {form} decoding: nothing is timed")
    return runs


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "paceline-291m")
    parser.add_argument("--peers", help="default: llama.cpp,openvino-genai on the CPU, none on CUDA")
    given = parser.parse_args()
    if given.peers is None:
        given.peers = "" if given.device == "cuda" else "llama.cpp,openvino-genai"
    return given


def main() -> None:
    given = parsed()
    torch.set_num_threads(given.threads)
    folder = random_llama(given.model_dir)
    prompt = torch.randint(0, 8192, (64,), generator=torch.Generator().manual_seed(3)).tolist()
    shared: dict[str, Any] = {"tokenizer": BUNDLED_TARGET, "speculative_config": None, "dtype": "bfloat16", "device": given.device}
    llms = {form: LLM(folder, quantization=form, **shared) for form in FORMS.values()}
    found: dict[str, Any] = {"errors": {"291m": errors(llms, prompt), "bundled": bundled_errors(given.device)}}
    weights = {name: llms[form].runner.info.weight_bytes for name, form in FORMS.items()}
    with ExitStack() as stack:
        runs: dict[str, Run] = {}
        for name in [name for name in given.peers.split(",") if name]:
            peer = stack.enter_context(peers.open(name, folder, dtype="int8", threads=given.threads, options={"method": "plain"}))
            runs[f"{name} int8"] = theirs(peer, prompt, given.tokens)
        runs |= checked(llms, prompt, given)
        tokens = {name: run()[1] for name, run in runs.items()}
        seconds, bandwidth = timed(runs, given.repeats, given.device)
    for name in FORMS:
        same = {other: sum(a == b for a, b in zip(tokens[name], own, strict=True)) for other, own in tokens.items()}
        found[f"{name} over"] = {other: ratio(v, seconds[name]) for other, v in seconds.items() if other != name}
        found[f"tokens equal to {name}"] = same
    rates = {name: given.tokens / median(values) for name, values in seconds.items()}
    limits = {name: rates[name] * size / median(bandwidth) for name, size in weights.items()}
    for name, rate in rates.items():
        print(f"{name}: {rate:.1f} tokens/s" + (f", {limits[name]:.2f} of the limit" if name in limits else ""))
    figures = {"tokens_per_second": rates, "share_of_the_limit": limits, "weight_bytes": weights}
    measured = {"read_bandwidth": bandwidth, "seconds": seconds}
    save("quantized" if given.device == "cpu" else "quantized_cuda", {**figures, **found, **measured})


if __name__ == "__main__":
    main()
