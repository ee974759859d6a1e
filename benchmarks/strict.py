"""Strict mode: are the tokens of every drafter those of plain decoding, bit for bit, and what does it cost?

usage: strict.py count [--model smollm2] [--tokens 500] [--dtypes ...] [--batches ...] [--drafters ...] [--threads N]
       strict.py cost [--model smollm2] [--repeats 3]

*count*: what differs. The model decodes requests plainly, one after the other. Then every drafter of the registry that
has what it needs decodes the same requests at batch 1, 4 and 3; requests join and leave, so that prompts are fed beside
running ones. Every second request asks for logprobs, which are compared bit by bit. Further rows are requests with
seeds at temperature 0.8, PyTorch's operators in their strict form, and a control that must differ, if only in logprobs:
those operators in their fastest form.

Counts are taken in rounds of up to ROUND tokens for each row, and written after each with the commit; a run that is
stopped goes on where it was. *cost*: seconds with and without, in turn. Results: `results/strict_MODEL.json`. The
bundled target, whose step takes 0.2 ms, can be asked for 100,000 tokens.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, alternate, kept, provenance, ratio, save
from decoding import Model, add_model, model_of
from strict_settings import NAMES, NGRAM, settings

from paceline import LLM, RequestOutput, SamplingParams
from paceline.bench import bundled_prompts
from paceline.bench.run import dial_registered
from paceline.models.runners import native

PROVEN = "strict, proven by self-test"
LENGTHS = (96, 224, 160, 288)
"""New tokens of a request, in turn."""
ROUND = 5000

Request = tuple[list[int], SamplingParams]


def requests(llm: LLM, turn: int, tokens: int, temperature: float = 0.0) -> list[Request]:
    """Beginnings of the bundled prompts, so many that their outputs have `tokens` tokens; other ones in every round
    `turn`.
    """
    texts = [llm.tokenizer.encode(prompt.prompt) for prompt in bundled_prompts()]
    found: list[Request] = []
    left, number = tokens, turn * len(texts)
    while left > 0:
        ids, length = texts[number % len(texts)], min(left, LENGTHS[number % len(LENGTHS)])
        shorter = ids[: max(2, len(ids) - 3 * (number // len(texts)))]
        logprobs = 0 if number % 2 else None
        params = SamplingParams(
            temperature=temperature, max_tokens=length, ignore_eos=True, logprobs=logprobs, seed=number
        )
        found.append((shorter, params))
        left, number = left - length, number + 1
    return found


def decode(llm: LLM, given: Sequence[Request], plain: Sequence[RequestOutput] = ()) -> list[RequestOutput]:
    """The outputs of the requests; `plain` ones, with one token in nine changed, are what they say they expect."""
    prompts: list[dict[str, Any]] = [{"prompt_token_ids": ids} for ids, _ in given]
    for prompt, one in zip(prompts, plain, strict=False):
        prompt["prediction"] = [token if i % 9 else 7 for i, token in enumerate(one.outputs[0].token_ids)]
    found = llm.generate(prompts, [params for _, params in given])
    for one in found:
        one.raise_for_error()
    return found


def bits(output: RequestOutput) -> list[bytes]:
    """The logprobs of the chosen tokens as bytes."""
    first = output.outputs[0]
    pairs = zip(first.token_ids, first.logprobs or [], strict=False)
    return [struct.pack("d", table[token].logprob) for token, table in pairs]


def compare(plain: Sequence[RequestOutput], other: Sequence[RequestOutput]) -> dict[str, int]:
    """Counts of what differs; tokens behind an output's first difference belong to another text and count as
    different.
    """
    tokens = [(a.outputs[0].token_ids, b.outputs[0].token_ids) for a, b in zip(plain, other, strict=True)]
    same = [
        next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
        for a, b in tokens
    ]
    probabilities = [(bits(a), bits(b)) for a, b in zip(plain, other, strict=True)]
    steps, accepted = (
        sum(getattr(one.metrics, name) for one in other) for name in ("num_steps", "num_accepted_tokens")
    )
    return {
        "outputs": len(tokens),
        "identical": sum(a == b for a, b in tokens),
        "tokens": sum(len(a) for a, _ in tokens),
        "different_tokens": sum(max(len(a), len(b)) - n for (a, b), n in zip(tokens, same, strict=True)),
        "logprobs": sum(len(a) for a, _ in probabilities),
        "different_logprobs": sum(
            len(a) != len(b) or sum(x != y for x, y in zip(a, b, strict=False)) for a, b in probabilities
        ),
        "steps": steps,
        "accepted": accepted,
    }


class Strict:
    """One model, and the rows of its result file.

    Args:
        folder: of the result file.
    """

    def __init__(self, model: Model, folder: Path) -> None:
        self.model, self.folder, self.name = model, folder, f"strict_{model.name}"

    def count(self, tokens: int, dtypes: Sequence[str], batches: Sequence[int], drafters: Sequence[str]) -> None:
        """All counts, on PyTorch's present number of threads."""
        loaded = {(dtype, batch): self._open(dtype, batch) for dtype in dtypes for batch in (1, *batches)}
        operators = {
            (dtype, e): self._open(dtype, 4, e, compiled=False) for dtype in dtypes for e in ("auto", "strict")
        }
        names = [(batch, name) for batch in batches for name in drafters if (batch, name) != (1, "plain")]
        size = min(tokens, ROUND)
        for turn in range(-(-tokens // size)):
            for dtype in dtypes:
                if not turn:
                    for exactness in ("auto", "strict"):
                        self._operators(operators[dtype, exactness], dtype, size // 2)
                self._drafters(loaded, dtype, names, turn, size)
                self._seeds(loaded, dtype, turn, size // 5)

    def _drafters(
        self, loaded: Mapping[tuple[str, int], LLM], dtype: str, names: Sequence[tuple[int, str]], turn: int, size: int
    ) -> None:
        """One round at temperature 0 of every one of `names`, batch sizes and drafters."""
        left = [(batch, name) for batch, name in names if self._rounds(_key(dtype, batch, name)) <= turn]
        if not left:
            return
        alone = loaded[dtype, 1]
        given = requests(alone, turn, size)
        plain = decode(alone, given)
        known = settings(plain, self.model) | {"plain": None}
        for batch, name in left:
            if name in known:
                llm = loaded[dtype, batch].with_speculative_config(known[name])
                self._add(
                    _key(dtype, batch, name), compare(plain, decode(llm, given, plain if name == "prediction" else ()))
                )

    def _seeds(self, loaded: Mapping[tuple[str, int], LLM], dtype: str, turn: int, size: int) -> None:
        """One short round of drafters of points above temperature 0."""
        keys = {name: _key(dtype, 4, name, temperature=0.8) for name in ("ngram", "corrupted_oracle")}
        if (dtype, 4) not in loaded or all(self._rounds(key) > turn for key in keys.values()):
            return
        given = requests(loaded[dtype, 1], turn, size, temperature=0.8)
        plain = decode(loaded[dtype, 1], given)
        for name, key in keys.items():
            llm = loaded[dtype, 4].with_speculative_config(settings(plain, self.model)[name])
            self._add(key, compare(plain, decode(llm, given)))

    def _operators(self, llm: LLM, dtype: str, size: int) -> None:
        """One short round on PyTorch's operators: their fastest form, which must differ, or their strict form, which
        must not.
        """
        key = _key(dtype, 4, "corrupted_oracle", passes="operators", exactness=str(llm.exactness))
        if self._rounds(key):
            return
        given = requests(llm, 0, size)
        plain = [decode(llm, [one])[0] for one in given]
        self._add(
            key,
            compare(plain, decode(llm.with_speculative_config(settings(plain, self.model)["corrupted_oracle"]), given)),
        )

    def _open(self, dtype: str, batch: int, exactness: str = "strict", *, compiled: bool = True) -> LLM:
        fits = native.fits
        if not compiled:
            native.fits = lambda *_, **__: False
        try:
            return self.model.open(dtype=dtype, max_num_seqs=batch, exactness=exactness)
        finally:
            native.fits = fits

    def _row(self, key: Mapping[str, Any]) -> dict[str, Any]:
        return next((row for row in kept(self.name, self.folder).get("count", []) if row.items() >= key.items()), {})

    def _rounds(self, key: Mapping[str, Any]) -> int:
        return int(self._row(key).get("rounds", 0))

    def _add(self, key: Mapping[str, Any], found: Mapping[str, int]) -> None:
        """Add one round to a row on disk."""
        known, old = kept(self.name, self.folder), self._row(key)
        sums = {name: old.get(name, 0) + value for name, value in (found | {"rounds": 1}).items()}
        sums["mean_acceptance_length"] = round(1 + sums["accepted"] / sums["steps"], 3)
        commits = list(dict.fromkeys([*old.get("commits", []), provenance()["commit"]]))
        rows = [row for row in known.get("count", []) if row != old] + [key | sums | {"commits": commits}]
        print(rows[-1], flush=True)
        save(self.name, known | {"model": self.model.weights, "count": rows}, self.folder, parts=["count"])

    def cost(self, repeats: int) -> None:
        """Seconds of strict against automatic mode, on compiled passes (the same in both) and on PyTorch's
        operators.
        """
        found: dict[str, Any] = {}
        for dtype in ("bfloat16", "float32"):
            for compiled in (True, False):
                for method, config in (("plain", None), ("ngram", NGRAM)):
                    seconds = self._seconds(dtype, config, compiled, repeats)
                    key = f"{dtype}, {'compiled passes' if compiled else 'operators'}, {method}"
                    found[key] = {"strict_over_auto": ratio(seconds["strict"], seconds["auto"]), "seconds": seconds}
                    print(key, found[key]["strict_over_auto"], flush=True)
        made = kept(self.name, self.folder) | {"model": self.model.weights, "cost": found}
        save(self.name, made, self.folder, parts=["cost"])

    def _seconds(self, dtype: str, config: Any, compiled: bool, repeats: int) -> dict[str, list[float]]:
        """Of one request of 128 tokens; models are loaded anew twice, since where their memory lies counts too."""
        seconds: dict[str, list[float]] = {"auto": [], "strict": []}
        for order in (("auto", "strict"), ("strict", "auto")):
            llms = {
                name: self._open(dtype, 4, name, compiled=compiled).with_speculative_config(config) for name in order
            }
            ids = requests(llms["auto"], 0, 1)[0][0]
            given = [(ids, SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True))]
            found = alternate({name: partial(decode, llm, given) for name, llm in llms.items()}, repeats)
            for name in seconds:
                seconds[name] += found[name]
        return seconds


def _key(dtype: str, batch: int, drafter: str, **more: Any) -> dict[str, Any]:
    """What tells one row from the others."""
    known = {"dtype": dtype, "threads": torch.get_num_threads(), "batch": batch, "drafter": drafter}
    return known | {"temperature": 0.0, "passes": "compiled", "exactness": PROVEN} | more


@dial_registered()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["count", "cost"])
    add_model(parser)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 3])
    parser.add_argument("--drafters", nargs="+", choices=[*NAMES, "plain"], default=[*NAMES, "plain"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    strict = Strict(model_of(asked.model), asked.folder)
    if asked.part == "count":
        strict.count(asked.tokens, asked.dtypes, asked.batches, asked.drafters)
    else:
        strict.cost(asked.repeats)


if __name__ == "__main__":
    main()
