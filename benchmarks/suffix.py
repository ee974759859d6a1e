"""SuffixDecoding: look-ups, updates and memory against cached tokens, and an agent-like load on the bundled target.

usage: suffix.py [--data DIR] [--threads 2] [--repeats 5] [--tasks 3] [--tokens 256] [--only tree,load]

tree   microseconds of a proposal and of taking in and forgetting a token, bytes a token, at 1,000 to 1,000,000 cached tokens
load   requests that share long parts and edit earlier outputs: plain decoding against `suffix` and `auto`, every turn as a new
       tenant with empty tables, after a turn that is not timed; outputs must be equal or differ first at a near tie. Kinds:
       *first*, a new task; *again*, the same task in other words; *edit*, the earlier answer up to a changed token, to be written
       on; *turn*, a second turn that asks for a variation; *rerun*, the same request again. Times with and without the prompt's;
       and, with hindsight, what passes over the tokens that stood would take, behind the load's mean context, nothing else counted;
       and, with foresight, the same with what plain and drafted steps take outside their passes.

DIR holds folders of benchmark prompts that the bundled target was not trained on (humaneval, gsm8k, mt-redundant; the README of
src/paceline/bundled names what it has seen). Without it the bundled prompts make the load, and the texts of `tree` are synthetic.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from common import kept, ratio, save

from paceline import LLM, SamplingParams
from paceline.bench.compare import first_difference
from paceline.bench.demo import bundled_prompts
from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.suffix import SuffixDrafter
from paceline.tree.token_tree import EMPTY_TREE, TokenTree
from paceline.tree.types import Budget

SIZES = (1_000, 10_000, 100_000, 1_000_000)
REQUEST = 256  # tokens of a cached text
AGAIN = ("Attempt {n}. {task}", "{task} This is attempt {n}.")
TURN = "Repeat your answer with one small change."
EDITED = (1 / 6, 1 / 4, 1 / 3, 1 / 2)  # of an answer, where the changed token stands
DEEP = "suffix, 24 tokens, depth 64"
METHODS: dict[str, Any] = {
    "suffix": {"method": "suffix"},
    "suffix, 12 tokens": {"method": "suffix", "num_speculative_tokens": 12},
    DEEP: {"method": "suffix", "num_speculative_tokens": 24, "suffix_decoding_max_tree_depth": 64},
    "auto": {"method": "auto"},
    "suffix + draft_model": {"method": ["suffix", "draft_model"]},
    "ngram + draft_model": {"method": ["ngram", "draft_model"]},
    "suffix + ngram + draft_model": {"method": ["suffix", "ngram", "draft_model"]},
}


def texts(llm: LLM, data: Path | None) -> Iterator[np.ndarray]:
    """Token ids in pieces of a request's length, without end."""
    if data is not None:
        files = sorted(
            p for name in ("spec-bench", "gsm8k", "wiki-questions", "mbpp", "xquad") for p in (data / name).glob("*.json*")
        )
        for path in (p for p in files if p.suffix != ".gz"):
            ids = np.array(llm.tokenizer.encode(path.read_text(encoding="utf-8")), np.int32)
            yield from (ids[i : i + REQUEST] for i in range(0, len(ids) - REQUEST, REQUEST))
    rng = np.random.default_rng(0)
    pool = [(rng.zipf(1.3, 64) % 6000).astype(np.int32) for _ in range(2000)]
    while True:
        yield np.concatenate(
            [pool[int(i)] if fresh else rng.zipf(1.3, 64) % 6000 for i, fresh in rng.integers(0, (2000, 2), (4, 2))]
        )


def tree(llm: LLM, data: Path | None) -> list[dict[str, float]]:
    """One row a size: what the tables cost when they hold so many tokens."""
    args = DrafterArgs(vocab_size=llm.runner.info.vocab_size, index=0, max_context=2048)
    drafter = SuffixDrafter(args, max_cached_tokens=2 * SIZES[-1])
    cache, source, rows = drafter.tables.of("default"), texts(llm, data), []
    propose(drafter, next(source))  # compiles
    cache.add(next(source))
    cache.forget()
    for size in SIZES:
        pieces = list(islice(source, max(0, size - cache.tokens) // REQUEST + 1))
        start = perf_counter()
        for piece in pieces:
            cache.add(piece.astype(np.int32))
        added = (perf_counter() - start) / sum(map(len, pieces))
        proposals = [propose(drafter, piece) for piece in (pieces[0], pieces[-1], next(source))]
        seconds = np.concatenate(proposals)
        held, start = cache.tokens, perf_counter()
        for _ in range(3):
            cache.forget()
        row = {
            "cached_tokens": held,
            "propose_us_median": 1e6 * float(np.median(seconds)),
            "propose_us_p99": 1e6 * float(np.quantile(seconds, 0.99)),
            "add_us_per_token": 1e6 * added,
            "forget_us_per_token": 1e6 * (perf_counter() - start) / (held - cache.tokens),
            "bytes_per_token": cache.tree.nbytes / held,
        }
        print({key: round(value, 2) for key, value in row.items()})
        rows.append(row)
    return rows


def propose(drafter: SuffixDrafter, text: np.ndarray) -> list[float]:
    """Seconds of each proposal while a request writes this text, the update of its own tree included."""
    tokens, seconds = [int(t) for t in text], []
    context = Context("timed", tokens[:32], 32)
    (state,) = drafter.begin([context])
    for token in tokens[32:]:
        context.tokens.append(token)
        start = perf_counter()
        drafter.propose([state], [Budget(16, 16)], [EMPTY_TREE])
        seconds.append(perf_counter() - start)
    return seconds


def tasks(data: Path | None, count: int) -> list[str]:
    """User messages, `count` of each source."""
    if data is None:
        return [p.prompt for p in bundled_prompts()][: 3 * count]
    rows = {
        name: [json.loads(line) for line in islice((data / name / file).open(encoding="utf-8"), count)]
        for name, file in (
            ("humaneval", "HumanEval.even.jsonl"),
            ("gsm8k", "test.first-half.jsonl"),
            ("mt-redundant", "question_redundant.odd.jsonl"),
        )
    }
    found = [f"Complete this program.\n{row['prompt']}" for row in rows["humaneval"]]
    return found + [row["question"] for row in rows["gsm8k"]] + [row["turns"][0] for row in rows["mt-redundant"]]


def agent_load(plain: LLM, messages: list[str], tokens: int) -> list[tuple[str, list[int]]]:
    """(kind, prompt) of all requests: every task first, then its variations, round by round."""
    user = [[{"role": "user", "content": task}] for task in messages]
    asked = [plain.chat_ids(turns) for turns in user]
    answers = [decode(plain, ids, tokens)[0] for ids in asked]
    load = [("first", ids) for ids in asked]
    for n, form in enumerate(AGAIN, start=2):
        load += [("again", plain.chat_ids([{"role": "user", "content": form.format(n=n, task=task)}])) for task in messages]
    for share in EDITED:
        for ids, answer in zip(asked, answers, strict=True):
            cut = int(share * len(answer))
            load.append(("edit", [*ids, *answer[:cut], answer[(cut + 7) % len(answer)]]))
    for turns, answer in zip(user, answers, strict=True):
        said = {"role": "assistant", "content": plain.tokenizer.decode(answer)}
        load.append(("turn", plain.chat_ids([*turns, said, {"role": "user", "content": TURN}])))
    return load + [("rerun", ids) for ids in asked]


def decode(llm: LLM, ids: list[int], tokens: int, tenant: str = "default") -> tuple[list[int], float, float, int]:
    """The output, seconds, seconds without those up to the first token, passes of the target."""
    start = perf_counter()
    (found,) = llm.generate({"prompt_token_ids": ids, "cache_salt": tenant}, SamplingParams(temperature=0.0, max_tokens=tokens))
    seconds = perf_counter() - start
    return found.outputs[0].token_ids, seconds, seconds - (found.metrics.time_to_first_token or 0.0), found.metrics.num_steps


def load(plain: LLM, data: Path | None, repeats: int, count: int, tokens: int) -> dict[str, Any]:
    """Tokens a second of every method, in turn, with tables that start empty in every turn, as a new tenant's do."""
    requests = agent_load(plain, tasks(data, count), tokens)
    base = [decode(plain, ids, tokens)[0] for _, ids in requests]
    llms = {name: plain.with_speculative_config(METHODS.get(name)) for name in ("plain", *METHODS)}
    runs: dict[str, list[list[tuple[list[int], float, float, int]]]] = {name: [] for name in llms}
    behind = int(mean(len(ids) + len(answer) / 2 for (_, ids), answer in zip(requests, base, strict=True)))
    passes: list[list[float]] = []
    agreement, rng = dict[str, int](), np.random.default_rng(0)
    seen: dict[str, dict[int, list[Seen]]] = {"plain": {}, DEEP: {}}
    for turn in range(repeats + 1):
        passes += pass_seconds(plain, METHODS[DEEP]["num_speculative_tokens"], behind)
        made: dict[str, list[tuple[list[int], float, float, int]]] = {name: [] for name in llms}
        for number, (_, ids) in enumerate(requests):
            for name in rng.permutation(list(llms)).tolist():
                watched = not turn and name in seen
                with watching(llms[name].engine, seen[name].setdefault(number, [])) if watched else nullcontext():
                    made[name].append(decode(llms[name], ids, tokens, f"turn {turn}"))
        for name, own in made.items():
            differing = [i for i, one in enumerate(own) if one[0] != base[i]]
            differences = [first_difference(plain.runner, requests[i][1], base[i], own[i][0]) for i in differing]
            if any(d is not None and not d.near_tie for d in differences):
                raise SystemExit(f"{name}: outputs differ outside near ties, nothing is timed: {differences[:3]}")
            agreement[name] = len(requests) - len(differing)
            if turn:  # the first turn warms up
                runs[name].append(own)
    costs = [median(one) for one in zip(*passes, strict=True)]
    outside = {name: outside_of(steps) for name, steps in seen.items()}
    found: dict[str, Any] = {"identical": agreement, "mean context": behind, "pass seconds by rows": costs, "outside": outside}
    for kind in ("all", *dict.fromkeys(kind for kind, _ in requests)):
        picked = [i for i, (one, _) in enumerate(requests) if kind in ("all", one)]
        found[kind] = summary(runs, picked)
        steps = [one for i in picked for one in seen[DEEP][i]]
        found[kind] |= {"with hindsight": hindsight(costs, steps), "with foresight": foresight(costs, steps, outside)}
    return found


class Seen(NamedTuple):
    """A step: drafted tokens that it accepted, whether it scored any, and seconds outside the pass."""

    accepted: int
    drafted: bool
    outside: float


@contextmanager
def watching(engine: Any, seen: list[Seen]) -> Iterator[None]:
    """Note every step."""

    def note(record: Any) -> None:
        seen.append(Seen(len(record.verdicts[0].path), len(record.trees[0]) > 0, record.times.total - record.times.score))

    engine.watchers.append(note)
    try:
        yield
    finally:
        engine.watchers.remove(note)


def pass_seconds(plain: LLM, most: int, behind: int, turns: int = 10) -> list[list[float]]:
    """Per turn the seconds of passes over 1 to `most` + 1 rows behind so many tokens, each after one like it, as steps are."""
    cache = plain.runner.open()
    plain.runner.extend([cache], [[i % 4000 for i in range(behind)]])
    trees = [EMPTY_TREE, *(TokenTree.chain([0] * count) for count in range(1, most + 1))]
    times: list[list[float]] = []
    for _ in range(turns):
        times.append([])
        for tree in trees:
            plain.runner.score([cache], [0], [tree])
            start = perf_counter()
            plain.runner.score([cache], [0], [tree])
            times[-1].append(perf_counter() - start)
    plain.runner.release(cache)
    return times


def hindsight(costs: list[float], steps: list[Seen]) -> float:
    """Times plain decoding, where passes are all that takes time, every guess costs nothing, and only tokens of the deepest
    suffix trees that stand are scored. No bound: plain steps take time outside their passes too, for each of their tokens."""
    return sum(1 + step.accepted for step in steps) * costs[0] / sum(costs[step.accepted] for step in steps)


def outside_of(seen: dict[int, list[Seen]]) -> list[float]:
    """Median seconds outside the pass of steps that score nothing that is drafted, and of those that do, if there are any."""
    steps = [one for own in seen.values() for one in own]
    return [median(one.outside for one in steps if one.drafted is whether) for whether in sorted({one.drafted for one in steps})]


def foresight(costs: list[float], steps: list[Seen], outside: dict[str, list[float]]) -> float:
    """The same with what steps take outside their passes: what the deepest trees would bring with this engine if they knew how many
    of their tokens stand."""
    (plain,), (asked, drafted) = outside["plain"], outside[DEEP]
    spent = sum(costs[one.accepted] + (drafted if one.accepted else asked) for one in steps)
    return sum(1 + one.accepted for one in steps) * (costs[0] + plain) / spent


def summary(runs: dict[str, list[list[tuple[list[int], float, float, int]]]], picked: list[int]) -> dict[str, Any]:
    """Rates, acceptance and paired speed-ups over some of the requests."""
    result: dict[str, Any] = {"requests": len(picked), "tokens": sum(len(runs["plain"][0][i][0]) for i in picked)}
    for what, column in (("with prompts", 1), ("decoding", 2)):
        total = {name: [sum(turn[i][column] for i in picked) for turn in turns] for name, turns in runs.items()}
        result[what] = {
            "tokens_per_second": {name: result["tokens"] / median(values) for name, values in total.items()},
            "speedup over plain": {name: ratio(total["plain"], values) for name, values in total.items() if name != "plain"},
        }
    steps = {name: sum(turns[-1][i][3] for i in picked) for name, turns in runs.items()}
    return {**result, "tokens_per_step": {name: result["tokens"] / max(1, count) for name, count in steps.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--only", default="tree,load")
    parser.add_argument("--name", default="suffix", help="name of the result file")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    plain, parts, result = LLM(speculative_config=None, enable_prefix_caching=False), given.only.split(","), {}
    if "tree" in parts:
        result["tree"] = tree(plain, given.data)
    if "load" in parts:
        result["load"] = load(plain, given.data, given.repeats, given.tasks, given.tokens)
        for kind, one in result["load"].items():
            for what in ("with prompts", "decoding") if isinstance(one, dict) and "with hindsight" in one else ():
                ratios = {name: round(r["median"], 2) for name, r in one[what]["speedup over plain"].items()}
                print(kind, what, ratios, {key: round(one[key], 2) for key in ("with hindsight", "with foresight")})
    save(given.name, kept(given.name) | result, parts=list(result))


if __name__ == "__main__":
    main()
