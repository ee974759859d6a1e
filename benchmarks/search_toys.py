"""Searches where the best answer is known: texts of five letters out of four, all of which can be looked at.

usage: search_toys.py [--prompts 24] [--threads 2] [--folder results]

a_star     with the true remaining cost as its reward: rows that it computes until it has the likeliest text, and those
           of the narrowest beam that finds it
pg_td      the 20th likeliest text is wanted, each letter in its place rewarded: how often it is found in 64 rollouts,
           and by plain samples of as many rows
diverse    first tokens and pairs of tokens that differ among the texts of diverse and of plain beams
coupling   entropy of greedy couplings above the larger of the two marginal entropies, which no coupling goes below (the
           least there is may itself be above; the greedy one is within 0.53 bits of that)

The bundled model. Results: `results/search_toys.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise, product
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from common import RESULTS, save

from paceline import LLM, SamplingParams
from paceline.bench import bundled_prompts
from paceline.search import Branch, Found, Search, Steps, entropy_bits, minimum_entropy_coupling

LETTERS, LENGTH = "abcd", 5
RANK = 20
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
TEXTS = ["".join(one) for one in product(LETTERS, repeat=LENGTH)]


class Enumerate(Search):
    """Looks at everything; `totals` holds the log-probability of every beginning."""

    name = "enumerate"
    totals: dict[str, float]

    def steps(self, root: Branch) -> Steps[None]:
        type(self).totals = {"": 0.0}
        level = {"": root}
        for _ in range(LENGTH):
            rows = yield list(level.values())
            following = {}
            for (text, branch), logprobs in zip(level.items(), rows.logprobs, strict=True):
                for letter in LETTERS:
                    token = int(self.tokenizer.encode(letter)[-1])
                    child = branch.child(token, float(logprobs[token]))
                    following[text + letter] = child
                    self.totals[text + letter] = child.logprob
            level = following
        self.found = [Found(one, one.logprob) for one in level.values()]


class Toy:
    """The bundled model, held to the letters."""

    def __init__(self, threads: int) -> None:
        self.llm = LLM(dtype="float32", speculative_config=None, threads=threads)
        ids = [self.llm.tokenizer.encode(letter)[-1] for letter in LETTERS]
        self.params = SamplingParams(
            temperature=1.0, seed=1, max_tokens=LENGTH, ignore_eos=True, allowed_token_ids=ids
        )  # fmt: skip

    def search(self, prompt: str, **search: Any) -> tuple[str, int]:
        """The best text, and the rows computed."""
        (found,) = self.llm.generate(prompt, self.params, use_tqdm=False, search=search)
        found.raise_for_error()
        assert found.search is not None
        return found.outputs[0].text, found.search.num_tokens

    def totals(self, prompt: str) -> dict[str, float]:
        """The log-probability of every beginning."""
        self.search(prompt, method=f"{__name__}:Enumerate")
        return Enumerate.totals


def a_star(toy: Toy, prompts: Sequence[str]) -> dict[str, Any]:
    """See the script."""
    found, rows, narrowest = [], [], []
    for prompt in prompts:
        totals = toy.totals(prompt)
        best = max(TEXTS, key=lambda text: totals[text])

        def reward(texts: Sequence[str], totals: dict[str, float] = totals) -> list[float]:
            ends = [max(totals[one] for one in TEXTS if one.startswith(text)) for text in texts]
            return [min(1.0, exp(end - totals[text])) for end, text in zip(ends, texts, strict=True)]

        text, spent = toy.search(prompt, method="a_star", reward=reward, branching=64, step_tokens=1,
                                 heuristic="log", cost="surprisal", path="sum")  # fmt: skip
        found.append(text == best)
        rows.append(spent)
        for width in WIDTHS:
            text, spent = toy.search(prompt, method="beam", beam_width=width, length_penalty=0.0)
            if text == best:
                break
        narrowest.append(spent)
    return {"found": fmean(found), "rows": fmean(rows), "rows of the narrowest beam": fmean(narrowest),
            "beams that needed more": fmean(a < b for a, b in zip(rows, narrowest, strict=True))}  # fmt: skip


def pg_td(toy: Toy, prompts: Sequence[str]) -> dict[str, Any]:
    """See the script."""
    found, rows, plain = [], [], []
    for prompt in prompts:
        totals = toy.totals(prompt)
        hidden = sorted(TEXTS, key=lambda text, totals=totals: -totals[text])[RANK - 1]

        def reward(texts: Sequence[str], hidden: str = hidden) -> list[float]:
            return [sum(a == b for a, b in zip(text, hidden, strict=False)) / LENGTH for text in texts]

        toy.params.temperature = 0.0
        text, spent = toy.search(prompt, method="pg_td", reward=reward, rollouts=64, branching=4)
        toy.params.temperature = 1.0
        found.append(text == hidden)
        rows.append(spent)
        chance = exp(totals[hidden])
        plain.append(1 - (1 - chance) ** (spent / LENGTH))
    return {"found": fmean(found), "rows": fmean(rows), "found by plain samples of as many rows": fmean(plain)}


def diverse(toy: Toy, prompts: Sequence[str]) -> dict[str, Any]:
    """See the script."""
    params, made = SamplingParams(temperature=0.0, max_tokens=16, n=4), {}
    for method in ("beam", "diverse_beam"):
        results = toy.llm.generate(
            list(prompts), params, use_tqdm=False, search={"method": method, "beam_width": 4}
        )  # fmt: skip
        texts = [[one.token_ids for one in result.outputs] for result in results]
        made[method] = {
            "different first tokens": fmean(len({one[0] for one in group}) for group in texts),
            "different pairs": fmean(_different(group) for group in texts),
        }
    return made


def _different(texts: Sequence[Sequence[int]]) -> float:
    pairs = [pair for one in texts for pair in pairwise(one)]
    return len(set(pairs)) / max(1, len(pairs))


def coupling(count: int = 2000) -> dict[str, Any]:
    """See the script."""
    random, above = np.random.default_rng(0), []
    for _ in range(count):
        p, q = (random.dirichlet(np.full(random.integers(2, 33), 0.5)) for _ in range(2))
        joint = minimum_entropy_coupling(p, q)
        above.append(entropy_bits(joint) - max(entropy_bits(p), entropy_bits(q)))
    return {"pairs": count, "bits above, mean": fmean(above), "bits above, most": max(above)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    toy = Toy(given.threads)
    prompts = [one.prompt for one in bundled_prompts()][: given.prompts]
    result = {"prompts": len(prompts), "a_star": a_star(toy, prompts), "pg_td": pg_td(toy, prompts),
              "diverse": diverse(toy, prompts), "coupling": coupling()}  # fmt: skip
    save("search_toys", result, given.folder)
    for name in ("a_star", "pg_td", "diverse", "coupling"):
        print(name, result[name])


if __name__ == "__main__":
    main()
