"""int8 and int4 weights: plain decoding against bfloat16 and other engines' int8, and what rounding costs.

usage: quantized.py [--model smollm2] [--device cpu] [--threads 2] [--repeats 5] [--tokens 96]
                    [--peers llama.cpp,openvino-genai]

Engines round weights differently, so their texts may part; the number of equal tokens is stored, nothing is withheld
for it. Our own decoding on the CPU is compared with itself under drafts (`ngram`), which must give equal tokens;
otherwise nothing is timed. Share of the limit: bytes of weights read per second over the speed of reading memory.
Errors are those of logits on 512 tokens of the shipped prompts, in standard deviations of bfloat16's logits; SmolLM2's
weights here were rounded to 4 bits before, which flatters. Results: `results/quantized_MODEL.json`, on CUDA
`quantized_MODEL_cuda.json`.
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
from common import RESULTS, ratio, read_bandwidth, save
from decoding import add_model, model_of

from lab.peers import Peer, open_peer
from paceline import LLM, SamplingParams
from paceline.bench import bundled_prompts
from paceline.utils import in_turn

Run = Callable[[], tuple[list[int], float | None]]
"""Gives tokens, and the seconds that an engine in another process took by its own clock."""

FORMS = {"paceline int4": "int4", "paceline int8": "int8", "paceline bfloat16": None}


def ours(llm: LLM, prompt: list[int], tokens: int) -> Run:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def run() -> tuple[list[int], None]:
        (found,) = llm.generate({"prompt_token_ids": prompt}, params)
        return list(found.outputs[0].token_ids), None

    return run


def theirs(peer: Peer, prompt: list[int], tokens: int) -> Run:
    def run() -> tuple[list[int], float]:
        found = peer.generate(prompt, tokens)
        return list(found.token_ids), found.seconds

    return run


def errors(llms: Mapping[str | None, LLM], ids: list[int]) -> dict[str, dict[str, float]]:
    """Of each form: error of logits, divergence of distributions in nats, share of positions with the same most likely
    token.
    """

    def logits(form: str | None) -> torch.Tensor:
        runner = llms[form].runner
        return runner.extend([runner.open()], [ids], all_logits=True).logits.float()

    wanted, found = logits(None), {}
    distribution = wanted.log_softmax(-1)
    for form in ("int8", "int4"):
        own = logits(form)
        found[form] = {
            "logit_error": float((own - wanted).square().mean().sqrt() / wanted.std()),
            "divergence": float((distribution.exp() * (distribution - own.log_softmax(-1))).sum(-1).mean()),
            "same_token": float((own.argmax(-1) == wanted.argmax(-1)).float().mean()),
        }
    return found


def seconds_of(runs: dict[str, Run], repeats: int, device: str) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of each run, in turn, and the speed of reading memory beside them."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    bandwidth = []
    calls = {name: lambda *_, run=run: run() for name, run in runs.items()}
    for turn in in_turn(calls, [None], repeats):
        bandwidth.append(read_bandwidth(device=device))
        for name, (_, own) in turn.outputs.items():
            seconds[name].append(own or turn.seconds[name])
    return seconds, bandwidth


def checked(llms: Mapping[str | None, LLM], prompt: list[int], given: argparse.Namespace) -> dict[str, Run]:
    """Our own decoding in each form; exits where drafts change its tokens."""
    runs: dict[str, Run] = {}
    for name, form in FORMS.items():
        runs[name] = ours(llms[form], prompt, given.tokens)
        if given.device == "cpu" and form:
            drafted = ours(llms[form].with_speculative_config({"method": "ngram"}), prompt, given.tokens)
            if drafted()[0] != runs[name]()[0]:
                sys.exit(f"{form} decoding with drafts differs from plain {form} decoding: nothing is timed")
    return runs


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--peers", help="default: llama.cpp,openvino-genai on the CPU, none on CUDA")
    given = parser.parse_args()
    if given.peers is None:
        given.peers = "" if given.device == "cuda" else "llama.cpp,openvino-genai"
    return given


def main() -> None:
    given = parsed()
    torch.set_num_threads(given.threads)
    model = model_of(given.model)
    llms = {form: model.open(quantization=form, dtype="bfloat16", device=given.device) for form in FORMS.values()}
    text = llms[None].tokenizer.encode("\n".join(prompt.prompt for prompt in bundled_prompts()))
    prompt = text[:64]
    found: dict[str, Any] = {"model": model.weights, "errors": errors(llms, text[:512])}
    weights = {name: llms[form].runner.info.weight_bytes for name, form in FORMS.items()}
    with ExitStack() as stack:
        runs: dict[str, Run] = {}
        for name in [name for name in given.peers.split(",") if name]:
            peer = stack.enter_context(
                open_peer(name, model.folder, dtype="int8", threads=given.threads, options={"method": "plain"})
            )
            runs[f"{name} int8"] = theirs(peer, prompt, given.tokens)
        runs |= checked(llms, prompt, given)
        tokens = {name: run()[0] for name, run in runs.items()}
        seconds, bandwidth = seconds_of(runs, given.repeats, given.device)
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
    name = f"quantized_{model.name}" + ("" if given.device == "cpu" else "_cuda")
    save(name, {**figures, **found, **measured}, given.folder)


if __name__ == "__main__":
    main()
