"""Numbers that a user's functions give, too large or none at all; the budget of a search without one; spellings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, log, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from paceline import LLM, SamplingParams
from paceline.engine import RequestOutput
from paceline.errors import ConfigError
from tests.search.letters import LETTERS, letter_params, searched, texts
from tests.search.test_sample_and_rank import encoder

PROMPT = "x = "


def half(found: Sequence[Any]) -> list[float]:
    return [0.5] * len(found)


# ------------------------------------------------------------------------------------------------ what is a number

ASKED: dict[str, tuple[float, str, dict[str, Any]]] = {
    "sample_and_rank": (1.0, "scorer", {"num_samples": 2}),
    "transfer_q": (0.0, "reward", {"top_k": 2}),
    "transfer_q with a baseline": (0.0, "baseline_reward", {"top_k": 2, "reward": half}),
    "a_star": (1.0, "reward", {"step_tokens": 2, "branching": 2}),
    "pg_td": (0.0, "reward", {"rollouts": 2}),
    "ved": (0.0, "value", {"beam_width": 2}),
    "gfd": (0.0, "scorer", {}),
}
WRONG: dict[str, Callable[[int], Any]] = {
    "NaN": lambda count: [nan] * count,
    "infinity": lambda count: [inf] * count,
    "-infinity": lambda count: [-inf] * count,
    "None": lambda count: [None] * count,
    "a string": lambda count: ["0.5"] * count,
    "no float": lambda count: [10**400] * count,
    "too many": lambda count: [0.5] * (count + 1),
    "a number alone": lambda _: 0.5,
    "rows": lambda count: torch.full((count, 2), 0.5),
}
RIGHT: dict[str, Callable[[int], Any]] = {
    "floats": lambda count: [0.5] * count,
    "integers": lambda count: [1] * count,
    "NumPy": lambda count: np.full(count, 0.5, np.float32),
    "PyTorch": lambda count: torch.full((count,), 0.5),
    "truth": lambda count: [True] * count,
}


def asked(llm: LLM, method: str, answer: Callable[[int], Any]) -> RequestOutput:
    temperature, option, options = ASKED[method]
    search = {"method": method.split(maxsplit=1)[0], **options, option: lambda found: answer(len(found))}
    (found,) = llm.generate(PROMPT, letter_params(llm, temperature=temperature), search=search)
    return found


@pytest.mark.parametrize("method", ASKED)
def test_what_is_no_finite_number_is_an_error_that_names_who_gave_it(llm: LLM, method: str) -> None:
    option = ASKED[method][1]
    for kind, answer in WRONG.items():
        error = str(asked(llm, method, answer).outputs[0].error)
        assert error.startswith(f"{option} must give a "), (kind, error)
        assert "number" in error
    for answer in RIGHT.values():
        assert asked(llm, method, answer).outputs[0].error is None


def test_complexities_are_numbers(llm: LLM) -> None:
    options: dict[str, Any] = {"method": "complexity_voting", "num_samples": 3, "answer": str}
    for wrong in (nan, inf, None, "3"):
        how = letter_params(llm, temperature=1.0)
        (found,) = llm.generate(PROMPT, how, search={**options, "complexity": lambda _, wrong=wrong: wrong})
        assert str(found.outputs[0].error).startswith("complexity must give a finite number")
    assert searched(llm, letter_params(llm, temperature=1.0), **options, complexity=len).outputs[0].text


def test_a_model_that_gives_no_numbers_is_named_too(llm: LLM, tmp_path: Path) -> None:
    fine = encoder(tmp_path / "fine", pooler=True)
    search = {"method": "sample_and_rank", "num_samples": 2, "scorer": {"model": str(fine)}}
    assert searched(llm, letter_params(llm, temperature=1.0), **search).outputs[0].error is None
    broken = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "fine")
    broken.classifier.bias.data.fill_(nan)
    encoder(tmp_path / "broken", pooler=True)
    broken.save_pretrained(tmp_path / "broken")
    search["scorer"] = {"model": str(tmp_path / "broken")}
    (found,) = llm.generate(PROMPT, letter_params(llm, temperature=1.0), search=search)
    assert str(found.outputs[0].error).startswith("scorer must give a finite number for each of")


@pytest.mark.parametrize("weights", [[inf], [nan], [True], ["1"], [-1.0]])
def test_weights_of_n_grams_are_numbers(llm: LLM, weights: list[Any]) -> None:
    with pytest.raises(ConfigError, match="order_weights must be a"):
        searched(llm, letter_params(llm), method="superposed", order_weights=weights)


# ------------------------------------------------------------------------------------------------ Transfer Q*

LARGE = [
    ([1.0, 2.0, 3.0], None, 1e6, 2),
    ([1e300, 2e300, 1.5e300], None, 1e6, 1),
    ([-1e300, -2e300, -1.5e300], None, 1e6, 0),
    ([-1e308, 1e308, 0.0], None, 1e6, 1),
    ([3000.0, 2000.0, 1000.0], [0.0, 0.0, 0.0], 1.0, 0),  # e^(r / 2) r is larger than any float
    ([3000.0, 3000.0, 3000.0], [0.0, 1.0, 2.0], 1.0, 0),
    ([1e300, 1e300, 1e300], [9e299, 1e299, 8e299], 1.0, 1),
    ([-3000.0, -2000.0, -2500.0], [0.0, 0.0, 0.0], 1.0, None),  # each is worth 0 but for less than any float
    ([-3000.0, -2000.0, -2500.0], [-9000.0, -9000.0, -9000.0], 1.0, 0),
    ([3000.0, -3000.0, 1.0], [0.0, -9000.0, 0.0], 1.0, 0),
    ([0.0, -3000.0, -1.0], [0.0, -9000.0, 0.0], 1.0, 0),
]
"""Rewards of a, b and c, those of the model behind the rollouts, the weight; and which letter is worth most, if any."""


@pytest.mark.parametrize(("rewards", "others", "weight", "best"), LARGE)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_values_larger_than_any_float_are_compared(
    llm: LLM, rewards: list[float], others: list[float] | None, weight: float, best: int | None, temperature: float
) -> None:
    def by(numbers: list[float]) -> Callable[[Sequence[str]], list[float]]:
        return lambda found: [numbers[LETTERS.index(one)] for one in found]

    options: dict[str, Any] = {"reward": by(rewards), "weight": weight, "rollout_tokens": 0}
    if others is not None:
        options["baseline_reward"] = by(others)
    how = letter_params(llm, max_tokens=1, temperature=temperature)
    (plain,) = llm.generate(PROMPT, how)
    found = searched(llm, how, method="transfer_q", **options)
    assert texts(found) == (texts(plain) if best is None else [LETTERS[best]])
    assert found.outputs[0].score == rewards[LETTERS.index(found.outputs[0].text)]


RULES: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"structured_outputs": {"regex": "[0-9]{9}"}}, str.isdigit),
    ({"bad_words": ["time"]}, lambda text: "time" not in text),
    ({"logits_processors": [lambda output, logits: logits.index_fill(0, torch.tensor(WITH_E), -inf)]},
     lambda text: "e" not in text),
]  # fmt: skip
WITH_E: list[int] = []


@pytest.mark.parametrize("model", [None, "bundled/draft"])
def test_continuations_keep_to_the_rules_of_the_request(llm: LLM, model: str | None) -> None:
    WITH_E[:] = [one for one in range(llm.runner.info.vocab_size) if "e" in llm.tokenizer.decode([one])]
    judged: list[str] = []

    def reward(found: Sequence[str]) -> list[float]:
        judged.extend(found)
        return half(found)

    def seen(**rules: Any) -> list[str]:
        judged.clear()
        how = SamplingParams(temperature=0.0, max_tokens=6, **rules)
        search = {"method": "transfer_q", "reward": reward, "top_k": 3, "rollout_tokens": 5, "rollout_model": model}
        llm.generate("Once upon a time", how, search=search)[0].raise_for_error()
        return list(judged)

    free = seen()
    for rules, fine in RULES:
        assert all(map(fine, seen(**rules)))
        assert not all(map(fine, free))


def test_a_continuation_ends_where_nothing_is_allowed(llm: LLM) -> None:
    """Which is no error: only what is chosen must be allowed."""
    judged: list[str] = []

    def reward(found: Sequence[str]) -> list[float]:
        judged.extend(found)
        return [float(not one.startswith("c")) for one in found]

    ids = {letter: llm.tokenizer.encode(letter)[-1] for letter in LETTERS}

    def stuck(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -inf) if output[:1] == [ids["c"]] else logits

    how = letter_params(llm, logits_processors=[stuck])
    found = searched(llm, how, method="transfer_q", reward=reward, weight=99.0, rollout_tokens=3)
    assert "c" in judged[:3]
    assert sorted(map(len, judged[:3])) == [1, 4, 4]
    assert found.outputs[0].text[0] != "c"


# ------------------------------------------------------------------------------------------------ A*


def expansions(llm: LLM, reward: Callable[[str], float], size: int, **search: Any) -> tuple[list[str], RequestOutput]:
    """The texts that were gone on from by a token, in order."""
    asked: list[str] = []

    def judge(found: Sequence[str]) -> list[float]:
        asked.append(found[0][:-1])
        return [reward(one) for one in found]

    how = letter_params(llm, temperature=1.0, max_tokens=size)
    return asked, searched(llm, how, method="a_star", reward=judge, step_tokens=1, branching=32, **search)


def test_a_long_text_of_good_steps_is_gone_on_with(llm: LLM) -> None:
    """Steps of "a" leave 0.2 to be desired, others 0.5. The mean of any number of good ones is 0.2, and 0.2 + 0.2 is
    always less than 0.5 + 0.5; their sum is no less from the fifth on, so that the search turns back.
    """

    def reward(text: str) -> float:
        return 0.8 if set(text) <= {"a"} else 0.5

    gone_on, found = expansions(llm, reward, 8)
    assert gone_on == ["a" * size for size in range(8)]
    assert texts(found) == ["a" * 8]
    assert found.outputs[0].score == pytest.approx(-0.4)
    summed, _ = expansions(llm, reward, 8, path="sum")
    assert summed[:5] == gone_on[:5]
    assert len(summed) > 10


def test_of_equal_texts_the_longest_is_gone_on_with(llm: LLM) -> None:
    gone_on, _ = expansions(llm, lambda _: 0.7, 8)
    assert [len(one) for one in gone_on] == list(range(8))
    broad, _ = expansions(llm, lambda _: 0.7, 3, path="sum")
    assert [len(one) for one in broad] == [0, 1, 1, 1, *[2] * 9], "a sum sends it back to every shorter text"


def test_without_a_budget_it_computes_what_four_texts_need_at_most(llm: LLM) -> None:
    search: dict[str, Any] = {"method": "a_star", "reward": half, "step_tokens": 2, "branching": 3, "path": "sum"}
    how = letter_params(llm, temperature=1.0, max_tokens=12)
    found = searched(llm, how, **search)
    assert found.search is not None
    assert found.search.budget_spent
    assert 4 * 3 * 12 <= found.search.num_tokens <= 4 * 3 * 12 + 3
    more = searched(llm, how, **search, budget_tokens=250)
    assert more.search is not None
    assert 250 <= more.search.num_tokens <= 253
    wanted = searched(llm, letter_params(llm, temperature=1.0, max_tokens=12, n=6), **search)
    assert wanted.search is not None
    assert 6 * 3 * 12 <= wanted.search.num_tokens <= 6 * 3 * 12 + 3
    mean = searched(llm, how, **search | {"path": "mean"})
    assert mean.search is not None
    assert not mean.search.budget_spent


def test_totals_are_those_of_the_formulas(llm: LLM) -> None:
    """One text of two steps of two letters: the score is minus the cost of its path and what is left."""

    def of(**search: Any) -> tuple[float, float]:
        how = letter_params(llm, temperature=1.0)
        options = {"method": "a_star", "reward": half, "step_tokens": 2, "branching": 1, **search}
        (text,) = searched(llm, how, **options).outputs
        return text.score or 0.0, text.cumulative_logprob or 0.0

    assert of(path_weight=0.0)[0] == pytest.approx(-0.5)
    assert of(path_weight=0.0, heuristic="log")[0] == pytest.approx(log(0.5))
    assert of(path_weight=3.0)[0] == pytest.approx(-3 * 0.5 - 0.5)
    assert of(path="sum")[0] == pytest.approx(-2 * 0.5 - 0.5)
    score, logprob = of(cost="surprisal")
    assert score == pytest.approx(logprob / 4 - 0.5, abs=1e-5)
    score, logprob = of(cost="surprisal", path="sum")
    assert score == pytest.approx(logprob / 2 - 0.5, abs=1e-5)


def test_a_step_ends_with_a_delimiter_behind_its_first_word(llm: LLM) -> None:
    ids = [llm.tokenizer.encode("x" + text)[-1] for text in ("\n", "a")]
    asked: list[str] = []

    def alternating(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -inf).index_fill(0, torch.tensor([ids[len(output) % 2]]), 0.0)

    def reward(found: Sequence[str]) -> list[float]:
        asked.extend(found)
        return half(found)

    how = SamplingParams(temperature=1.0, max_tokens=6, logits_processors=[alternating])
    searched(llm, how, method="a_star", reward=reward, branching=1)
    assert asked == ["\na\n", "\na\na\n", "\na\na\na"]


@pytest.mark.parametrize("delimiter", ["", 3, None, b"\n"])
def test_a_delimiter_is_a_string_with_characters(llm: LLM, delimiter: Any) -> None:
    with pytest.raises(ConfigError, match="delimiter must be a string of a character or more, got"):
        expansions(llm, lambda _: 0.5, 4, delimiter=delimiter)
    assert expansions(llm, lambda _: 0.5, 4, delimiter="b")[0]


# ------------------------------------------------------------------------------------------------ first finish


def test_texts_that_are_refused_do_not_come_back(llm: LLM) -> None:
    end = min(llm.defaults.eos_ids)

    def how(bias: float, count: int = 1) -> SamplingParams:
        return SamplingParams(n=count, temperature=1.0, max_tokens=8, seed=7, logit_bias={end: bias})

    def ends(bias: float) -> list[tuple[int, Any]]:
        (result,) = llm.generate(PROMPT, how(bias, 4))
        return [(len(one.token_ids), one.finish_reason) for one in result.outputs]

    search: dict[str, Any] = {"method": "first_finish", "num_samples": 4}
    assert {reason for _, reason in ends(12.0)} == {"stop"}
    assert searched(llm, how(12.0), **search).outputs[0].finish_reason == "stop"
    (none,) = llm.generate(PROMPT, how(12.0), search={**search, "accept": lambda _: False})
    assert none.outputs[0].error == "accept counts none of 4 texts; raise num_samples or loosen accept"
    assert ends(10.0) == [(8, "length"), (2, "stop"), (3, "stop"), (7, "stop")]
    cut = searched(llm, how(10.0), **search, accept=lambda _: False)
    assert cut.outputs[0].finish_reason == "length"
    spent = searched(llm, how(10.0), **search, accept=lambda _: False, budget_tokens=7)  # of 1 + 4 + 3 rows
    assert spent.search is not None
    assert spent.search.budget_spent
    assert spent.outputs[0].finish_reason == "abort"


# ------------------------------------------------------------------------------------------------ spellings


def by_letters(found: Sequence[str]) -> list[float]:
    return [sum(ord(letter) % 7 for letter in one) / 100 for one in found]


@pytest.mark.parametrize(
    ("temperature", "search"),
    [
        (0.0, {"method": "ved", "value": by_letters, "budget_multiplier": 40.0, "gated": False}),
        (0.0, {"method": "pg_td", "reward": by_letters, "rollouts": 100, "branching": 4}),
        (1.5, {"method": "sample_and_rank", "num_samples": 60}),
        (1.5, {"method": "a_star", "reward": by_letters, "step_tokens": 2, "branching": 16}),
        (0.0, {"method": "gfd", "scorer": half, "weight": 0.0, "beam_width": 12, "candidates": 8}),
    ],
)
def test_a_text_comes_back_once_however_it_is_spelled(llm: LLM, temperature: float, search: dict[str, Any]) -> None:
    """Among tokens of one letter, and of two, there are eight ways to spell "tttt"."""
    rules = {"structured_outputs": {"regex": "[ts]{4}"}, "max_tokens": 5, "seed": 3}
    beam = searched(
        llm, SamplingParams(temperature=0.0, n=12, **rules), method="beam", beam_width=12, length_penalty=0.0
    )
    assert len(set(texts(beam))) < len(beam.outputs) == 12, "there are several spellings"
    found = searched(llm, SamplingParams(temperature=temperature, n=12, **rules), **search)
    assert len(set(texts(found))) == len(found.outputs) > 4
    if search["method"] == "a_star":
        assert len(found.outputs) == 12, "it goes on until so many different ones are found"
    assert [one.score for one in found.outputs] == sorted((one.score or 0.0 for one in found.outputs), reverse=True)


def test_functions_judge_texts_also_where_the_caller_wants_none(llm: LLM) -> None:
    judged: list[str] = []

    def scorer(found: Sequence[str]) -> list[float]:
        judged.extend(found)
        return by_letters(found)

    made = []
    for wants in (True, False):
        how = letter_params(llm, temperature=1.5, n=8, detokenize=wants)
        found = searched(llm, how, method="sample_and_rank", num_samples=30, scorer=scorer)
        made.append([(one.token_ids, one.score) for one in found.outputs])
        assert all(bool(one.text) == wants for one in found.outputs)
    assert made[0] == made[1]
    assert len(made[0]) == 8
    assert all(len(one) == 4 for one in judged)


# ------------------------------------------------------------------------------------------------ groups of beams


def tables(size: int, seed: int) -> Callable[[Sequence[int]], torch.Tensor]:
    """Log-probabilities of a few tokens behind each text of them."""

    def row(text: Sequence[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *text)) % 2**31)
        return (3 * torch.randn(size, generator=generator)).log_softmax(-1)

    return row


def diverse_by_hand(
    row: Callable[[Sequence[int]], torch.Tensor], size: int, most: int, penalty: float, first_only: bool
) -> list[list[tuple[int, ...]]]:
    """Ended texts of two groups of two beams, best first; token 0 ends a text.

    A group ends where no beam, at its present length, is better than the worst of its two ended texts; with
    `first_only` where the beam is not that is the best with its penalty.
    """
    beams: list[list[tuple[float, tuple[int, ...]]]] = [[(0.0, ())], [(0.0, ())]]
    found: list[list[tuple[float, tuple[int, ...]]]] = [[], []]

    def over(i: int) -> bool:
        heads = beams[i][:1] if first_only else beams[i]
        better = [total / max(1, len(text)) for total, text in heads]
        return not beams[i] or (len(found[i]) == 2 and max(better) <= min(mean for mean, _ in found[i]))

    while going := [i for i in range(2) if not over(i)]:
        used = torch.zeros(size)
        for i in going:
            made = []
            for total, text in beams[i]:
                for token, value in enumerate(row(text).tolist()):
                    made.append((total + value - penalty * float(used[token]), total + value, (*text, token)))
            made.sort(key=lambda one: -one[0])
            ended = [(raw / len(text), text) for place, (_, raw, text) in enumerate(made[:4])
                     if place < 2 and (text[-1] == 0 or len(text) == most)]  # fmt: skip
            found[i] = sorted([*found[i], *ended], key=lambda one: -one[0])[:2]
            beams[i] = [(raw, text) for _, raw, text in made[:4] if text[-1] != 0 and len(text) < most][:2]
            for _, text in beams[i]:
                used[text[-1]] += 1
    return [[text for _, text in one] for one in found]


def test_a_group_goes_on_while_any_of_its_beams_may_become_better(llm: LLM) -> None:
    """The beam that is best with the penalty is not the likeliest, and does not say that the others cannot win."""
    end, size = min(llm.defaults.eos_ids), 5
    ids = [end, *(llm.tokenizer.encode(letter)[-1] for letter in "abcd")]
    told_apart = 0
    for seed in range(60):
        row, penalty = tables(size, seed), (0.7, 3.0)[seed % 2]
        expected, early = (diverse_by_hand(row, size, 6, penalty, first_only) for first_only in (False, True))
        told_apart += expected != early
        if expected == early and seed > 20:
            continue

        def process(output: list[int], logits: torch.Tensor, row: Any = row) -> torch.Tensor:
            return torch.full_like(logits, -inf).index_copy(0, torch.tensor(ids), row([ids.index(i) for i in output]))

        how = SamplingParams(temperature=0.0, max_tokens=6, n=4, logits_processors=[process])
        search = {"beam_width": 4, "num_beam_groups": 2, "diversity_penalty": penalty}
        found = searched(llm, how, method="diverse_beam", **search)
        made = sorted(tuple(ids.index(token) for token in one.token_ids) for one in found.outputs)
        assert made == sorted(text for group in expected for text in group)
    assert told_apart > 2
