"""Every cell of the exactness table, proven under every sampling parameter: each drafter x verifier x mode against
plain decoding.

A cell that is claimed bit-equal is compared bit by bit: a prompt alone, and among others of other lengths and other
parameters. One that is claimed equal in distribution takes a G-test against the exact law of plain decoding for every
parameter that changes what is drawn. An approximate one must keep its verifier's bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from contract.worlds import (
    BATCHES,
    PREDICTION,
    PROMPT,
    SEED,
    VOCAB,
    accepted,
    decoded,
    engine,
    letters,
    make,
    requested,
    target,
    verifier,
)
from datastores import Numbers, write
from drafters.test_contract import VARIANTS
from engine.harness import run
from processors import at_the_root, by_all_tokens, unlike_the_last
from tools.enumerate_draws import Choices, EnumeratingDraws, enumerate_distribution
from tools.gtest import ERROR, g_test

from paceline import claims, registry
from paceline.claims import Cell
from paceline.config import RequestOutputKind, SamplingParams
from paceline.errors import ConfigError
from paceline.models.heads import StateJudge
from paceline.sampling.logit_rules import ForbiddenTokens, Processors
from paceline.verifiers import RecursiveRejection, Reflection
from paceline.verifiers.accept_thresholds import AcceptThresholds
from paceline.verifiers.fly import Fly
from paceline.verifiers.judge import Judge
from paceline.verifiers.lexical_units import LexicalUnits
from paceline.verifiers.reflective import Reflective
from paceline.verifiers.relaxed_thinking import RelaxedThinking
from paceline.verifiers.typical import TypicalAcceptance

# What structured_outputs asks for at every second token is what the heads of reduced vocabularies lack, i and j.
CASES: dict[str, dict[str, Any]] = {
    "n": {"n": 3},
    "temperature": {},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 4},
    "min_p": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": 0.8},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "logit_bias": {"logit_bias": {3: 2.0, 5: -100.0}},
    "allowed_token_ids": {"allowed_token_ids": [0, 2, 3, 5, 8]},
    "bad_words": {"bad_words": ["b", "cd"]},
    "logits_processors": {"logits_processors": [unlike_the_last, by_all_tokens]},
    "structured_outputs": {"structured_outputs": {"regex": "[a-e]?([b-h][ij])*"}},
    "steering": {"steering": {"method": "cfg", "guidance_scale": 1.8, "negative_prompt": [4, 5]}},
    "seed": {},
    "stop": {"stop": ["ab", "j"]},
    "stop_token_ids": {"stop_token_ids": [5]},
    "include_stop_str_in_output": {"stop": ["c", "hi"], "include_stop_str_in_output": True},
    "max_tokens": {"max_tokens": 5},
    "min_tokens": {"min_tokens": 7},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 5},
    "ignore_eos": {"ignore_eos": True},
    "detokenize": {"detokenize": False},
    "skip_special_tokens": {"skip_special_tokens": False},
    "output_kind": {"output_kind": RequestOutputKind.FINAL_ONLY},
}
UNTOUCHED = {"n", "seed", "logprobs", "prompt_logprobs", "detokenize", "skip_special_tokens", "output_kind"}
"""Parameters that change what a caller is shown and not what is drawn."""
TOUCHED = [parameter for parameter in CASES if parameter not in UNTOUCHED]
LIKE_OTHERS = {"max_tokens", "include_stop_str_in_output"}
"""Outputs of a G-test have two tokens whatever `max_tokens` is; the other one ends an output where `stop` ends it."""

CELLS = list(claims.cells())
EQUAL = [cell for cell in CELLS if cell.claim.startswith("bit-equal")]
IN_DISTRIBUTION = [cell for cell in CELLS if cell.claim == "equal in distribution"]
APPROXIMATE = [cell for cell in CELLS if cell.claim == "approximate"]
OUTPUTS, EACH, LENGTH, DRAFT_NODES, FIRST_SEED = 160, 32, 2, 4, 50_000


def named(cells: list[Cell]) -> Any:
    return pytest.mark.parametrize("cell", cells, ids=lambda c: f"{c.drafter}-{c.verifier}-{c.mode}")


def params(parameter: str, mode: str, **more: Any) -> SamplingParams:
    base: dict[str, Any] = {"temperature": 0.0 if mode == "greedy" else 0.8, "max_tokens": 8}
    base |= {"seed": 11} if mode == "seeded" else {}
    return SamplingParams(**base | CASES[parameter] | more)


@cache
def store() -> str:
    """A datastore of what this target says, and of something else, in the toy world's tokenizer."""
    folder = Path(mkdtemp(prefix="paceline-contract-"))
    words = Numbers(VOCAB, letters().fingerprint())
    return str(
        write(
            folder / "texts.datastore",
            [PROMPT + target().greedy(PROMPT, 60), [5, 6, 5, 6, 7, 1, 2, 9]],
            tokenizer=words,
        )
    )


def options(drafter: str) -> dict[str, Any]:
    """How the contract of drafters builds it; those that look something up are told what this target will say."""
    found = VARIANTS.get(drafter, [{}])[0]
    return found | {"datastore": store()} if "datastore" in found else found


def all_of(live: Any, parameters: Sequence[str], mode: str, batch: str) -> dict[str, list[Any]]:
    """What each parameter gives: a prompt alone one after the other, several prompts of all parameters in one batch."""
    prompts, each = BATCHES[batch], [params(parameter, mode) for parameter in parameters]
    if batch == "alone":
        return {name: decoded(live, prompts, one) for name, one in zip(parameters, each, strict=True)}
    seeds = [*range(SEED, SEED + len(prompts))] * len(each)
    found = requested(live, prompts * len(each), [one for one in each for _ in prompts], seeds)
    return {name: list(chain(*found[i * len(prompts) : (i + 1) * len(prompts)])) for i, name in enumerate(parameters)}


@cache
def plain_each(parameter: str, mode: str, batch: str) -> list[list[Any]]:
    """What plain decoding gives, prompt by prompt."""
    prompts = BATCHES[batch]
    wanted, seeds = [params(parameter, mode)] * len(prompts), range(SEED, SEED + len(prompts))
    return requested(engine((), verifier("rejection_sampler")), prompts, wanted, seeds)


def plain(parameter: str, mode: str, batch: str) -> list[Any]:
    return list(chain(*plain_each(parameter, mode, batch)))


def live_of(cell: Cell, seed: int = 3, sampled: Any = None) -> Any:
    runner = target(seed)
    sampled = sampled or verifier("rejection_sampler" if cell.verifier == "greedy" else cell.verifier)
    drafter = make(cell.drafter, options(cell.drafter), runner, chains_only=sampled.chains_only)
    return engine([drafter], sampled, runner=runner)


def drafted(cell: Cell, parameters: Sequence[str], batch: str, seed: int = 3) -> dict[str, list[Any]]:
    return all_of(live_of(cell, seed), parameters, cell.mode, batch)


DRAWN: list[tuple[str, ...]] = [
    ("temperature", "top_p"),
    ("top_k", "stop"),
    ("min_p", "stop_token_ids"),
    ("presence_penalty", "frequency_penalty"),
    ("repetition_penalty", "ignore_eos"),
    ("logit_bias",),
    ("allowed_token_ids", "truncate_prompt_tokens"),
    ("bad_words", "min_tokens"),
    ("logits_processors",),
    ("structured_outputs",),
    ("steering",),
]
"""Parameters of the G-tests; those that hide nothing of each other come together."""


EXACT = sorted({cell.verifier for cell in EQUAL if cell.mode != "greedy"} - {RelaxedThinking.name})
"""Relaxed acceptance is exact above temperature 0, where it is `rejection_sampler`, but does not meet every drafter."""


def parameters_of(cell: Cell, every: list[Any]) -> list[Any]:
    """What a cell is tested with: all at temperature 0. Above it the exact verifiers take turns, so that each of them
    meets every parameter, and so does each drafter in every mode; of the others drafters take two each.
    """
    if cell.claim == "approximate" or cell.verifier == RelaxedThinking.name:
        return every[turn_of(cell) % (len(every) // 2) :: len(every) // 2]
    if cell.mode == "greedy":
        return every
    turn = turn_of(cell) + EXACT.index(cell.verifier)
    return every[turn % len(EXACT) :: len(EXACT)]


def turn_of(cell: Cell) -> int:
    return list(registry.DRAFTERS).index(cell.drafter)


def asked_together(cell: Cell, every: list[str]) -> list[tuple[str, int]]:
    """Parameters of a cell, each with the numbers of two prompts; drafters take turns, so that each parameter meets
    every prompt.
    """
    many, mine = len(BATCHES["together"]), parameters_of(cell, every)
    return [(one, (list(CASES).index(one) + turn_of(cell) + more) % many) for one in mine for more in (0, 2)]


def together(live: Any, mode: str, asked: Sequence[tuple[str, int]]) -> list[list[Any]]:
    """What parameters with prompts give in one batch."""
    prompts, seeds = [BATCHES["together"][number] for _, number in asked], [SEED + number for _, number in asked]
    return requested(live, prompts, [params(parameter, mode) for parameter, _ in asked], seeds)


@named(EQUAL)
def test_bit_equal(cell: Cell) -> None:
    """Among others with every parameter of the cell; alone, drafters take turns with half of them."""
    half = parameters_of(cell, list(CASES))[turn_of(cell) % 2 :: 2]
    for parameter, found in drafted(cell, half, "alone").items():
        assert found == plain(parameter, cell.mode, "alone"), parameter
    asked = asked_together(cell, list(CASES))
    for (parameter, number), found in zip(asked, together(live_of(cell), cell.mode, asked), strict=True):
        assert found == plain_each(parameter, cell.mode, "together")[number], (parameter, number)


@named([cell for cell in EQUAL if cell.mode == "greedy"])
def test_bit_equal_where_no_request_of_a_batch_has_rules(cell: Cell) -> None:
    """The engine takes another way through such a batch."""
    (found,) = drafted(cell, ["temperature"], "together").values()
    assert found == plain("temperature", cell.mode, "together")


def drawn(live: Any, names: Sequence[str], requests: int = OUTPUTS // EACH, each: int = EACH) -> list[Any]:
    """Token ids and reasons of outputs under parameters, over requests of so many outputs each."""
    given = {key: value for name in names for key, value in CASES[name].items()}
    shortest = min(1, given.get("min_tokens", 0))
    given |= {"n": each, "max_tokens": LENGTH, "min_tokens": shortest}
    wanted = params("temperature", "sampled", **given)
    found = decoded(live, [PROMPT] * requests, wanted, FIRST_SEED)
    return [(tuple(tokens), reason) for tokens, _, reason, *_ in found]


def drafting(cell: Cell, sampled: Any) -> Any:
    runner = target()
    drafter = make(cell.drafter, options(cell.drafter), runner, chains_only=sampled.chains_only)
    return engine([drafter], sampled, runner=runner, nodes=DRAFT_NODES)


class Enumerated(RecursiveRejection):
    """Plain decoding whose draws are the decisions of an exact enumeration."""

    choices = Choices(())

    def verify(self, trees: Any, rows: Any, draws: Any) -> Any:
        return super().verify(trees, rows, [EnumeratingDraws(self.choices) for _ in trees])


@cache
def law(names: tuple[str, ...]) -> dict[Any, float]:
    """The probability of every output of plain decoding under parameters."""
    sampled = Enumerated()
    live = engine((), sampled)

    def output(choices: Choices) -> Any:
        sampled.choices = choices
        (one,) = drawn(live, names, 1, 1)
        return one

    return enumerate_distribution(output)


def p_value(live: Any, names: tuple[str, ...]) -> float:
    """Of "its outputs have the distribution of plain decoding"."""
    chances = law(names)
    counts = Counter(drawn(live, names))
    every = [*chances, *(counts.keys() - chances.keys())]
    return g_test([counts[one] for one in every], [chances.get(one, 0.0) for one in every])


@named(IN_DISTRIBUTION)
def test_equal_in_distribution(cell: Cell) -> None:
    for names in parameters_of(cell, DRAWN):
        assert p_value(drafting(cell, verifier(cell.verifier)), names) > ERROR, names


@pytest.mark.parametrize("sampled", EXACT)
def test_plain_decoding_has_its_own_law(sampled: str) -> None:
    for names in DRAWN[EXACT.index(sampled) :: len(EXACT)]:
        assert p_value(engine((), verifier(sampled)), names) > ERROR, names


def expected_g(drawn_from: dict[Any, float], tested: dict[Any, float]) -> float:
    """What the statistic of a G-test is beyond chance, an output, where outputs have another law."""
    return sum(p * math.log(p / max(tested.get(one, 0.0), 1e-9)) for one, p in drawn_from.items() if p > 0.0)


def test_parameters_that_come_together_hide_nothing_of_each_other() -> None:
    """One that is forgotten shows as it does where it comes alone."""
    for names in DRAWN:
        for one in names if len(names) > 1 else ():
            others = tuple(name for name in names if name != one)
            alone = expected_g(law(("temperature",)), law((one,)))
            assert expected_g(law(others), law(names)) >= 0.6 * alone, (one, names)


def test_the_g_tests_have_every_parameter_that_changes_what_is_drawn() -> None:
    assert sorted(chain(*DRAWN)) == sorted({*TOUCHED} - LIKE_OTHERS)


@pytest.mark.parametrize("cells", [EQUAL, IN_DISTRIBUTION, APPROXIMATE], ids=lambda cells: cells[0].claim)
def test_every_verifier_meets_every_parameter_and_every_drafter_does_in_every_mode(cells: list[Cell]) -> None:
    every = {id(EQUAL): list(CASES), id(IN_DISTRIBUTION): DRAWN}.get(id(cells), TOUCHED)
    met = [(cell, parameter) for cell in cells for parameter in parameters_of(cell, every)]
    assert {(cell.verifier, one) for cell, one in met} == set(product({cell.verifier for cell in cells}, every))
    if cells is not APPROXIMATE:
        found = {((cell.drafter, cell.mode), one) for cell, one in met}
        assert found == set(product({(cell.drafter, cell.mode) for cell in cells}, every))


def test_every_parameter_meets_every_prompt_of_a_batch_in_every_mode() -> None:
    met = {(cell.mode, *one) for cell in EQUAL for one in asked_together(cell, list(CASES))}
    assert met == set(product({cell.mode for cell in EQUAL}, CASES, range(len(BATCHES["together"]))))


class Bounded(TypicalAcceptance):
    """Typical acceptance that checks its own bound, from probabilities worked out another way."""

    loosened = 1.0

    def verify(self, trees: Any, rows: Any, draws: Any) -> Any:
        found = super().verify(trees, rows, draws)
        for tree, rows_nv, verdict in zip(trees, rows, found, strict=True):
            node = -1
            for child in verdict.path:
                p = torch.softmax(rows_nv[node + 1].double(), -1)
                entropy = -sum(x * math.log(x) for x in p.tolist() if x > 0)
                bound = min(self.posterior_threshold, self.posterior_alpha * math.exp(-entropy))
                assert float(p[int(tree.tokens[child])]) > bound * self.loosened - 1e-9, "below the bound"
                node = child
        return found


class BoundedFly(Fly):
    """Fly that checks at each departure what must hold there."""

    loosened = 1.0

    def __init__(self) -> None:
        super().__init__(fly_window_size=2, fly_entropy_threshold=0.3)

    def verify(self, trees: Any, rows: Any, draws: Any) -> Any:
        found = super().verify(trees, rows, draws)
        for tree, rows_nv, verdict in zip(trees, rows, found, strict=True):
            for place, later in zip(verdict.departures, (*verdict.departures[1:], len(tree)), strict=False):
                node = verdict.path[place - 1] if place else -1
                p = torch.softmax(rows_nv[node + 1].double(), -1)
                entropy = -sum(x * math.log(x) for x in sorted(p.tolist())[-3:] if x > 0)
                assert entropy >= 0.3 * self.loosened, "below the bound"
                assert later - place > 2, "no agreement in between"
                assert p[verdict.accepted[place]] > 0
        return found


class BoundedThinking(RelaxedThinking):
    """Relaxed acceptance that checks each draft that it lets pass; thoughts begin with token 1 and end with token 8."""

    loosened = 1.0

    def __init__(self) -> None:
        super().__init__(4, 0.4, begin_thinking_phase_token=1, end_thinking_phase_token=8)

    def plausible(self, weights_v: Any, token: int, depth: int) -> bool:
        found = super().plausible(weights_v, token, depth)
        p = torch.softmax(weights_v.double(), -1)
        assert not found or p.max() - p[token] < 0.4 / self.loosened + 1e-6, "below the bound"
        assert not found or (p > p[token]).sum() < 4
        return found


class BoundedThresholds(AcceptThresholds):
    """Thresholds that check each draft that they let pass: by the sum of all drafts there, divided."""

    loosened = 1.0

    def __init__(self) -> None:
        super().__init__(0.6, 0.5)

    def verify(self, trees: Any, rows: Any, draws: Any) -> Any:
        found = super().verify(trees, rows, draws)
        for tree, rows_nv, source, verdict in zip(trees, rows, draws, found, strict=True):
            for place, (parent, node) in enumerate(zip((-1, *verdict.path), verdict.path, strict=False)):
                p = torch.softmax(rows_nv[parent + 1].double(), -1)
                tried = list(dict.fromkeys(int(tree.tokens[trial.node]) for trial in tree.trials_of(parent)))
                upto = tried[: tried.index(int(tree.tokens[node])) + 1]
                chance = float(p[upto].sum()) / 0.5 / self.loosened + 1e-6
                likely = float(p[upto[-1]]) >= 0.6 * self.loosened - 1e-6
                assert likely or source.bernoulli(place, 0, min(1.0, chance)), "below the bound"
        return found


class BoundedReflection(Reflection):
    """Reflection that checks how far it moves logits: by its share of the way."""

    def mixed(self, rows_mv: Any, n: int) -> Any:
        found = super().mixed(rows_mv, n)
        own, again = rows_mv[: n + 1].double(), rows_mv[-n - 1 :].double()
        way = self.alpha / BoundedReflective.loosened * (again - own).abs()
        assert bool(((found - own).abs() <= way + 1e-5).all()), "below the bound"
        return found


class BoundedReflective(Reflective):
    """Reflective verification with such a reflection; the prompt that asks is two letters."""

    loosened = 1.0

    def __init__(self) -> None:
        super().__init__(0.4, [2, 3])
        self.reflection = BoundedReflection(0.4, (2, 3), 2)


class BoundedJudge(Judge):
    """Judge that checks what it keeps by the state that has read it."""

    loosened = 1.0

    def __init__(self) -> None:
        super().__init__(judge_threshold=0.4)
        self.use(StateJudge(torch.linspace(-1.0, 1.0, 8), 0.2), 4)

    def verify(self, trees: Any, rows: Any, draws: Any) -> Any:
        found = super().verify(trees, rows, draws)
        assert self.head is not None
        for states, verdict in zip(self._states, found, strict=True):
            for place in verdict.departures:
                odds = float(states[verdict.path[place] + 1].double() @ self.head.weight.double()) + self.head.bias
                assert 1 / (1 + math.exp(-odds)) > 0.4 * self.loosened - 1e-6, "below the bound"
        return found


class BoundedUnits(LexicalUnits):
    """Lexical units that check at each departure how sure the drafter was."""

    loosened = 1.0

    def __init__(self) -> None:
        super().__init__(unit_threshold=0.3)

    def verify(self, trees: Any, rows: Any, draws: Any) -> Any:
        found = super().verify(trees, rows, draws)
        for tree, rows_nv, verdict in zip(trees, rows, found, strict=True):
            for place in verdict.departures:  # of a chain, whose nodes are its places; the last one may be the token
                assert tree.confidence[place] >= 0.3 * self.loosened, "below the bound"
                assert torch.softmax(rows_nv[place].double(), -1)[int(tree.tokens[place])] > 0
        return found


BOUNDED: dict[str, Any] = {
    "accept_thresholds": BoundedThresholds,
    "typical_acceptance_sampler": Bounded,
    "fly": BoundedFly,
    "relaxed_thinking": BoundedThinking,
    "reflective": BoundedReflective,
    "judge": BoundedJudge,
    "lexical_units": BoundedUnits,
}
"""Approximate verifiers that check themselves."""


@named(APPROXIMATE)
def test_approximate_within_its_bound(cell: Cell) -> None:
    live = live_of(cell, sampled=BOUNDED[cell.verifier]())
    together(live, cell.mode, asked_together(cell, TOUCHED))


@pytest.mark.parametrize("drafter", registry.DRAFTERS)
def test_bit_equal_where_the_model_has_ids_that_are_no_tokens(drafter: str) -> None:
    """And their logits are the largest: what comes out is what comes out of the model without them."""
    runner = target(pad=5)
    runner.info = replace(runner.info, stored_rows=VOCAB)  # of heads, which are made for the tokens
    live = engine([make(drafter, options(drafter), runner)], verifier("rejection_sampler"), runner=runner)
    for parameter in ("temperature", "repetition_penalty"):
        assert all_of(live, [parameter], "greedy", "together")[parameter] == plain(parameter, "greedy", "together")
    found = decoded(live, BATCHES["together"], params("ignore_eos", "sampled"))
    assert all(max(tokens) < VOCAB for tokens, *_ in found)


def test_the_comparison_catches_ids_that_are_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForbiddenTokens, "apply", lambda *_: None)
    found = decoded(engine((), verifier("rejection_sampler"), runner=target(pad=5)), [PROMPT], params("n", "greedy"))
    assert all(max(tokens) >= VOCAB for tokens, *_ in found)


def raising_late(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(output) >= 4:
        raise LookupError("a mistake of the user's")
    return logits


@pytest.mark.parametrize("drafter", registry.DRAFTERS)
def test_bit_equal_beside_a_request_whose_rule_raises(drafter: str) -> None:
    runner = target()
    live = engine([make(drafter, options(drafter), runner)], verifier("rejection_sampler"), runner=runner)
    prompts, healthy = BATCHES["together"], params("temperature", "greedy")
    wrong = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logits_processors=[raising_late])
    fine, failing = [healthy] * len(prompts), [wrong] * len(prompts)
    found = run(live, prompts * 2, fine + failing, prediction=PREDICTION)
    outputs = [output for request in found for output in request.outputs]
    expected = plain("temperature", "greedy", "together")
    for one, (tokens, text, reason, *_) in zip(outputs, expected, strict=False):
        assert (one.token_ids, one.text, one.finish_reason) == (tokens, text, reason)
    for one in outputs[len(prompts) :]:
        assert (len(one.token_ids), one.finish_reason) == (4, "error")


def test_parameters_that_are_not_supported_are_rejected_by_an_error_that_names_them() -> None:
    for parameter in claims.REFUSED:
        with pytest.raises(ConfigError, match=parameter):
            SamplingParams.from_dict({parameter: 1})


def test_every_parameter_and_drafter_has_cells() -> None:
    """A new parameter, drafter or class without a way to prove it fails here."""
    assert set(CASES) == set(claims.PARAMETERS)
    assert {cell.drafter for cell in CELLS} == set(registry.DRAFTERS)
    assert {(cell.verifier, cell.mode) for cell in CELLS} == {
        ("greedy", "greedy"),
        *product(claims.verifiers(), ("sampled", "seeded")),
        *product(("fly", "relaxed_thinking", "reflective", "judge", "lexical_units"), ("greedy",)),
    }
    assert len(EQUAL) + len(IN_DISTRIBUTION) + len(APPROXIMATE) == len(CELLS)
    assert {cell.verifier for cell in APPROXIMATE} == set(BOUNDED)


@pytest.mark.parametrize("drafter", registry.DRAFTERS)
def test_drafts_are_accepted_so_that_equality_means_something(drafter: str) -> None:
    runner = target()
    live = engine([make(drafter, options(drafter), runner)], verifier("rejection_sampler"), runner=runner)
    more = {"structured_outputs": {"regex": "(bcdefg){9}"}} if drafter == "grammar" else {"ignore_eos": True}
    greedy = SamplingParams(temperature=0.0, max_tokens=60, **more)
    assert accepted(live, [PROMPT] * 2, greedy) > 1


def test_the_comparison_catches_another_target() -> None:
    cell = next(cell for cell in EQUAL if cell.mode == "greedy")
    for batch in BATCHES:
        assert drafted(cell, ["temperature"], batch, seed=4)["temperature"] != plain("temperature", cell.mode, batch)


@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_the_comparison_catches_a_relaxed_rule(drafter: str) -> None:
    cell = Cell(drafter, "typical_acceptance_sampler", "seeded", "bit-equal")
    assert any(
        drafted(cell, ["temperature"], batch)["temperature"] != plain("temperature", cell.mode, batch)
        for batch in BATCHES
    )


def test_the_g_test_catches_a_relaxed_rule() -> None:
    relaxed = TypicalAcceptance(posterior_threshold=0.02, posterior_alpha=0.3)
    assert p_value(drafting(IN_DISTRIBUTION[0], relaxed), ("temperature",)) < ERROR


def test_the_comparisons_catch_processors_that_see_the_text_of_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = next(cell for cell in EQUAL if (cell.drafter, cell.mode) == ("draft_model", "greedy"))
    sampled = next(cell for cell in IN_DISTRIBUTION if cell.drafter == "draft_model")
    base = plain("logits_processors", "greedy", "together")
    (names,) = (names for names in DRAWN if "logits_processors" in names)
    law(names)
    monkeypatch.setattr(Processors, "apply", at_the_root)
    assert drafted(greedy, ["logits_processors"], "together")["logits_processors"] != base
    assert p_value(drafting(sampled, verifier(sampled.verifier)), names) < ERROR


def test_the_same_tokens_are_drawn_under_parameters_that_touch_none_and_others_under_one_that_does() -> None:
    cell = IN_DISTRIBUTION[0]
    bare, *untouched, cut = (
        drawn(drafting(cell, verifier(cell.verifier)), [parameter], 1)
        for parameter in ("temperature", *sorted(UNTOUCHED), "top_k")
    )
    assert all(found == bare for found in untouched)
    assert cut != bare


@pytest.mark.parametrize("rule", BOUNDED)
def test_the_bound_catches_a_looser_rule(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    monkeypatch.setattr(BOUNDED[rule], "loosened", 3.0)
    with pytest.raises(AssertionError, match="below the bound"):
        go_through([cell for cell in APPROXIMATE if cell.verifier == rule])


def go_through(cells: list[Cell]) -> None:
    for cell in cells:
        test_approximate_within_its_bound(cell)
