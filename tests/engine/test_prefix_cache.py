"""Prompts that begin alike are computed once, and nothing can be told from the results but the time: tokens, logprobs,
streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import write

from paceline import LLM, RequestOutput, SamplingParams
from paceline.models import memory_of
from paceline.models.state.arena import PrefixIndex
from paceline.models.state.window_slots import BLOCK
from paceline.tree import Scores

BEGINNING = [5 + (7 * i) % 90 for i in range(70)]
PROMPTS = [[*BEGINNING, 200 + i, 300 + i] for i in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512))


def opened(folder: str, **options: Any) -> LLM:
    return LLM(folder, **({"speculative_config": None, "exactness": "strict", "threads": 1} | options))


def decode(llm: LLM, prompts: Sequence[Sequence[int]], params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params)


def results(found: Sequence[RequestOutput]) -> list[Any]:
    return [(one.outputs, one.prompt_logprobs) for one in found]


@pytest.fixture(scope="module")
def plain(folder: str) -> list[Any]:
    llm = opened(folder, enable_prefix_caching=False)
    found = decode(llm, PROMPTS)
    assert [one.num_cached_tokens for one in found] == [None] * 4
    assert len({str(one.outputs[0].token_ids) for one in found}) > 1
    return results(found)


class Fed:
    """Counts the prompt tokens that a model computes."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens, extend = 0, llm.runner.extend

        def counting(caches: Any, chunks: Any, **options: Any) -> Any:
            self.tokens += sum(map(len, chunks))
            return extend(caches, chunks, **options)

        monkeypatch.setattr(llm.runner, "extend", counting)


def test_prompts_of_one_batch_share_their_beginning(
    folder: str, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = opened(folder)
    fed, found = Fed(llm, monkeypatch), decode(llm, PROMPTS)
    assert results(found) == plain
    assert [one.num_cached_tokens for one in found] == [0, 64, 64, 64]
    assert fed.tokens == 71 + 3 * 7


def test_they_do_so_when_prompts_come_in_chunks(folder: str, plain: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = opened(folder, max_num_batched_tokens=20)
    fed, found = Fed(llm, monkeypatch), decode(llm, PROMPTS)
    assert results(found) == plain
    assert fed.tokens == 71 + 3 * 7


def test_ended_requests_leave_prompt_and_output(folder: str, plain: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = opened(folder)
    (first,) = decode(llm, PROMPTS[:1])
    longer = [*PROMPTS[0], *first.outputs[0].token_ids, 9]
    fed, (found,) = Fed(llm, monkeypatch), decode(llm, [longer])
    assert found.num_cached_tokens == 80
    assert fed.tokens == len(longer) - 1 - 80
    assert results([found]) == results(decode(opened(folder, enable_prefix_caching=False), [longer]))
    assert results(decode(llm, PROMPTS)) == plain


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_the_last_token_is_always_computed(folder: str, length: int) -> None:
    llm, ids = opened(folder), BEGINNING[:length]
    want = results(decode(llm, [ids]))
    (again,) = decode(llm, [ids])
    assert again.num_cached_tokens == (length - 1) // BLOCK * BLOCK
    assert results([again]) == want


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafters_and_seeds_see_no_difference(folder: str, method: str) -> None:
    params = [
        SamplingParams(temperature=t, seed=5, max_tokens=24, ignore_eos=True, logprobs=1, n=n)
        for t, n in ((0, 1), (0.8, 2))
    ]
    config = {"method": method, "num_speculative_tokens": 4} | ({"model": folder} if method == "draft_model" else {})
    want = [results(decode(opened(folder, enable_prefix_caching=False), PROMPTS[:1], one)) for one in params]
    llm = opened(folder, speculative_config=config)
    for _ in range(2):
        assert [results(decode(llm, PROMPTS[:1], one)) for one in params] == want


def test_prompt_logprobs_are_computed_for_every_position(folder: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1)
    llm = opened(folder)
    want = results(decode(llm, PROMPTS[:1], params))
    (again,) = decode(llm, PROMPTS[:1], params)
    assert again.num_cached_tokens == 0
    assert results([again]) == want
    assert len(again.prompt_logprobs or ()) == len(PROMPTS[0])
    assert decode(llm, PROMPTS[:1])[0].num_cached_tokens == 64


def test_tenants_share_nothing(folder: str) -> None:
    llm = opened(folder)

    def cached(tenant: str) -> int | None:
        seen.extend(llm.generate({"prompt_token_ids": PROMPTS[0], "cache_salt": tenant}, GREEDY))
        return seen[-1].num_cached_tokens

    seen: list[RequestOutput] = []
    assert [cached(tenant) for tenant in ("a", "b", "a", "b")] == [0, 0, 64, 64]
    assert len({str(one.outputs[0].token_ids) for one in seen}) == 1


def test_a_stream_tells_how_much_was_cached(folder: str, plain: list[Any]) -> None:
    llm = opened(folder)
    decode(llm, PROMPTS[:1])
    chunks = list(llm.stream({"prompt_token_ids": PROMPTS[1]}, GREEDY))
    assert chunks[0].output.num_cached_tokens == 64
    assert [token for chunk in chunks for token in chunk.token_ids] == plain[1][0][0].token_ids


def test_an_index_that_does_not_compare_tokens_fails(
    folder: str, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = opened(folder)
    decode(llm, [[9] * 72])
    monkeypatch.setattr(PrefixIndex, "find", lambda self, tenant, pieces: self.blocks[:1])
    monkeypatch.setattr(PrefixIndex, "known", lambda self, tenant, pieces: 1)
    assert results(decode(llm, PROMPTS)) != plain


def test_failed_requests_leave_nothing(folder: str, plain: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = opened(folder)
    with monkeypatch.context() as broken:
        score = llm.runner.score

        def nan(*given: Any, **options: Any) -> Any:
            scores = score(*given, **options)
            return Scores(torch.full_like(scores.logits, float("nan")), scores.rows, scores.taps)

        broken.setattr(llm.runner, "score", nan)
        assert decode(llm, PROMPTS[:1])[0].outputs[0].finish_reason == "error"
    assert len(llm.runner.arena.prefixes) == 0
    assert results(decode(llm, PROMPTS)) == plain


def test_models_that_cannot_share_say_nothing(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    llm = opened(str(write(tmp_path, rope_parameters=scaling)), exactness="auto")
    assert memory_of(llm.runner) is None
    for _ in range(2):
        assert decode(llm, PROMPTS[:1])[0].num_cached_tokens is None


def test_engines_around_the_same_weights_share(folder: str) -> None:
    llm = opened(folder)
    decode(llm, PROMPTS[:1])
    other = llm.with_speculative_config({"method": "ngram"})
    assert decode(other, PROMPTS[1:2])[0].num_cached_tokens == 64
