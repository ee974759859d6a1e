"""Structured output: which published schemas can be enforced, what constraints cost, and what forced tokens gain.

usage: structured.py --data FOLDER [--model MODEL] [--schemas 24] [--tokens 160] [--only PARTS]

schemas  share of the schemas of SchemaStore and Iglu that compile, strictly and leniently, and seconds to compile
speed    records of different schemas from Iglu, each decoded once in turn, greedily: plain without a constraint, under
         it, with forced tokens drafted (`grammar`), with `suffix`, with `auto`. Constrained outputs must be equal, and
         finished ones are checked against their schemas by another library

Results: `results/structured.json`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from common import RESULTS, kept, ratio, save
from real_models import smollm2

from paceline import LLM, CompletionOutput, SamplingParams
from paceline.config import StructuredOutputsParams
from paceline.errors import ConfigError
from paceline.grammar import Constraint, constraint
from paceline.utils import in_turn, timed

SETS = {"schemastore": "schemastore.part-a.jsonl.gz", "iglu-central": "schemas.part-a.jsonl"}
METHODS: Mapping[str, Any] = {"plain": None, "grammar": "grammar", "suffix": "suffix", "auto": "auto"}
FREE = "plain, no constraint"
Rows = list[dict[str, Any]]


def rows(folder: Path, name: str) -> Rows:
    path = folder / name / SETS[name]
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    found = [json.loads(line) for line in text.splitlines() if line]
    for row in found if name == "iglu-central" else ():  # keywords of Iglu's own, and the dialect that has them
        row["schema"] = {key: value for key, value in row["schema"].items() if key not in ("$schema", "self")}
    return found


def rule(llm: LLM, schema: Any, *, strict: bool, compact: bool = False) -> Constraint:
    given = StructuredOutputsParams(json=schema, strict=strict, disable_any_whitespace=compact)
    return constraint(given, llm.tokenizer, llm.runner.info.vocab_size, llm.defaults.eos_ids)


def compiled(llm: LLM, found: Rows) -> dict[str, Any]:
    """Of one set of schemas."""
    result: dict[str, Any] = {"schemas": len(found)}
    for word, strict in (("strict", True), ("lenient", False)):
        seconds, fine = [], 0
        for row in found:
            try:
                _, taken = timed(partial(rule, llm, row["schema"], strict=strict))
            except ConfigError:
                continue
            fine += 1
            seconds.append(taken)
        result[word] = {"share": fine / len(found), "median seconds": float(np.median(seconds))}
    return result


def records(llm: LLM, found: Rows, count: int) -> list[Any]:
    """Schemas of records of three to ten properties that can be enforced, from different makers."""
    picked: dict[str, Any] = {}
    for row in found:
        schema, maker = dict(row["schema"]), row["path"].split("/")[1]
        if maker in picked or not 3 <= len(schema.get("properties", {})) <= 10:
            continue
        schema |= {"required": list(schema["properties"]), "additionalProperties": False}
        try:
            rule(llm, schema, strict=True, compact=True)
        except ConfigError:
            continue
        picked[maker] = schema
    return list(picked.values())[:count]


def speed(llm: LLM, schemas: Sequence[Any], tokens: int) -> dict[str, Any]:
    """Tokens per second of each method, and their ratios to plain constrained decoding."""

    def decode(name: str, config: Any) -> Callable[[Any, int], CompletionOutput]:
        engine = llm.with_speculative_config(config)

        def run(schema: Any, _: int) -> CompletionOutput:
            text = f"Write a JSON record of this kind, with made-up values: {schema.get('description', 'a record')}"
            ids = llm.chat_ids([{"role": "user", "content": text}])
            bound = None if name == FREE else {"json": schema, "disable_any_whitespace": True}
            params = SamplingParams(temperature=0.0, max_tokens=tokens, structured_outputs=bound)
            return engine.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0]

        return run

    runs = {FREE: decode(FREE, None), **{name: decode(name, config) for name, config in METHODS.items()}}
    rates: dict[str, list[float]] = {name: [] for name in runs}
    finished = valid = 0
    for turn in in_turn(runs, schemas, 1):
        for name, output in turn.outputs.items():
            rates[name].append(len(output.token_ids) / turn.seconds[name])
        if len({turn.outputs[name].text for name in METHODS}) > 1:
            sys.exit(f"outputs differ: {turn.outputs}")
        plain, schema = turn.outputs["plain"], schemas[turn.item]
        if plain.finish_reason == "stop":
            finished += 1
            valid += jsonschema.validators.validator_for(schema)(schema).is_valid(json.loads(plain.text))
    over = {name: ratio(rates[name], rates["plain"]) for name in (FREE, "grammar", "suffix", "auto")}
    return {
        "records": len(schemas), "finished": finished, "valid": valid,
        "tokens per second": {name: float(np.median(rate)) for name, rate in rates.items()},
        "over plain constrained": over,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default=None, help="default: SmolLM2, see real_models.py")
    parser.add_argument("--schemas", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--only", default="schemas,speed")
    given = parser.parse_args()
    llm = LLM(given.model or smollm2(), profile=False)
    only, result = given.only.split(","), kept("structured", RESULTS)
    if "schemas" in only:
        result["schemas"] = {name: compiled(llm, rows(given.data, name)) for name in SETS}
        print(json.dumps(result["schemas"], indent=1))
    if "speed" in only:
        schemas = records(llm, rows(given.data, "iglu-central"), given.schemas)
        result["speed"] = speed(llm, schemas, given.tokens)
        print(json.dumps(result["speed"], indent=1))
    save("structured", result, RESULTS, parts=only)


if __name__ == "__main__":
    main()
