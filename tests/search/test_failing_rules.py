"""Every search ends with the error of plain decoding where a rule of its request fails or allows no token, alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch

from paceline import LLM, SamplingParams, registry
from paceline.engine import RequestOutput
from paceline.sampling.logit_rules import AllowedTokens
from paceline.search import hide_message
from paceline.search.message import Channel
from tests.search.indices import Shifting, store_of
from tests.search.letters import letter_params, searched, texts

GREEDY = 0.0
SAMPLED = 1.0
HIDDEN = 256


def half(found: Sequence[Any]) -> list[float]:
    return [0.5] * len(found)


SEARCHES: dict[str, tuple[float, dict[str, Any]]] = {
    "beam": (GREEDY, {}),
    "diverse_beam": (GREEDY, {"num_beam_groups": 2}),
    "self_consistency": (SAMPLED, {"num_samples": 3, "answer": str}),
    "complexity_voting": (SAMPLED, {"num_samples": 3, "answer": str}),
    "sample_and_rank": (SAMPLED, {"num_samples": 3}),
    "first_finish": (SAMPLED, {"num_samples": 3}),
    "cautious": (SAMPLED, {"most_trials": 3, "high_entropy": 0.02, "trial_tokens": 2}),
    "adadec": (GREEDY, {"threshold": 0.0, "lookahead": 1}),
    "transfer_q": (GREEDY, {"reward": half, "top_k": 2, "rollout_tokens": 2}),
    "superposed": (GREEDY, {}),
    "a_star": (SAMPLED, {"reward": half, "step_tokens": 1, "branching": 2}),
    "pg_td": (GREEDY, {"reward": half, "rollouts": 3}),
    "ved": (GREEDY, {"value": half, "beam_width": 2}),
    "gfd": (GREEDY, {"scorer": half}),
    "ead": (GREEDY, {"model": "bundled/draft", "entropy_threshold": 99.0}),
    "arbitrage": (GREEDY, {"model": "bundled/draft", "router": half, "threshold": 0.6, "step_tokens": 2}),
    "ralm": (GREEDY, {"index": Shifting(), "interval": 1, "query_tokens": 2, "stride": 3}),
    "knn_lm": (GREEDY, {"index": store_of(np.zeros((2, HIDDEN), np.float32), [1, 2], 0), "stride": 3}),
    "backoff": (GREEDY, {"denied": "no such text"}),
    "paceline.search.message:HideMessage": (SAMPLED, {"data": bytes(3)}),
}


def test_all_searches_are_here() -> None:
    assert {name for name in SEARCHES if ":" not in name} == set(registry.FAMILIES["searches"])


Processor = Callable[[list[int], torch.Tensor], torch.Tensor]


def raising(place: int) -> Processor:
    def processor(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) >= place:
            raise ZeroDivisionError("a mistake of the user's")
        return logits

    return processor


def filling(value: float) -> Callable[[int], Processor]:
    """Puts a value into all logits from a place on."""

    def made(place: int) -> Processor:
        return lambda output, logits: torch.full_like(logits, value) if len(output) >= place else logits

    return made


FAILING = {"raises": raising, "NaN": filling(nan), "infinity": filling(inf), "no token": filling(-inf)}
SAYS = {
    "raises": "ZeroDivisionError: a mistake",
    "NaN": "NaN",
    "infinity": "infinity",
    "no token": "no token is allowed",
}


def both(llm: LLM, method: str, failing: Processor, **changes: Any) -> list[RequestOutput]:
    """Of a request with a rule, and of one without beside it."""
    temperature, options = SEARCHES[method]
    how = [letter_params(llm, temperature=temperature, logits_processors=some, **changes) for some in ([failing], [])]
    extra = {"channel": Channel(b"key")} if ":" in method else {}
    return llm.generate(["x = "] * 2, how, search={"method": method, **options, **extra})


@pytest.mark.parametrize("kind", FAILING)
@pytest.mark.parametrize("method", SEARCHES)
def test_the_error_is_that_of_plain_decoding_and_of_this_request_alone(llm: LLM, method: str, kind: str) -> None:
    for place in (0, 2) if kind == "raises" else (2,):
        failing = FAILING[kind](place)
        how = letter_params(llm, temperature=SEARCHES[method][0], logits_processors=[failing])
        (plain,) = llm.generate("x = ", how)
        assert SAYS[kind] in str(plain.outputs[0].error)
        found, beside = both(llm, method, failing)
        assert [(one.finish_reason, one.error) for one in found.outputs] == [("error", plain.outputs[0].error)]
        assert [one.error for one in beside.outputs] == [None]


@pytest.mark.parametrize("method", SEARCHES)
def test_a_rule_that_would_fail_behind_the_last_token_changes_nothing(llm: LLM, method: str) -> None:
    found, beside = both(llm, method, raising(4))
    assert texts(found) == texts(beside)
    assert len(found.outputs[0].text) == 4


@pytest.mark.parametrize("method", ["beam", "adadec", "gfd", "self_consistency"])
@pytest.mark.parametrize("what", ["apply", "fork"])
def test_a_rule_that_raises_by_itself_ends_its_request_alone(
    llm: LLM, method: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    temperature, options = SEARCHES[method]
    how = [letter_params(llm, temperature=temperature), SamplingParams(temperature=temperature, max_tokens=4, seed=3)]
    search = {"method": method, **options}
    (alone,) = llm.generate("x = ", how[1], search=search)

    def fails(*_: object) -> None:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(AllowedTokens, what, fails)
    (plain,) = llm.generate("x = ", replace(how[0], n=2))
    found, beside = llm.generate(["x = "] * 2, how, search=search)
    assert (found.outputs[0].finish_reason, found.outputs[0].error) == ("error", plain.outputs[1].error)
    assert "KeyError: 'a mistake of ours'" in str(found.outputs[0].error)
    assert texts(beside) == texts(alone)


@pytest.mark.parametrize(
    "search",
    [
        {"method": "beam", "beam_width": 4},
        {"method": "diverse_beam", "beam_width": 4, "num_beam_groups": 2},
        {"method": "ved", "value": half, "beam_width": 3},
        {"method": "gfd", "scorer": half, "weight": 0.0, "beam_width": 4},
        {"method": "superposed", "alpha": 0.0, "mix_temperature": 1.0},
        {"method": "adadec", "threshold": 0.0, "lookahead": 3},
    ],
)
def test_a_dead_end_of_one_branch_leaves_the_others(llm: LLM, search: dict[str, Any]) -> None:
    """That the search would have gone through: without the dead end its best text begins so."""
    best = searched(llm, letter_params(llm), **search).outputs[0].text
    stuck = best[:2]
    found = searched(llm, letter_params(llm, logits_processors=[dead_behind(llm, stuck)]), **search)
    assert len(found.outputs[0].text) == 4
    assert not found.outputs[0].text.startswith(stuck)


def test_a_lookahead_that_is_stuck_is_not_followed_however_likely_it_began(llm: LLM) -> None:
    """The likeliest letter leads nowhere: its mean is log 0.6, that of "b" less than log 0.4."""
    ids = [llm.tokenizer.encode(letter)[-1] for letter in "ab"]

    def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if output == ids[:1]:
            return torch.full_like(logits, -inf)
        if output:
            return logits
        return torch.full_like(logits, -inf).index_copy(0, torch.tensor(ids), torch.tensor([0.6, 0.4]).log())

    how = letter_params(llm, logits_processors=[process])
    assert searched(llm, how, method="adadec", threshold=0.0, lookahead=1).outputs[0].text.startswith("b")
    (plain,) = llm.generate("x = ", how)
    assert "no token is allowed" in str(plain.outputs[0].error)


def dead_behind(llm: LLM, stuck: str) -> Processor:
    """No token is allowed behind a text of letters."""
    ids = [llm.tokenizer.encode(letter)[-1] for letter in stuck]
    return lambda output, logits: torch.full_like(logits, -inf) if output == ids else logits


def test_a_message_in_a_text_that_cannot_go_on_is_an_error(llm: LLM) -> None:
    how = letter_params(llm, temperature=1.0, logits_processors=[filling(-inf)(2)])
    with pytest.raises(Exception, match="no token is allowed"):
        hide_message(llm, "x = ", b"at noon", how, key=b"key")
