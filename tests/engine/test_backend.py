"""Both kinds of models behind one protocol: what a caller that knows only that can do with them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from paceline import LLM, SamplingParams
from paceline.config import ALL_DRAFTS, DraftChoice
from paceline.engine import Backend, Request, StreamChunk
from paceline.errors import ConfigError

PROMPTS = ["One day", "2+2="]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module", params=[None, "bundled/diffusion"], ids=["autoregressive", "diffusion"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM(request.param, dtype="float32", profile=False, seed=0)


@pytest.fixture(scope="module")
def denoiser() -> LLM:
    return LLM("bundled/diffusion", dtype="float32", seed=0)


def opened(
    llm: LLM, params: SamplingParams = PARAMS, prompts: Iterable[str] = PROMPTS
) -> tuple[Backend, list[Request]]:
    """Requests in the queue of a backend."""
    requests = [llm.request(prompt, params)[0] for prompt in prompts]
    for request in requests:
        llm.backend.open(request)
    return llm.backend, requests


def chunks_of(backend: Backend, requests: Iterable[Request]) -> dict[str, list[StreamChunk]]:
    """All chunks of open requests, which are forgotten then."""
    chunks: dict[str, list[StreamChunk]] = {request.id: [] for request in requests}
    while not all(each and each[-1].finish_reason for each in chunks.values()):
        backend.step()
        for name, each in chunks.items():
            each.extend(backend.collect(name))
    for name in chunks:
        backend.drop(name)
    return chunks


def test_what_is_open_is_decoded_step_by_step_to_the_same_tokens(llm: LLM) -> None:
    backend, requests = opened(llm)
    chunks = chunks_of(backend, requests)
    for request, whole in zip(requests, llm.generate(PROMPTS, PARAMS), strict=True):
        mine = chunks[request.id]
        assert len(mine) > 1
        assert [token for chunk in mine for token in chunk.token_ids] == whole.outputs[0].token_ids
        assert "".join(chunk.text for chunk in mine) == whole.outputs[0].text


def test_the_gauges_and_the_lists_follow_the_requests(llm: LLM) -> None:
    backend, requests = opened(llm)
    assert (backend.gauges().running, backend.gauges().waiting) == (0, 2)
    assert backend.requests().waiting == requests
    together = backend.gauges().max_running > 1
    assert together == backend.can_draft
    backend.step()
    assert (backend.gauges().running, backend.gauges().waiting) == ((2, 0) if together else (1, 1))
    assert backend.requests().running + backend.requests().waiting == requests
    for request in requests:
        backend.drop(request.id)
    assert (backend.gauges().running, backend.gauges().waiting) == (0, 0)
    assert backend.requests().running == backend.requests().waiting == []
    assert all(output.finish_reason == "abort" for output in requests[0].outputs)


def test_the_share_of_the_cache_is_known_where_there_is_one(llm: LLM) -> None:
    usage = llm.backend.gauges().cache_usage
    assert (usage is not None) == llm.backend.can_draft == llm.reset_prefix_cache()
    assert usage is None or 0 <= usage <= 1


def test_the_sizes_are_the_models(llm: LLM) -> None:
    info = llm.backend.info
    most = info.vocab_size - 1
    token = most if llm.backend.can_draft else 1  # the last one of a diffusion model is its mask
    llm.request({"prompt_token_ids": [token] * (info.max_context - 1)}, PARAMS)
    for tokens in ([most + 1], [token] * info.max_context):
        with pytest.raises(ValueError, match=f"0..{most}" if len(tokens) == 1 else f"holds {info.max_context}"):
            llm.request({"prompt_token_ids": tokens}, PARAMS)


def test_each_kind_rejects_what_is_the_others(llm: LLM) -> None:
    check = llm.backend.check_params
    check(PARAMS, ALL_DRAFTS)
    canvas, plain = SamplingParams(canvas=[1, "a"]), DraftChoice(())
    if llm.backend.can_draft:
        check(PARAMS, plain)
        with pytest.raises(ConfigError, match="canvas cannot be used with an autoregressive model"):
            check(canvas, ALL_DRAFTS)
    else:
        check(canvas, ALL_DRAFTS)
        with pytest.raises(ConfigError, match="speculative_config must be left out for a diffusion language model"):
            check(PARAMS, plain)


def test_what_a_diffusion_model_cannot_honour_is_rejected_at_once_and_harms_nobody(denoiser: LLM) -> None:
    with pytest.raises(ConfigError, match="top_p"):
        opened(denoiser, SamplingParams(top_p=0.5), PROMPTS[:1])
    backend, fine = opened(denoiser, PARAMS, PROMPTS[1:])
    assert backend.gauges().waiting == len(fine)
    assert chunks_of(backend, fine)[fine[0].id][-1].output.outputs[0].token_ids


def test_requests_that_are_open_when_a_model_closes_end(llm: LLM) -> None:
    own = LLM(llm.folder, dtype="float32", profile=False)
    backend, (running, waiting) = opened(own)
    backend.step()
    own.close()
    for request in (running, waiting):
        if backend.can_draft:
            assert backend.collect(request.id)[-1].finish_reason == "abort"
        else:
            with pytest.raises(RuntimeError, match="the model was closed"):
                backend.collect(request.id)
    assert (backend.gauges().running, backend.gauges().waiting) == (0, 0)
