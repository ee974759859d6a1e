"""kNN-LM: the mixture is the one by hand, and whatever neighbours are guessed, the text is the plain loop's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.errors import PacelineError
from paceline.retrieval import TokenStore
from paceline.search import states_of
from paceline.search.methods.knn_lm import KnnLm
from tests.search.indices import States, store_of

TEXTS = [
    "Once upon a time there was a small dog. The dog liked to run and play in the park with a red ball.",
    "def f(x):\n    return x + 1\n\ndef g(x):\n    return f(x) * 2\n",
]
PROMPTS = ["Once upon a time", "def f(x):\n    return"]
OPTIONS = {"neighbours": 4, "weight": 0.6, "distance_temperature": 20.0, "following": 2}


@pytest.fixture(scope="module")
def store(llm: LLM) -> TokenStore:
    """Of two texts, with much beside that is near nothing in particular."""
    layer = llm.runner.info.num_layers
    states, tokens = [], list[int]()
    for text in TEXTS:
        ids = llm.tokenizer.encode(text)
        states.append(states_of(llm.runner, ids[:-1], layer))
        tokens += ids[1:]
    known = np.concatenate(states)
    rng = np.random.default_rng(3)
    noise = known[rng.integers(len(known), size=200)] + rng.normal(0.0, known.std(), (200, known.shape[1]))
    others = rng.integers(5, llm.runner.info.vocab_size, 200).tolist()
    return store_of(np.concatenate([known, noise.astype(np.float32)]), [*tokens, *others], layer)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 14, "seed": 7, "ignore_eos": True, **changes})


RULES = {"temperature": 0.9, "repetition_penalty": 1.2, "logit_bias": {40: 2.0}}


def written(llm: LLM, store: TokenStore, how: SamplingParams, prompt: str = PROMPTS[0], **options: Any) -> Any:
    (result,) = llm.generate(prompt, how, retrieval={"index": store, **OPTIONS, **options})
    result.raise_for_error()
    return result


def ids(result: Any) -> list[int]:
    return list(result.outputs[0].token_ids)


def by_hand(llm: LLM, store: TokenStore, prompt: str, weight: float, count: int = 14) -> list[int]:
    """Likeliest tokens of the mixture, each from a pass over the whole text."""
    vectors = store.vectors
    assert isinstance(vectors, States)
    held, text, start = torch.from_numpy(vectors.held), llm.tokenizer.encode(prompt), 0
    start, layer = len(text), store.layer
    for _ in range(count):
        cache = llm.runner.open()
        scores = llm.runner.extend([cache], [text], taps=(layer,))
        llm.runner.release(cache)
        distances = (held - scores.taps[layer][-1].float()).square().sum(1)
        near = distances.argsort()[:4]
        shares = (-distances[near] / 20.0).softmax(0)
        p = (1 - weight) * scores.logits[0].float().softmax(-1)
        for share, token in zip(shares, store.tokens[near.numpy()].tolist(), strict=True):
            p[token] += weight * share
        text.append(int(p.argmax()))
    return text[start:]


def test_the_plain_loop_is_the_mixture_by_hand(llm: LLM, store: TokenStore) -> None:
    (without,) = llm.generate(PROMPTS[0], params())
    wanted = by_hand(llm, store, PROMPTS[0], 0.6)
    assert ids(written(llm, store, params(), speculate=False)) == wanted != ids(without)
    assert by_hand(llm, store, PROMPTS[0], 0.2) != wanted
    assert ids(written(llm, store, params(), weight=0.0)) == ids(without)


def test_whatever_is_guessed_the_text_is_the_plain_loops(llm: LLM, store: TokenStore) -> None:
    taken = right = 0
    for how, prompt in ((params(), PROMPTS[0]), (params(**RULES), PROMPTS[1])):
        plain = written(llm, store, how, prompt, speculate=False)
        assert plain.retrieval.searches == 14
        for way in ({"stride": 1}, {"stride": 5}, {}, {"stride": 3, "asynchronous": True}, {"asynchronous": True}):
            one = written(llm, store, how, prompt, **way)
            assert ids(one) == ids(plain)
            taken += one.retrieval.taken_back
            right += one.retrieval.speculated - one.retrieval.taken_back
    assert taken > 0
    assert right > 20


def test_the_comparison_catches_a_loop_that_takes_nothing_back(
    llm: LLM, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def departs() -> bool:
        plain = [ids(written(llm, store, params(), prompt, speculate=False)) for prompt in PROMPTS]
        return plain != [ids(written(llm, store, params(), prompt, stride=4)) for prompt in PROMPTS]

    assert not departs()
    monkeypatch.setattr(KnnLm, "agrees", lambda *_: True)
    assert departs()


def test_entries_that_follow_join_the_cache(llm: LLM, store: TokenStore) -> None:
    search = KnnLm(store, following=2)
    search.tokenizer, search.runner = llm.tokenizer, llm.runner
    search.prepare()
    last = store.size - 1
    assert list(search.neighbours([3, 4, last])) == [3, 4, 5, 6, last]


def test_side_by_side_they_are_as_alone_and_memory_is_given_back(llm: LLM, store: TokenStore) -> None:
    together = llm.generate(PROMPTS, params(), retrieval={"index": store, **OPTIONS})
    assert [ids(one) for one in together] == [ids(written(llm, store, params(), prompt)) for prompt in PROMPTS]
    llm.reset_prefix_cache()
    runner: Any = llm.runner
    assert runner.memory.used == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"neighbours": 0}, "neighbours must be an integer"),
        ({"weight": 1.5}, "weight must be in 0..1"),
        ({"distance_temperature": 0.0}, "distance_temperature must be above 0"),
        ({"following": -1}, "following must be an integer"),
        ({"method": "ralm"}, "needs one of passages, got kind 'knn'"),
        ({"interval": 2}, "option of search method 'knn_lm' does not know 'interval'"),
    ],
)
def test_bad_options_get_one_line(llm: LLM, store: TokenStore, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        llm.generate("x", params(), retrieval={"index": store, **options})


def test_a_store_of_another_model_is_rejected(llm: LLM, store: TokenStore) -> None:
    layer = store.layer
    narrow = store_of(np.zeros((4, 3), np.float32), [1, 2, 3, 4], layer)
    with pytest.raises(PacelineError, match="index must hold states of"):
        llm.generate("x", params(), retrieval={"index": narrow})
    states: Any = store.vectors
    other = TokenStore(states, "exact", store.tokens, layer=layer, model="another")
    with pytest.raises(PacelineError, match="index must be made with the model's own tokenizer"):
        llm.generate("x", params(), retrieval={"index": other})
