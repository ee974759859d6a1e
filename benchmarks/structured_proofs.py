"""Structured output under drafting: is every finished text of a published schema valid, whatever drafts?

usage: structured_proofs.py --data FOLDER [--schemas 200] [--tokens 384] [--temperature 0.8] [--only WORD]

Schemas of SchemaStore, Iglu and the JSON Schema Test Suite, mixed, of which strict mode compiles (`strict: true`; the
share is reported). The bundled model, which knows nothing of JSON, writes an instance of each, in batches, under every
setting of `methods` (or those with WORD in their names), with a seed: chains and trees, and heads of random weights
that know few of the tokens, among them none that a schema may ask for. Every second one is compact. Texts that have
ended are read with `json` and checked by `jsonschema`; those that reach --tokens are counted and must be beginnings of
what the schema allows, by construction of the text so far: they are not judged. All give the tokens of plain decoding,
and no drafter is dropped. The control: the same schemas without a constraint must give texts that are not valid. Exits
with 1 where a text is invalid or differs, a drafter is dropped, or the control is blind.

That draws have the distribution of the constrained model is tested in tests/grammar/test_structured.py
(`test_drawn_outputs_have_the_distribution_of_the_constrained_model`: chi-square against exact probabilities, with the
distribution conditioned on whole outputs as its control).

Results: `results/structured_proofs.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import referencing
from common import RESULTS, save
from stand_ins import random_head
from structured import SETS, rows, rule

from paceline import LLM, CompletionOutput, SamplingParams
from paceline.bench import BUNDLED_DRAFT
from paceline.errors import ConfigError

DRAFT = {"method": "draft_model", "model": str(BUNDLED_DRAFT)}
PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
TREES = {"tree_policy": "static", "speculative_token_tree": PATHS}
SUITE = "json-schema-test-suite/tests/draft2020-12"
FEW = 500
"""Tokens that a head drafts."""


def methods(llm: LLM) -> Mapping[str, Any]:
    """Settings by name."""
    info = llm.runner.info
    heads = {
        name: {"method": name, "model": random_head(name, info.hidden_size, info.vocab_size, tokens=FEW)}
        for name in ("medusa", "hydra", "mlp_speculator", "eagle", "eagle3", "p_eagle")
    }
    fixed = {"controller": "fixed", "num_speculative_tokens": 3}
    return {
        "plain": None,
        "ngram": "ngram",
        "suffix": "suffix",
        "draft_model, trees": {**DRAFT, **TREES},
        "draft_model, few tokens": {**DRAFT, **fixed, "draft_vocab_size": FEW},
        **{f"{name}, few tokens": head | fixed for name, head in heads.items()},
        "eagle3, few tokens, trees": {**heads["eagle3"], **TREES},
        "auto": "auto",
    }


def compiled(llm: LLM, found: Sequence[Any], count: int) -> tuple[list[Any], int]:
    """So many schemas that strict mode takes, and how many were tried."""
    picked: list[Any] = []
    for tried, schema in enumerate(found, 1):
        try:
            rule(llm, schema, strict=True, compact=True)
        except ConfigError:
            continue
        picked.append(schema)
        if len(picked) == count:
            return picked, tried
    return picked, len(found)


def dialect(schema: Any) -> Any:
    """What checks it, the newest where it does not say."""
    return jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)


def sound(schema: Any) -> bool:
    """Whether it is a schema of its dialect: another library must be able to judge by it."""
    try:
        dialect(schema).check_schema(schema)
    except jsonschema.SchemaError:
        return False
    return True


def mixed(data: Path) -> list[Any]:
    """Sound schemas of the sets in turn."""
    sets = [[row["schema"] for row in rows(data, name) if sound(row["schema"])] for name in SETS]
    files = [json.loads(path.read_text()) for path in sorted((data / SUITE).glob("*.json"))]
    sets.append([group["schema"] for file in files for group in file if isinstance(group["schema"], dict)])
    longest = max(map(len, sets))
    return [one[i] for i in range(longest) for one in sets if i < len(one)]


def valid(schema: Any, text: str) -> bool:
    """By another library, which reads no references to elsewhere."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return bool(dialect(schema)(schema, registry=referencing.Registry()).is_valid(found))


def written(
    llm: LLM, config: Any, schemas: Sequence[Any], given: Any, *, bound: bool = True
) -> tuple[list[CompletionOutput], list[str]]:
    """An instance of each schema, and why drafters were dropped."""
    engine, params = llm.with_speculative_config(config), []
    for number, schema in enumerate(schemas):
        rules = {"json": schema, "strict": True, "disable_any_whitespace": number % 2 == 0} if bound else None
        params.append(
            SamplingParams(
                temperature=given.temperature, seed=number, max_tokens=given.tokens, structured_outputs=rules
            )
        )
    found = engine.generate(["A record:\n"] * len(schemas), params, use_tqdm=False)
    for one in found:
        one.raise_for_error()
    return [one.outputs[0] for one in found], [
        str(one.metrics.dropped_drafters) for one in found if one.metrics.dropped_drafters
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--only", default="")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    llm = LLM(speculative_config=None, profile=False, exactness="strict")
    schemas, tried = compiled(llm, mixed(given.data), given.schemas)
    print(f"{len(schemas)} of {tried} schemas compile", flush=True)
    free, _ = written(llm, None, schemas, given, bound=False)
    control = sum(valid(schema, one.text) for schema, one in zip(schemas, free, strict=True))
    results, wrong = dict[str, Any](), list[str]()
    plain, _ = written(llm, None, schemas, given)
    for name, config in methods(llm).items():
        if given.only not in name:
            continue
        found, dropped = written(llm, config, schemas, given)
        ended = [(schema, one) for schema, one in zip(schemas, found, strict=True) if one.finish_reason == "stop"]
        bad = [one.text[:200] for schema, one in ended if not valid(schema, one.text)]
        other = [b.text[:200] for a, b in zip(plain, found, strict=True) if a.token_ids != b.token_ids]
        results[name] = {
            "finished": len(ended),
            "valid": len(ended) - len(bad),
            "tokens of plain decoding": len(found) - len(other),
            "requests that dropped it": len(dropped),
        }
        wrong += [f"{name}: {text}" for text in (*bad, *other, *dropped)]
        print(name, results[name], flush=True)
    about = {"schemas": len(schemas), "tried": tried, "share that compiles": len(schemas) / tried}
    save("structured_proofs", {**about, "valid without a constraint": control, "methods": results, "wrong": wrong[:9]},
         given.folder)  # fmt: skip
    print(*wrong[:9], sep="\n")
    sys.exit(bool(wrong or control == len(schemas)))


if __name__ == "__main__":
    main()
