"""Drafting while the target scores against drafting before it: PEARL and the sequential pair on the same threads.

usage: pearl.py PART [--threads 2] [--repeats 7] [--tokens 96] [--model-dir DIR]

Parts, each stored beside the others in results/pearl.json:
  bundled    the bundled pair, greedy, bfloat16, batch 1 and 4: draft_model (one after the other), pearl with and without overlap,
             and left to choose, all with windows of the same lengths, and plain decoding
  costs      why: milliseconds of a pass of the target and of a draft, alone on all threads, alone on the share that it has when
             both run, and both at once; for the bundled pair, and for a target of 291M parameters with drafts of 2.7M and 23M. From
             these, by the paper's counting, how much faster or slower overlap is where each token stands with some chance

Settings take turns. Tokens are compared with plain decoding's before anything is timed; settings whose tokens differ are not timed.
Ratios are medians of pairs with 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from common import alternate, kept, random_llama, ratio, save

from paceline import LLM, SamplingParams
from paceline.bench.demo import BUNDLED_DRAFT, BUNDLED_TARGET, bundled_prompts
from paceline.bench.random_model import open_folder
from paceline.engine.overlap import Helper
from paceline.models.load import load_runner
from paceline.tree.token_tree import TokenTree

WINDOWS = (2, 4, 6)
CHANCES = (0.7, 0.9, 1.0)
SMALL = "llama:hidden=512,layers=6,heads=8,kv_heads=8,mlp=1408,vocab=8192,context=4096,tie=1"
CONTEXT = 200


def settings() -> dict[str, dict[str, Any] | None]:
    found: dict[str, dict[str, Any] | None] = {"plain": None}
    for window in WINDOWS:
        base = {"model": str(BUNDLED_DRAFT), "num_speculative_tokens": window}
        found[f"draft_model, {window}"] = base | {"method": "draft_model"}
        found[f"pearl, {window}"] = base | {"method": "pearl", "overlap": True}
    four = {"method": "pearl", "model": str(BUNDLED_DRAFT), "num_speculative_tokens": 4}
    found["pearl without overlap, 4"] = four | {"overlap": False}
    found["pearl, 4, left to choose"] = four
    return found


def decoding(batch: int, repeats: int, tokens: int) -> dict[str, Any]:
    """Speed of every setting over plain decoding and over the sequential pair with its window."""
    plain = LLM(speculative_config=None, dtype="bfloat16", seed=1)
    prompts = [{"prompt_token_ids": plain.chat_ids([{"role": "user", "content": p.prompt}])} for p in bundled_prompts()[::6][:4]]
    groups = [prompts] if batch > 1 else [[prompt] for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    llms = {name: plain if config is None else plain.with_speculative_config(config) for name, config in settings().items()}

    def run(llm: LLM) -> Callable[[], list[Any]]:
        return lambda: [out for group in groups for out in llm.generate(group, params)]

    found: dict[str, Any] = {}
    written: dict[str, list[int]] = {}
    for name, llm in llms.items():
        outs = run(llm)()
        written[name] = [token for out in outs for token in out.outputs[0].token_ids]
        drafted, stood = (sum(getattr(out.metrics, key) for out in outs) for key in ("num_draft_tokens", "num_accepted_tokens"))
        steps = sum(out.metrics.num_steps for out in outs)
        found[name] = {"scored": drafted, "accepted": stood, "steps": steps, "tokens_per_step": len(written[name]) / steps}
    for name, one in found.items():
        one["differing_tokens"] = sum(a != b for a, b in zip(written[name], written["plain"], strict=True))
    timed = {name: run(llm) for name, llm in llms.items() if not found[name]["differing_tokens"]}
    seconds = alternate(timed, repeats)
    for name, took in seconds.items():
        found[name] |= {"tokens_per_second": len(written[name]) / median(took), "over_plain": ratio(seconds["plain"], took)}
        pair = f"draft_model, {name.split(', ')[1]}" if "pearl" in name else None
        if pair in seconds:
            found[name]["over_the_sequential_pair"] = ratio(seconds[pair], took)
        found[name]["seconds"] = took
    return found


def gain(row: dict[str, float], window: int, chance: float) -> float:
    """Overlapped over sequential tokens per second where every drafted token stands with this chance, by the measured times.

    One after the other a step brings 1 + c + ... + c^g tokens. Overlapped, a step that judges g tokens brings 1 + ... + c^(g-1) and
    is followed by another with chance c^g; one that judges the first alone brings 1, and the other kind follows with chance c.
    """
    after = sum(chance**i for i in range(window + 1))
    judging = chance / (chance + 1.0 - chance**window)
    beside = judging * (after - chance**window) + 1.0 - judging
    return beside / row["both_at_once"] / (after / row["one_after_the_other"])


def timed(work: Callable[[], None], threads: int) -> float:
    """Milliseconds, after one warm-up with this number of threads."""
    torch.set_num_threads(threads)
    work()
    start = perf_counter()
    work()
    return 1e3 * (perf_counter() - start)


def works(target: Any, draft: Any, window: int, share: int, helper: Helper) -> dict[str, Callable[[], None]]:
    """A pass of the target, a draft, and both at once."""
    text = [(31 * i) % 6000 + 4 for i in range(CONTEXT)]
    one, two, tree = target.open(), draft.open(), TokenTree.chain(text[: window - 1])
    target.extend([one], [text])
    draft.extend([two], [text])

    def score() -> None:
        target.score([one], [7], [tree])

    def write() -> None:
        if hasattr(draft, "draft_chains"):
            draft.draft_chains([two], [[7]], [window], [None])
        else:
            for token in range(window):
                draft.extend([two], [[7 + token]])
        draft.truncate(two, CONTEXT)

    def both() -> None:
        running = helper.start(write, share)
        score()
        helper.join([running])

    return {"target": score, "draft": write, "both": both}


def costs(target: Any, draft: Any, threads: int, repeats: int) -> dict[str, Any]:
    """Milliseconds, medians of interleaved measurements, for every window."""
    helper, share = Helper(), max(threads // 4, 1)
    found: dict[str, Any] = {}
    for window in WINDOWS:
        work = works(target, draft, window, share, helper)
        ways = {
            "target_all_threads": (work["target"], threads), "draft_all_threads": (work["draft"], threads),
            "target_its_share": (work["target"], max(threads - share, 1)), "draft_its_share": (work["draft"], share),
            "both_at_once": (work["both"], threads),
        }  # fmt: skip
        seen: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():
                seen[name].append(timed(*way))
        row: dict[str, Any] = {name: median(each) for name, each in seen.items()}
        row["one_after_the_other"] = row["target_all_threads"] + row["draft_all_threads"]
        row["larger_of_the_shares"] = max(row["target_its_share"], row["draft_its_share"])
        found[str(window)] = row | {f"gain_where_{chance}_stand": gain(row, window, chance) for chance in CHANCES}
    torch.set_num_threads(threads)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("bundled", "costs"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "paceline-291m")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found: dict[str, Any]
    if given.part == "bundled":
        found = {f"batch {batch}": decoding(batch, given.repeats, given.tokens) for batch in (1, 4)}
    else:
        draft = load_runner(BUNDLED_DRAFT, dtype="bfloat16", draft=True)
        larger = load_runner(open_folder(SMALL, given.model_dir.with_name("paceline-23m")), dtype="bfloat16", draft=True)
        found = {"bundled": costs(load_runner(BUNDLED_TARGET, dtype="bfloat16"), draft, given.threads, 60)}
        target = load_runner(random_llama(given.model_dir), dtype="bfloat16")
        found |= {"291m, 2.7M": costs(target, draft, given.threads, 15), "291m, 23M": costs(target, larger, given.threads, 15)}
    for name, one in found.items():
        for setting, row in one.items():
            print(
                f"{name:10s} {setting:26s} "
                + ", ".join(f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float))
            )
            for key in ("over_plain", "over_the_sequential_pair"):
                if key in row:
                    print(f"{'':38s}{key} {row[key]['median']:.3f} [{row[key]['low']:.3f}, {row[key]['high']:.3f}]")
    save("pearl", kept("pearl") | {given.part: found, "threads": given.threads}, parts=[given.part])


if __name__ == "__main__":
    main()
