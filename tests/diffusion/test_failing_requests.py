"""What code of one request raises, wherever it is called, ends that request and no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, RequestOutput, SamplingParams
from paceline.config import ThinkParams
from paceline.diffusion import ConfiguredMethod
from paceline.diffusion.outputs import CanvasChunk
from tests.diffusion.test_failing_rules import Raising
from tests.tiny_diffusion import write

MISTAKE = "a mistake of a user's"
MARKED = 2
"""A token that no text but the failing prompt holds."""
FAILING = [MARKED, 14, 8, 11]
PROMPTS: list[str | list[int]] = ["a1: ", FAILING, "b3: "]
THINK = {"max_tokens": 4}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "canvas": {"canvas": [2, "ab"]},
    "stop": {"stop": ["zz"]},
    "think": {"think": {**THINK, "check_prompt": "1:"}},
    "think and canvas": {"think": {**THINK, "check_prompt": "1:"}, "canvas": [2, "ab"]},
}

Patch = Callable[[pytest.MonkeyPatch, LLM], None]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = write(tmp_path_factory.mktemp("sdar"), "sdar")
    return LLM(folder, diffusion_config="leftmost", dtype="float32", seed=0)


def params(asked: str, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 7, "ignore_eos": True, **ASKED[asked], **more})


def told(out: RequestOutput) -> list[Any]:
    return [(one.text, one.token_ids, one.reasoning, one.finish_reason, one.error) for one in out.outputs]


def decoding(patch: pytest.MonkeyPatch, llm: LLM) -> None:
    """A tokenizer that cannot decode a token of the failing prompt."""
    inner = llm.tokenizer.decode

    def decode(ids: Any, *more: Any) -> str:
        if MARKED in list(ids):
            raise LookupError(MISTAKE)
        return inner(ids, *more)

    patch.setattr(llm.tokenizer, "decode", decode)


def making(patch: pytest.MonkeyPatch, llm: LLM) -> None:
    """A method that cannot be made for the failing prompt."""
    inner = ConfiguredMethod.parts

    def parts(self: Any, denoiser: Any, canvas: Any, **more: Any) -> Any:
        if canvas.tokens[0] == MARKED:
            raise LookupError(MISTAKE)
        return inner(self, denoiser, canvas, **more)

    patch.setattr(ConfiguredMethod, "parts", parts)


def choosing(patch: pytest.MonkeyPatch, llm: LLM) -> None:
    """A rule that fails in the third round of the failing prompt."""
    inner = ConfiguredMethod.parts

    def parts(self: Any, denoiser: Any, canvas: Any, **more: Any) -> Any:
        made = inner(self, denoiser, canvas, **more)
        if canvas.tokens[0] == MARKED:
            made.transition.commit = Raising(made.transition.commit, 2)
        return made

    patch.setattr(ConfiguredMethod, "parts", parts)


WHERE: dict[str, tuple[Patch, str]] = {
    "decoding": (decoding, f"the text could not be made: the tokenizer failed (LookupError: {MISTAKE})"),
    "making": (making, f"the diffusion method failed (LookupError: {MISTAKE})"),
    "choosing": (choosing, f"a rule of the diffusion method failed (LookupError: {MISTAKE})"),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("where", WHERE)
def test_a_request_that_fails_in_a_batch_fails_alone(
    llm: LLM, where: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [told(llm.generate(prompt, params(asked))[0]) for prompt in PROMPTS]
    assert [found[0][3:] for found in alone] == [("length", None)] * 3, "nothing fails by itself"
    patch, message = WHERE[where]
    patch(monkeypatch, llm)
    found = llm.generate(PROMPTS, params(asked))
    assert [told(found[0]), told(found[2])] == [alone[0], alone[2]]
    (failed,) = found[1].outputs
    assert (failed.finish_reason, failed.error) == ("error", message)
    written = {"making": 0, "choosing": 2, "decoding": 0}[where]  # a text is read after the first pass
    tokens = failed.reasoning_token_ids if "think" in asked else failed.token_ids
    assert len(tokens) == (4 if (where, asked) == ("choosing", "canvas") else written), "up to the first open slot"


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("where", WHERE)
def test_a_stream_that_fails_ends_with_the_error(
    llm: LLM, where: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch, message = WHERE[where]
    patch(monkeypatch, llm)
    chunks = list(llm.stream(FAILING, params(asked)))
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["error"]
    (output,) = chunks[-1].output.outputs
    assert output.error == message
    assert "".join(chunk.text for chunk in chunks) == output.text
    assert [token for chunk in chunks for token in chunk.token_ids] == output.token_ids
    reasoning = "".join(chunk.reasoning for chunk in chunks if isinstance(chunk, CanvasChunk))
    assert reasoning == (output.reasoning or "")


def test_thoughts_whose_answer_cannot_be_begun_are_kept(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer reads the check prompt of one request once, when the request is looked at."""
    asked = [params("think", think=ThinkParams(max_tokens=4, check_prompt=text)) for text in ("1:", "2:", "1:")]
    alone = [told(out) for out in llm.generate(PROMPTS, asked)]
    inner, seen = llm.tokenizer.encode, []

    def encode(text: str, **more: Any) -> list[int]:
        seen.append(text)
        if text == "2:" and seen.count(text) > 1:
            raise LookupError(MISTAKE)
        return inner(text, **more)

    monkeypatch.setattr(llm.tokenizer, "encode", encode)
    found = [told(out) for out in llm.generate(PROMPTS, asked)]
    assert [found[0], found[2]] == [alone[0], alone[2]]
    message = f"the answer to the thoughts failed (LookupError: {MISTAKE})"
    assert found[1] == [("", [], alone[1][0][2], "error", message)]
    assert alone[1][0][2]


def test_an_output_that_fails_leaves_the_others_of_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    three: dict[str, Any] = {"temperature": 1.0, "n": 3, "seed": 5}
    [whole] = llm.generate(PROMPTS[0], params("plain", **three))
    inner, made = ConfiguredMethod.parts, []

    def parts(self: Any, *given: Any, **more: Any) -> Any:
        made.append(inner(self, *given, **more))
        if len(made) == 3:  # the first output's are made when the request is looked at, too
            made[-1].transition.commit = Raising(made[-1].transition.commit, 2)
        return made[-1]

    monkeypatch.setattr(ConfiguredMethod, "parts", parts)
    chunks = list(llm.stream(PROMPTS[0], params("plain", **three)))
    found = told(chunks[-1].output)
    assert [found[0], found[2]] == [told(whole)[0], told(whole)[2]]
    assert found[1][3:] == ("error", WHERE["choosing"][1])
