"""Speed against transformers with the same weights, dtype, device and threads, greedy, batch 1, in one run.

usage: speed.py [--device cpu] [--threads 2] [--repeats 7] [--model-dir DIR] [--only plain,large,demo]

plain   the bundled target, `LLM(...)` without drafts against `generate`
large   a random 291M Llama in bfloat16: the same, the share of the memory-bandwidth limit, and the cost of scoring trees
demo    the bundled prompts: Paceline plain and "auto" against transformers' assisted generation and prompt lookup

Outputs must be equal, or differ first at a near tie (counted); otherwise nothing is timed. Parts that are not asked for stay as
they are in the result file, which says of every part which run made it.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from common import alternate, kept, random_llama, ratio, read_bandwidth, save

from paceline import LLM, SamplingParams
from paceline.bench.compare import first_difference
from paceline.bench.demo import BUNDLED_DRAFT, BUNDLED_TARGET, bundled_prompts
from paceline.tree.token_tree import TokenTree

DEVICE = "cpu"
UNITS = 4.0  # of tolerance against another engine, which rounds differently at every layer


def open_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE).eval()


@torch.inference_mode()
def hf_generate(model: Any, ids: list[int], tokens: int, **options: Any) -> list[int]:
    inputs = torch.tensor([ids], device=DEVICE)
    out = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, do_sample=False, **options)
    return out[0, len(ids) :].tolist()


def ours(llm: LLM, ids: list[int], tokens: int, turn: str = "") -> list[int]:
    """The tokens of one request; what it taught a drafter stays within its turn, so that nobody copies an earlier answer."""
    prompt = {"prompt_token_ids": ids, "cache_salt": turn} if turn else {"prompt_token_ids": ids}
    (found,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=tokens))
    return found.outputs[0].token_ids


def must_agree(llm: LLM, prompts: list[list[int]], a: list[list[int]], b: list[list[int]], what: str) -> dict[str, int]:
    """Equal, or first different at a near tie; anything else ends the benchmark."""
    differences = [first_difference(llm.runner, p, x, y, UNITS) for p, x, y in zip(prompts, a, b, strict=True)]
    wrong = [d for d in differences if d is not None and not d.near_tie]
    if wrong:
        raise SystemExit(f"{what}: outputs differ outside near ties, nothing is timed: {wrong[:3]}")
    return {"prompts": len(prompts), "identical": sum(d is None for d in differences)}


def plain(repeats: int, name: str, folder: Path, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Plain decoding, ours against transformers'."""
    model, llm = (
        open_transformers(folder),
        LLM(
            folder if name != "bundled" else None,
            speculative_config=None,
            tokenizer=BUNDLED_TARGET,
            device=DEVICE,
            enable_prefix_caching=False,
        ),
    )
    theirs, mine = ([hf_generate(model, p, tokens) for p in prompts], [ours(llm, p, tokens) for p in prompts])
    agreement = must_agree(llm, prompts, mine, theirs, name)
    seconds = alternate(
        {
            "transformers": lambda: [hf_generate(model, p, tokens) for p in prompts],
            "paceline plain": lambda: [ours(llm, p, tokens) for p in prompts],
        },
        repeats,
    )
    made = {"transformers": sum(map(len, theirs)), "paceline plain": sum(map(len, mine))}
    per_token = {key: [s / made[key] for s in values] for key, values in seconds.items()}
    rates = {key: 1 / median(values) for key, values in per_token.items()}
    return {
        "agreement": agreement,
        "tokens_per_second": rates,
        "speedup": ratio(per_token["transformers"], per_token["paceline plain"]),
        "seconds_per_token": per_token,
    }


def large(repeats: int, folder: Path) -> dict[str, Any]:
    """The 291M model: plain speed, the share of the limit, rows."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 8192, (64,), generator=generator).tolist() for _ in range(2)]
    found = plain(repeats, "291M", folder, prompts, 64)
    llm = LLM(folder, speculative_config=None, tokenizer=BUNDLED_TARGET, device=DEVICE, enable_prefix_caching=False)
    limits, shares, steps = [], [], []
    for _ in range(repeats):
        bandwidth = read_bandwidth(device=DEVICE)
        step = score_seconds(llm, 0)
        limits.append(bandwidth)
        steps.append(step)
        shares.append(llm.runner.info.weight_bytes / bandwidth / step)
    turns = [[score_seconds(llm, nodes) for nodes in (0, 1, 3, 7, 15)] for _ in range(repeats)]
    cost = {nodes: [turn[i] / turn[0] for turn in turns] for i, nodes in enumerate((0, 1, 3, 7, 15))}
    found["limit"] = {
        "weight_bytes": llm.runner.info.weight_bytes,
        "read_bandwidth": median(limits),
        "step_seconds": median(steps),
        "share_of_limit": median(shares),
        "share_of_limit_generate": found["tokens_per_second"]["paceline plain"] * llm.runner.info.weight_bytes / median(limits),
    }
    found["profile"] = profile(llm)
    found["tree_cost"] = {f"{nodes} nodes": {"median": median(v), "all": v} for nodes, v in cost.items()}
    return found


def profile(llm: LLM, tokens: int = 32) -> dict[str, float]:
    """Share of the seconds of plain decoding by what they were spent on (`score` is the model's pass)."""
    before = llm.engine.times.to_dict()
    ours(llm, [(7 * i) % 8192 for i in range(96)], tokens)
    spent = {name: seconds - before[name] for name, seconds in llm.engine.times.to_dict().items() if name != "prefill"}
    return {name: round(seconds / sum(spent.values()), 4) for name, seconds in spent.items()}


def score_seconds(llm: LLM, nodes: int, context: int = 96, repeats: int = 9) -> float:
    """Median seconds of scoring a root and a tree of so many nodes (two branches)."""
    cache = llm.runner.open()
    llm.runner.extend([cache], [[(7 * i) % 8192 for i in range(context)]])
    tree = TokenTree.build([(11 * i) % 8192 for i in range(nodes)], [max(-1, i - 2) for i in range(nodes)])
    seconds = []
    for _ in range(repeats + 2):
        start = perf_counter()
        llm.runner.score([cache], [1], [tree]).logits[-1, 0].item()
        seconds.append(perf_counter() - start)
    llm.runner.release(cache)
    return median(seconds[2:])


def demo(repeats: int) -> dict[str, Any]:
    """The bundled prompts four ways."""
    llm = LLM(device=DEVICE, enable_prefix_caching=False)
    off = llm.with_speculative_config(None)
    model, draft = open_transformers(BUNDLED_TARGET), open_transformers(BUNDLED_DRAFT)
    prompts = bundled_prompts()
    ids = [llm.chat_ids([{"role": "user", "content": p.prompt}]) for p in prompts]
    tokens = 128
    runs: dict[str, Any] = {
        "transformers plain": lambda p, _: hf_generate(model, p, tokens),
        "transformers assisted": lambda p, _: hf_generate(model, p, tokens, assistant_model=draft),
        "transformers prompt lookup": lambda p, _: hf_generate(model, p, tokens, prompt_lookup_num_tokens=8),
        "paceline plain": lambda p, turn: ours(off, p, tokens, turn),
        "paceline auto": lambda p, turn: ours(llm, p, tokens, turn),
    }
    turns = count()

    def decode(name: str, picked: list[int]) -> list[list[int]]:
        turn = f"turn {next(turns)}"
        return [runs[name](ids[i], turn) for i in picked]

    outputs = {name: decode(name, list(range(len(ids)))) for name in runs}
    base = outputs["paceline plain"]
    agreement = {name: must_agree(off, ids, base, out, name) for name, out in outputs.items()}
    found: dict[str, Any] = {"agreement": agreement}
    for group, picked in (("all", list(range(len(ids)))), ("with repetition", [i for i, p in enumerate(prompts) if p.repetitive])):
        seconds = alternate({name: partial(decode, name, picked) for name in runs}, repeats)
        made = {name: sum(len(outputs[name][i]) for i in picked) for name in runs}
        per_token = {name: [s / made[name] for s in values] for name, values in seconds.items()}
        found[group] = {
            "tokens_per_second": {name: 1 / median(values) for name, values in per_token.items()},
            "speedup of paceline auto over": {
                n: ratio(v, per_token["paceline auto"]) for n, v in per_token.items() if n != "paceline auto"
            },
            "seconds_per_token": per_token,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "paceline-291m")
    parser.add_argument("--only", default="plain,large,demo")
    parser.add_argument("--name", help="name of the result file; default: speed_DEVICE")
    given = parser.parse_args()
    globals()["DEVICE"] = given.device
    torch.set_num_threads(given.threads)
    name, parts = given.name or f"speed_{given.device}", given.only.split(",")
    result = kept(name)
    if "plain" in parts:
        llm = LLM(speculative_config=None, device=DEVICE, enable_prefix_caching=False)
        prompts = [llm.chat_ids([{"role": "user", "content": p.prompt}]) for p in bundled_prompts()[:6]]
        result["plain"] = plain(given.repeats, "bundled", BUNDLED_TARGET, prompts, 128)
    if "large" in parts:
        result["large"] = large(given.repeats, random_llama(given.model_dir))
    if "demo" in parts:
        result["demo"] = demo(given.repeats)
    save(name, result, parts=[part for part in parts if part in result])


if __name__ == "__main__":
    main()
