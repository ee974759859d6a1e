"""structured_outputs: masks along paths, end tokens, forced tokens, and whole outputs of the bundled model under every
kind of drafter.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from contract.worlds import engine, make, verifier
from engine.harness import run
from jsonschema import Draft202012Validator
from scipy.stats import chisquare
from toy_models import letters
from toys import ToyRunner

from paceline import LLM, SamplingParams
from paceline.checkpoints import token_bytes
from paceline.config import StructuredOutputsParams
from paceline.errors import ConfigError
from paceline.grammar import Constraint, constraint
from paceline.sampling import Rules
from paceline.tree import TokenTree, Trial

VOCAB, END, DRAWN = 11, 0, 2000
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
METHODS = ("grammar", "ngram", "draft_model", ["grammar", "suffix"], "auto")
"""One of each kind; `contract.test_pairwise` has all."""


def made(**given: Any) -> Constraint:
    return constraint(StructuredOutputsParams(**given), letters(), VOCAB, (END,))


def ids(text: str) -> list[int]:
    return letters().encode(text, add_special_tokens=False)


def allowed(rule: Constraint, path: Sequence[int] = ()) -> str:
    """The letters that may follow a path, and "." for the end."""
    row = torch.zeros(1, VOCAB)
    rule.apply(row, [path], [])
    found = [token for token in range(VOCAB) if row[0, token] > -math.inf]
    return "".join("." if token == END else letters().decode([token]) for token in found)


def test_a_row_allows_what_continues_the_text_along_its_own_path() -> None:
    rule = made(regex="ab(c|de)*")
    assert [allowed(rule, ids(path)) for path in ("", "a", "ab", "abd", "abc")] == ["a", "b", ".cd", "e", ".cd"]


def test_rows_equal_those_of_a_state_that_went_there() -> None:
    rule, text = made(regex="(a|bc|bd)*e?"), ids("abcbd")
    for count in range(len(text) + 1):
        there = made(regex="(a|bc|bd)*e?")
        there.advance(text[:count])
        assert allowed(there) == allowed(rule, text[:count])


def test_advancing_rewinding_and_forking_keep_states_apart() -> None:
    rule = made(regex="ab?c")
    rule.advance(ids("a"))
    twin = rule.fork()
    rule.advance([*ids("bc"), END])
    assert (allowed(rule), allowed(twin)) == (".", "bc")
    rule.rewind([END])
    assert allowed(rule) == "."
    rule.rewind(ids("bc"))
    assert allowed(rule) == "bc"


def test_what_lies_behind_a_forbidden_token_is_left_alone_and_harms_nothing() -> None:
    rule = made(regex="abc")
    assert allowed(rule, ids("ba")) == allowed(made(regex="[a-j]*"), ids("ba"))
    assert allowed(rule) == "a"


def test_forced_tokens_are_those_without_a_choice() -> None:
    rule = made(regex="abc(d|e)f")
    assert rule.forced(9) == [(token, 1.0) for token in ids("abc")]
    assert rule.forced(2) == [(token, 1.0) for token in ids("ab")]
    rule.advance(ids("abcd"))
    assert rule.forced(9) == [(*ids("f"), 1.0), (END, 1.0)]
    assert made(regex="[ab]+").forced(4) == []


def test_points_that_are_forbidden_are_cut_and_drawn_tokens_are_not() -> None:
    rules = Rules(SamplingParams(), vocab_size=VOCAB, prompt=[1], constraint=made(regex="ab(c|d)*"))
    a, b, c, e = ids("abce")
    tree = TokenTree.build([a, b, b, e, c], [-1, -1, 0, 2, 2])
    assert rules.possible(tree).tokens.tolist() == [a, b, c]
    row = torch.full((VOCAB,), 1 / VOCAB)
    drawn = TokenTree.build([a, e], [-1, 0], trials={-1: [Trial(0, row)], 0: [Trial(1, row)]})
    assert rules.possible(drawn) is drawn
    assert Rules(SamplingParams(), vocab_size=VOCAB, prompt=[1]).possible(tree) is tree


@cache
def bundled() -> LLM:
    return LLM(dtype="float32", profile=False)


def outputs(method: Any, **given: Any) -> list[tuple[str, str | None]]:
    llm = bundled().with_speculative_config(method)
    params = SamplingParams(**{"max_tokens": 60, "temperature": 0.0, "n": 1} | given)
    found = llm.generate(["A record of a person:", "Once upon a time"], params)
    assert not any(one.metrics.dropped_drafters for one in found)
    return [(output.text, output.finish_reason) for one in found for output in one.outputs]


def test_what_permits_everything_changes_nothing() -> None:
    free = outputs(None)
    assert outputs(None, structured_outputs={"regex": r"[\s\S]*"}) == free
    assert outputs(None, structured_outputs={"regex": "[a-z ]*"}) != free
    text = outputs(None, n=1)[0][0]
    (found, *_) = outputs(None, structured_outputs={"choice": [text, "Something else"]})
    assert found == (text, "length")


def everywhere(**given: Any) -> Constraint:
    """A constraint on the bundled model's texts."""
    llm = bundled()
    return constraint(StructuredOutputsParams(**given), llm.tokenizer, llm.runner.info.vocab_size, llm.defaults.eos_ids)


RECORDS = [{"a": a, "b": b} for a in ("x", "yes") for b in (True, False)]
LANGUAGES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "json": (
        {
            "json": {
                "type": "object",
                "properties": {"a": {"enum": ["x", "yes"]}, "b": {"type": "boolean"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
            "disable_any_whitespace": True,
        },
        [json.dumps(one) for one in RECORDS],
    ),
    "regex": (
        {"regex": "(for|if|import){1,2}( é)?"},
        [a + b + c for a in ("for", "if", "import") for b in ("", "for", "if", "import") for c in ("", " é")],
    ),
}
"""Constraints and all the texts that follow them."""


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_mask_is_that_of_brute_force_over_the_whole_vocabulary(language: str) -> None:
    """All 6,144 tokens; where the next bytes are certain, they are written in their usual tokens alone."""
    given, texts = LANGUAGES[language]
    llm, size = bundled(), bundled().runner.info.vocab_size
    written, rule, ends = token_bytes(llm.tokenizer), everywhere(**given), set(llm.defaults.eos_ids)

    def expected(left: Sequence[bytes]) -> set[int]:
        found = {token for token, data in enumerate(written) if data and any(one.startswith(data) for one in left)}
        return found | (ends if b"" in left else set())

    free, blind = 0, True
    for text in texts[:: len(texts) // 4]:
        path = llm.tokenizer.encode(text, add_special_tokens=False)
        for count, token in enumerate([*path, min(ends)]):
            before, row = b"".join(written[one] or b"" for one in path[:count]), torch.zeros(1, size)
            rule.apply(row, [path[:count]], [])
            found = set((row[0] > -math.inf).nonzero().flatten().tolist())
            left = [one.encode()[len(before) :] for one in texts if one.encode().startswith(before)]
            if len({one[:1] for one in left}) > 1:
                assert found == expected(left)
                free += 1
                blind &= found == expected([one for one in left if one[:1] != left[0][:1]])
            else:
                assert token in found
                assert found <= expected(left)
    assert free > 3
    assert not blind, "a language without some of the texts has another mask"


INSTANCES: list[tuple[Any, list[Any], list[Any]]] = [
    (
        RECORD,
        [{"name": "Ann", "age": 3}, {"name": "", "age": 99}, {"name": 'Zoë "Z"', "age": 10}],
        [
            {"name": "Ann", "age": 100},
            {"name": "Ann"},
            {"name": "Ann", "age": 3, "x": 1},
            {"name": "x" * 13, "age": 1},
            [],
        ],
    ),
    (
        {"type": "array", "items": {"type": "number", "minimum": -2}, "minItems": 1, "maxItems": 3},
        [[1], [-2, 0.5], [1e3, 2, 3]],
        [[], [1, 2, 3, 4], [-3], ["1"], {"0": 1}],
    ),
    (
        {"anyOf": [{"const": None}, {"type": "string", "pattern": "^[A-C]+-[0-9]{2}$"}, {"enum": [1, "two"]}]},
        [None, "AB-01", 1, "two"],
        ["AB-1", "D-01", 2, "three", False],
    ),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), INSTANCES)
def test_every_token_of_a_valid_value_is_in_the_mask_and_some_of_an_invalid_one_is_not(
    schema: Any, valid: list[Any], invalid: list[Any]
) -> None:
    judge, llm, rule = Draft202012Validator(schema), bundled(), everywhere(json=schema)
    for value in [*valid, *invalid]:
        path = llm.tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False)
        path.append(min(llm.defaults.eos_ids))
        assert (rule.allowed(path) == len(path)) == judge.is_valid(value) == (value in valid), value


FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "json": ({"json": RECORD}, lambda text: Draft202012Validator(RECORD).is_valid(json.loads(text))),
    "compact": (
        {"json": RECORD, "disable_any_whitespace": True},
        lambda text: json.dumps(json.loads(text), ensure_ascii=False) == text,
    ),
    "regex": ({"regex": "[A-Z][a-z]{2,7} (is|was) here"}, re.compile("[A-Z][a-z]{2,7} (is|was) here").fullmatch),
    "choice": ({"choice": ["yes, of course", "no"]}, lambda text: text in {"yes, of course", "no"}),
    "lark": ({"grammar": 'start: "x" "=" NUMBER\nNUMBER: /[0-9]{1,4}/'}, re.compile("x=[0-9]{1,4}").fullmatch),
    "gbnf": ({"grammar": 'root ::= "x" "=" [0-9]+ ";"'}, re.compile("x=[0-9]+;?").match),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["greedy", "seeded"])
def test_every_method_writes_what_plain_decoding_writes_and_it_follows_the_constraint(form: str, mode: str) -> None:
    given, follows = FORMS[form]
    more = {} if mode == "greedy" else {"temperature": 1.0, "seed": 5, "n": 2}
    plain = outputs(None, structured_outputs=given, **more)
    assert [text for text, reason in plain if reason == "stop" and not follows(text)] == []
    assert form == "gbnf" or any(reason == "stop" for _, reason in plain)
    for method in METHODS:
        assert outputs(method, structured_outputs=given, **more) == plain, method
    free = outputs(None, **more)
    assert free != plain  # the model alone writes something else, so that all this says something


def test_the_forced_part_of_a_record_is_drafted_and_accepted() -> None:
    llm = bundled().with_speculative_config("grammar")
    given = SamplingParams(
        temperature=0.0, max_tokens=60, structured_outputs={"json": RECORD, "disable_any_whitespace": True}
    )
    metrics = llm.generate("A record:", given)[0].metrics.drafters["grammar"]
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 3
    assert not llm.generate("A record:", SamplingParams(temperature=0.0))[0].metrics.drafters


def test_drawn_outputs_have_the_distribution_of_the_constrained_model() -> None:
    """Against exact probabilities of a toy: p of each allowed token, renormalised at each step."""
    runner = ToyRunner(VOCAB, seed=2)
    rule = made(regex="[a-d][b-f]")
    exact = Counter[tuple[int, int]]()
    first = masked(runner.logits([1, 2]), rule, ())
    for a in range(VOCAB):
        if first[a] > 0:
            second = masked(runner.logits([1, 2, a]), rule, (a,))
            for b in range(VOCAB):
                exact[a, b] = float(first[a] * second[b])
    assert abs(sum(exact.values()) - 1) < 1e-5
    drawn = Counter(pairs(runner, DRAWN, structured_outputs={"regex": "[a-d][b-f]"}))
    keys = [key for key, p in exact.items() if p > 0]
    assert set(drawn) <= set(keys)
    assert chisquare([drawn[key] for key in keys], [DRAWN * exact[key] for key in keys]).pvalue > 1e-4
    joint = {
        (a, b): float(torch.softmax(runner.logits([1, 2]), 0)[a] * torch.softmax(runner.logits([1, 2, a]), 0)[b])
        for a, b in keys
    }
    other = [
        DRAWN * joint[key] / sum(joint.values()) for key in keys
    ]  # conditioned on the whole output: another distribution
    assert chisquare([drawn[key] for key in keys], other).pvalue < 1e-4


def masked(logits: torch.Tensor, rule: Constraint, path: Sequence[int]) -> torch.Tensor:
    row = logits[None].clone()
    rule.apply(row, [path], [])
    return torch.softmax(row[0].double(), -1)


def pairs(runner: ToyRunner, count: int, **given: Any) -> list[tuple[int, int]]:
    live = engine(
        [make("draft_model", {"model": "draft", "draft_sample_method": "probabilistic"}, runner)],
        verifier("rejection_sampler"),
        runner=runner,
    )
    params = SamplingParams(n=100, temperature=1.0, max_tokens=2, **given)
    found = [run(live, [[1, 2]], params, seed) for seed in range(count // 100)]
    return [tuple(output.token_ids[:2]) for (request,) in found for output in request.outputs]


REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "exactly one of"),
    "two": ({"json": {}, "regex": "a"}, "exactly one of"),
    "unknown keyword": ({"json": {"not": {}}}, r'cannot be enforced: \["not"\]'),
    "unknown name": ({"jsn": {}}, "jsn"),
    "overlapping oneOf": ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
    "bad JSON": ({"json": "{"}, "structured_outputs json"),
    "bad regex": ({"regex": "(a"}, "regex"),
    "bad grammar": ({"grammar": 'root ::= "a" b'}, "grammar"),
    "no choice": ({"choice": []}, "choice"),
    "remote reference": ({"json": {"$ref": "http://example.com/schema"}}, "not present in a registry"),
    "bad tag": ({"structural_tag": {"structures": [{}], "triggers": []}}, "structural_tag"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_what_cannot_be_enforced_is_rejected_in_one_line_that_names_it(case: str) -> None:
    given, why = REJECTED[case]
    with pytest.raises(ConfigError, match=why) as caught:
        bundled().generate("a", SamplingParams(structured_outputs=given))
    assert "\n" not in str(caught.value)


def test_keywords_that_cannot_be_enforced_are_ignored_where_asked() -> None:
    given = {"json": {"type": "integer", "not": {"const": 7}}, "strict": False}
    assert outputs(None, structured_outputs=given, max_tokens=3)


def test_an_end_that_is_ignored_cannot_go_with_a_constraint() -> None:
    with pytest.raises(ConfigError, match="ignore_eos"):
        SamplingParams(ignore_eos=True, structured_outputs={"regex": "a"})


def test_structural_tags_bind_what_stands_between_their_marks() -> None:
    tag = {
        "structures": [{"begin": "<call>", "schema": {"type": "integer"}, "end": "</call>"}],
        "triggers": ["<call>"],
    }
    llm = bundled()
    size, ends, encode = llm.runner.info.vocab_size, llm.defaults.eos_ids, llm.tokenizer.encode
    rule = constraint(StructuredOutputsParams(structural_tag=tag), llm.tokenizer, size, ends)
    good, bad = (encode(text, add_special_tokens=False) for text in ("so <call>12</call> and", "so <call>x</call>"))
    assert rule.allowed(good) == len(good)
    assert rule.allowed(bad) < len(bad)


def test_requests_with_and_without_a_constraint_share_a_batch() -> None:
    llm = bundled().with_speculative_config("auto")
    prompts = ["One day", "The name of"]
    params = [
        SamplingParams(temperature=0.0, max_tokens=20),
        SamplingParams(temperature=0.0, max_tokens=20, structured_outputs={"choice": ["tea", "coffee"]}),
    ]
    together = [one.outputs[0].text for one in llm.generate(prompts, params)]
    alone = [llm.generate(prompt, one)[0].outputs[0].text for prompt, one in zip(prompts, params, strict=True)]
    assert together == alone
    assert all(a != b for a, b in pairwise(together))
