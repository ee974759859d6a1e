"""Passes that leave out layers, or thoughts, beside the whole model: departures, distance, right answers, and speed.

usage: skipping.py --data FOLDER --made FOLDER [--model smollm2] [--part train|layers|thoughts] [--prompts 12]
                   [--learned 400] [--steps 300] [--rows 4] [--tokens 96] [--seconds 720] [--threads 2]
                   [--only NAME,...] [--name skipping]

"train" has the model answer GSM8K's training problems, and teaches with these answers, into --made: adapters of Unified
Layer Skipping for speed-ups of 1.5 and 2, and corrections of LoRA-Drop for a quarter and a half of the layers with
three tokens reused. On made sums of three steps ("Start with 7, add 5, ...") it teaches a thinker, the model that
answers with its thought (HCoT), and two plain adapters: one that writes thoughts before the answer, one that does not.

"layers" decodes GSM8K's test problems at temperature 0, all settings in turn in an order drawn anew for each; after
--seconds no further prompt begins. Departures: tokens in 1,000 that are not the whole model's likeliest behind the text
before them; KL of the written tokens, as point masses, from the whole model's distribution, in nats a token; tokens per
second, prompts included, and the ratio to the whole model, paired by prompt. Control: the same methods untrained, and
LoRA-Drop's by the operators that it runs by, with nothing dropped.

"thoughts" asks sums that were not learned: the share that is right, seconds and tokens an answer, of the four models.
Control: HCoT with the thought of another question. All with 95 % bootstrap intervals over prompts.
Results: `results/NAME.json`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import numpy as np
from approximate_rules import ASK, Piece, against_target, gsm8k, ratio, table
from common import RESULTS, estimated, save
from decoding import model_of

from paceline import LLM, SamplingParams
from paceline.search import last_number
from paceline.training import Fitting, train, training_config
from paceline.tree import EMPTY_TREE
from paceline.utils import in_turn

WHOLE = "whole model"
SPEEDUPS, DROPS = (1.5, 2.0), (0.25, 0.5)
Run = Callable[[Any, int], Any]


# --------------------------------------------------------------------------------------------------------------- sums


def summed(random: Random) -> dict[str, str]:
    """A sum of three steps with its thoughts and its answer."""
    value = random.randint(2, 20)
    question, thought = f"Start with {value}", []
    for _ in range(3):
        kind, by = random.choice(["add", "take away", "double"]), random.randint(2, 9)
        before = value
        value = {"add": value + by, "take away": value - by, "double": 2 * value}[kind]
        question += f", {kind} it" if kind == "double" else f", {kind} {by}"
        said = {"add": f"{before} + {by}", "take away": f"{before} - {by}", "double": f"2 * {before}"}[kind]
        thought.append(f"{said} = {value}.")
    return {"question": f"{question}. What is it?", "thought": " ".join(thought), "answer": str(value)}


def sums(count: int, seed: int) -> list[dict[str, str]]:
    """Different ones; those of even seeds and those of odd seeds have no question in common."""
    random, found = Random(seed), dict[str, dict[str, str]]()
    while len(found) < count:
        one = summed(random)
        if sum(map(ord, one["question"])) % 2 == seed % 2:
            found[one["question"]] = one
    return list(found.values())


def messages(question: str, answer: str | None = None) -> list[dict[str, str]]:
    asked = [{"role": "user", "content": question}]
    return asked if answer is None else [*asked, {"role": "assistant", "content": answer}]


# -------------------------------------------------------------------------------------------------------------- train


def taught(given: argparse.Namespace, llm: LLM, name: str, method: str, data: Path, **options: Any) -> None:
    """Train one thing; what was trained is there already."""
    if given.only and name not in given.only.split(","):
        return
    fitting = Fitting(steps=given.steps, batch_rows=given.rows, row_tokens=384, eval_steps=100, warmup_steps=20)
    config = training_config(method=method, data=(data,), texts=True, held_out_share=0.05, fitting=fitting, **options)
    done = train(llm, config, given.made / name)
    before, after = done.curve.judged[0].acceptance[0], done.test.acceptance[0]
    print(f"{name}: {before:.3f} -> {after:.3f} of held-out tokens are now the likeliest ones", flush=True)


def lines(path: Path, rows: list[Mapping[str, Any]]) -> Path:
    if not path.exists():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def teach(given: argparse.Namespace) -> None:
    folder = model_of(given.model).folder
    llm = LLM(str(folder), speculative_config=None, threads=given.threads)
    given.made.mkdir(parents=True, exist_ok=True)
    data = given.made / "answers.jsonl"
    if not data.exists():
        asked = questions(given.data / "gsm8k/train.jsonl.gz", given.learned)
        prompts = [{"prompt_token_ids": llm.chat_ids(messages(one))} for one in asked]
        found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=given.tokens))
        rows = [{"messages": messages(a, b.outputs[0].text)} for a, b in zip(asked, found, strict=True)]
        lines(data, rows)
    for speedup in SPEEDUPS:
        taught(given, llm, f"unified-{speedup:g}", "unified_layer_skipping", data, speedup=speedup)
    for drop in DROPS:
        taught(given, llm, f"dropped-{drop:g}", "lora_drop", data, drop=drop, reuse=3)
    made = sums(given.learned * 4, 0)
    both = lines(given.made / "sums.jsonl", [{"messages": messages(one["question"]), **one} for one in made])
    taught(given, llm, "thinker", "hcot_thinker", both)
    taught(given, llm, "hcot", "hcot", both, thinker=str(given.made / "thinker"))
    for name, said in (("thoughts written", "{thought} {answer}"), ("at once", "{answer}")):
        rows = [{"messages": messages(one["question"], said.format(**one))} for one in made]
        taught(given, llm, name, "lora", lines(given.made / f"{name}.jsonl", rows))


def questions(file: Path, count: int) -> list[str]:
    """GSM8K's problems, asked as `gsm8k` asks them."""
    with gzip.open(file, "rt", encoding="utf-8") as opened_file:
        rows = [json.loads(line) for line in opened_file]
    return [row["question"] + ASK for row in rows[:: max(1, len(rows) // count)][:count]]


# ------------------------------------------------------------------------------------------------------------- layers


def layer_settings(given: argparse.Namespace) -> dict[str, Any]:
    """Name -> arguments of `LLM` beside the whole model's."""
    made: dict[str, Any] = {WHOLE: {}, "nothing dropped": {"skipping": {"method": "lora_drop", "reuse": 0}}}
    for speedup in SPEEDUPS:
        skipping = {"skipping": {"method": "unified_layer_skipping", "speedup": speedup}}
        made[f"unified {speedup:g} untrained"] = skipping
        made[f"unified {speedup:g}"] = skipping | {"lora": given.made / f"unified-{speedup:g}"}
    for drop in DROPS:
        made[f"dropped {drop:g} untrained"] = {"skipping": {"method": "lora_drop", "drop": drop}}
        adapter = str(given.made / f"dropped-{drop:g}")
        made[f"dropped {drop:g}"] = {"skipping": {"method": "lora_drop", "adapter": adapter}}
    known = {name: one for name, one in made.items() if "untrained" in name or there(one)}
    if absent := made.keys() - known.keys():
        print(f"left out, --part train makes them: {', '.join(sorted(absent))}", file=sys.stderr)
    wanted = [WHOLE, *given.only.split(",")] if given.only else list(known)
    return {name: one for name, one in known.items() if name in wanted}


def there(options: Mapping[str, Any]) -> bool:
    """Whether what a setting needs has been trained."""
    needs = [options.get("lora"), options.get("skipping", {}).get("adapter"), options.get("skipping", {}).get("path")]
    return all(one is None or any(Path(one).glob("*.safetensors")) for one in needs)


def opened(given: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, LLM]:
    shared: dict[str, Any] = {"speculative_config": None, "threads": given.threads, "enable_prefix_caching": False}
    folder = str(model_of(given.model).folder)
    return {name: LLM(folder, **shared, **options) for name, options in settings.items()}


def generating(llm: LLM, tokens: int) -> Run:
    params = SamplingParams(temperature=0, max_tokens=tokens)

    def run(piece: Piece, _: int) -> Any:
        return llm.generate({"prompt_token_ids": piece.ids}, params)[0]

    return run


def layers(given: argparse.Namespace) -> dict[str, Any]:
    models = opened(given, layer_settings(given))
    whole = models[WHOLE]
    pieces = gsm8k(whole, given.data / "gsm8k/test.first-half.jsonl", given.prompts)
    for llm in models.values():
        generating(llm, 4)(pieces[0], 0)
    runs = {name: generating(llm, given.tokens) for name, llm in models.items()}
    rows: dict[str, list[list[float]]] = {name: [] for name in runs}
    deadline = monotonic() + given.seconds
    for turn in in_turn(runs, pieces, 1):
        piece = pieces[turn.item]
        for name, found in turn.outputs.items():
            out = found.outputs[0]
            departures, kl = against_target(whole, piece.ids, out.token_ids, 0.0)
            right = float(piece.right(out.text.rstrip()))
            rows[name].append([turn.item, turn.seconds[name], len(out.token_ids), departures, kl, right])
        print(f"{turn.item + 1} of {len(pieces)} prompts, {deadline - monotonic():.0f} s left", file=sys.stderr)
        if monotonic() > deadline:
            break
    passes = {name: llm.runner.info.passes for name, llm in models.items()}
    return {"passes": passes, "figures": layer_figures(rows), "raw": rows}


def layer_figures(rows: Mapping[str, list[list[float]]]) -> dict[str, Any]:
    """Estimates of every setting."""
    found, plain = {}, {int(row[0]): row for row in rows[WHOLE]}
    for name, some in rows.items():
        _, seconds, tokens, departures, kl, right = np.array(some).T[:, :, None]
        beside = np.array([plain[int(row[0])] for row in some])
        paired = [tokens, seconds, beside[:, 2:3], beside[:, 1:2]]
        found[name] = {
            "prompts": len(some),
            "departures per 1,000 tokens": estimated([departures, tokens], lambda a, b: 1000 * ratio(a, b)),
            "KL": estimated([kl, tokens], ratio),
            "right": estimated([right], lambda a: a.mean((-2, -1))),
            "tokens per second": estimated([tokens, seconds], ratio),
            "over the target": estimated(paired, lambda a, b, c, d: ratio(a, b) / ratio(c, d)),
        }
    return found


# ----------------------------------------------------------------------------------------------------------- thoughts


def thoughts(given: argparse.Namespace) -> dict[str, Any]:
    hcot = {"skipping": {"method": "hcot", "path": str(given.made / "hcot")}}
    settings: dict[str, Any] = {name: {"lora": given.made / name} for name in ("thoughts written", "at once")}
    models = opened(given, settings | {"hcot": hcot, WHOLE: {}})
    asked = sums(given.prompts * 8, 1)
    pieces = [models[WHOLE].chat_ids(messages(one["question"])) for one in asked]
    params = SamplingParams(temperature=0, max_tokens=given.tokens)

    def of(llm: LLM) -> Run:
        return lambda ids, _: llm.generate({"prompt_token_ids": ids}, params)[0]

    runs = {name: of(llm) for name, llm in models.items()}
    runs["hcot with another's thought"] = with_other_thoughts(models["hcot"], pieces, params)
    rows: dict[str, list[list[float]]] = {name: [] for name in runs}
    deadline = monotonic() + given.seconds
    for turn in in_turn(runs, pieces, 1):
        for name, found in turn.outputs.items():
            out = found.outputs[0]
            right = last_number(out.text) == float(asked[turn.item]["answer"])
            rows[name].append([turn.seconds[name], len(out.token_ids), float(right)])
        if monotonic() > deadline:
            break
    found = {}
    for name, some in rows.items():
        seconds, tokens, right = np.array(some).T[:, :, None]
        columns = {"right": right, "seconds": seconds, "tokens": tokens}
        found[name] = {key: estimated([one], lambda a: a.mean((-2, -1))) for key, one in columns.items()}
        found[name]["prompts"] = len(some)
        print(name, {key: round(found[name][key]["value"], 3) for key in columns})
    return {"figures": found, "raw": rows}


def with_other_thoughts(llm: LLM, pieces: list[list[int]], params: SamplingParams) -> Run:
    """Answers with the thought of the question before."""
    runner: Any = llm.runner
    plain = runner.score

    def run(ids: list[int], _: int) -> Any:
        other = pieces[pieces.index(ids) - 1]
        cache = runner.open()
        runner.extend([cache], [other])
        plain([cache], list(runner.prompt_end), [EMPTY_TREE])
        (thought,) = cache.others[0].vectors.values()
        runner.release(cache)

        def score(caches: Any, roots: Any, trees: Any, **more: Any) -> Any:
            for state, root in zip(caches, roots, strict=True):
                if (root,) == runner.prompt_end:
                    state.others[0].vectors[state.length] = thought
            return plain(caches, roots, trees, **more)

        runner.score = score
        try:
            return llm.generate({"prompt_token_ids": ids}, params)[0]
        finally:
            runner.score = plain

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--made", type=Path, required=True)
    parser.add_argument("--part", choices=("train", "layers", "thoughts"), default="layers")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--learned", type=int, default=400, help="answers that are learned (%(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of each training (%(default)s)")
    parser.add_argument("--rows", type=int, default=4, help="of 384 tokens, in a step (%(default)s)")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=720.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="settings beside the whole model; of train, what to make")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--name", default="skipping")
    given = parser.parse_args()
    if given.part == "train":
        teach(given)
        return
    made = layers(given) if given.part == "layers" else thoughts(given)
    save(given.name, {given.part: {"model": given.model} | made}, given.folder, parts=[given.part])
    if given.part == "layers":
        print(table(made["figures"]))


if __name__ == "__main__":
    main()
