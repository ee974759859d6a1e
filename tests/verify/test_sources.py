"""What an encoder has read belongs to an output's prompt when its tokens are scored again."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import tiny_encoder_decoder as tiny

from paceline import LLM, SamplingParams
from paceline.llm import BUNDLED
from paceline.models import NO_INPUTS, Inputs
from paceline.verify import inputs_of, verify
from paceline.verify.proof import plain_from

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("marian")
    tiny.make("marian", folder, vocab_size=4096, decoder_vocab_size=4096, forced_eos_token_id=None)
    for file in (BUNDLED / "target").glob("tokenizer*"):
        shutil.copy(file, folder)
    return LLM(folder, dtype="float32", speculative_config=NGRAM)


def sources() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(3, 4000, 12).tolist() for _ in range(4)]


def test_samples_are_tested_against_what_the_model_says_of_their_source(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the sources (the control) the test of the distribution fails, for plain decoding, too."""
    report = verify(llm, sources(), max_tokens=16, samples=4)
    assert report.holds
    assert report.distribution is not None
    assert report.distribution.p_value > 1e-3
    monkeypatch.setattr("paceline.verify.proof.inputs_of", lambda output: NO_INPUTS)
    control = verify(llm, sources(), max_tokens=16, samples=4)
    assert control.plain_distribution is not None
    assert not control.plain_distribution.holds
    assert not control.holds


def test_plain_decoding_goes_on_with_the_source_of_the_output(llm: LLM) -> None:
    """After a near tie the text so far is what the output began with, and no new source."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    (found,) = llm.generate(sources()[:1], params)
    text = list(found.outputs[0].token_ids)
    go_on = plain_from(llm, found.prompt_token_ids, params, inputs_of(found))
    assert [*text[:5], *go_on(text[:5])] == text
    others = [Inputs(encoder_tokens=other) for other in sources()[1:]]
    gone = [plain_from(llm, found.prompt_token_ids, params, other)(text[:5]) for other in others]
    assert any([*text[:5], *tokens] != text for tokens in gone), "the control: other sources"
