"""A hybrid that writes text: SmolLM2 with mixers in place of most of its attention, how much worse it is, and how often
it accepts drafts.

usage: hybrid_quality.py [train] [perplexity] [drafts] [timed] --data FOLDER --work FOLDER [--minutes 40] [--prompts 12]
                         [--tokens 128] [--threads 2] [--batch-rows 1] [--folder FOLDER]

No published weights of hybrid models could be had; so this one is a stand-in: SmolLM2-135M-Instruct, of whose layers
three of four get a Mamba-2 mixer (`paceline train hybrid`), trained for so many minutes on what `head_texts.py` left.
It is worse than SmolLM2 and than any published hybrid. Its texts are texts, though, and so is what it accepts.

train       in FOLDER/hybrid; a run that was stopped goes on, a hybrid that is there is left as it is
perplexity  of SmolLM2, of the hybrid, and of the hybrid before training, on texts that SmolLM2 wrote and nothing
            learned (`smollm2_more_answers`), prompts not counted, and on WikiText-2; and how often each finds the
            token the likeliest that SmolLM2 does
drafts      tokens a pass of `SETTINGS` on four published sets, all prompts of a set at once; the draft model is SmolLM2
            itself, which costs as much as the hybrid: its figures are of acceptance, not of speed
timed       the same, prompt by prompt, with tokens per second beside plain decoding's; wants a quiet machine

Greedy texts must equal those of plain decoding, or differ first at a near tie (counted); otherwise nothing is reported.

Results: `results/hybrid_quality.json`.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, kept, save
from decoding import Ids, counted, must_agree, published, run
from head_texts import OUT as TEXTS
from heads import PLAIN, SETS, by_depth, ids, of_set
from real_models import WEIGHTS, smollm2

from paceline import LLM, SamplingParams
from paceline.models import Runner, load_runner
from paceline.training import Fitting, documents_of, texts_of, train, trainer, training_config

HELD_OUT = TEXTS.with_name("smollm2_more_answers.jsonl.gz")
WINDOW, WINDOWS = 512, 16
"""Tokens that are read at once, and how many such texts of each kind."""

ROW_TOKENS = 512
HELD_OUT_SHARE = 0.0025
"""Of texts, to choose the best state by, and to test it on: few, since judging takes time from training."""

TREE = {"tree_policy": "eagle2"}
SETTINGS: Mapping[str, dict[str, Any]] = {
    "ngram, chain of 4": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix, chain of 8": {"method": "suffix", "num_speculative_tokens": 8},
    "suffix, tree of 8": {"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_use_tree_spec": True},
    "token_recycling, tree of 15": {"method": "token_recycling", "num_speculative_tokens": 15},
    "draft, chain of 4": {"method": "draft_model", "num_speculative_tokens": 4},
    "draft, chain of 8": {"method": "draft_model", "num_speculative_tokens": 8},
    "draft, tree of 8": {"method": "draft_model", "num_speculative_tokens": 8, **TREE},
    "draft, tree of 16": {"method": "draft_model", "num_speculative_tokens": 16, **TREE},
}


def trained(given: argparse.Namespace) -> dict[str, Any]:
    """Train, and say what the report says."""
    folder: Path = given.work / "hybrid"
    if not (folder / "report.json").exists():
        fitting = Fitting(
            minutes=given.minutes,
            batch_rows=given.batch_rows,
            row_tokens=ROW_TOKENS,
            eval_steps=60,
            patience=1000,
            warmup_steps=20,
        )
        config = training_config("hybrid", data=(TEXTS,), texts=True, held_out_share=HELD_OUT_SHARE, fitting=fitting)
        train(opened(smollm2(), given), config, folder)
    found = json.loads((folder / "report.json").read_text())
    return {key: found[key] for key in ("right", "before", "texts", "steps", "minutes", "curve", "settings")}


def untrained(given: argparse.Namespace) -> Path:
    """The hybrid before its first step."""
    folder: Path = given.work / "untrained"
    if not (folder / "config.json").exists():
        llm = opened(smollm2(), given)
        config = training_config("hybrid", data=(TEXTS,), texts=True)
        made, view = trainer("hybrid").init(llm, config, torch.arange(llm.runner.info.vocab_size))
        made.prepare(view, documents_of(texts_of(llm, [TEXTS], most=200), ROW_TOKENS), ROW_TOKENS, 0)
        folder.mkdir(parents=True, exist_ok=True)
        made.write(folder, llm, view, {"untrained": True})
    return folder


def opened(folder: Path, given: argparse.Namespace) -> LLM:
    return LLM(folder, speculative_config=None, threads=given.threads, enable_prefix_caching=False)


# ------------------------------------------------------------------------------------------------ how good it is


def windows(given: argparse.Namespace) -> dict[str, list[tuple[Ids, int]]]:
    """Texts of each kind, and the first token of each that counts."""
    llm = opened(smollm2(), given)
    written = documents_of(texts_of(llm, [HELD_OUT], most=4 * WINDOWS), WINDOW)[::4]
    prose = gzip.decompress((given.data / "wikitext-2" / "valid.txt.gz").read_bytes()).decode()
    tokens = llm.tokenizer.encode(prose[: 8 * WINDOW * WINDOWS], add_special_tokens=False)
    starts = range(0, min(len(tokens) - WINDOW, WINDOW * WINDOWS), WINDOW)
    return {
        "SmolLM2's own texts": [(list(one.tokens), one.first) for one in written],
        "WikiText-2": [(tokens[start : start + WINDOW], 1) for start in starts],
    }


def logprobs(runner: Runner, texts: Sequence[tuple[Ids, int]]) -> Iterator[torch.Tensor]:
    """(tokens that count, vocabulary) of each text."""
    for tokens, first in texts:
        cache = runner.open(len(tokens))
        rows = runner.extend([cache], [tokens], all_logits=True).logits[first - 1 : -1]  # type: ignore[attr-defined]
        yield rows.float().log_softmax(-1)
        runner.release(cache)


def perplexities(given: argparse.Namespace) -> dict[str, Any]:
    """Of each model on each kind of text, and how often its likeliest token is SmolLM2's."""
    folders = {"SmolLM2": smollm2(), "hybrid": given.work / "hybrid", "untrained": untrained(given)}
    texts, found = windows(given), dict[str, Any]()
    for kind, pairs in texts.items():
        likeliest: list[torch.Tensor] = []
        for name, folder in folders.items():
            runner = load_runner(folder)
            nats, count, right = 0.0, 0, 0
            for place, (rows, (tokens, first)) in enumerate(zip(logprobs(runner, pairs), pairs, strict=True)):
                best = rows.argmax(-1)
                if name == "SmolLM2":
                    likeliest.append(best)
                nats -= float(rows.gather(1, torch.tensor(tokens[first:])[:, None]).sum())
                right += int((best == likeliest[place]).sum())
                count += len(rows)
            one = {"perplexity": float(torch.tensor(nats / count).exp()), "as SmolLM2": right / count, "tokens": count}
            found.setdefault(name, {})[kind] = one
            print(f"{name:10s} {kind:20s} perplexity {one['perplexity']:.1f}, {one['as SmolLM2']:.3f} as SmolLM2")
    return found


# ------------------------------------------------------------------------------------------------ what it accepts


def drafting(given: argparse.Namespace) -> dict[str, LLM]:
    """The hybrid alone, and with every setting."""
    plain = opened(given.work / "hybrid", given)
    of_draft = {"draft_model": {"model": str(smollm2())}}
    wanted = {name: {"controller": "fixed", **one, **of_draft.get(one["method"], {})} for name, one in SETTINGS.items()}
    return {PLAIN: plain} | {name: plain.with_speculative_config(one) for name, one in wanted.items()}


def accepted(given: argparse.Namespace) -> dict[str, Any]:
    """What is accepted, by set and setting."""
    llms, sets = drafting(given), dict[str, Any]()
    params = SamplingParams(temperature=0.0, max_tokens=given.tokens)
    for name in SETS:
        prompts = published(llms[PLAIN], given.data, name, given.prompts)
        expected, sets[name] = ids(run(llms[PLAIN], prompts, params)), {}
        for setting, llm in llms.items():
            outputs = run(llm, prompts, params)
            agreement = must_agree(llms[PLAIN], prompts, expected, ids(outputs), what=setting)
            figures = {**agreement, **counted(outputs), "accepted_by_depth": by_depth(outputs)}
            sets[name][setting] = figures
            print(f"{name:12s} {setting:28s} {figures['tokens_per_pass']:.2f} tokens a pass, {agreement}", flush=True)
    return {"prompts": given.prompts, "tokens": given.tokens, "sets": sets}


def timed(given: argparse.Namespace) -> dict[str, Any]:
    """The same in turn with plain decoding, and how long it takes."""
    llms, sets = drafting(given), dict[str, Any]()
    for name in SETS:
        groups = [[prompt] for prompt in published(llms[PLAIN], given.data, name, given.prompts)]
        how = argparse.Namespace(temperature=0.0, tokens=given.tokens, repeats=1)
        sets[name] = of_set(llms, groups, how)
        for setting, one in sets[name].items():
            over = f"{one['over_plain']['value']:.2f} times plain"
            print(f"{name:12s} {setting:28s} {one['tokens_per_pass']:.2f} tokens a pass, {over}", flush=True)
    return {"prompts": given.prompts, "tokens": given.tokens, "threads": given.threads, "sets": sets}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"train": trained, "perplexity": perplexities, "drafts": accepted, "timed": timed}
    parser.add_argument("parts", nargs="*", default=list(parts), metavar="PART", help=", ".join(parts))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-rows", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    if unknown := set(given.parts) - set(parts):
        parser.error(f"parts are {', '.join(parts)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(given.threads)
    given.work.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        if name in given.parts:
            made = {**kept("hybrid_quality", given.folder), "model": WEIGHTS, name: part(given)}
            save("hybrid_quality", made, given.folder, parts=[name])


if __name__ == "__main__":
    main()
