"""Searches that sample: each collapses to plain decoding where its card says so, and chooses as it says elsewhere."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.engine import RequestOutput
from paceline.errors import ConfigError
from paceline.search import learned_threshold
from tests.search.letters import LETTERS, letter_params, likelihoods
from tests.search.letters import PROMPT as LETTER_PROMPT

PROMPT = "def fib(n):"


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.9, "top_p": 0.95, "max_tokens": 24, "seed": 7, **changes})


def searched(llm: LLM, how: SamplingParams, prompt: str = PROMPT, **search: Any) -> RequestOutput:
    (result,) = llm.generate(prompt, how, search=search)
    result.raise_for_error()
    return result


def sampled(llm: LLM, how: SamplingParams, prompt: str = PROMPT) -> list[Any]:
    (result,) = llm.generate(prompt, how)
    return result.outputs


@pytest.mark.parametrize(
    "search",
    [
        {"method": "cautious", "most_trials": 1},
        {"method": "cautious", "low_entropy": 20.0, "high_entropy": 30.0},
        {"method": "self_consistency", "num_samples": 1},
        {"method": "first_finish", "num_samples": 1},
        {"method": "a_star", "branching": 1, "step_tokens": 3, "reward": "tests.search.test_sampled_searches:half"},
    ],
)
def test_one_sample_is_plain_sampling(llm: LLM, search: dict[str, Any]) -> None:
    for seed in (1, 2, 3):
        (plain,) = sampled(llm, params(seed=seed))
        assert searched(llm, params(seed=seed), **search).outputs[0].token_ids == plain.token_ids
    (other,) = sampled(llm, params(seed=4))
    assert other.token_ids != plain.token_ids


def half(texts: Sequence[str]) -> list[float]:
    return [0.5] * len(texts)


def test_self_consistency_counts_the_samples_of_the_same_seeds(llm: LLM) -> None:
    samples = sampled(llm, params(n=12))
    answers = Counter(one.text.count("return") for one in samples)
    found = searched(llm, params(n=12), method="self_consistency", num_samples=12, answer=lambda t: t.count("return"))
    shares = [one.score for one in found.outputs]
    assert shares == sorted((count / 12 for count in answers.values()), reverse=True)
    texts = {one.text for one in samples}
    assert all(one.text in texts for one in found.outputs)
    assert found.outputs[0].text.count("return") == answers.most_common(1)[0][0]


def test_the_most_complex_alone_is_the_longest_and_the_unparsed_never_vote(llm: LLM) -> None:
    samples = sampled(llm, params(n=10))
    longest = max(samples, key=lambda one: len(one.text))
    found = searched(
        llm, params(), method="complexity_voting", num_samples=10, keep=1, complexity=len, answer=lambda text: text
    )
    assert found.outputs[0].text == longest.text
    parsed = [one for one in samples if "return" not in one.text]
    assert 0 < len(parsed) < 10
    found = searched(
        llm, params(n=10), method="complexity_voting", num_samples=10, keep=10, complexity=len,
        answer=lambda text: None if "return" in text else text,
    )  # fmt: skip
    assert {one.text for one in found.outputs} == {one.text for one in parsed}
    assert sum(one.score or 0.0 for one in found.outputs) == pytest.approx(1.0), "shares are of those that vote"


def test_with_all_kept_the_most_complex_are_all_and_equal_votes_keep_their_order(llm: LLM) -> None:
    voting: dict[str, Any] = {"num_samples": 12, "answer": lambda text: text.count("return")}
    all_of_them = searched(llm, params(n=12), method="self_consistency", **voting)
    found = searched(llm, params(n=12), method="complexity_voting", keep=12, **voting)
    assert [(one.token_ids, one.score) for one in found.outputs] == [
        (one.token_ids, one.score) for one in all_of_them.outputs
    ]
    few = searched(llm, params(n=12), method="complexity_voting", keep=3, **voting)
    assert [one.score for one in few.outputs] != [one.score for one in found.outputs]
    voting["answer"] = lambda text: text
    texts = [one.text for one in searched(llm, params(n=12), method="self_consistency", **voting).outputs]
    assert texts == list(dict.fromkeys(one.text for one in sampled(llm, params(n=12))))
    assert len(texts) > 4


@pytest.mark.parametrize(
    ("most", "others"),
    [
        ("One. Two. Three.", ["One. Two, three and four, five, six."]),
        ("One.\nTwo.\nThree", ["One. Two. Three. Four.\nFive."]),
    ],
)
def test_steps_are_lines_or_where_there_is_one_sentences(llm: LLM, most: str, others: list[str]) -> None:
    how = params(temperature=5.0, top_p=1.0, structured_outputs={"choice": [*others, most]}, max_tokens=40)
    assert {one.text for one in sampled(llm, replace(how, n=20))} == {most, *others}
    found = searched(llm, how, method="complexity_voting", num_samples=20, keep=1, answer=lambda text: text)
    assert found.outputs[0].text == most


def test_the_first_to_finish_is_the_shortest_and_costs_no_more_than_its_length_each(llm: LLM) -> None:
    lengths = [len(one.token_ids) for one in sampled(llm, params(n=8, max_tokens=60)) if one.finish_reason == "stop"]
    found = searched(llm, params(max_tokens=60), method="first_finish", num_samples=8)
    shortest = min(lengths)
    assert len(found.outputs[0].token_ids) == shortest < max(lengths)
    assert found.search is not None
    assert found.search.num_tokens == 8 * shortest - 7  # the prompt's row is computed once
    picky = searched(llm, params(max_tokens=60), method="first_finish", num_samples=8, accept=lambda t: len(t) > 60)
    assert len(picky.outputs[0].text) > 60
    cut = params(n=8, max_tokens=shortest - 1)
    unfinished = {tuple(one.token_ids) for one in sampled(llm, cut)}
    none = searched(llm, params(max_tokens=shortest - 1), method="first_finish", num_samples=8).outputs[0]
    assert tuple(none.token_ids) in unfinished
    assert none.finish_reason == "length"


def test_where_none_finishes_the_likeliest_is_taken(llm: LLM) -> None:
    firsts = 0
    for seed in range(4):
        how = params(n=4, max_tokens=4, seed=seed, ignore_eos=True)
        ranked = searched(llm, how, method="sample_and_rank", num_samples=4, scorer=half).outputs
        best = max(ranked, key=lambda one: (one.cumulative_logprob or 0.0) / len(one.token_ids))
        taken = searched(llm, replace(how, n=1), method="first_finish", num_samples=4).outputs[0]
        assert taken.token_ids == best.token_ids
        firsts += taken.token_ids == sampled(llm, how)[0].token_ids
    assert firsts < 4


@pytest.mark.parametrize(
    "search",
    [
        {"method": "first_finish", "num_samples": 4},
        {"method": "cautious", "low_entropy": 0.0, "high_entropy": 1e-30},
    ],
)
def test_where_all_samples_are_the_likeliest_text_it_is_greedy_decoding(llm: LLM, search: dict[str, Any]) -> None:
    """However many trials there are."""
    (greedy,) = sampled(llm, params(temperature=0.0, top_p=1.0))
    found = searched(llm, params(temperature=0.01, top_p=1.0), **search)
    assert found.outputs[0].token_ids == greedy.token_ids
    assert found.search is not None
    assert found.search.num_tokens > len(greedy.token_ids)
    warm = searched(llm, params(top_p=1.0), **search)
    assert warm.outputs[0].token_ids != greedy.token_ids


def trial_by_hand(llm: LLM, ids: list[int], most: int, how: SamplingParams, worst: bool) -> list[int]:
    """What cautious prediction adds to a text: of as many samples as the entropy asks for, cut behind punctuation, the
    likeliest; or the least likely.
    """
    (first,) = shaped_rows(llm, ids[-1:], ids[:-1], how.temperature)
    entropy = float(-(first.exp() * first).sum())
    count = math.floor(1 + (most - 1) * min(1.0, max(0.0, (entropy - 0.01) / (1.5 - 0.01))))
    (result,) = llm.generate({"prompt_token_ids": ids}, replace(how, n=count), use_tqdm=False)
    trials = []
    for one in result.outputs:
        ends = [llm.tokenizer.decode([token], False).rstrip(" ")[-1:] in set(".\n?!:;)]}") for token in one.token_ids]
        size = 1 if count == 1 else next((i for i, end in enumerate(ends) if end), 999) + 1
        trials.append(list(one.token_ids[:size]))
    rows = [shaped_rows(llm, [ids[-1], *one[:-1]], ids[:-1], how.temperature) for one in trials]
    means = [sum(float(r[t]) for r, t in zip(part, one, strict=True)) / len(one)
             for part, one in zip(rows, trials, strict=True)]  # fmt: skip
    return trials[means.index((min if worst else max)(means))]


def shaped_rows(llm: LLM, tokens: Sequence[int], before: Sequence[int], temperature: float) -> torch.Tensor:
    """(t, v) log-probabilities behind each of some tokens."""
    cache = llm.runner.open()
    logits = llm.runner.extend([cache], [[*before, *tokens]], all_logits=True).logits[-len(tokens) :].float()
    llm.runner.release(cache)
    return (logits / temperature).log_softmax(-1)


def test_every_segment_is_the_likeliest_of_as_many_trials_as_the_entropy_asks_for(llm: LLM) -> None:
    prompt = llm.tokenizer.encode("Once upon a time")
    how = params(top_p=1.0, ignore_eos=True, max_tokens=12)
    found = searched(llm, how, "Once upon a time", method="cautious", most_trials=6).outputs[0]
    for worst in (False, True):
        made: list[int] = []
        while len(made) < 12:
            left = replace(how, max_tokens=12 - len(made))
            made += trial_by_hand(llm, [*prompt, *made], 6, left, worst)
        assert (made == found.token_ids) == (not worst)


@pytest.mark.parametrize("longest", [1, 2])
def test_a_trial_without_punctuation_ends_after_so_many_tokens(llm: LLM, longest: int) -> None:
    """Three letters, of which none ends a trial; of three trials, as plain samples begin, the likeliest is kept."""
    known, how = likelihoods(llm, 4), letter_params(llm, temperature=1.0)
    search = {"method": "cautious", "most_trials": 3, "high_entropy": 0.02, "trial_tokens": longest}
    found = searched(llm, how, LETTER_PROMPT, **search)
    ids, made = llm.tokenizer.encode(LETTER_PROMPT), ""
    letter_of = dict(zip(how.allowed_token_ids or (), LETTERS, strict=True))
    while len(made) < 4:
        text = [*ids, *(how.allowed_token_ids[LETTERS.index(one)] for one in made)]  # type: ignore[index]
        (result,) = llm.generate({"prompt_token_ids": text}, replace(how, n=3, max_tokens=longest))
        trials = [made + "".join(letter_of[token] for token in one.token_ids) for one in result.outputs]
        made = max(trials, key=known.__getitem__)
    assert found.outputs[0].text == made


def test_trials_are_made_where_the_model_is_unsure_and_the_likeliest_is_kept(llm: LLM) -> None:
    plain = searched(llm, params(), method="cautious", most_trials=1)
    cautious = searched(llm, params(), method="cautious", most_trials=8)
    assert plain.search is not None
    assert cautious.search is not None
    assert cautious.search.num_tokens > 1.5 * plain.search.num_tokens
    means = []
    for setting in (1, 8):
        found = [
            searched(llm, params(seed=seed), method="cautious", most_trials=setting).outputs[0] for seed in range(4)
        ]
        means.append(sum(one.score or 0.0 for one in found) / 4)
    assert means[1] > means[0] + 0.1


@pytest.mark.parametrize(
    "search", [{"threshold": 1e9}, {"threshold": 0.0, "candidates": 1}, {"threshold": 0.0, "lookahead": 0}]
)
def test_adadec_collapses_to_greedy_decoding(llm: LLM, search: dict[str, Any]) -> None:
    greedy = params(temperature=0.0)
    (plain,) = sampled(llm, greedy)
    assert searched(llm, greedy, method="adadec", **search).outputs[0].token_ids == plain.token_ids
    looking = searched(llm, greedy, method="adadec", threshold=0.0)
    assert looking.outputs[0].token_ids != plain.token_ids


def test_adadec_ranks_by_the_tokens_ahead(llm: LLM) -> None:
    """With a lookahead of one token each choice is that of the best mean over two tokens, found by hand."""
    greedy = params(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompt = "Once upon a time"
    search = {"method": "adadec", "threshold": 0.0, "candidates": 4, "lookahead": 1}
    found = searched(llm, greedy, prompt, **search).outputs[0].token_ids
    text, expected = llm.tokenizer.encode(prompt), list[int]()

    def logprobs(ids: list[int]) -> torch.Tensor:
        cache = llm.runner.open()
        logits = llm.runner.extend([cache], [ids]).logits[0].float()
        llm.runner.release(cache)
        return logits.log_softmax(-1)

    for place in range(6):
        top = logprobs([*text, *expected]).topk(4)
        ahead = [0.0 if place == 5 else float(logprobs([*text, *expected, int(t)]).max()) for t in top.indices]
        means = [(float(v) + a) / (1 if place == 5 else 2) for v, a in zip(top.values, ahead, strict=True)]
        expected.append(int(top.indices[max(range(4), key=means.__getitem__)]))
    assert found == expected
    (plain,) = sampled(llm, greedy, prompt)
    assert found != plain.token_ids


def ranked_by_hand(known: dict[str, float], stops: str | None) -> str:
    """AdaDec on three letters: at each of five places that whose greedy continuation by three has the best mean."""
    text = ""
    while len(text) < 5:
        means = {}
        for letter in LETTERS:
            end = text + letter
            while len(end) < min(5, len(text) + 4):
                if stops is not None and end.endswith(stops) and len(end) > len(text) + 1:
                    break
                end = max((end + one for one in LETTERS), key=known.__getitem__)
            means[letter] = (known[end] - known[text]) / (len(end) - len(text))
        text += max(means, key=means.__getitem__)
    return text


def test_a_lookahead_that_is_stopped_counts_with_its_own_length(llm: LLM) -> None:
    known, how, expected = likelihoods(llm, 5), letter_params(llm, max_tokens=5), []
    for stop in (None, *LETTERS):
        search: dict[str, Any] = {"method": "adadec", "threshold": 0.0, "lookahead": 3}
        if stop is not None:
            search["stop_lookahead"] = lambda text, stop=stop: text.endswith(stop)
        expected.append(ranked_by_hand(known, stop))
        assert searched(llm, how, LETTER_PROMPT, **search).outputs[0].text == expected[-1]
    assert len(set(expected)) > 1


def test_the_entropy_is_the_models_own_whatever_the_rules_allow(llm: LLM) -> None:
    how = letter_params(llm, max_tokens=3)
    search: dict[str, Any] = {"method": "adadec", "lookahead": 1}
    never = searched(llm, how, LETTER_PROMPT, threshold=1e9, **search)
    paused = searched(llm, how, LETTER_PROMPT, threshold=1.5, **search)  # more than the logarithm of three
    assert never.search is not None
    assert paused.search is not None
    assert paused.search.num_tokens > never.search.num_tokens == 3


def test_the_threshold_is_learned_from_right_and_wrong_places() -> None:
    generator = torch.Generator().manual_seed(0)
    entropies = (torch.rand(4000, generator=generator) * 3).tolist()
    coins = torch.rand(4000, generator=generator).tolist()
    right = [coin < 1 / (1 + math.exp(4 * (one - 1.2))) for one, coin in zip(entropies, coins, strict=True)]
    assert learned_threshold(entropies, right) == pytest.approx(1.2, abs=0.25)
    assert learned_threshold([2 * one for one in entropies], right) == pytest.approx(2.4, abs=0.5)
    with pytest.raises(ConfigError, match="10 places of each kind"):
        learned_threshold([1.0] * 20, [True] * 20)


def returns_early(texts: Sequence[str]) -> list[float]:
    return [0.9 if "return" in text else 0.1 for text in texts]


def test_a_star_follows_its_reward(llm: LLM) -> None:
    rewarded = searched(llm, params(max_tokens=40), method="a_star", reward=returns_early, path_weight=0.1)
    assert "return" in rewarded.outputs[0].text
    indifferent = [
        searched(llm, params(max_tokens=40, seed=seed), method="a_star", reward=half, branching=1).outputs[0].text
        for seed in range(5)
    ]
    hits = [
        "return"
        in searched(llm, params(max_tokens=40, seed=seed), method="a_star", reward=returns_early).outputs[0].text
        for seed in range(5)
    ]
    assert sum(hits) > sum("return" in text for text in indifferent)


def test_a_budget_ends_a_search_with_what_it_has(llm: LLM) -> None:
    found = searched(llm, params(max_tokens=60, ignore_eos=True), method="self_consistency", budget_tokens=40)
    assert found.search is not None
    assert found.search.budget_spent
    assert 40 <= found.search.num_tokens <= 40 + 16
    assert found.outputs[0].finish_reason == "abort"
    assert 0 < len(found.outputs[0].token_ids) < 60
    whole = searched(llm, params(max_tokens=8, ignore_eos=True), method="self_consistency", budget_tokens=4000)
    assert whole.search is not None
    assert not whole.search.budget_spent


def test_a_star_without_time_to_end_gives_the_deepest_text(llm: LLM) -> None:
    search = {"method": "a_star", "reward": half, "step_tokens": 4, "branching": 3, "delimiter": "never"}
    for tokens in (2, 14, 30, 31, 32, 33):
        (result,) = llm.generate(
            PROMPT, params(max_tokens=60, ignore_eos=True), search={**search, "budget_tokens": tokens}
        )
        assert result.search is not None
        assert result.search.budget_spent
        text = result.outputs[0]
        assert text.token_ids, text
        assert (len(text.token_ids) % 4 == 0) == (tokens > 2), "a part of the first step is better than nothing"
    (none,) = llm.generate(PROMPT, params(max_tokens=60), search={**search, "budget_tokens": 1})
    assert "its budget is spent; raise budget_tokens" in str(none.outputs[0].error)


def test_drafts_are_rejected_with_a_search(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="prediction must be left out with search"):
        llm.generate({"prompt": PROMPT, "prediction": "return n"}, params(), search="beam")


@pytest.mark.parametrize("method", ["first_finish", "cautious", "adadec", "transfer_q", "backoff"])
def test_several_texts_are_rejected_where_one_is_made(llm: LLM, method: str) -> None:
    options = {"reward": lambda texts: [0.5] * len(texts)} if method == "transfer_q" else {}
    with pytest.raises(ConfigError, match=f"n must be 1 with search method '{method}', which makes one text, got 2"):
        searched(llm, params(n=2), method=method, **options)


def test_best_first_search_goes_on_until_there_are_as_many_texts_as_wanted(llm: LLM) -> None:
    options = {"method": "a_star", "reward": lambda texts: [min(1.0, len(text) / 40) for text in texts]}
    assert len(searched(llm, params(n=3, max_tokens=8), **options).outputs) == 3


@pytest.mark.parametrize("method", ["self_consistency", "complexity_voting", "first_finish", "cautious"])
def test_temperature_zero_is_rejected_where_samples_are_needed(llm: LLM, method: str) -> None:
    with pytest.raises(ConfigError, match=f"temperature must be above 0 with search method '{method}'"):
        searched(llm, params(temperature=0.0), method=method)


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"method": "a_star"}, "reward must be a function"),
        ({"method": "a_star", "reward": "no.such:thing"}, "reward: cannot import"),
        ({"method": "a_star", "reward": lambda texts: [2.0] * len(texts)}, "reward must give a number in 0..1"),
        ({"method": "a_star", "reward": lambda texts: "x" * len(texts)}, "reward must give a number .* got 'x"),
        ({"method": "complexity_voting", "num_samples": 4, "keep": 5}, "keep must be an integer in 1..4"),
        ({"method": "cautious", "high_entropy": 0.0}, "high_entropy must be above low_entropy"),
    ],
)
def test_bad_options_get_one_line(llm: LLM, search: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        searched(llm, params(), **search)
