"""Searches and steering on tasks with closed-form answers: quality and cost against plain sampling of as many tokens.

usage: searches.py [--model smollm2] [--tasks 40] [--samples 24] [--families story,program]
                   [--methods all] [--data FOLDER] [--folder results]

For every task `--samples` texts are sampled. A method is compared with as many of these as cost the tokens that it
took, from which one is chosen as the method chooses: the first, the likeliest, by votes, or by the same reward (which
knows the answer, and stands for a process reward model or unit tests; for programs other tests decide). Tokens are rows
of passes. Differences have 95 % bootstrap intervals over tasks. With `--data`, HumanEval's tasks with examples are one
more family. Results: `results/searches_MODEL.json`; a family or method that is not asked for stays as it is.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
from common import RESULTS, kept, save
from decoding import add_model, model_of
from search_tasks import FAMILIES, Programs, Task, humaneval
from tqdm import tqdm

from paceline import LLM, SamplingParams
from paceline.search import last_number

PLAIN = SamplingParams(temperature=0.7, max_tokens=48, seed=7)
LONGEST = {"program": 64, "humaneval": 160}
SUBSETS = 64
"""Of the samples of a task, drawn to say what so many are worth."""


@dataclass(frozen=True)
class Method:
    """A way to decode.

    Attributes:
        search: without what depends on the task: "reward" takes the task's, "tests" those that may be seen.
        choice: how it chooses, and plain samples beside it: "first", "likeliest", "votes" or "reward".
        families: on which it is tried; () for all. changes: of the parameters of plain sampling.
    """

    search: dict[str, Any] | None
    choice: str
    families: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)


GREEDY: dict[str, Any] = {"temperature": 0.0, "seed": None}
SUMS, CODE = ("story",), ("program", "humaneval")
METHODS: dict[str, Method] = {
    "greedy": Method(None, "first", changes=GREEDY),
    "beam": Method({"method": "beam", "beam_width": 4}, "likeliest", changes=GREEDY),
    "diverse_beam": Method({"method": "diverse_beam", "beam_width": 4}, "likeliest", changes=GREEDY),
    "self_consistency": Method({"method": "self_consistency", "num_samples": 8}, "likeliest", SUMS),
    "complexity_voting": Method({"method": "complexity_voting", "num_samples": 8}, "votes", SUMS),
    "sample_and_rank": Method({"method": "sample_and_rank", "num_samples": 8}, "votes", SUMS),
    "first_finish": Method({"method": "first_finish", "num_samples": 4}, "first"),
    "cautious": Method({"method": "cautious"}, "likeliest"),
    "adadec": Method({"method": "adadec"}, "likeliest", changes=GREEDY),
    "a_star": Method({"method": "a_star", "reward": None, "delimiter": ".", "path": "sum"}, "reward", ("story",)),
    "transfer_q": Method({"method": "transfer_q", "reward": None, "weight": 4.0}, "reward", ("story",), GREEDY),
    "ved": Method({"method": "ved", "value": None, "beam_width": 4}, "reward", ("story",)),
    "gfd": Method({"method": "gfd", "scorer": None, "weight": 0.5}, "reward", ("story",), GREEDY),
    "superposed": Method({"method": "superposed", "num_drafts": 3}, "likeliest", SUMS, GREEDY),
    "pg_td": Method({"method": "pg_td", "tests": None, "rollouts": 32}, "reward", CODE, GREEDY),
    "dola": Method(None, "first", changes={**GREEDY, "steering": {"method": "dola"}}),
    "cfg": Method(None, "first", changes={**GREEDY, "steering": {"method": "cfg"}}),
}  # fmt: skip


@dataclass
class Text:
    """A text of a task, with its tokens and mean log-probability."""

    text: str
    tokens: int
    mean: float


def samples_of(llm: LLM, tasks: Sequence[Task], count: int, params: SamplingParams) -> list[list[Text]]:
    """So many texts of each task."""
    found = []
    for task in tqdm(tasks, "samples"):
        own = replace(params, n=count, stop=task.stop, logprobs=0)
        (result,) = llm.generate(task.prompt, own, use_tqdm=False)
        result.raise_for_error()
        found.append([Text(one.text, len(one.token_ids), (one.cumulative_logprob or 0.0) / max(1, len(one.token_ids)))
                      for one in result.outputs])  # fmt: skip
    return found


def decoded(llm: LLM, method: Method, task: Task, longest: int) -> tuple[str, int, int]:
    """The text of a method, and the rows and passes that it took."""
    params = replace(PLAIN, **{**method.changes, "stop": task.stop, "max_tokens": longest})
    search = None if method.search is None else dict(method.search)
    for key in () if search is None else ("reward", "value", "scorer", "tests"):
        if key in search:
            search[key] = {"tests": list(task.known), "scorer": scorer(task)}.get(key, task.reward)
    (result,) = llm.generate(task.prompt, params, use_tqdm=False, search=search)
    result.raise_for_error()
    best = result.outputs[0]
    if result.search is None:
        return best.text, len(best.token_ids), len(best.token_ids)
    return best.text, result.search.num_tokens, result.search.num_passes


def scorer(task: Task) -> Callable[[Sequence[bytes]], list[float]]:
    """The reward as a recogniser's log-probability."""
    return lambda texts: np.log(task.reward([one.decode(errors="replace") for one in texts])).tolist()


def chosen(choice: str, task: Task, texts: Sequence[Text]) -> Text:
    """The one that is taken of several."""
    if choice == "likeliest":
        return max(texts, key=lambda one: one.mean)
    if choice == "votes":
        votes = Counter(last_number(one.text) for one in texts)
        return next(one for one in texts if last_number(one.text) == votes.most_common(1)[0][0])
    if choice == "reward":
        rewards = task.reward([one.text for one in texts])
        return texts[int(np.argmax(rewards))]
    return texts[0]


def worth(choice: str, task: Task, texts: Sequence[Text], tokens: int, random: Random) -> float:
    """How often plain samples of as many tokens are right, one of which is chosen."""
    count = round(tokens / fmean(one.tokens for one in texts))
    count = min(len(texts), max(1, count))
    if choice == "first":
        return fmean(task.right(one.text) for one in texts)
    subsets = [random.sample(texts, count) for _ in range(1 if count == len(texts) else SUBSETS)]
    return fmean(task.right(chosen(choice, task, one).text) for one in subsets)


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean over tasks with its 95 % bootstrap interval."""
    column, random = np.array(values), np.random.default_rng(0)
    means = column[random.integers(0, len(column), (4000, len(column)))].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return {"value": float(column.mean()), "low": float(low), "high": float(high)}


def row(llm: LLM, name: str, family: str, tasks: Sequence[Task], samples: Sequence[Sequence[Text]]) -> dict[str, Any]:
    """A method on a family."""
    method, random = METHODS[name], Random(1)
    right, even, spent = list[float](), list[float](), list[tuple[int, int]]()
    for task, texts in zip(tqdm(tasks, f"{family} {name}"), samples, strict=True):
        text, tokens, passes = decoded(llm, method, task, LONGEST.get(family, PLAIN.max_tokens or 48))
        right.append(float(task.right(text)))
        even.append(worth(method.choice, task, texts, tokens, random))
        spent.append((tokens, passes))
    tokens, passes = np.array(spent).mean(0)
    return {
        "search": method.search and {key: one for key, one in method.search.items() if one is not None},
        "steering": method.changes.get("steering"),
        "temperature": method.changes.get("temperature", PLAIN.temperature),
        "choice": method.choice,
        "right": interval(right),
        "tokens": float(tokens),
        "passes": float(passes),
        "samples of as many tokens": fmean(even),
        "more than these": interval(np.array(right) - np.array(even)),
    }


def tasks_of(family: str, count: int, data: Path | None) -> list[Task]:
    if family != "humaneval":
        return [FAMILIES[family](Random(f"{family} {i}")) for i in range(count)]
    assert data is not None
    (file,) = sorted(data.glob("humaneval/*.jsonl"))[:1]
    return list(islice(humaneval(file, Programs()), count))


def line(family: str, name: str, one: dict[str, Any]) -> str:
    """One line on a row."""
    gain = one["more than these"]
    return (f"{family:10s} {name:18s} right {one['right']['value']:.2f} at {one['tokens']:.0f} tokens in "
            f"{one['passes']:.0f} passes; samples of as many tokens {one['samples of as many tokens']:.2f}, "
            f"difference {gain['value']:+.2f} ({gain['low']:+.2f} to {gain['high']:+.2f})")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--methods", default="all")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    model = model_of(given.model)
    llm = LLM(model.folder, speculative_config=None, threads=given.threads)
    name = f"searches_{model.name}"
    families = [one for one in given.families.split(",") if one] + (["humaneval"] if given.data else [])
    for family in families:
        tasks = tasks_of(family, given.tasks, given.data)
        params = replace(PLAIN, max_tokens=LONGEST.get(family, PLAIN.max_tokens))
        samples = samples_of(llm, tasks, given.samples, params)
        alone = [fmean(task.right(one.text) for one in texts) for task, texts in zip(tasks, samples, strict=True)]
        print(f"{family:10s} one sample is right at {fmean(alone):.2f}", flush=True)
        sample = {"right": interval(alone), "tokens": fmean(one.tokens for texts in samples for one in texts)}
        for method in METHODS if given.methods == "all" else given.methods.split(","):
            if METHODS[method].families and family not in METHODS[method].families:
                continue
            found = kept(name, given.folder).get("families", {})
            rows = found.get(family, {}).get("methods", {})
            rows[method] = row(llm, method, family, tasks, samples)
            found[family] = {"tasks": len(tasks), "one sample": sample, "methods": rows}
            save(name, {"model": model.weights, "families": found}, given.folder, parts=[f"{family} {method}"])
            print(line(family, method, rows[method]), flush=True)


if __name__ == "__main__":
    main()
