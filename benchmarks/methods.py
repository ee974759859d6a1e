"""Every method on published prompts with a real model: first a screening of all, then the best of them again beside
`auto`.

usage: methods.py --data FOLDER [--model DIR] [--threads 2] [--sets spec-bench,humaneval,mt-redundant,gsm8k]
                  [--prompts 12] [--tokens 128] [--screening 4] [--screening-tokens 64] [--keep 3] [--repeats 1]
                  [--extra NAME=JSON ...] [--only NAME,NAME] [--name methods]

FOLDER holds `spec-bench/question*.jsonl`, `humaneval/*.jsonl`, `mt-redundant/*.jsonl` and `gsm8k/test*.jsonl`. Prompts
go through the chat template, as single requests at temperature 0; a second turn follows plain decoding's first answer,
whatever the setting. All settings decode a prompt before the next one comes, in an order drawn anew. The screening
decodes `--screening` conversations of each set with everything; plain decoding, `auto` and the `--keep` fastest of each
set then decode `--prompts`. Outputs must equal those of plain decoding, or differ first at a near tie (counted);
otherwise nothing is reported. Figures are total times, prompts included, their ratios paired by prompt, with 95 %
bootstrap intervals. Default model: SmolLM2-135M-Instruct, dequantised from Q4_1 (`real_models.py`). Results:
`results/NAME.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from common import estimated, save
from real_models import WEIGHTS, smollm2

from paceline import LLM, RequestOutput, SamplingParams
from paceline.utils import in_turn, read_prompts
from paceline.verify import first_difference

FILES = {
    "spec-bench": "spec-bench/question*.jsonl",
    "humaneval": "humaneval/*.jsonl",
    "mt-redundant": "mt-redundant/*.jsonl",
    "gsm8k": "gsm8k/test*.jsonl",
}

SETTINGS: dict[str, Any] = {
    "plain": None,
    "auto": {"method": "auto"},
    **{f"ngram {n}": {"method": "ngram", "num_speculative_tokens": n} for n in (2, 4, 8)},
    **{f"suffix {n}": {"method": "suffix", "num_speculative_tokens": n} for n in (2, 4, 8, 16)},
    **{f"copyspec {n}": {"method": "copyspec", "num_speculative_tokens": n} for n in (8,)},
    **{f"token_recycling {n}": {"method": "token_recycling", "num_speculative_tokens": n} for n in (3, 7, 15)},
    "jacobi 4": {"method": "jacobi", "num_speculative_tokens": 4},
    "lookahead 15": {"method": "lookahead", "num_speculative_tokens": 15},
    **{f"aded {n}": {"method": "aded", "num_speculative_tokens": n} for n in (3, 7)},
    **{f"quantized_copy {n}": {"method": "quantized_copy", "num_speculative_tokens": n} for n in (2, 4)},
    "specmquant 4": {"method": "specmquant", "num_speculative_tokens": 4},
    "swift 4": {"method": "swift", "num_speculative_tokens": 4},
    "layer_skip 2": {"method": "layer_skip", "num_speculative_tokens": 2},
    "del 2": {"method": "del", "num_speculative_tokens": 2},
    "suffix + token_recycling 7": {"method": ["suffix", "token_recycling"], "num_speculative_tokens": 7},
}

RUNS = count()


@dataclass(frozen=True, slots=True)
class Piece:
    """One request: its set, its conversation, its token ids, and what plain decoding says to it."""

    set: str
    conversation: str
    ids: list[int]
    answer: list[int]


@dataclass(slots=True)
class Timing:
    """Seconds, tokens and steps of one setting on one piece."""

    seconds: float
    tokens: int
    steps: int
    same: bool


class Bench:
    """One model and the settings that are compared on it."""

    def __init__(self, model: Path, threads: int) -> None:
        self.plain = LLM(model, speculative_config=None, threads=threads, enable_prefix_caching=False)
        self.llms: dict[str, LLM] = {"plain": self.plain}
        self.skipped: dict[str, str] = {}

    def open(self, name: str, config: Any) -> bool:
        """Whether there is such a setting here; one that does not run is named with its reason."""
        if name not in self.llms:
            try:
                self.llms[name] = self.plain.with_speculative_config(config)
            except Exception as error:
                self.skipped[name] = f"{type(error).__name__}: {error}"
                print(f"{name} does not run: {error}", file=sys.stderr)
        return name in self.llms

    def pieces(self, data: Path, name: str, conversations: int, tokens: int) -> list[Piece]:
        """The requests of a set, second turns with plain decoding's first answer before them."""
        found = sorted(data.glob(FILES[name]))
        if not found:
            sys.exit(f"{data} holds no {FILES[name]}; give --data a folder that does, or other --sets")
        made = []
        for one in read_prompts(found[0]).limited(conversations).conversations:
            messages = list(one.history)
            for turn in one.turns:
                messages.append({"role": "user", "content": turn})
                ids = self.plain.chat_ids(messages)
                output = self.plain.generate({"prompt_token_ids": ids}, _params(tokens))[0].outputs[0]
                messages.append({"role": "assistant", "content": output.text})
                made.append(Piece(name, one.id, ids, output.token_ids))
        return made

    def run(
        self, names: Sequence[str], pieces: Sequence[Piece], tokens: int, repeats: int
    ) -> dict[str, list[list[Timing]]]:
        """Setting -> piece -> repeat."""
        found: dict[str, list[list[Timing]]] = {name: [[] for _ in pieces] for name in names}
        for name in names:
            self._decode(name, min(tokens, 32), pieces[0])
        runs = {name: lambda piece, _, name=name: self._decode(name, tokens, piece) for name in names}
        for turn in in_turn(runs, pieces, repeats):
            piece = pieces[turn.item]
            for name, output in turn.outputs.items():
                found[name][turn.item].append(self._timing(name, piece, output, turn.seconds[name]))
            place = f"repeat {turn.repeat + 1}, {turn.item + 1}/{len(pieces)}"
            print(f"  {place} {piece.set} {piece.conversation}", file=sys.stderr)
        return found

    def _decode(self, name: str, tokens: int, piece: Piece) -> RequestOutput:
        prompt = {"prompt_token_ids": piece.ids, "cache_salt": f"run {next(RUNS)}"}
        return self.llms[name].generate(prompt, _params(tokens))[0]

    def _timing(self, name: str, piece: Piece, output: RequestOutput, seconds: float) -> Timing:
        ids = output.outputs[0].token_ids
        same = ids == piece.answer[: len(ids)]
        if (
            not same
            and (where := first_difference(self.plain.runner, piece.ids, piece.answer, ids))
            and not where.near_tie
        ):
            sys.exit(f"{name} differs from plain decoding outside near ties, nothing is reported: {where}")
        return Timing(seconds, len(ids), output.metrics.num_steps, same)


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens)


def summary(found: Mapping[str, list[list[Timing]]], base: str = "plain") -> dict[str, dict[str, float]]:
    """Setting -> tokens/s, tokens a pass, time of `base` over its own with an interval over prompts, the share of equal
    outputs.
    """

    def per_token(name: str) -> np.ndarray[Any, Any]:
        return np.array([min(t.seconds for t in timings) / timings[0].tokens for timings in found[name]])

    tokens = np.array([timings[0].tokens for timings in found[base]])
    result = {}
    for name, rows in found.items():
        slow, fast = per_token(base) * tokens, per_token(name) * tokens
        over = estimated([slow[:, None], fast[:, None]], lambda s, f: s.sum((-2, -1)) / f.sum((-2, -1)))
        every = [t for timings in rows for t in timings]
        result[name] = {
            "tokens_per_second": float(tokens.sum() / fast.sum()),
            "tokens_per_pass": sum(t.tokens for t in every) / sum(t.steps for t in every),
            f"over {base}": over["value"],
            "low": over["low"],
            "high": over["high"],
            "identical": sum(t.same for t in every) / len(every),
        }
    return result


def show(title: str, table: Mapping[str, Mapping[str, float]]) -> None:
    print(title)
    for name, row in sorted(table.items(), key=lambda item: -item[1]["over plain"]):
        print(
            f"  {name:28s} {row['tokens_per_second']:6.1f} tokens/s, {row['over plain']:.3f} "
            f"({row['low']:.2f} to {row['high']:.2f}), {row['tokens_per_pass']:.2f} tokens a pass, "
            f"{row['identical']:.2f} identical"
        )


def measure(bench: Bench, given: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The screening of all settings, and the choice of each set measured again."""
    result: dict[str, Any] = {
        "weights": WEIGHTS if given.model is None else str(given.model.name),
        "settings": dict(settings),
    }
    always = [name for name in settings if name == "plain" or name.startswith("auto")]
    tables: dict[str, Any] = defaultdict(dict)
    for name in given.sets.split(","):
        picked = list(settings)
        if given.screening:
            pieces = bench.pieces(given.data, name, given.screening, given.screening_tokens)
            screened = summary(bench.run(list(settings), pieces, given.screening_tokens, 1))
            show(f"screening of {name}, {len(pieces)} requests", screened)
            tables["screening"][name] = screened
            others = sorted(
                (one for one in screened if one not in always), key=lambda one: -screened[one]["over plain"]
            )
            picked = always + others[: given.keep]
        if given.prompts:
            pieces = bench.pieces(given.data, name, given.prompts, given.tokens)
            tables["final"][name] = summary(bench.run(picked, pieces, given.tokens, given.repeats))
            show(f"{name}, {len(pieces)} requests", tables["final"][name])
    return result | dict(tables) | {"skipped": bench.skipped}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sets", default=",".join(FILES))
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--screening", type=int, default=4)
    parser.add_argument("--screening-tokens", type=int, default=64)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--extra", action="append", default=[], help="NAME=JSON, a further setting")
    parser.add_argument("--only", help="names of the settings that are compared, plain decoding among them")
    parser.add_argument("--name", default="methods")
    given = parser.parse_args()
    settings = SETTINGS | {name: json.loads(text) for name, _, text in (one.partition("=") for one in given.extra)}
    if given.only:
        settings = {name: settings[name] for name in dict.fromkeys(["plain", *given.only.split(",")])}
    bench = Bench(given.model or smollm2(), given.threads)
    settings = {name: config for name, config in settings.items() if bench.open(name, config)}
    save(given.name, measure(bench, given, settings))


if __name__ == "__main__":
    main()
