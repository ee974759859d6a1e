"""Constrained decoding: whatever the denoiser says, what is finished is a text of the constraint; allowed texts stay
untouched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from lark import Lark, UnexpectedInput

import paceline
from paceline.checkpoints import Tokenizer
from paceline.diffusion import Canvas, CanvasMethod, ConfiguredMethod, FinishedCanvas, TokenTexts, decode
from paceline.errors import ConfigError, UnsatisfiableError
from tests.diffusion.toys import Independent, Toy

TEXTS = [*'{}[]:," -.01237abcnrtuslexyé()+*', '"a', '":', '": ', '",', "true", "}}", "]}", '"x":', "12", "ab", "(("]

END, MASK = len(TEXTS), len(TEXTS) + 1

PAIR = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 3},
        "x": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
    },
    "required": ["x"],
}

NEST = {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "boolean"}]}

SUMS = 'start: start "+" term | term\nterm: term "*" atom | atom\natom: /[a-c]+|[0-9]+/ | "(" start ")"\n'

PATTERN = r"(?:\[[ab]+\]|[0-3]+(?:\.[0-3]+)?)(?:,é)*"

Truth = Callable[[str], object]

CASES: dict[str, tuple[dict[str, Any], Truth]] = {
    "schema": ({"json_schema": PAIR}, lambda text: jsonschema.validate(json.loads(text), PAIR)),
    "recursive": ({"json_schema": NEST}, lambda text: jsonschema.validate(json.loads(text), NEST)),
    "grammar": ({"grammar": SUMS}, Lark(SUMS, parser="earley", lexer="dynamic_complete").parse),
    "regex": ({"regex": PATTERN}, lambda text: re.fullmatch(PATTERN, text).span()),  # type: ignore[union-attr]
}


def text_of(token: int) -> str | None:
    return TEXTS[token] if token < END else None


class Rough(Toy):
    """Random logits that change with every token of the canvas."""

    eos_token_ids = (END,)

    def __init__(self, seed: int, spread: float = 4.0) -> None:
        super().__init__(MASK + 1)
        self.seed, self.spread = seed, spread

    def rows(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng([self.seed, *ids.tolist()])
        return rng.normal(size=(slots.size, self.vocab_size)) * self.spread


class Endless(Rough):
    """Never ends its text."""

    def rows(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        rows = super().rows(ids, slots)
        rows[:, END] = -np.inf
        return rows


def parts(toy: Toy, canvas: Canvas, config: dict[str, Any], seed: int = 0) -> CanvasMethod:
    return ConfiguredMethod({"method": "static", **config}).parts(toy, canvas, seed=seed, token_text=text_of)


def blank(length: int, prompt: tuple[int, ...] = ()) -> Canvas:
    return Canvas.of(prompt, length, mask_token_id=MASK, eos_token_ids=(END,))


def run(toy: Toy, canvas: Canvas, config: dict[str, Any], seed: int = 0) -> tuple[FinishedCanvas, Any]:
    made = parts(toy, canvas, config, seed)
    [outcome] = decode([canvas], toy, [made])
    assert outcome.error is None, outcome.error
    return outcome, made.transition.check


def written(outcome: FinishedCanvas, start: int | None = None) -> str:
    tokens = outcome.canvas.tokens[outcome.canvas.start if start is None else start :].tolist()
    stop = tokens.index(END) if END in tokens else len(tokens)
    assert set(tokens[stop:]) <= {END}
    return "".join(TEXTS[token] for token in tokens[:stop])


METHODS: list[dict[str, Any]] = [
    {"method": "cfg_dllm"},
    {"method": "static", "denoising_steps": 3, "block_length": 6},
    {"method": "threshold", "confidence_threshold": 0.3},
    {"method": "random", "temperature": 1.0},
    {"method": "entropy", "max_rejections": 2},
    {"method": "prophet", "gap_thresholds": (4.0, 2.0, 1.0)},
    {"method": "freedave"},
    {"method": "eotp"},
    {"method": "eotp", "eager_end": True},
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method["method"])
@pytest.mark.parametrize("case", CASES)
def test_every_finished_text_parses(case: str, method: dict[str, Any]) -> None:
    constraint, truth = CASES[case]
    for seed in range(3):
        outcome, _ = run(Rough(seed), blank(12, prompt=(3, 5)), {**method, **constraint}, seed)
        truth(written(outcome))


@pytest.mark.parametrize(
    "empty", [{"regex": ""}, {"regex": "a{0}"}, {"regex": "()"}, {"regex": "^$"}, {"grammar": "start: "}], ids=str
)
def test_a_constraint_that_only_the_empty_text_meets(empty: dict[str, str]) -> None:
    outcome, _ = run(Rough(0), blank(6, prompt=(3, 5)), empty)
    assert outcome.canvas.output == [END] * 6
    assert run(Rough(0), blank(6, prompt=(3, 5)), {"regex": "a?b?c{3}"})[0].canvas.output != [END] * 6


@pytest.mark.parametrize("case", CASES)
def test_without_the_constraint_none_does(case: str) -> None:
    outcome, _ = run(Rough(0), blank(12), {"method": "static"})
    text = "".join(text_of(token) or "" for token in outcome.canvas.output)
    with pytest.raises((ValueError, AttributeError, UnexpectedInput)):
        CASES[case][1](text)


def test_any_text_allowed_changes_nothing() -> None:
    for seed in range(3):
        ours, check = run(Endless(seed), blank(10), {"regex": "(?s:.)*"})
        plain, _ = run(Endless(seed), blank(10), {})
        assert (check.checks, check.rejections, check.completions) == (10, 0, 0)
        assert ours.canvas.tokens.tolist() == plain.canvas.tokens.tolist()
        assert ours.trajectory.order.tolist() == plain.trajectory.order.tolist()


def test_a_text_that_fits_is_left_as_it_is() -> None:
    tokens = [TEXTS.index(text) for text in ("{", '"x":', "[", "12", "]}")] + [END, END]
    toy = Independent([0.9, 0.5, 0.7, 0.6, 0.8, 0.95, 0.3], vocab_size=MASK + 1, tokens=tokens)
    toy.eos_token_ids = (END,)
    outcome, check = run(toy, blank(7), {"json_schema": PAIR})
    assert outcome.canvas.output == tokens
    assert (check.rejections, check.completions) == (0, 0)


def sure(*slots: dict[str, float]) -> Toy:
    """A denoiser with given probabilities at each slot, the rest shared out."""
    toy = Independent([0.5] * len(slots), vocab_size=MASK + 1)
    for row, wanted in zip(toy.table, slots, strict=True):
        rest = (1 - sum(wanted.values())) / (MASK - len(wanted))
        row[:] = np.log(rest)
        for text, p in wanted.items():
            row[TEXTS.index(text)] = np.log(p)
    return toy


def test_after_a_rejection_all_slots_are_ranked_again() -> None:
    toy = sure({"b": 0.9, "a": 0.05}, {"b": 0.6})
    outcome, check = run(toy, blank(2), {"regex": "ab|cb"})
    assert written(outcome) == "ab"
    assert outcome.trajectory.order.tolist() == [1, 0]
    assert check.rejections == 1  # what is ruled out is not tested again in the second round


def test_what_is_ruled_out_is_not_made_up_for_by_unsure_slots() -> None:
    toy = sure({"x": 0.95}, {"b": 0.92}, {"c": 0.5})
    outcome, _ = run(toy, blank(3), {"method": "threshold", "regex": "abc"})
    assert outcome.trajectory.rounds[0].slots.tolist() == [1]


def test_without_a_budget_the_shortest_text_is_written() -> None:
    toy = sure(*[{"é": 0.9}] * 9)
    toy.eos_token_ids = (END,)
    outcome, check = run(toy, blank(9), {"json_schema": PAIR, "max_rejections": 0})
    assert written(outcome) == '{"x":[0]}'
    assert check.completions > 0


def test_several_regions_of_a_template_are_filled() -> None:
    for seed in range(6):
        template = (
            [TEXTS.index(t) for t in ("{", '"x":', "[")]
            + [MASK] * 4
            + [TEXTS.index(t) for t in (",", "7", ",")]
            + [MASK] * 2
        )
        template += [TEXTS.index("]}")]
        canvas = Canvas.infill(template, mask_token_id=MASK)
        outcome, _ = run(Rough(seed), canvas, {"json_schema": PAIR, "constrained_from": 0, "method": "threshold"})
        given = np.asarray(template) != MASK
        assert (outcome.canvas.tokens[given] == np.asarray(template)[given]).all()
        jsonschema.validate(json.loads(written(outcome, 0)), PAIR)


def test_what_comes_before_the_constraint_is_free() -> None:
    canvas = Canvas.infill([MASK, MASK, 5], mask_token_id=MASK)
    with pytest.raises(ConfigError, match=r"constrained_from must be an integer in 0\.\.0"):
        parts(Rough(0), canvas, {"regex": ".*", "constrained_from": 1})


def test_an_end_closes_the_text() -> None:
    toy = sure(*[{"a": 0.5}] * 6)
    toy.table[2, END] = 3.0
    toy.eos_token_ids = (END,)
    outcome, _ = run(toy, blank(6), {"regex": "a*"})
    assert outcome.canvas.output[2:] == [END] * 4
    assert written(outcome) == "aa"
    assert outcome.trajectory.rounds[0].slots.size == 4


def test_canvases_of_a_batch_do_not_mix() -> None:
    configs = [{"json_schema": PAIR}, {"regex": PATTERN}, {"grammar": SUMS}]
    toy, canvases = Rough(1), [blank(12), blank(9), blank(10)]
    together = decode(canvases, toy, [parts(toy, c, config) for c, config in zip(canvases, configs, strict=True)])
    for outcome, canvas, config in zip(together, canvases, configs, strict=True):
        assert outcome.canvas.output == run(toy, canvas, config)[0].canvas.output


def test_drafts_verified_ahead_give_the_static_text() -> None:
    for seed in range(2):
        for constraint, _ in CASES.values():
            ours, plain = (
                run(Rough(seed, 2.0), blank(12), {"method": m, **constraint})[0] for m in ("freedave", "static")
            )
            assert ours.canvas.output == plain.canvas.output


def test_a_template_that_contradicts_is_rejected_and_leaves_others_alone() -> None:
    toy = Rough(0)
    wrong = Canvas.infill([TEXTS.index("a"), MASK, TEXTS.index("+")], mask_token_id=MASK)
    short = blank(1)
    canvases, configs = (
        [wrong, blank(3), short],
        [{"grammar": SUMS, "constrained_from": 0}, {"grammar": SUMS}, {"json_schema": PAIR}],
    )
    outcomes = decode(canvases, toy, [parts(toy, c, config) for c, config in zip(canvases, configs, strict=True)])
    assert [type(outcome.error) for outcome in outcomes] == [UnsatisfiableError, type(None), UnsatisfiableError]
    assert "contradicts the constraint, or its 1 masked slots" in str(outcomes[0].error)
    assert "no text of the constraint fits 1 slots" in str(outcomes[2].error)
    assert not any("\n" in str(outcome.error) for outcome in outcomes)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"regex": "a", "grammar": SUMS}, ConfigError, "be one of grammar, regex and json_schema"),
        ({"check": "grammar"}, ConfigError, "be one of grammar, regex and json_schema"),
        ({"regex": "("}, ConfigError, "not valid"),
        ({"regex": 3}, ConfigError, "regex must be a string"),
        ({"grammar": "start: start"}, UnsatisfiableError, "allows no text"),
        ({"grammar": 'start: "a"', "grammar_start": "begin"}, ConfigError, "not valid"),
        ({"json_schema": "{"}, ConfigError, "cannot be read"),
        ({"json_schema": {"const": {1}}}, ConfigError, "is not JSON"),
        ({"json_schema": 3}, ConfigError, "json_schema must be"),
        ({"json_schema": False}, UnsatisfiableError, "allows no text"),
        ({"regex": "a", "max_rejections": -1}, ConfigError, "max_rejections must be"),
        ({"regex": "a", "method": "ete_tokens"}, ConfigError, "explore_tokens' must be left out"),
        ({"regex": "a", "method": "llada2.1_q"}, ConfigError, "edit must be left out"),
    ],
    ids=str,
)
def test_wrong_use_is_one_clear_line(config: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        parts(Rough(0), blank(4), config)
    assert "\n" not in str(caught.value)


def test_a_constraint_needs_the_text_of_tokens() -> None:
    toy, canvas = Rough(0), blank(4)
    with pytest.raises(ConfigError, match="come with token_text"):
        ConfiguredMethod({"method": "static", "regex": "a"}).parts(toy, canvas)


FOLDER = Path(paceline.__file__).parent / "bundled" / "target"


def test_texts_of_tokens_put_together_are_the_decoded_text() -> None:
    tokenizer = Tokenizer.load(FOLDER)
    texts = TokenTexts(tokenizer)
    text = '{"name": "Añb", "list": [1, 2,\n3]} def f(x):\n    return x'
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = [texts(token) for token in ids]
    if None not in whole:  # a character of several tokens has no text of its own
        assert "".join(filter(None, whole)) == text
    plain = tokenizer.encode('{"name": [1, 2]}', add_special_tokens=False)
    assert "".join(texts(token) or "?" for token in plain) == '{"name": [1, 2]}'


def test_tokens_without_text() -> None:
    tokenizer = Tokenizer.load(FOLDER)
    texts = TokenTexts(tokenizer)
    assert all(texts(token) is None for token in tokenizer.special_ids)
    assert texts(10**6) is None
