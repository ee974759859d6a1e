"""Trained heads on published prompts: what each gives alone, in chains and trees, beside plain decoding and `auto`.

usage: heads.py HEAD [HEAD ...] --data FOLDER [--model smollm2] [--sets spec-bench,gsm8k,humaneval,mt-redundant]
                [--prompts 12] [--tokens 128] [--repeats 1] [--threads 2] [--folder FOLDER]

HEAD is a folder that `paceline train` made for the model. Of every set, `--prompts` first turns are decoded greedily,
in turn with plain decoding: with a chain of 2, 3 and 4 drafts, with EAGLE-2's tree of 8 nodes, with the method's
defaults, with `auto` choosing how much the head drafts, among the table drafters alone, and among them and the head.
Outputs must equal plain decoding's, or differ first at a near tie (counted); otherwise nothing is timed. Results:
`results/heads_MODEL.json`, with the heads' own reports.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, save
from decoding import Ids, Model, add_model, counted, decode, differs, model_of, must_agree, published, run

from paceline import LLM, SamplingParams
from paceline.bench import speedup, time_in_turn, tokens_per_second

PLAIN = "plain"
SETS = ("spec-bench", "gsm8k", "humaneval", "mt-redundant")


def settings_of(heads: Sequence[Path]) -> dict[str, Any]:
    """Name of a setting -> its speculative_config."""
    found: dict[str, Any] = {"auto": {"method": "auto"}}
    for head in heads:
        method = json.loads((head / "config.json").read_text())["paceline_head"]["method"]
        own = {"method": method, "model": str(head)}
        for length in (2, 3, 4):
            found[f"{method} chain {length}"] = {**own, "controller": "fixed", "num_speculative_tokens": length}
        tree = {"tree_policy": "eagle2", "controller": "fixed", "num_speculative_tokens": 8}
        found[f"{method} tree 8"] = own | tree
        found[f"{method} default"] = own
        found[f"{method} auto"] = own | {"controller": "auto"}
        found[f"{method} with tables, auto"] = [own, "ngram", "suffix"]
    return found


def of_set(llms: Mapping[str, LLM], prompts: list[Ids], given: argparse.Namespace) -> dict[str, Any]:
    """All settings on the prompts of one set, in turn."""
    plain, params = llms[PLAIN], SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True)
    reference = [decode(plain, [prompt], params)[0] for prompt in prompts]
    found: dict[str, Any] = {}
    for name, llm in llms.items():
        everything = [run(llm, [prompt], params)[0] for prompt in prompts]
        agreement = must_agree(plain, prompts, reference, [one.outputs[0].token_ids for one in everything])
        found[name] = {"agreement": agreement, **counted(everything)}
    seconds = time_in_turn(
        {name: lambda prompt, llm=llm: decode(llm, [prompt], params)[0] for name, llm in llms.items()},
        prompts, given.repeats, differs=differs(plain),
    )  # fmt: skip
    tokens = np.full_like(seconds[PLAIN], given.tokens)
    for name, one in found.items():
        rate, over = tokens_per_second(tokens, seconds[name]), speedup(tokens, seconds[PLAIN], tokens, seconds[name])
        if rate is None or over is None:
            raise SystemExit("nothing was measured")
        one |= {"tokens_per_second": rate.to_dict(), "over_plain": over.to_dict()}
    return found


def measured(given: argparse.Namespace, model: Model) -> dict[str, Any]:
    plain = model.open(threads=given.threads)
    llms = {PLAIN: plain} | {
        name: plain.with_speculative_config(config) for name, config in settings_of(given.heads).items()
    }
    sets = {}
    for name in given.sets.split(","):
        sets[name] = of_set(llms, published(plain, given.data, name, given.prompts), given)
        for setting, one in sets[name].items():
            over = one["over_plain"]
            print(f"{name:12s} {setting:28s} {one['tokens_per_pass']:.2f} tokens a pass, {over['value']:.2f} "
                  f"({over['low']:.2f} to {over['high']:.2f}) times plain", flush=True)  # fmt: skip
    reports = {head.name: json.loads((head / "report.json").read_text()) for head in given.heads}
    fields = {key: getattr(given, key) for key in ("prompts", "tokens", "repeats")}
    return {"model": model.weights, **fields, "sets": sets, "heads": reports}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="+", type=Path)
    add_model(parser)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    model = model_of(given.model)
    save(f"heads_{model.name}", measured(given, model), given.folder)


if __name__ == "__main__":
    main()
