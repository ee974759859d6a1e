"""Every approximate rule beside its target and its draft: departures, distance, answers that are right, and speed.

usage: approximate_rules.py --target FILE --draft FILE --data FOLDER --heads FOLDER [--part heads|tasks]
                            [--temperature 0] [--prompts 5] [--tokens 192] [--seconds 720] [--threads 2]
                            [--only NAME,...] [--name approximate_rules]

"heads" trains what two of the rules need, into FOLDER: a judge (and one whose marks are shuffled, the control) on the
target's states, from worked answers of GSM8K's training part of which every second one has a wrong result put in, which
arithmetic marks, and from MBPP's programs of which every second one was changed and fails its tests; and a router on
the draft's states, from steps that draft and target wrote to GSM8K's training problems, marked by which of the two
reached more of the known results.

"tasks" decodes GSM8K's test problems and HumanEval's programs, none of which were learned from, one by one, all
settings in an order drawn anew for each; after --seconds no further prompt begins. At temperature 0 rules are left out
that are exact there. Reported with 95 % bootstrap intervals over prompts:

- departures: tokens in 1,000 that are not the target's likeliest behind the text before them (above temperature 0: as
  the rule has counted);
- KL: nats a token; at temperature 0 of the written tokens, as point masses, from the target's distribution at
  temperature 1; above it their surprisal less the entropy of the distribution they should have been drawn from;
- right: answers whose number, or program by its tests, is right;
- tokens per second, prompts included, and the ratio to the target alone, paired by prompt.

Controls are settings of their own: the judge with shuffled marks, a router that draws, the oracle that knows the
results (GSM8K), exact drafts. Results: `results/NAME.json`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import numpy as np
import torch
from common import RESULTS, estimated, save
from search_tasks import ENDS, Programs

from paceline import LLM, SamplingParams
from paceline.search import last_number
from paceline.training import Fitting, train, training_config
from paceline.utils import in_turn

TARGET, DRAFT, EXACT = "target alone", "draft alone", "exact drafts"
DRAFTED, STEP, DELIMITER = 6, 64, "\n"
RESULT = re.compile(r"<<[^=>]*=([\d.]+)>>")
SPREAD = 0.04
"""Share of a number by which a wrong result misses it at least, or by 1."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One problem.

    Attributes:
        ids: of the prompt. right: whether a text behind it is. reward: of texts so far, in 0..1; None without one.
    """

    task: str
    ids: list[int]
    right: Callable[[str], bool]
    reward: Callable[[Sequence[str]], list[float]] | None = None


def results_of(solution: str) -> list[str]:
    """The intermediate results and the answer of a solution of GSM8K."""
    return [*RESULT.findall(solution), solution.rsplit("####", 1)[1].strip().replace(",", "")]


def reached(wanted: Sequence[str], texts: Sequence[str]) -> list[float]:
    """The share of known results that each text holds: a reward that knows the answer."""
    held = [set(re.findall(r"\d+(?:\.\d+)?", text.replace(",", ""))) for text in texts]
    return [sum(one in found for one in wanted) / len(wanted) for found in held]


def gsm8k(llm: LLM, file: Path, count: int) -> list[Piece]:
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    found = []
    for row in rows[:: max(1, len(rows) // count)][:count]:
        wanted = results_of(row["answer"])
        ids = llm.chat_ids([{"role": "user", "content": row["question"] + ASK}])
        right = partial(lambda answer, text: last_number(text) == float(answer), wanted[-1])
        found.append(Piece("gsm8k", ids, right, partial(reached, wanted)))
    return found


ASK = " Think step by step, one short line a step, and end with the number alone on the last line."


def humaneval(llm: LLM, file: Path, count: int) -> list[Piece]:
    rows, programs = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()], Programs()
    found = []
    for row in rows[:: max(1, len(rows) // count)][:count]:
        head, test = row["prompt"].rstrip("\n"), f"{row['test']}\ncheck({row['entry_point']})"
        right = partial(lambda head, test, text: programs.share(head + text, (test,)) == 1.0, head, test)
        found.append(Piece("humaneval", llm.tokenizer.encode(head), right))
    return found


# --------------------------------------------------------------------------------------------------------------- heads


def wrong_results(solution: str, random: Random) -> dict[str, Any]:
    """A worked answer with one result replaced by a number that the sum before it does not have."""
    said = re.sub(r"<<[^>]*>>", "", solution).split("\n####")[0]
    sums = list(re.finditer(r"= ?\$?(\d+)\b", said))
    if not sums:
        return {"answer": said}
    match = random.choice(sums)
    value = int(match.group(1))
    other = str(value + random.choice([-1, 1]) * max(1, round(value * random.uniform(SPREAD, 1.0))))
    start = match.start(1)
    return {"answer": said[:start] + other + said[match.end(1) :], "mistake": [start, start + len(other)]}


CHANGES = [
    ("+", "-"),
    ("-", "+"),
    ("<", ">"),
    (">", "<"),
    ("==", "!="),
    ("*", "+"),
    ("0", "1"),
    ("1", "2"),
    ("max", "min"),
]


def broken_program(row: Mapping[str, Any], programs: Programs, random: Random) -> dict[str, Any] | None:
    """A program of MBPP with a change that its tests fail; None where no change that was tried does."""
    code, tests = row["code"].replace("\r\n", "\n").replace("\t", "    "), tuple(row["test_list"])
    places = [(m.start(), old, new) for old, new in CHANGES for m in re.finditer(re.escape(old), code)]
    random.shuffle(places)
    for start, old, new in places[:3]:
        changed = code[:start] + new + code[start + len(old) :]
        if programs.share(changed, tests) < 1.0:
            return {"answer": changed, "mistake": [start, start + len(new)]}
    return None


def marked(data: Path, count: int) -> list[dict[str, Any]]:
    """Right and wrong answers, with marks."""
    random, programs, rows = Random(0), Programs(), list[dict[str, Any]]()
    with gzip.open(data / "gsm8k/train.jsonl.gz", "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines][:: 7473 // count][:count]
    for number, one in enumerate(problems):
        asked = {"messages": [{"role": "user", "content": one["question"] + ASK}]}
        said = re.sub(r"<<[^>]*>>", "", one["answer"]).split("\n####")[0]
        rows.append(asked | (wrong_results(one["answer"], random) if number % 2 else {"answer": said}))
    tasks = [json.loads(line) for line in (data / "mbpp/mbpp.jsonl").read_text(encoding="utf-8").splitlines()]
    for number, one in enumerate(tasks[:: max(1, len(tasks) // count)][:count]):
        right = {"answer": one["code"].replace("\r\n", "\n").replace("\t", "    ")}
        made = broken_program(one, programs, random) if number % 2 else right
        if made is not None:
            rows.append({"messages": [{"role": "user", "content": one["text"]}]} | made)
    return rows


def shuffled(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same answers, each mark moved to another place of its answer."""
    random, found = Random(1), list[dict[str, Any]]()
    for row in rows:
        one = dict(row)
        if "mistake" in one:
            size = one["mistake"][1] - one["mistake"][0]
            start = random.randrange(max(1, len(one["answer"]) - size))
            one["mistake"] = [start, min(len(one["answer"]), start + size)]
        found.append(one)
    return found


def step_of(llm: LLM, ids: list[int]) -> str:
    """The next step of a model."""
    params = SamplingParams(temperature=0.0, max_tokens=STEP, stop=[DELIMITER], include_stop_str_in_output=True)
    return llm.generate({"prompt_token_ids": ids}, params)[0].outputs[0].text


def routed(target: LLM, draft: LLM, pieces: Sequence[Piece], steps: int = 8) -> Iterator[dict[str, Any]]:
    """Steps of the draft behind what stands, the last character marked where the target's reaches more results."""
    for number, piece in enumerate(pieces):
        prompt, text = target.tokenizer.decode(piece.ids, False), ""
        for _ in range(steps):
            ids = [*piece.ids, *target.tokenizer.encode(text, add_special_tokens=False)]
            little, large = step_of(draft, ids), step_of(target, ids)
            if not little or not large or piece.reward is None:
                break
            of_little, of_large = piece.reward([text + little, text + large])
            row = {"prompt": prompt + text, "answer": little}
            yield row | ({"mistake": [len(little) - 1, len(little)]} if of_large > of_little else {})
            text += large if of_large > of_little else little
        print(f"router: {number + 1} of {len(pieces)} problems", file=sys.stderr)


def heads(given: argparse.Namespace) -> None:
    """Train judge, control and router."""
    target, draft = (
        LLM(str(path), speculative_config=None, threads=given.threads) for path in (given.target, given.draft)
    )
    given.heads.mkdir(parents=True, exist_ok=True)
    rows = marked(given.data, given.learned)
    problems = gsm8k(target, given.data / "gsm8k/train.jsonl.gz", given.learned // 4)
    parts = {
        "judge": (target, lambda: rows), "judge-shuffled": (target, lambda: shuffled(rows)),
        "router": (draft, lambda: list(routed(target, draft, problems))),
    }  # fmt: skip
    for name, (llm, made) in parts.items():
        data = given.heads / f"{name}.jsonl"
        if not data.exists():
            data.write_text("".join(json.dumps(row) + "\n" for row in made()), encoding="utf-8")
        fitting = Fitting(steps=given.steps, batch_rows=4, row_tokens=384, eval_steps=40, bf16=False)
        shared = {"feature_disk_bytes": 4 << 30, "feature_folder": given.heads / "states"}
        config = training_config("judge", data=(data,), held_out_share=0.1, fitting=fitting, **shared)
        done = train(llm, config, given.heads / name)
        print(f"{name}: {done.test.acceptance[0]:.3f} of {done.test.tokens} held-out tokens judged as marked")


# --------------------------------------------------------------------------------------------------------------- tasks

Run = Callable[[Piece, int], Any]


def settings(given: argparse.Namespace, target: LLM, draft: LLM) -> dict[str, Run]:
    """Name -> decodes a piece."""
    spec = {
        "method": "draft_model",
        "model": str(given.draft),
        "num_speculative_tokens": DRAFTED,
        "controller": "fixed",
    }
    marks = {
        "begin_thinking_phase_token": target.tokenizer.encode("<|im_start|>", add_special_tokens=False)[0],
        "end_thinking_phase_token": 0,
    }
    rules: dict[str, dict[str, Any]] = {
        EXACT: {"acceptance_method": "rejection_sampler"},
        "fly": {"fly_window_size": 3},
        "reflective": {},
        "judge": {"judge_model": str(given.heads / "judge")},
        "judge, shuffled marks": {"judge_model": str(given.heads / "judge-shuffled")},
    }
    if given.temperature:
        rules |= {"typical_acceptance_sampler": {}, "accept_thresholds": {"speculative_accept_threshold_acc": 0.5}}
    else:
        rules["relaxed_thinking"] = {"relaxed_topk": 10, "relaxed_delta": 0.6} | marks
    made: dict[str, Run] = {TARGET: plain(given, target), DRAFT: plain(given, draft)}
    if absent := [name for name in ("judge", "judge-shuffled", "router") if not trained(given, name)]:
        print(f"{given.heads} lacks {', '.join(absent)}, left out; --part heads trains them", file=sys.stderr)
    for name, options in rules.items():
        if "judge_model" in options and not trained(given, Path(options["judge_model"]).name):
            continue
        rule = {"acceptance_method": name.split(",")[0]} | options
        made[name] = plain(given, target.with_speculative_config(spec | rule))
    steps = {"method": "arbitrage", "delimiter": DELIMITER, "step_tokens": STEP}
    router, random = {"router": str(given.heads / "router")}, Random(0)
    made["ead"] = searched(given, target, {"method": "ead", "entropy_threshold": 1.0})
    if trained(given, "router"):
        made["arbitrage"] = searched(given, target, steps | router)
    made["arbitrage, random router"] = searched(given, target, steps | {"router": lambda texts: [random.random()]})
    made["arbitrage, oracle"] = searched(given, target, steps | {"threshold": 0.0}, oracle=True)
    wanted = [TARGET, DRAFT, *given.only.split(",")] if given.only else list(made)
    return {name: made[name] for name in made if name in wanted}


def trained(given: argparse.Namespace, name: str) -> bool:
    return (given.heads / name / "model.safetensors").exists()


def params_of(given: argparse.Namespace, piece: Piece) -> SamplingParams:
    stop = list(ENDS) if piece.task == "humaneval" else []
    seed = 7 if given.temperature else None
    return SamplingParams(temperature=given.temperature, max_tokens=given.tokens, stop=stop, seed=seed)


def plain(given: argparse.Namespace, llm: LLM) -> Run:
    def run(piece: Piece, _: int) -> Any:
        return llm.generate({"prompt_token_ids": piece.ids}, params_of(given, piece))[0]

    return run


def searched(given: argparse.Namespace, llm: LLM, search: dict[str, Any], *, oracle: bool = False) -> Run:
    """With a search that has the draft beside it; the oracle runs where results are known."""

    def run(piece: Piece, _: int) -> Any:
        if oracle and piece.reward is None:
            return None
        more = {"reward": piece.reward} if oracle else {}
        how = search | {"model": str(given.draft)} | more
        return llm.generate({"prompt_token_ids": piece.ids}, params_of(given, piece), search=how)[0]

    return run


def against_target(llm: LLM, ids: Sequence[int], written: Sequence[int], temperature: float) -> tuple[int, float]:
    """Tokens that are not the target's likeliest, and the sum of their KL, as above."""
    cache = llm.runner.open()
    try:
        if len(ids) > 1:
            llm.runner.extend([cache], [ids[:-1]])
        rows = llm.runner.extend([cache], [[ids[-1], *written[:-1]]], all_logits=True).logits.float()
    finally:
        llm.runner.release(cache)
    tokens = torch.tensor(written)
    logs = (rows / (temperature or 1.0)).log_softmax(-1)
    surprisal = -logs[torch.arange(len(tokens)), tokens].double()
    entropy = -(logs.exp() * logs).sum(-1).double() if temperature else 0.0
    return int((rows.argmax(-1) != tokens).sum()), float((surprisal - entropy).sum())


def measure(given: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"speculative_config": None, "threads": given.threads, "enable_prefix_caching": False}
    target, draft = (LLM(str(path), **options) for path in (given.target, given.draft))
    files = {
        "gsm8k": (gsm8k, "gsm8k/test.first-half.jsonl"),
        "humaneval": (humaneval, "humaneval/HumanEval.even.jsonl"),
    }
    each = [make(target, given.data / file, given.prompts) for make, file in files.values()]
    pieces = [piece for pair in zip(*each, strict=True) for piece in pair]
    runs = settings(given, target, draft)
    short = argparse.Namespace(**vars(given) | {"tokens": 8})
    for run in settings(short, target, draft).values():
        run(pieces[0], 0)
    deadline, rows = monotonic() + given.seconds, {name: list[list[float]]() for name in runs}
    for turn in in_turn(runs, pieces, 1):
        piece = pieces[turn.item]
        for name, found in turn.outputs.items():
            if found is not None:
                found.raise_for_error()
                rows[name].append([turn.item, turn.seconds[name], *row_of(given, target, piece, found)])
        print(f"{turn.item + 1} of {len(pieces)} prompts, {deadline - monotonic():.0f} s left", file=sys.stderr)
        if monotonic() > deadline:
            break
    return {"pieces": [piece.task for piece in pieces], "settings": rows}


def row_of(given: argparse.Namespace, target: LLM, piece: Piece, found: Any) -> list[float]:
    """Tokens, departures, KL, right, tokens of the draft or accepted drafts."""
    out = found.outputs[0]
    departures, kl = against_target(target, piece.ids, out.token_ids, given.temperature)
    if given.temperature:
        departures = found.metrics.num_departures
    text = out.text.rstrip() if piece.task == "gsm8k" else out.text
    right = piece.right(text)
    return [len(out.token_ids), departures, kl, float(right), found.metrics.num_accepted_tokens]


def figures(made: Mapping[str, Any]) -> dict[str, Any]:
    """Estimates of every setting."""
    plain = {int(row[0]): row for row in made["settings"][TARGET]}
    found = {}
    for name, rows in made["settings"].items():
        if not rows:
            continue
        _, seconds, tokens, departures, kl, right, _ = np.array(rows).T[:, :, None]
        beside = np.array([plain[int(row[0])] for row in rows])
        paired = [tokens, seconds, beside[:, 2:3], beside[:, 1:2]]
        found[name] = {
            "prompts": len(rows),
            "departures per 1,000 tokens": estimated([departures, tokens], lambda a, b: 1000 * ratio(a, b)),
            "KL": estimated([kl, tokens], ratio),
            "right": estimated([right], lambda a: a.mean((-2, -1))),
            "tokens per second": estimated([tokens, seconds], ratio),
            "over the target": estimated(paired, lambda a, b, c, d: ratio(a, b) / ratio(c, d)),
        }
    return found


def ratio(a_pr: Any, b_pr: Any) -> Any:
    """(..., prompts, 1) -> (...)."""
    return a_pr.sum((-2, -1)) / b_pr.sum((-2, -1))


def table(found: Mapping[str, Any]) -> str:
    """Markdown."""
    columns = {"departures per 1,000 tokens": 0, "KL": 3, "right": 2, "tokens per second": 1, "over the target": 2}
    lines = [f"| setting | prompts | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 2)}"]
    for name, one in found.items():
        cells = [
            f"{one[key]['value']:.{digits}f} ({one[key]['low']:.{digits}f} to {one[key]['high']:.{digits}f})"
            for key, digits in columns.items()
        ]
        lines.append(f"| {name} | {one['prompts']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "draft", "data", "heads"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--part", choices=("heads", "tasks"), default="tasks")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=5, help="of each task (%(default)s)")
    parser.add_argument("--learned", type=int, default=96, help="answers of each kind that heads learn (%(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="of each head's training (%(default)s)")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--seconds", type=float, default=720.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="settings beside target and draft")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--name", default="approximate_rules")
    given = parser.parse_args()
    if given.part == "heads":
        heads(given)
        return
    made = measure(given)
    found = figures(made)
    about = {"target": given.target.name, "draft": given.draft.name, "temperature": given.temperature}
    save(given.name, about | {"figures": found, "raw": made}, given.folder)
    print(table(found))


if __name__ == "__main__":
    main()
