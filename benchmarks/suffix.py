"""SuffixDecoding: lookups, updates and memory against cached tokens, and an agent-like load.

usage: suffix.py [--model smollm2] [--data FOLDER] [--threads 2] [--repeats 3] [--tasks 2] [--tokens 128]
                 [--only tree,load]

tree   microseconds of a proposal and of taking in and forgetting a token, bytes a token, at 1,000 to 1,000,000 cached
       tokens
load   requests that share long parts and edit earlier outputs: plain decoding against `suffix` and `auto`, every turn
       as a new tenant with empty tables, after a turn that is not timed; outputs must be equal or differ first at a
       near tie. Kinds: *first*, a new task; *again*, the same task in other words; *edit*, the earlier answer up to a
       changed token, to be written on; *turn*, a second turn that asks for a variation; *rerun*, the same request
       again. Times with and without the prompt's.

FOLDER holds published prompt sets (`methods.py`); without it the shipped prompts make the load. Texts of `tree` are
synthetic. Results: `results/suffix_MODEL.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import RESULTS, kept, ratio, save
from decoding import add_model, asked, model_of, must_agree
from methods import FILES

from paceline import LLM, RequestOutput, SamplingParams
from paceline.bench import bundled_prompts
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.suffix import SuffixDrafter
from paceline.tree import EMPTY_TREE, Budget
from paceline.utils import in_turn, read_prompts, repeated, timed

SIZES = (1_000, 10_000, 100_000, 1_000_000)
REQUEST = 256  # tokens of a cached text
AGAIN = ("Attempt {n}. {task}", "{task} This is attempt {n}.")
TURN = "Repeat your answer with one small change."
EDITED = (1 / 6, 1 / 4, 1 / 3, 1 / 2)  # of an answer, where the changed token stands
METHODS: dict[str, Any] = {
    "suffix": {"method": "suffix"},
    "suffix, 12 tokens": {"method": "suffix", "num_speculative_tokens": 12},
    "suffix, 24 tokens, depth 64": {
        "method": "suffix",
        "num_speculative_tokens": 24,
        "suffix_decoding_max_tree_depth": 64,
    },
    "ngram, 12 tokens": {"method": "ngram", "num_speculative_tokens": 12},
    "auto": {"method": "auto"},
}

Row = tuple[list[int], float, float, int]
"""An output, seconds, seconds without those up to the first token, passes of the target."""


def texts() -> Iterator[np.ndarray]:
    """Token ids in pieces of a request's length, without end."""
    rng = np.random.default_rng(0)
    pool = [(rng.zipf(1.3, 64) % 6000).astype(np.int32) for _ in range(2000)]
    while True:
        yield np.concatenate(
            [pool[int(i)] if fresh else rng.zipf(1.3, 64) % 6000 for i, fresh in rng.integers(0, (2000, 2), (4, 2))]
        )


def tree(llm: LLM) -> list[dict[str, float]]:
    """One row a size: what the tables cost when they hold so many tokens."""
    args = DrafterArgs(vocab_size=llm.runner.info.vocab_size, index=0, max_context=2048)
    drafter = SuffixDrafter(args, max_cached_tokens=2 * SIZES[-1])
    cache, source, rows = drafter.tables.of("default"), texts(), []

    def add(pieces: list[np.ndarray]) -> None:
        for piece in pieces:
            cache.add(piece.astype(np.int32))

    propose(drafter, next(source))  # compiles
    cache.add(next(source))
    cache.forget()
    for size in SIZES:
        pieces = list(islice(source, max(0, size - cache.tokens) // REQUEST + 1))
        _, adding = timed(partial(add, pieces))
        proposals = [propose(drafter, piece) for piece in (pieces[0], pieces[-1], next(source))]
        seconds = np.concatenate(proposals)
        held = cache.tokens
        forgetting = sum(repeated(cache.forget, 3, warm_up=0))
        row = {
            "cached_tokens": held,
            "propose_us_median": 1e6 * float(np.median(seconds)),
            "propose_us_p99": 1e6 * float(np.quantile(seconds, 0.99)),
            "add_us_per_token": 1e6 * adding / sum(map(len, pieces)),
            "forget_us_per_token": 1e6 * forgetting / (held - cache.tokens),
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
        seconds.append(timed(lambda: drafter.propose([state], [Budget(16, 16)], [EMPTY_TREE]))[1])
    return seconds


def tasks(data: Path | None, count: int) -> list[str]:
    """User messages, `count` of each source."""
    if data is None:
        return [p.prompt for p in bundled_prompts()][: 3 * count]
    found = []
    for name in ("humaneval", "gsm8k", "mt-redundant"):
        if not (files := sorted(data.glob(FILES[name]))):
            raise SystemExit(f"{data} holds no {FILES[name]}; give --data a folder that does")
        found += [one.turns[0] for one in read_prompts(files[0]).limited(count).conversations]
    return found


def agent_load(plain: LLM, messages: list[str], tokens: int) -> list[tuple[str, list[int]]]:
    """(kind, prompt) of all requests: every task first, then its variations, round by round."""
    user = [[{"role": "user", "content": task}] for task in messages]
    first = [asked(plain, task) for task in messages]
    answers = [decode(plain, ids, tokens).outputs[0].token_ids for ids in first]
    load = [("first", ids) for ids in first]
    for n, form in enumerate(AGAIN, start=2):
        load += [("again", asked(plain, form.format(n=n, task=task))) for task in messages]
    for share in EDITED:
        for ids, answer in zip(first, answers, strict=True):
            cut = int(share * len(answer))
            load.append(("edit", [*ids, *answer[:cut], answer[(cut + 7) % len(answer)]]))
    for turns, answer in zip(user, answers, strict=True):
        said = {"role": "assistant", "content": plain.tokenizer.decode(answer)}
        load.append(("turn", plain.chat_ids([*turns, said, {"role": "user", "content": TURN}])))
    return load + [("rerun", ids) for ids in first]


def decode(llm: LLM, ids: list[int], tokens: int, tenant: str = "default") -> RequestOutput:
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    return llm.generate({"prompt_token_ids": ids, "cache_salt": tenant}, params)[0]


def row_of(found: RequestOutput, seconds: float) -> Row:
    metrics = found.metrics
    return found.outputs[0].token_ids, seconds, seconds - (metrics.time_to_first_token or 0.0), metrics.num_steps


def load(plain: LLM, messages: list[str], repeats: int, tokens: int) -> dict[str, Any]:
    """Tokens a second of every method, in turn, with tables that start empty in every turn, as a new tenant's do."""
    requests = agent_load(plain, messages, tokens)
    prompts = [ids for _, ids in requests]
    base = [decode(plain, ids, tokens).outputs[0].token_ids for ids in prompts]
    llms = {name: plain.with_speculative_config(METHODS.get(name)) for name in ("plain", *METHODS)}
    calls = {
        name: lambda ids, repeat, llm=llm: decode(llm, ids, tokens, f"turn {repeat}") for name, llm in llms.items()
    }
    made: dict[str, list[list[Row]]] = {name: [[] for _ in range(repeats + 1)] for name in llms}
    for turn in in_turn(calls, prompts, repeats + 1):
        for name, output in turn.outputs.items():
            made[name][turn.repeat].append(row_of(output, turn.seconds[name]))
    agreement = dict[str, Any]()
    for name, own in made.items():
        for rows in own:
            agreement[name] = must_agree(plain, prompts, base, [one[0] for one in rows], what=name)
    runs = {name: own[1:] for name, own in made.items()}  # the first turn warms up
    found: dict[str, Any] = {"agreement": agreement}
    for kind in ("all", *dict.fromkeys(kind for kind, _ in requests)):
        picked = [i for i, (one, _) in enumerate(requests) if kind in ("all", one)]
        found[kind] = summary(runs, picked)
    return found


def summary(runs: dict[str, list[list[Row]]], picked: list[int]) -> dict[str, Any]:
    """Rates, acceptance and paired speed-ups over some of the requests."""
    result: dict[str, Any] = {"requests": len(picked), "tokens": sum(len(runs["plain"][0][i][0]) for i in picked)}
    for what, column in (("with prompts", 1), ("decoding", 2)):
        total = {name: [sum(turn[i][column] for i in picked) for turn in turns] for name, turns in runs.items()}
        result[what] = {
            "tokens_per_second": {name: result["tokens"] / median(values) for name, values in total.items()},
            "speedup over plain": {
                name: ratio(total["plain"], values) for name, values in total.items() if name != "plain"
            },
        }
    steps = {name: sum(turns[-1][i][3] for i in picked) for name, turns in runs.items()}
    return {**result, "tokens_per_step": {name: result["tokens"] / max(1, count) for name, count in steps.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--data", type=Path, help="folder of published prompt sets; default: the shipped prompts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--only", default="tree,load")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    model, parts, result = model_of(given.model), given.only.split(","), dict[str, Any]()
    plain = model.open(threads=given.threads)
    if "tree" in parts:
        result["tree"] = tree(plain)
    if "load" in parts:
        result["load"] = load(plain, tasks(given.data, given.tasks), given.repeats, given.tokens)
        for kind, one in result["load"].items():
            for what in ("with prompts", "decoding") if kind != "agreement" else ():
                print(kind, what, {name: round(r["median"], 2) for name, r in one[what]["speedup over plain"].items()})
    name = f"suffix_{model.name}"
    save(name, kept(name, given.folder) | {"model": model.weights} | result, given.folder, parts=list(result))


if __name__ == "__main__":
    main()
