"""Schemas as programs send them, in one batch, under heads that know few of the target's tokens: what they may draft is
often none of what the schema allows. Outputs are those of plain decoding, and no head is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from benchmarks.stand_ins import random_head
from paceline import LLM, RequestOutput, SamplingParams
from paceline.bench import BUNDLED_DRAFT

TEXT = {"type": "string", "maxLength": 8}


def record(**properties: Any) -> dict[str, Any]:
    """An object that has them all, and no more."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
NODE = record(v=DIGIT, kids={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1})
ITEM = record(id={"type": "integer"}, n=DIGIT)
MAIL = {"type": ["string", "null"], "maxLength": 9}

SCHEMAS: Mapping[str, Any] = {
    "answer": record(reasoning=TEXT, answer={"type": "integer"}),
    "person": record(name=TEXT, age={"type": "integer", "minimum": 0, "maximum": 120}, email=MAIL),
    "sentiment": record(label={"enum": ["positive", "neutral", "negative"]}, score={"type": "number"}),
    "weather call": record(name={"const": "get_weather"}, arguments=record(city=TEXT, unit={"enum": ["C", "F"]})),
    "list of tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    "yes or no": {"type": "boolean"},
    "measure": record(value={"type": "number"}, unit={"type": "string", "pattern": "^[a-z]{1,3}$"}),
    "date": record(when={"type": "string", "format": "date"}),
    "one of two": {"anyOf": [record(kind={"const": "a"}, n={"type": "integer"}), record(kind={"const": "b"})]},
    "point": {"type": "array", "prefixItems": [{"type": "number"}, {"type": "number"}], "items": False, "minItems": 2},
    "tree": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "order": record(items={"type": "array", "items": ITEM, "minItems": 1, "maxItems": 2}, paid={"type": "boolean"}),
}
TOKENS, FEW, TREE = 60, 400, [(0,), (1,), (0, 0), (0, 1), (1, 0)]


@cache
def plain() -> LLM:
    return LLM(speculative_config=None, profile=False, exactness="strict")


def heads() -> dict[str, dict[str, Any]]:
    info, fixed = plain().runner.info, {"controller": "fixed", "num_speculative_tokens": 3}
    trees = {"tree_policy": "static", "speculative_token_tree": TREE}
    models = {name: random_head(name, info.hidden_size, info.vocab_size, tokens=FEW) for name in ("medusa", "eagle3")}
    return {
        "medusa": {"method": "medusa", "model": models["medusa"], **fixed},
        "eagle3, trees": {"method": "eagle3", "model": models["eagle3"], **trees},
        "draft_model, trees": {
            "method": "draft_model", "model": str(BUNDLED_DRAFT), "draft_vocab_size": FEW, **trees,
        },
    }  # fmt: skip


def written(llm: LLM, schemas: Sequence[Any], temperature: float) -> list[RequestOutput]:
    params = [
        SamplingParams(temperature=temperature, seed=number, max_tokens=TOKENS, structured_outputs={"json": schema})
        for number, schema in enumerate(schemas)
    ]
    return llm.generate(["As JSON:\n"] * len(schemas), params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_heads_that_know_few_tokens_write_what_plain_decoding_writes(temperature: float) -> None:
    expected = written(plain(), list(SCHEMAS.values()), temperature)
    texts = {name: one.outputs[0] for name, one in zip(SCHEMAS, expected, strict=True)}
    ended = {name: one.text for name, one in texts.items() if one.finish_reason == "stop"}
    assert len(ended) >= 6
    assert [name for name, text in ended.items() if not valid(SCHEMAS[name], text)] == []
    assert not valid(SCHEMAS["person"], ended["yes or no"]), "the judge tells schemas apart"
    for name, config in heads().items():
        found = written(plain().with_speculative_config(config), list(SCHEMAS.values()), temperature)
        assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected], name
        assert [one.metrics.dropped_drafters for one in found if one.metrics.dropped_drafters] == [], name
        assert sum(one.metrics.num_draft_tokens for one in found) > 20, name


def valid(schema: Any, text: str) -> bool:
    return bool(Draft202012Validator(schema).is_valid(json.loads(text)))
