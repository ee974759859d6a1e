"""Speed against transformers with the same weights, dtype, device and threads, greedy, batch 1, in one run.

usage: speed.py [--model smollm2] [--device cpu] [--threads 2] [--repeats 3] [--prompts 24] [--tokens 64]
                [--only large,demo]

demo    the shipped prompts: Paceline plain and `auto` against transformers' generation, plain, with prompt lookup, and
        on the bundled pair with its draft model
large   a random 291M Llama in bfloat16: plain decoding against `generate`, the share of the memory-bandwidth limit, and
        the cost of scoring trees

Prompts go through the chat template; settings decode each prompt in turn. Outputs must be
equal, or differ first at a near tie (counted); otherwise nothing is timed. Parts that are not asked for, and other
models, stay as they are in `results/speed_DEVICE.json`, which says of every part which run made it; `table.py` writes
the table of the README from it.
"""

from __future__ import annotations

import argparse
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import RESULTS, alternate, kept, ratio, read_bandwidth, save
from decoding import Ids, Model, add_model, asked, differs, model_of, must_agree

from paceline import LLM, SamplingParams
from paceline.bench import BUNDLED_DRAFT, bundled_prompts
from paceline.tree import TokenTree
from paceline.utils import repeated, time_in_turn

DEVICE = "cpu"
UNITS = 4.0  # of tolerance against another engine, which rounds differently at every layer
AUTO = "paceline auto"


def open_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE).eval()


@torch.inference_mode()
def hf_generate(model: Any, ids: list[int], tokens: int, **options: Any) -> list[int]:
    inputs = torch.tensor([ids], device=DEVICE)
    out = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, do_sample=False, **options
    )
    return out[0, len(ids) :].tolist()


def ours(llm: LLM, ids: list[int], tokens: int, turn: str = "") -> list[int]:
    """The tokens of one request; what it taught a drafter stays within its turn, so that nobody copies an earlier
    answer.
    """
    prompt = {"prompt_token_ids": ids, "cache_salt": turn} if turn else {"prompt_token_ids": ids}
    (found,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=tokens))
    return found.outputs[0].token_ids


def large(repeats: int) -> dict[str, Any]:
    """The 291M model: plain speed, the share of the limit, rows."""
    model = model_of("291m")
    theirs, llm = open_transformers(model.folder), model.open(device=DEVICE)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 8192, (64,), generator=generator).tolist() for _ in range(2)]
    runs = {
        "transformers": lambda: [hf_generate(theirs, p, 64) for p in prompts],
        "paceline plain": lambda: [ours(llm, p, 64) for p in prompts],
    }
    outputs = {name: run() for name, run in runs.items()}
    agreement = must_agree(llm, prompts, outputs["paceline plain"], outputs["transformers"], units=UNITS, what="291M")
    seconds = alternate(runs, repeats)
    made = {name: sum(map(len, found)) for name, found in outputs.items()}
    rates = {name: made[name] / median(took) for name, took in seconds.items()}
    limits = [read_bandwidth(device=DEVICE) for _ in range(repeats)]
    turns = [[score_seconds(llm, nodes) for nodes in (0, 1, 3, 7, 15)] for _ in range(repeats)]
    step, weights = median(turn[0] for turn in turns), llm.runner.info.weight_bytes
    return {
        "agreement": agreement,
        "tokens_per_second": rates,
        "speedup": ratio(seconds["transformers"], seconds["paceline plain"]),
        "limit": {
            "weight_bytes": weights,
            "read_bandwidth": median(limits),
            "step_seconds": step,
            "share_of_limit": weights / median(limits) / step,
            "share_of_limit_generate": rates["paceline plain"] * weights / median(limits),
        },
        "tree_cost": {
            f"{n} nodes": median(turn[i] / turn[0] for turn in turns) for i, n in enumerate((0, 1, 3, 7, 15))
        },
    }


def score_seconds(llm: LLM, nodes: int, context: int = 96, repeats: int = 9) -> float:
    """Median seconds of scoring a root and a tree of so many nodes (two branches)."""
    cache = llm.runner.open()
    llm.runner.extend([cache], [[(7 * i) % 8192 for i in range(context)]])
    tree = TokenTree.build([(11 * i) % 8192 for i in range(nodes)], [max(-1, i - 2) for i in range(nodes)])

    def score() -> None:
        llm.runner.score([cache], [1], [tree]).logits[-1, 0].item()

    seconds = repeated(score, repeats, warm_up=2)
    llm.runner.release(cache)
    return median(seconds)


def demo(model: Model, repeats: int, prompts: int, tokens: int) -> dict[str, Any]:
    """The shipped prompts, every way."""
    off = model.open(device=DEVICE)
    auto, theirs = off.with_speculative_config({"method": "auto"}), open_transformers(model.folder)
    picked = [bundled_prompts()[5 * i % len(bundled_prompts())] for i in range(prompts)]
    ids, turns = [asked(off, prompt.prompt) for prompt in picked], count()
    runs: dict[str, Any] = {
        "transformers plain": lambda p: hf_generate(theirs, p, tokens),
        "transformers prompt lookup": lambda p: hf_generate(theirs, p, tokens, prompt_lookup_num_tokens=8),
        "paceline plain": lambda p: ours(off, p, tokens, f"turn {next(turns)}"),
        AUTO: lambda p: ours(auto, p, tokens, f"turn {next(turns)}"),
    }
    if model.name == "bundled":
        draft = open_transformers(BUNDLED_DRAFT)
        runs["transformers assisted"] = lambda p: hf_generate(theirs, p, tokens, assistant_model=draft)
    outputs = {name: [run(p) for p in ids] for name, run in runs.items()}
    base = outputs["paceline plain"]
    agreement = {name: must_agree(off, ids, base, found, units=UNITS, what=name) for name, found in outputs.items()}
    runs = {"paceline plain": runs.pop("paceline plain"), **runs}  # what the others are compared with
    taken = time_in_turn(runs, ids, repeats, differs=differs(off, UNITS))
    seconds = {name: one.T.tolist() for name, one in taken.items()}  # by repeat and prompt
    found: dict[str, Any] = {"weights": model.weights, "tokens": tokens, "agreement": agreement}
    groups = {
        "all": list(range(len(ids))),
        "with repetition": [i for i, prompt in enumerate(picked) if prompt.repetitive],
    }
    for group, chosen in groups.items():
        if chosen:
            found[group] = figures(seconds, outputs, chosen)
    return found


def figures(seconds: dict[str, list[list[float]]], outputs: dict[str, list[Ids]], chosen: list[int]) -> dict[str, Any]:
    """Rates over some prompts, and what `auto` takes against every other setting, by token."""
    made = {name: sum(len(found[i]) for i in chosen) for name, found in outputs.items()}
    per_token = {name: [sum(turn[i] for i in chosen) / made[name] for turn in turns] for name, turns in seconds.items()}
    return {
        "prompts": len(chosen),
        "tokens_per_second": {name: 1 / median(values) for name, values in per_token.items()},
        f"speedup of {AUTO} over": {
            name: ratio(values, per_token[AUTO]) for name, values in per_token.items() if name != AUTO
        },
        "seconds_per_token": per_token,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--only", default="large,demo")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    globals()["DEVICE"] = given.device
    torch.set_num_threads(given.threads)
    name, parts = f"speed_{given.device}", given.only.split(",")
    if "large" in parts:
        save(name, kept(name, given.folder) | {"large": large(given.repeats)}, given.folder, parts=["large"])
    if "demo" in parts:
        model, result = model_of(given.model), kept(name, given.folder)
        made = demo(model, given.repeats, given.prompts, given.tokens)
        result["demo"] = result.get("demo", {}) | {model.name: made}
        save(name, result, given.folder, parts=[f"demo {model.name}"])


if __name__ == "__main__":
    main()
