"""What a request has beside its tokens reaches the model and the drafters, and is part of every key under which state
is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engine.harness import engine, tokens
from tiny_checkpoint import write
from tiny_llama import tokens as tiny_tokens
from toy_parts import EncoderRunner

from paceline import LLM, ConfigError, PromptError, SamplingParams
from paceline.drafters import Context, Drafter
from paceline.engine import Engine, Request
from paceline.engine.plain_loop import decode_plainly
from paceline.models import NO_INPUTS, EmbeddedSpan, Inputs, load_runner
from paceline.tree import EMPTY_TREE, Budget, TokenTree

PROMPT = tiny_tokens(70, seed=2)
LENGTH = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
ROWS = np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32)
KINDS: dict[str, tuple[Inputs, Inputs]] = {
    "encoder tokens": (Inputs(encoder_tokens=[1, 2, 3]), Inputs(encoder_tokens=[1, 2, 4])),
    "features": (Inputs(features={"sound": ROWS}), Inputs(features={"sound": ROWS + 1})),
    "embeddings": (Inputs(embeddings=[EmbeddedSpan(14, ROWS)]), Inputs(embeddings=[EmbeddedSpan(14, ROWS[::-1])])),
    "none and some": (NO_INPUTS, Inputs(encoder_tokens=[1])),
}


@pytest.fixture(scope="module")
def reference() -> EncoderRunner:
    return EncoderRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512))


@pytest.fixture
def llm(folder: str, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """A model that takes inputs, behind the front door."""
    monkeypatch.setattr(
        "paceline.llm.load_runner", lambda *args, **options: EncoderRunner(load_runner(*args, **options))
    )
    return LLM(folder, speculative_config="ngram", threads=1, profile=False)


def request(name: str, inputs: Inputs, params: SamplingParams = GREEDY, **more: Any) -> Request:
    return Request(name, None, list(PROMPT), params, 7, LENGTH, inputs=inputs, **more)


def decoded(live: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """The first output of each; all are decoded side by side."""
    for one in requests:
        live.add(one)
    while live.has_work:
        live.step()
    return [outputs[0] for outputs in tokens(requests)]


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_share_their_state_with_the_same_inputs_only(
    kind: str, side_by_side: bool, reference: EncoderRunner
) -> None:
    one, other = KINDS[kind]
    live, each = engine(EncoderRunner()), [one, other, one, other]
    requests = [request(f"r{i}", inputs) for i, inputs in enumerate(each)]
    found = decoded(live, requests) if side_by_side else [decoded(live, [each])[0] for each in requests]
    assert found == [reference.greedy(PROMPT, LENGTH, inputs) for inputs in each]
    assert found[0] != found[1]
    assert [each.num_cached_tokens for each in requests] == [0, 0, 64, 64]


def test_without_the_digest_another_input_would_be_taken_over(
    reference: EncoderRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Request, "prefix_key", property(lambda self: self.tenant))
    one, other = KINDS["encoder tokens"]
    live, second = engine(EncoderRunner()), request("b", other)
    decoded(live, [request("a", one)])
    assert decoded(live, [second]) != [reference.greedy(PROMPT, LENGTH, other)]
    assert second.num_cached_tokens == 64


def test_no_tenant_is_mistaken_for_another_with_inputs() -> None:
    inputs = Inputs(encoder_tokens=[1])
    pairs = [("", inputs), ("", NO_INPUTS), ("a", inputs), ("a", NO_INPUTS)]
    pairs += [(f"{inputs.digest}/a", NO_INPUTS), (f"{inputs.digest}/", NO_INPUTS), (f"/{inputs.digest}/a", NO_INPUTS)]
    assert len({request("r", each, tenant=tenant).prefix_key for tenant, each in pairs}) == len(pairs)


@pytest.mark.parametrize("keyed", [True, False])
def test_a_parked_sequence_goes_on_with_its_own(
    keyed: bool, reference: EncoderRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not keyed:
        monkeypatch.setattr(Request, "prefix_key", property(lambda self: self.tenant))
    one, other = KINDS["features"]
    live = engine(EncoderRunner())
    parked, between = request("a", one, park_at=5), request("b", other)
    decoded(live, [parked])
    assert len(parked.outputs[0].token_ids) == 5
    decoded(live, [between])
    parked.park_at = None
    live.scheduler.resume("a")
    while live.has_work:
        live.step()
    found = [outputs[0] for outputs in tokens([parked, between])]
    expected = [reference.greedy(PROMPT, LENGTH, inputs) for inputs in (one, other)]
    assert (found == expected) == keyed
    assert found[0] == expected[0]


def test_all_outputs_of_a_request_have_its_inputs() -> None:
    runner, inputs = EncoderRunner(), KINDS["encoder tokens"][0]
    params = SamplingParams(temperature=1.0, max_tokens=LENGTH, n=3, ignore_eos=True)
    live, one, again = engine(runner), request("a", inputs, params), request("b", inputs, params)
    decoded(live, [one])
    live.check(again)
    assert tokens([one]) == decode_plainly(runner, [again], (0,))


class Reader(Drafter):
    """Notes what it sees."""

    name = "reader"

    def __init__(self) -> None:
        self.sources = list[Sequence[int] | None]()

    def begin(self, contexts: Sequence[Context]) -> list[Any]:
        self.sources += [context.source for context in contexts]
        return list(contexts)

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        return [EMPTY_TREE] * len(states)

    def fork(self, state: Any, context: Context) -> Any:
        self.sources.append(context.source)
        return context


def test_drafters_see_the_text_that_an_encoder_reads() -> None:
    reader, twice = Reader(), SamplingParams(temperature=0.0, max_tokens=2, n=2)
    live = engine(EncoderRunner(), [reader], 2)
    decoded(live, [request("a", Inputs(encoder_tokens=[4, 5, 6]), twice)])
    assert reader.sources == [(4, 5, 6), (4, 5, 6)]
    decoded(live, [request("b", Inputs(features={"sound": ROWS})), request("c", NO_INPUTS)])
    assert reader.sources[2:] == [None, None]


def test_the_runner_says_how_many_tokens_fit() -> None:
    live = engine(EncoderRunner())
    live.check(request("a", Inputs(encoder_tokens=[1] * 400)))
    with pytest.raises(PromptError, match=r"70 tokens, but with these inputs the context of tiny holds 62 including"):
        live.check(request("a", Inputs(encoder_tokens=[1] * 450)))
    with pytest.raises(PromptError, match="encoder tokens must lie in"):
        live.check(request("a", Inputs(encoder_tokens=[64])))
    with pytest.raises(PromptError, match="within the prompt of 70 tokens, got some up to 70"):
        live.check(request("a", Inputs(embeddings=[EmbeddedSpan(65, ROWS)])))


def test_steering_by_a_second_sequence_and_inputs_exclude_each_other() -> None:
    live = engine(EncoderRunner())
    params = SamplingParams(temperature=0.0, steering={"method": "cfg", "guidance_scale": 1.5})
    live.check(request("a", NO_INPUTS, params))
    with pytest.raises(PromptError, match=r"'cfg' has a second sequence, .* the prompt has encoder_tokens \(1 ids\)"):
        live.check(request("b", Inputs(encoder_tokens=[1]), params))


def test_generate_passes_inputs_through(llm: LLM) -> None:
    one, other = Inputs(encoder_tokens=[1, 2]), Inputs(encoder_tokens=[2, 1])
    for cached in (0, 64):
        prompts = [{"prompt_token_ids": PROMPT, "inputs": inputs} for inputs in (one, other)]
        found = llm.generate(prompts, GREEDY)
        runner = llm.runner
        expected = [runner.greedy(PROMPT, LENGTH, inputs) for inputs in (one, other)]
        assert [result.outputs[0].token_ids for result in found] == expected
        assert [result.num_cached_tokens for result in found] == [cached, cached]
    long = {"prompt_token_ids": PROMPT, "inputs": Inputs(encoder_tokens=[3] * 435)}
    (short,) = llm.generate(long, GREEDY)
    assert len(short.outputs[0].token_ids) == 512 - 435 - 70
    cut = SamplingParams(truncate_prompt_tokens=20)
    with pytest.raises(ConfigError, match="truncate_prompt_tokens must leave a prompt whole"):
        llm.generate({"prompt_token_ids": PROMPT, "inputs": Inputs(embeddings=[EmbeddedSpan(1, ROWS)])}, cut)


def test_searches_keep_inputs_apart(llm: LLM) -> None:
    one, other = Inputs(encoder_tokens=[1, 2]), Inputs(encoder_tokens=[2, 1])
    search = {"method": "beam", "beam_width": 2}

    def found(inputs: Inputs) -> Any:
        (result,) = llm.generate({"prompt_token_ids": PROMPT, "inputs": inputs}, GREEDY, search=search)
        return result.outputs[0].token_ids, result.num_cached_tokens

    results = [found(inputs) for inputs in (one, other, one, other)]
    assert [cached for _, cached in results] == [0, 0, 64, 64]
    assert results[0][0] == results[2][0] != results[1][0] == results[3][0]


def test_models_of_tokens_reject_them_in_one_line(folder: str) -> None:
    llm = LLM(folder, speculative_config=None, threads=1, profile=False)
    message = r"^.* takes tokens as inputs, got encoder_tokens \(2 ids\), features \(sound \(6, 32\)\); leave out"
    inputs = Inputs([1, 2], {"sound": ROWS})
    with pytest.raises(PromptError, match=message):
        llm.generate({"prompt_token_ids": [1, 2, 3], "inputs": inputs}, GREEDY)
    with pytest.raises(PromptError, match=message):
        next(llm.stream({"prompt": "a", "inputs": inputs}, GREEDY))
    with pytest.raises(PromptError, match="a prompt dict does not know 'inputs'; known are cache_salt"):
        llm.generate({"prompt_token_ids": [1, 2, 3], "inputs": {"encoder_tokens": [1]}}, GREEDY)
    llm.generate({"prompt_token_ids": [1, 2, 3], "inputs": NO_INPUTS}, GREEDY)


def test_diffusion_models_reject_them() -> None:
    llm = LLM("bundled/diffusion", threads=1)
    with pytest.raises(
        PromptError, match=r"diffusion language model takes tokens as inputs, got encoder_tokens \(1 ids\)"
    ):
        llm.generate({"prompt_token_ids": [1, 2, 3], "inputs": Inputs([1])}, SamplingParams(max_tokens=4))
