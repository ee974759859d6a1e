"""Does a drafter that learns from requests draft better, does it follow when they change, and what keeps it from harm?

usage: online_learning.py --data FOLDER [--method hydra] [--warm-steps 300] [--requests 48] [--tokens 64]
                          [--interval 16] [--steps 32] [--threads 1] [--settings all] [--work FOLDER] [--folder FOLDER]
                          [--name online_learning]

SmolLM2 answers three kinds of requests, one after the other: GSM8K (test), questions for SQL, chats (MT-bench, Vicuna
bench). FOLDER holds these as they are published. A head of `--method`, which has learned `--warm-steps` steps of the
texts that `head_texts.py` left, drafts chains of 3:

    static          as it is
    online          it learns from the requests; rounds are waited for, so that figures are the same on a busy machine
    frozen          control: the same without a learning rate; must be what static is, request by request
    tables          `auto` with ngram, suffix and the head, as it is
    tables online   likewise, and the head learns

Then a head that is never right takes the place of the one that drafts, once with the comparison that takes such a one
back, once without (control). Outputs of all settings are compared with plain decoding's. `results/NAME_smollm2.json`
holds, for each setting, drafted and accepted tokens by request, written once it is measured; the picture shows shares
in windows of 8 requests. Exits with 1 where a control fails.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import RESULTS, pyplot, save
from head_texts import OUT as TEXTS
from real_models import WEIGHTS, smollm2

from paceline import LLM, SamplingParams
from paceline.drafters.learning import LearningDrafter
from paceline.models.heads import read_head, write_head
from paceline.training import Fitting, TrainConfig, train

KINDS = ("GSM8K", "SQL", "chat")
WINDOW = 8
POISON = 20.0
Prompts = list[list[int]]


class Outcome(NamedTuple):
    """What one request drafted."""

    drafted: int
    accepted: int
    steps: int
    tokens: list[int]


def gsm8k(data: Path) -> Iterator[str]:
    for line in (data / "gsm8k" / "test.first-half.jsonl").read_text().splitlines():
        yield json.loads(line)["question"]


def sql(data: Path) -> Iterator[str]:
    for name in ("instruct_basic_sqlite", "questions_gen_sqlite"):
        with (data / "sql-eval" / f"{name}.part-a.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                yield f"Write an SQL query for the database {row['db_name']}. {row['question']}"


def chats(data: Path) -> Iterator[str]:
    for folder in ("mt-bench", "vicuna-bench"):
        for line in (data / folder / "question.odd.jsonl").read_text().splitlines():
            yield json.loads(line)["turns"][0]


def stream(llm: LLM, data: Path, count: int) -> Prompts:
    """The requests, `count` of each kind."""
    texts = [text for kind in (gsm8k, sql, chats) for text in islice(kind(data), count)]
    return [llm.chat_ids([{"role": "user", "content": text}]) for text in texts]


def warmed(llm: LLM, given: argparse.Namespace) -> Path:
    """A head that has learned a little, trained here before or now."""
    folder: Path = given.work / f"{given.method}-{given.warm_steps}"
    if not (folder / "report.json").exists():
        steps = given.warm_steps
        fitting = Fitting(steps=steps, batch_rows=2, row_tokens=512, eval_steps=steps, bf16=False)
        config = TrainConfig(method=given.method, data=(TEXTS,), texts=True, most_prompts=400, fitting=fitting)
        train(llm, config, folder, speed_prompts=0)
    return folder


def learner_of(llm: LLM) -> Any:
    """The one that learns; None where none does."""
    found = [one.learner for one in llm.engine.parts.drafter_set.drafters if isinstance(one, LearningDrafter)]
    return found[0] if found else None


def served(llm: LLM, prompts: Prompts, tokens: int) -> tuple[list[Outcome], list[int], float]:
    """Each request alone; what came of each, the version that drafted for it, and seconds of rounds."""
    params, learner = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), learner_of(llm)
    found, versions, seconds = list[Outcome](), list[int](), 0.0
    for prompt in prompts:
        versions.append(0 if learner is None else learner.of("").current.number)
        (out,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        counts, ids = out.metrics, [*out.outputs[0].token_ids]
        found.append(Outcome(counts.num_draft_tokens, counts.num_accepted_tokens, counts.num_steps, ids))
        start = time.perf_counter()
        while learner is not None and learner.busy:
            time.sleep(0.05)
        seconds += time.perf_counter() - start
    return found, versions, seconds


def settings_of(head: Path, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Name -> speculative_config."""
    own = {"method": given.method, "model": str(head)}
    fixed = own | {"controller": "fixed", "num_speculative_tokens": 3}
    tables = {"method": ["ngram", "suffix", own], "controller": "auto"}
    learn = {"interval": given.interval, "steps": given.steps, "pause": "never"}
    return {
        "static": fixed,
        "online": fixed | {"learn": learn},
        "frozen": fixed | {"learn": learn | {"learning_rate": 0.0}},
        "tables": tables,
        "tables online": tables | {"learn": learn},
    }


def poisoned(
    llm: LLM, head: Path, config: dict[str, Any], prompts: Prompts, given: argparse.Namespace
) -> dict[str, Any]:
    """What a head does that is never right, with the comparison and without."""
    shape, weights = read_head(head, llm.runner.info, dtype=torch.float32)
    spoilt = {name: one for name, one in weights.items() if ".blocks." in name or "fc" in name}
    noise = {name: POISON * torch.randn(one.shape) for name, one in spoilt.items()}
    folder = write_head(given.work / "poison", shape, weights | noise)
    found = {}
    for rollback in (True, False):
        learn = {"interval": 10**6, "rollback": rollback}
        with llm.with_speculative_config(config | {"learn": learn}) as other:
            before, _, _ = served(other, prompts[:WINDOW], given.tokens)
            learner = learner_of(other)
            learner.adopt("", folder)
            after, versions, _ = served(other, prompts[:WINDOW], given.tokens)
            found["with rollback" if rollback else "without"] = {
                "accepted_before": share(before), "accepted_after": share(after), "versions": versions,
                "taken_back": learner.of("").rolled_back, "version": learner.of("").current.number,
                "equal": [one.tokens for one in before] == [one.tokens for one in after],
            }  # fmt: skip
    return found


def share(outcomes: Sequence[Outcome]) -> float:
    """Of drafted tokens, those that were accepted."""
    return sum(one.accepted for one in outcomes) / max(1, sum(one.drafted for one in outcomes))


def tokens_a_pass(outcomes: Sequence[Outcome]) -> float:
    return sum(len(one.tokens) for one in outcomes) / max(1, sum(one.steps for one in outcomes))


def picture(found: dict[str, Any], count: int, path: Path) -> None:
    """Accepted share in windows of requests, by setting."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 3.4))
    for name in ("static", "online", "tables", "tables online"):
        if name in found:
            drafted, accepted = found[name]["drafted"], found[name]["accepted"]
            windows = range(0, len(drafted), WINDOW)
            shares = [sum(accepted[i : i + WINDOW]) / max(1, sum(drafted[i : i + WINDOW])) for i in windows]
            axes.plot([i + WINDOW / 2 for i in windows], shares, marker=".", label=name)
    for number, kind in enumerate(KINDS):
        axes.axvspan(number * count, (number + 1) * count, color="0.5", alpha=0.06 + 0.06 * (number % 2), lw=0)
        axes.text(number * count + 1, axes.get_ylim()[1], f" {kind}", va="top")
    axes.set(xlabel="request", ylabel="drafts accepted", xlim=(0, 3 * count))
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"wrote {path}")


def write(found: dict[str, Any], given: argparse.Namespace) -> None:
    """What was measured so far, and its picture."""
    save(f"{given.name}_smollm2", found, given.folder)
    picture(found["settings"], given.requests, given.folder / f"{given.name}_smollm2.png")


def failures(found: dict[str, Any]) -> list[str]:
    """Controls that do not hold."""
    wrong = [
        f"{name}: outputs differ from plain decoding's" for name, one in found["settings"].items() if not one["equal"]
    ]
    settings = found["settings"]
    if {"static", "frozen"} <= settings.keys():
        frozen, static = ((settings[name]["drafted"], settings[name]["accepted"]) for name in ("frozen", "static"))
        if frozen != static:
            wrong.append("a trainer without a learning rate changed drafts")
    for name, wanted in (("with rollback", 1), ("without", 0)):
        poison = found.get("poison", {}).get(name)
        if poison is not None and (poison["taken_back"] != wanted or not poison["equal"]):
            wrong.append(f"poison {name}: taken back {poison['taken_back']} times, outputs equal: {poison['equal']}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--method", default="hydra")
    numbers = {"warm-steps": 300, "requests": 48, "tokens": 64, "interval": 16, "steps": 32, "threads": 1}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--settings", default="all")
    parser.add_argument("--work", type=Path, default=Path("build") / "online_learning")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--name", default="online_learning")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    llm = LLM(smollm2(), speculative_config=None, enable_prefix_caching=False, threads=given.threads)
    head, prompts = warmed(llm, given), stream(llm, given.data, given.requests)
    plain, _, _ = served(llm, prompts, given.tokens)
    configs = settings_of(head, given)
    chosen = list(configs) if given.settings == "all" else given.settings.split(",")
    found: dict[str, Any] = {"model": WEIGHTS, "method": given.method, "requests": given.requests, "settings": {}}
    for name in chosen:
        with llm.with_speculative_config(configs[name]) as other:
            outcomes, versions, seconds = served(other, prompts, given.tokens)
            learned = other.engine.parts.drafter_set.learning()
        parts = [outcomes[i * given.requests : (i + 1) * given.requests] for i in range(len(KINDS))]
        found["settings"][name] = {
            "drafted": [one.drafted for one in outcomes], "accepted": [one.accepted for one in outcomes],
            "versions": versions, "round_seconds": seconds, "rounds": learned[0].rounds if learned else 0,
            "accepted_share": dict(zip(KINDS, map(share, parts), strict=True)),
            "second_half": {kind: share(part[len(part) // 2 :]) for kind, part in zip(KINDS, parts, strict=True)},
            "tokens_a_pass": dict(zip(KINDS, map(tokens_a_pass, parts), strict=True)),
            "equal": [one.tokens for one in outcomes] == [one.tokens for one in plain],
        }  # fmt: skip
        shown = found["settings"][name]
        print(name, {key: shown[key] for key in ("accepted_share", "second_half", "tokens_a_pass", "equal", "rounds")})
        write(found, given)
    if given.settings == "all":
        found["poison"] = poisoned(llm, head, configs["static"], prompts, given)
        print("poison", found["poison"])
        write(found, given)
    if wrong := failures(found):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
