"""What constraints cost a diffusion decoder on the host: tables, a check, a round; and whether every text parses.

usage: diffusion_constraints.py [--texts 3] [--lengths 32,64]

For each constraint (a flat JSON schema, a recursive one, any JSON value, a grammar of sums, a regular expression), with
the vocabulary of the bundled target:

tables  seconds to make them (once for a constraint and a vocabulary), automata states, kinds of tokens, joins
check   milliseconds of one test of a tentative token, by how much of the canvas is written
round   milliseconds that checks add to a round, tests and rejections a round, over whole texts of a denoiser with
        random logits, the worst there is: nearly every token it proposes is ruled out
parsed  of those texts, how many parse and validate (by json and jsonschema, Lark, or re)

Only rules are timed; the denoiser is not a model.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema
import numpy as np
import torch
from common import save
from lark import Lark

import paceline
from paceline.checkpoints import Tokenizer
from paceline.diffusion import Canvas, ConfiguredMethod, GrammarCheck, TokenTexts, decode
from paceline.grammar import MASKED, Fillings
from paceline.models import Call
from paceline.utils import timed

FLAT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "score": {"type": ["number", "null"]},
    },
    "required": ["name", "score"],
}
TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["v", "kids"],
}
SUMS = 'start: start "+" term | term\nterm: term "*" atom | atom\natom: /[a-z]+|[0-9]+/ | "(" start ")"\n'
DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:T[0-9]{2}:[0-9]{2})?(?:, [A-Za-z ]+)*"


def json_by(schema: Any) -> Callable[[str], object]:
    return lambda text: jsonschema.validate(json.loads(text), schema)


def matched(text: str) -> None:
    if not re.fullmatch(DATE, text):
        raise ValueError(text)


CASES: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "JSON, flat schema": ({"json_schema": FLAT}, json_by(FLAT)),
    "JSON, recursive schema": ({"json_schema": TREE}, json_by(TREE)),
    "JSON, any value": ({"json_schema": True}, json_by(True)),
    "grammar of sums": ({"grammar": SUMS}, Lark(SUMS, parser="lalr").parse),
    "regular expression": ({"regex": DATE}, matched),
}


class Rough:
    """Random logits; as `Denoiser`, without a model."""

    attention = "full"
    block_length = None
    needs_left = False
    max_length = 1 << 20

    def __init__(self, vocab_size: int, end: int, seed: int) -> None:
        self.vocab_size, self.mask_token_id, self.eos_token_ids = vocab_size + 1, vocab_size, (end,)
        self.rng = np.random.default_rng(seed)

    def new_cache(self, length: int) -> Any:
        raise NotImplementedError

    def forward(self, calls: list[Call]) -> list[torch.Tensor]:
        found = []
        for call in calls:
            rows = call.ids.size if call.wanted is None else call.wanted.size
            logits = torch.from_numpy(self.rng.normal(size=(rows, self.vocab_size)).astype(np.float32) * 4)
            logits[:, self.mask_token_id] = -torch.inf
            found.append(logits)
        return found


class Bench:
    def __init__(self) -> None:
        tokenizer = Tokenizer.load(Path(paceline.__file__).parent / "bundled" / "target")
        assert tokenizer.eos_id is not None
        self.texts, self.size, self.end = TokenTexts(tokenizer), tokenizer.vocab_size, tokenizer.eos_id

    def parts(self, length: int, config: dict[str, Any], seed: int = 0) -> tuple[Rough, Canvas, Any]:
        toy = Rough(self.size, self.end, seed)
        canvas = Canvas.of([], length, mask_token_id=toy.mask_token_id, eos_token_ids=toy.eos_token_ids)
        return toy, canvas, ConfiguredMethod({"method": "static", **config}).parts(toy, canvas, token_text=self.texts)

    def tables(self, config: dict[str, Any]) -> dict[str, Any]:
        """Made anew: another `TokenTexts` is another vocabulary."""
        self.parts(8, config)
        fresh = Bench()
        parts, seconds = timed(lambda: fresh.parts(8, config)[2])
        lexicon = parts.transition.check.lexicon
        found = {"states": lexicon.accepts.size, "kinds": lexicon.steps.shape[0], "joins": lexicon.joins}
        return {"seconds": seconds, **found, "symbols": lexicon.cfg.size, "terminals": len(lexicon.cfg.terminals)}

    def check(self, config: dict[str, Any], length: int, part: float) -> float:
        """Median milliseconds of a test with a share of the canvas written, at random slots."""
        check: GrammarCheck = self.parts(length, config)[2].transition.check
        canvas, rng = Fillings(check.lexicon, length, closes=True), np.random.default_rng(0)
        order, kinds = rng.permutation(length), check.lexicon.steps.shape[0]
        for slot in order[: int(part * length)].tolist():
            assert canvas.possible, "what follows starts from a full table"
            example = canvas.example()[slot]
            if example is not None:
                canvas.put(slot, int(check.kinds[example]))

        def test(slot: int) -> bool:
            canvas.put(slot, int(rng.integers(kinds)))
            return canvas.possible

        seconds = []
        for slot in rng.choice(order[int(part * length) :], 30).tolist():
            assert canvas.possible
            seconds.append(timed(partial(test, slot))[1])
            canvas.put(slot, MASKED)
        return 1e3 * median(seconds)

    def rounds(
        self, config: dict[str, Any], truth: Callable[[str], object], length: int, texts: int
    ) -> dict[str, float]:
        seconds, rounds, tests, rejections, completions, parsed = list[float](), 0, 0, 0, 0, 0
        for seed in range(texts):
            toy, canvas, parts = self.parts(length, config, seed)
            check: GrammarCheck = parts.transition.check
            check.constrain = partial(_clocked, check.constrain, seconds)
            [outcome] = decode([canvas], toy, [parts])
            assert outcome.error is None
            tokens = outcome.canvas.output
            text = "".join(
                self.texts(token) or "" for token in tokens[: tokens.index(self.end) if self.end in tokens else None]
            )
            truth(text)
            parsed += 1
            rounds += len(outcome.trajectory.rounds)
            tests, rejections = tests + check.checks, rejections + check.rejections
            completions += check.completions
        return {
            "check_ms_per_round": 1e3 * sum(seconds) / rounds,
            "tests_per_round": tests / rounds,
            "rejections_per_round": rejections / rounds,
            "completed_tokens": completions / texts,
            "texts": texts,
            "parsed": parsed,
        }


def _clocked(constrain: Callable[..., Any], seconds: list[float], *given: Any) -> Any:
    found, taken = timed(partial(constrain, *given))
    seconds.append(taken)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--lengths", default="32,64")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench, lengths = Bench(), [int(length) for length in args.lengths.split(",")]
    result: dict[str, Any] = {"vocabulary": bench.size, "cases": {}}
    for name, (config, truth) in CASES.items():
        found: dict[str, Any] = {"tables": bench.tables(config)}
        for length in lengths:
            found[str(length)] = {
                "check_ms": {str(part): bench.check(config, length, part) for part in (0.0, 0.5, 0.9)},
                **bench.rounds(config, truth, length, args.texts),
            }
        result["cases"][name] = found
        print(name, json.dumps(found))
    save("diffusion_constraints", result)


if __name__ == "__main__":
    main()
