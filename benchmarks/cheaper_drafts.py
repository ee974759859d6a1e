"""Drafts from cheaper models: rounded copies of the target, trimmed heads, a hierarchy; acceptance and speed.

usage: cheaper_drafts.py PART [--threads 2] [--repeats 5] [--tokens 64] [--model-dir DIR]

Parts, each stored beside the others in results/cheaper_drafts.json:
  bundled    plain decoding, the bundled draft, int8 and int4 copies and the hierarchy on the bundled target, four of its prompts
  291m       the same copies on the random-weights model of 291M parameters, whose step is its weights
  trim       the bundled draft with heads of several sizes, counted on what the target says to other prompts than those measured

Greedy, bfloat16, batch 1. Every setting's tokens are compared with plain decoding's; where they differ, their number is stored
(bfloat16 passes of several rows may differ in near ties). Settings take turns; ratios are medians of pairs with 95 % bootstrap
intervals. A level of a chain is a fifth of a chain of five tokens drafted by the runner, in turn with steps of the target.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from common import alternate, kept, random_llama, ratio, save

from paceline import LLM, SamplingParams
from paceline.bench.demo import BUNDLED_DRAFT, BUNDLED_TARGET, bundled_prompts
from paceline.drafters.vocab_trim import kept_tokens
from paceline.models.load import load_runner
from paceline.tree.token_tree import EMPTY_TREE

Prompts = list[dict[str, list[int]]]
SIZES = (6144, 4096, 2048, 1024, 512, 300)
LEVELS, CONTEXT = 5, 200


def copies(lengths: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Rounded copies with chains of some lengths."""
    return {
        f"{form} copy, {length}": {"method": "quantized_copy", "quantization": form, "num_speculative_tokens": length}
        for form in ("int8", "int4")
        for length in lengths
    }


def bundled_settings() -> dict[str, dict[str, Any]]:
    draft = {"method": "draft_model", "model": str(BUNDLED_DRAFT)}
    hierarchy = {"method": "specmquant", "model": str(BUNDLED_DRAFT), "quantization": "int4"}
    return {
        "draft model, 4": draft | {"num_speculative_tokens": 4},
        **copies((2, 4)),
        "hierarchy, 4": hierarchy | {"num_speculative_tokens": 6, "min_draft_length": 4},
        "hierarchy, 8": hierarchy | {"num_speculative_tokens": 10, "min_draft_length": 8},
    }


def decoding(plain: LLM, settings: Mapping[str, dict[str, Any]], prompts: Prompts, repeats: int, tokens: int) -> dict[str, Any]:
    """Acceptance, mean acceptance length and speed of each setting against plain decoding."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    llms = {"plain": plain} | {name: plain.with_speculative_config(config) for name, config in settings.items()}
    found: dict[str, Any] = {}

    def run(llm: LLM) -> Callable[[], list[Any]]:
        return lambda: [llm.generate(prompt, params)[0] for prompt in prompts]

    for name, llm in llms.items():
        outs = run(llm)()
        drafted, stood = (sum(getattr(o.metrics, key) for o in outs) for key in ("num_draft_tokens", "num_accepted_tokens"))
        written = [token for o in outs for token in o.outputs[0].token_ids]
        found[name] = {"drafted": drafted, "accepted": stood, "acceptance": stood / drafted if drafted else None, "tokens": written}
    want = found["plain"]["tokens"]
    seconds = alternate({name: run(llm) for name, llm in llms.items()}, repeats)
    for name, one in found.items():
        one["differing_tokens"] = sum(a != b for a, b in zip(one.pop("tokens"), want, strict=True))
        one["tokens_per_second"] = len(want) / median(seconds[name])
        one["mean_acceptance_length"] = len(want) / max(1, len(want) - one["accepted"])
        one["over_plain"] = ratio(seconds["plain"], seconds[name])
        one["seconds"] = seconds[name]
    return found


def chat(llm: LLM, which: slice) -> Prompts:
    return [{"prompt_token_ids": llm.chat_ids([{"role": "user", "content": p.prompt}])} for p in bundled_prompts()[which]]


def level_seconds(runner: Any, target: Any, repeats: int) -> dict[str, float]:
    """Of a level of a chain and of a step of the target, in turn."""
    text = [(31 * i) % 6000 + 4 for i in range(CONTEXT)]
    caches = target.open(), runner.open()
    target.extend([caches[0]], [text])
    runner.extend([caches[1]], [text])
    levels, steps = [], []
    for _ in range(repeats):
        start = perf_counter()
        target.score([caches[0]], [7], [EMPTY_TREE])
        middle = perf_counter()
        runner.draft_chains([caches[1]], [[7]], [LEVELS], [None])
        end = perf_counter()
        runner.truncate(caches[1], CONTEXT)
        steps.append(middle - start)
        levels.append((end - middle) / LEVELS)
    return {"draft_level_seconds": median(levels), "target_step_seconds": median(steps)}


def trimmed(repeats: int, tokens: int) -> dict[str, Any]:
    """Heads of several sizes: time of a level, acceptance and speed on prompts that the counts have not seen."""
    plain = LLM(speculative_config=None, dtype="bfloat16", seed=1)
    params = SamplingParams(temperature=0.0, max_tokens=192)
    counts: dict[str, int] = {}
    for out in plain.generate(chat(plain, slice(0, None, 2)), params):
        for token in out.outputs[0].token_ids:
            counts[str(token)] = counts.get(str(token), 0) + 1
    file = Path(tempfile.mkdtemp()) / "counts.json"
    file.write_text(json.dumps(counts))
    prompts = chat(plain, slice(1, None, 6))
    settings = {
        f"head of {size}": {
            "method": "draft_model", "model": str(BUNDLED_DRAFT), "num_speculative_tokens": 4, "draft_vocab_size": size,
            "draft_vocab_file": str(file),
        }
        for size in SIZES
    }  # fmt: skip
    found = decoding(plain, settings, prompts, repeats, tokens)
    words = [t for p in prompts for t in plain.generate(p, params)[0].outputs[0].token_ids]
    for size in SIZES:
        rows = kept_tokens(size, str(file), plain.tokenizer, 6144)
        runner = load_runner(BUNDLED_DRAFT, dtype="bfloat16", draft=True, head_rows=rows)
        held = sum(token in set(rows) for token in words) if rows else len(words)
        found[f"head of {size}"] |= level_seconds(runner, plain.runner, 200) | {"covered": held / len(words)}
    return found | {"counted_tokens": sum(counts.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("bundled", "291m", "trim"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "paceline-291m")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.part == "trim":
        found = trimmed(given.repeats, given.tokens)
    elif given.part == "bundled":
        plain = LLM(speculative_config=None, dtype="bfloat16", seed=1)
        found = decoding(plain, bundled_settings(), chat(plain, slice(0, None, 6)), given.repeats, given.tokens)
    else:
        plain = LLM(random_llama(given.model_dir), tokenizer=BUNDLED_TARGET, speculative_config=None, dtype="bfloat16")
        ids = torch.randint(0, 8192, (64,), generator=torch.Generator().manual_seed(3)).tolist()
        found = decoding(plain, copies((2, 4)), [{"prompt_token_ids": ids}], given.repeats, given.tokens)
    for name, one in found.items():
        if isinstance(one, dict):
            print(f"{name:20s} " + ", ".join(f"{key} {value:.4g}" for key, value in one.items() if isinstance(value, float)))
    save("cheaper_drafts", kept("cheaper_drafts") | {given.part: found}, parts=[given.part])


if __name__ == "__main__":
    main()
