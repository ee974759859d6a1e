"""Encoder-decoder models behind the engine: prompts with a source, drafts that read it, outputs that share it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_encoder_decoder as tiny
import torch

from paceline import LLM, PromptError, SamplingParams
from paceline.assembly import find_exactness
from paceline.engine.plain_loop import decode_plainly
from paceline.errors import ConfigError
from paceline.llm import BUNDLED
from paceline.models import Inputs

VOCABULARY = json.loads((BUNDLED / "target" / "config.json").read_text())["vocab_size"]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
METHODS = ("ngram", "suffix", "copyspec", "token_recycling", "auto")


def words(folder: Path) -> Path:
    for file in (BUNDLED / "target").glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module", params=["t5", "marian"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of transformers, and its folder with a tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"vocab_size": VOCABULARY, "eos_token_id": 1}
    if request.param == "marian":
        sizes |= {"decoder_vocab_size": VOCABULARY, "forced_eos_token_id": None}
    return tiny.make(request.param, folder, **sizes), words(folder)


@pytest.fixture(scope="module")
def llm(pair: tuple[Any, Path]) -> LLM:
    return LLM(pair[1], dtype="float32", speculative_config=None)


def sources(count: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(3, VOCABULARY, 7 + 9 * i).tolist() for i in range(count)]


def by_transformers(model: Any, source: list[int], **options: Any) -> list[list[int]]:
    given = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False} | options
    with torch.no_grad():
        return [row[1:] for row in model.generate(torch.tensor([source]), **given).tolist()]


@pytest.mark.parametrize("method", [None, *METHODS])
def test_texts_are_those_of_transformers(method: str | None, pair: tuple[Any, Path], llm: LLM) -> None:
    model, _ = pair
    drafting = llm.with_speculative_config({"method": method}) if method else llm
    outputs = drafting.generate([{"encoder_prompt": one} for one in sources(4)], GREEDY)
    for source, output in zip(sources(4), outputs, strict=True):
        assert [output.outputs[0].token_ids] == by_transformers(model, source)


def test_beams_are_those_of_transformers(pair: tuple[Any, Path], llm: LLM) -> None:
    model, _ = pair
    params = SamplingParams(max_tokens=24, temperature=0, n=3, ignore_eos=True)
    for source in sources(3):
        (output,) = llm.generate({"encoder_prompt": source}, params, search={"method": "beam", "beam_width": 3})
        want = by_transformers(model, source, num_beams=3, num_return_sequences=3)
        assert [one.token_ids for one in output.outputs] == want


def test_drafts_leave_drawn_texts_as_they_are(pair: tuple[Any, Path]) -> None:
    """Keyed noise: the same seed draws the same tokens, drafted or not; n outputs read the source once."""
    _, folder = pair
    params = SamplingParams(max_tokens=24, temperature=1.0, top_k=5, n=3, seed=7, ignore_eos=True)
    texts = []
    for method in (None, {"method": "ngram"}):
        llm = LLM(folder, dtype="float32", speculative_config=method)
        (output,) = llm.generate({"encoder_prompt": sources(1)[0]}, params)
        texts.append([one.token_ids for one in output.outputs])
        assert llm.runner.sources_read == 1
    if method is not None:
        assert len({tuple(text) for text in texts[0]}) == 3
    request = llm.request({"encoder_prompt": sources(1)[0]}, params)[0]
    llm.engine.check(request)
    plain = decode_plainly(llm.runner, [request], llm.defaults.eos_ids)
    assert [len(text) for text in plain[0]] == [24, 24, 24]


def test_an_expected_text_takes_few_passes(llm: LLM) -> None:
    """Aggressive Decoding: the identical text in one pass or two, one edit in as few more; a wrong text (the control)
    costs passes and no token.
    """
    source = {"encoder_prompt": sources(3)[2]}
    plain = llm.generate(source, GREEDY)[0].outputs[0].token_ids
    following = llm.with_speculative_config({"method": "prediction", "num_speculative_tokens": 32})
    edited = [*plain[:9], 77, *plain[10:]]
    passes = {}
    for name, expected in (("equal", plain), ("edited", edited), ("wrong", [3 + i for i in range(24)])):
        (output,) = following.generate({**source, "prediction": expected}, GREEDY)
        assert output.outputs[0].token_ids == plain
        passes[name] = output.metrics.num_steps
    assert passes["equal"] <= 2
    assert passes["edited"] <= passes["equal"] + 4
    assert passes["wrong"] > passes["edited"]


def test_a_draft_model_has_an_encoder_of_its_own(
    pair: tuple[Any, Path], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target drafts for itself: all drafts are right, since the draft model reads the source, too; where it reads
    another one (the control) they are not, and the texts are the same.
    """
    _, folder = pair
    draft = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 4}
    prompts = [{"encoder_prompt": one} for one in sources(3)]
    plain = llm.generate(prompts, GREEDY)
    passes = []
    for reads in (True, False):
        if not reads:
            monkeypatch.setattr("paceline.drafters.common.bases.EncodesInputs", int)
        outputs = llm.with_speculative_config(draft).generate(prompts, GREEDY)
        assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in plain]
        passes.append(sum(one.metrics.num_steps for one in outputs))
    assert passes[0] == 3 * 5 < passes[1]


def test_the_encoder_counts_against_the_tokens_of_a_step(pair: tuple[Any, Path]) -> None:
    _, folder = pair
    llm = LLM(folder, dtype="float32", speculative_config=None, max_num_batched_tokens=16)
    llm.generate([{"encoder_prompt": one} for one in sources(3)], GREEDY)  # 7, 16 and 25 rows
    requests = [llm.request({"encoder_prompt": one}, GREEDY)[0] for one in sources(3)]
    for request in requests:
        llm.engine.add(request)
    read = []
    for _ in range(3):
        llm.engine.step()
        read.append(llm.runner.sources_read - 3)
    assert read == [1, 2, 3]


def test_equal_texts_with_other_sources_share_nothing(pair: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests whose decoder prompts are equal; with the digest dropped (the control) the second takes the first's
    keys and values, and its numbers are wrong.
    """
    _, folder = pair
    first, second = sources(2)
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logprobs=0)

    def numbers(*texts: list[int]) -> list[float | None]:
        """Of the last text's first token, behind the others in one engine."""
        llm = LLM(folder, dtype="float32", speculative_config=None)
        prompt = [*llm.defaults.decoder_start_ids, *range(10, 42)]
        outputs = [llm.generate({"encoder_prompt": one, "prompt_token_ids": prompt}, params)[0] for one in texts]
        return [one.outputs[0].cumulative_logprob for one in outputs][-1:]

    alone = numbers(second)
    assert numbers(first, second) == alone
    monkeypatch.setattr("paceline.engine.request.Request.prefix_key", "the same for all")
    assert numbers(first, second) != alone


def test_prompts_in_all_spellings(llm: LLM) -> None:
    start = list(llm.defaults.decoder_start_ids)
    text = "The ships came back."
    ids = llm.tokenizer.encode(text)
    outputs = llm.generate(
        [
            text,
            ids,
            {"encoder_prompt": text},
            {"encoder_prompt": {"prompt_token_ids": ids}, "decoder_prompt": None},
            {"encoder_prompt": text, "prompt_token_ids": []},
        ],
        GREEDY,
    )
    assert {tuple(one.outputs[0].token_ids) for one in outputs} == {tuple(outputs[0].outputs[0].token_ids)}
    assert outputs[0].prompt_token_ids == start
    begun = llm.generate({"encoder_prompt": text, "prompt": "They"}, GREEDY)[0]
    assert begun.prompt_token_ids == [*start, *llm.tokenizer.encode("They", add_special_tokens=False)]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"encoder_prompt": []}, "reads a source before it writes"),
        ({"encoder_prompt": [10**6]}, "must lie in 0.."),
        ({"encoder_prompt": 5}, "encoder_prompt must be"),
        ({"encoder_prompt": "x", "wrong": 1}, "'wrong'; known are cache_salt, decoder_prompt, encoder_prompt"),
        ({"inputs": Inputs(features={"sound": np.zeros(4, np.float32)})}, "takes tokens and encoder_tokens"),
    ],
)
def test_wrong_prompts_are_named(prompt: Any, message: str, llm: LLM) -> None:
    with pytest.raises(PromptError, match=message):
        llm.generate(prompt, GREEDY)


def test_near_ties_have_a_reason_of_their_own(pair: tuple[Any, Path]) -> None:
    """Heads that do not fill vectors are PyTorch's."""
    runner = LLM(pair[1]).runner
    assert "only compiled passes keep the bits" in str(find_exactness(runner, "auto"))
    with pytest.raises(ConfigError, match="only compiled passes keep the bits"):
        find_exactness(runner, "strict")


def test_models_without_an_encoder_say_so() -> None:
    with pytest.raises(PromptError, match="this model has no encoder"):
        LLM().generate({"encoder_prompt": "x", "prompt": "y"}, GREEDY)


def test_memory_counts_sources(pair: tuple[Any, Path]) -> None:
    """Cross keys and values lie under the cap of the caches: what does not fit waits, what never fits is refused."""
    free = LLM(pair[1], dtype="float32", speculative_config=None)
    memory, many = free.runner.memory, sources(4)
    whole = memory.blocks_to_come(Inputs(encoder_tokens=many[3]))
    tight = (whole + 2 * memory.blocks_for(32)) * memory.block_bytes
    llm = LLM(pair[1], dtype="float32", speculative_config=None, kv_cache_memory_bytes=tight)
    prompts = [{"encoder_prompt": one} for one in many]
    with pytest.raises(PromptError, match="beside its source"):
        llm.generate({"encoder_prompt": many[3] + many[2]}, SamplingParams(max_tokens=60))
    texts = [[one.outputs[0].token_ids for one in model.generate(prompts, GREEDY)] for model in (llm, free)]
    assert texts[0] == texts[1]
