"""Iterative retrieval: the plain loop is the one by hand, and whatever is guessed, the text is the plain loop's."""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError, PacelineError, PromptError
from paceline.search.methods.ralm import Ralm
from paceline.search.retrieving import Retrieving
from tests.search.indices import Nothing, Shifting

PROMPTS = ["def f(x):\n    return", "Once upon a time"]
FEW = {"interval": 3, "query_tokens": 6, "prefetch": 2}


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 18, "seed": 7, "ignore_eos": True, **changes})


RULES = {"temperature": 0.9, "repetition_penalty": 1.2, "logit_bias": {40: 2.0}}


def written(llm: LLM, how: SamplingParams, prompt: str = PROMPTS[0], **options: Any) -> Any:
    given = {"index": Shifting(), **FEW, **options}
    (result,) = llm.generate(prompt, how, retrieval=given)
    result.raise_for_error()
    return result


def ids(result: Any) -> list[int]:
    return list(result.outputs[0].token_ids)


def by_hand(llm: LLM, prompt: str, count: int, interval: int, query_tokens: int) -> tuple[list[int], list[int]]:
    """Likeliest tokens, each behind passage, prompt and text as a whole; and the passages."""
    index, start = Shifting(), llm.tokenizer.encode(prompt)
    text: list[int] = []
    passages = []
    while len(text) < count:
        if len(text) % interval == 0:
            (hits,) = index.search([sum([*start, *text][-query_tokens:])], 1)
            passages.append(hits.best)
            passage = llm.tokenizer.encode(index.passage(hits.ids[0]), add_special_tokens=False)
            before = [*passage, *llm.tokenizer.encode("\n\n", add_special_tokens=False)]
        cache = llm.runner.open()
        text.append(int(llm.runner.extend([cache], [[*before, *start, *text]]).logits[0].argmax()))
        llm.runner.release(cache)
    return text, passages


def test_the_plain_loop_is_the_one_by_hand(llm: LLM) -> None:
    wanted, passages = by_hand(llm, PROMPTS[0], 18, 3, 6)
    one = written(llm, params(), speculate=False)
    assert ids(one) == wanted
    kept = [number for i, number in enumerate(passages) if not i or passages[i - 1] != number]
    assert [number for _, number in one.retrieval.passages] == kept
    assert len(set(kept)) > 2
    assert one.retrieval.searches == len(passages) == 6
    assert by_hand(llm, PROMPTS[0], 18, 3, 7)[0] != wanted, "the window of the query counts"


WAYS = [{"stride": 1}, {"stride": 4}, {}, {"stride": 3, "asynchronous": True}, {"asynchronous": True, "contexts": 1}]


@pytest.mark.parametrize("how", [params(), params(**RULES)], ids=["greedy", "drawn"])
def test_whatever_is_guessed_the_text_is_the_plain_loops(llm: LLM, how: SamplingParams) -> None:
    plain = written(llm, how, speculate=False)
    right = 0
    for way in WAYS:
        one = written(llm, how, **way)
        report = one.retrieval
        assert ids(one) == ids(plain)
        assert report.passages == plain.retrieval.passages
        assert 0 < report.taken_back <= report.speculated
        assert report.tokens_lost > 0
        right += report.speculated - report.taken_back
    assert right > 0


def departs(llm: LLM) -> bool:
    """Whether some text is not the plain loop's, or its retrieval fails."""
    for how in (params(), params(temperature=1.0)):
        plain = written(llm, how, speculate=False)
        (one,) = llm.generate(PROMPTS[0], how, retrieval={"index": Shifting(), **FEW, "stride": 4})
        if one.outputs[0].error is not None or ids(one) != ids(plain):
            return True
    return False


def test_the_comparison_catches_a_loop_that_takes_nothing_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not departs(llm)
    monkeypatch.setattr(Ralm, "agrees", lambda *_: True)
    assert departs(llm)
    monkeypatch.undo()
    query = Ralm.query
    monkeypatch.setattr(Ralm, "query", lambda self, text: query(self, text) + 50 * self.retrieval.tokens_lost)
    assert departs(llm), "a window of the query that what was taken back has moved"


def test_what_is_told_is_never_taken_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    given, how = {"index": Shifting(), **FEW, "stride": 4}, params()

    def told() -> tuple[str, Any]:
        chunks = list(llm.stream(PROMPTS[0], how, retrieval=given))
        assert len(chunks) > 1
        return "".join(chunk.text for chunk in chunks), chunks[-1].output.outputs[0]

    text, output = told()
    assert text == output.text == written(llm, how, speculate=False).outputs[0].text
    keep = Ralm.keep

    def early(self: Ralm, text: Any, trail: Any) -> None:
        """Tells guesses."""
        keep(self, text, trail)
        self.alive = [(trail[-1].after if trail else text).told]

    monkeypatch.setattr(Ralm, "keep", early)
    assert "has told another text" in str(told()[1].error)


def test_a_stride_of_one_asks_no_less_often_and_a_longer_one_less(llm: LLM) -> None:
    plain = written(llm, params(), speculate=False).retrieval
    one, four = (written(llm, params(), stride=stride).retrieval for stride in (1, 4))
    assert one.searches >= plain.searches == plain.queries
    steady = Shifting(spread=10**9)
    often = written(llm, params(), index=steady, stride=4).retrieval
    assert often.taken_back == 0
    assert often.searches < plain.searches
    assert [len(queries) for queries in steady.asked] == [1, 4, 1]
    assert four.queries > four.searches


def test_with_nothing_found_it_is_plain_decoding(llm: LLM) -> None:
    for how in (params(), params(**RULES)):
        (plain,) = llm.generate(PROMPTS[0], how)
        assert ids(written(llm, how, index=Nothing())) == ids(plain) != ids(written(llm, how))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_guess_is_made_while_the_index_is_asked(llm: LLM, asynchronous: bool) -> None:
    index, guessing = Shifting(spread=10**9), Event()
    made: list[bool] = []
    index.before = lambda: made.append(guessing.wait(5.0 if asynchronous and len(index.asked) == 2 else 0.0))
    cache = index.cache()
    find = cache.search
    searched: list[int] = []

    def search(query: int, most: int) -> Any:
        searched.append(query)
        if len(searched) == 3:  # the first behind the two of the first round
            guessing.set()
        return find(query, most)

    cache.search = search  # type: ignore[method-assign]
    index.cache = lambda: cache  # type: ignore[method-assign]
    written(llm, params(max_tokens=12), index=index, stride=2, asynchronous=asynchronous)
    assert made[1] is asynchronous


def test_side_by_side_they_are_as_alone_and_memory_is_given_back(llm: LLM) -> None:
    given = {"index": Shifting(), **FEW, "asynchronous": True}
    together = llm.generate(PROMPTS, params(), retrieval=given)
    assert [ids(one) for one in together] == [ids(written(llm, params(), prompt)) for prompt in PROMPTS]
    llm.reset_prefix_cache()
    runner: Any = llm.runner
    assert runner.memory.used == 0


def test_a_spent_budget_leaves_verified_text(llm: LLM) -> None:
    plain = ids(written(llm, params(), speculate=False))
    for budget in (10, 16):
        cut = ids(written(llm, params(), stride=4, budget_tokens=budget))
        assert 0 < len(cut) < 18
        assert cut == plain[: len(cut)]


def test_an_error_of_the_index_ends_its_request_alone(llm: LLM) -> None:
    bad = Shifting()

    def fails() -> None:
        raise OSError("the disk is gone")

    bad.before = fails
    one, other = llm.generate(PROMPTS, params(), retrieval=[{"index": bad}, {"index": Shifting(), **FEW}])
    assert "the disk is gone" in str(one.outputs[0].error)
    assert ids(other) == ids(written(llm, params(), PROMPTS[1]))


def test_a_long_passage_is_cut_to_the_room_and_none_is_an_error(llm: LLM) -> None:
    free = llm.runner.info.max_context - len(llm.tokenizer.encode(PROMPTS[0]))
    given = {"index": Shifting(passages=["word " * 100, "other " * 100]), **FEW, "budget_tokens": 8}
    (one,) = llm.generate(PROMPTS[0], params(max_tokens=free - 20), retrieval=given)
    assert one.outputs[0].error is None
    assert len(ids(one)) > 2
    (one,) = llm.generate(PROMPTS[0], params(max_tokens=None), retrieval=given)
    assert "lower max_tokens" in str(one.outputs[0].error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": 0}, "interval must be an integer"),
        ({"query_tokens": 0}, "query_tokens must be an integer"),
        ({"template": "x"}, "template must hold {passage} once"),
        ({"stride": "fast"}, "stride must be a number of steps or 'os3'"),
        ({"stride": 0}, "stride must be an integer"),
        ({"speculate": 1}, "speculate must be True or False"),
        ({"prefetch": 0}, "prefetch must be an integer"),
        ({"contexts": 0}, "contexts must be an integer"),
        ({"index": 3}, "index must be the folder of an index"),
        ({"index": "/nowhere"}, "index: cannot read"),
        ({"method": "knn_lm"}, "needs a store of tokens"),
        ({"wide": 1}, "option of search method 'ralm' does not know 'wide'"),
    ],
)
def test_bad_options_get_one_line(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PacelineError, match=message) as caught:
        llm.generate("x", params(), retrieval={"index": Shifting(), **options})
    assert "\n" not in str(caught.value)


def test_what_goes_with_it_and_what_does_not(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="retrieval must be left out with search"):
        llm.generate("x", params(), search="beam", retrieval={"index": Shifting()})
    with pytest.raises(ConfigError, match="retrieval must be the folder of an index"):
        llm.generate("x", params(), retrieval={"interval": 4})
    with pytest.raises(ConfigError, match="retrieval must be one for all or one per prompt"):
        llm.generate(["x", "y"], params(), retrieval=[{"index": Shifting()}])
    with pytest.raises(ConfigError, match="n must be 1 with search method 'ralm'"):
        llm.generate("x", params(temperature=1.0, n=2), retrieval={"index": Shifting()})
    assert issubclass(PromptError, PacelineError)
    assert Retrieving.needs_code, "clients of a server may not name indices"
