"""Texts that cross the length at which rotary angles change: equal to transformers', whatever is drafted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
import torch
from transformers import AutoModelForCausalLM

from paceline import LLM, SamplingParams
from paceline.errors import PromptError
from paceline.models.passes.compiled_decoder import CompiledDecoder
from paceline.tree import Scores

BORDER, NEW = 32, 14
LONGROPE = {"short_factor": [1.0] * 16, "long_factor": [1.0 + i / 3 for i in range(16)], "attention_factor": 1.1}
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": BORDER, **LONGROPE
    },
}  # fmt: skip
TEXT = torch.randint(4, 400, (60,), generator=torch.Generator().manual_seed(3)).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
HIDDEN = {"compiled": 64, "operators": 40}  # the second does not fill vectors


def shape(kind: str, passes: str) -> dict[str, Any]:
    sizes = {"hidden_size": HIDDEN[passes], "head_dim": 32, "intermediate_size": 96, "initializer_range": 0.3}
    return sizes | {"rope_parameters": ROPES[kind], "max_position_embeddings": BORDER if kind == "dynamic" else 256}


MODELS = [(kind, passes) for kind in ROPES for passes in HIDDEN]


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, LLM]:
    kind, passes = request.param
    folder = tiny_checkpoint.write(tmp_path_factory.mktemp(kind), **shape(kind, passes))
    llm = LLM(str(folder), speculative_config=None, max_num_batched_tokens=16, threads=1)
    assert isinstance(llm.runner.passes, CompiledDecoder) is (passes == "compiled")
    return kind, folder, llm


@cache
def expected(kind: str, folder: Path, length: int) -> list[int]:
    """transformers' tokens: the prompt in one pass; then one token at a time, or for longrope whole texts again."""
    prompt = TEXT[:length]
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        model(torch.tensor([[1]]))  # angles of an earlier text are forgotten
        if kind == "dynamic":
            out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
            return out[0, len(prompt) :].tolist()
        text = list(prompt)
        for _ in range(NEW):
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params)]


def prompts_of(kind: str) -> list[list[int]]:
    return [TEXT[:length] for length in ((35, 45) if kind == "dynamic" else (20, 31, 32, 40))]


OTHERS = ["token_recycling", "layer_skip", "quantized_copy", "specmquant", "aded"]
EVERY = [(model, drafts) for model in MODELS for drafts in ("model", "ngram")]
EVERY += [((kind, "compiled"), drafts) for kind in ROPES for drafts in OTHERS]


@pytest.mark.parametrize(("made", "drafts"), EVERY, indirect=["made"], ids=map(str, EVERY))
def test_drafted_texts_are_those_of_transformers(made: Any, drafts: str) -> None:
    kind, folder, llm = made
    prompts = prompts_of(kind)
    right = [expected(kind, folder, len(prompt)) for prompt in prompts]
    model = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 5}
    other = llm.with_speculative_config(model if drafts == "model" else drafts)
    assert tokens(llm, prompts) == right
    assert tokens(other, prompts) == right
    assert [tokens(other, [prompt])[0] for prompt in prompts] == right
    if drafts == "model":
        assert other.generate(prompts[0], GREEDY)[0].metrics.mean_acceptance_length > 2


@pytest.mark.parametrize("made", [("longrope", passes) for passes in HIDDEN], ids="-".join, indirect=True)
def test_best_tokens_of_the_short_angles_would_show(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the right logits beside the best tokens of angles that no longer hold."""
    kind, folder, llm = made
    runner: Any = llm.runner
    real = type(runner).with_long_rows

    def stale(self: Any, scores: Scores, *others: Any) -> Scores:
        best = scores.logits.argmax(-1).tolist()
        return replace(real(self, scores, *others), best=best)

    monkeypatch.setattr(type(runner), "with_long_rows", stale)
    other = llm.with_speculative_config({"method": "draft_model", "model": str(folder), "num_speculative_tokens": 5})
    assert tokens(other, prompts_of(kind)[:3]) != [
        expected(kind, folder, len(prompt)) for prompt in prompts_of(kind)[:3]
    ]


def test_a_prompt_within_the_border_of_dynamic_angles_ends_there(made: Any) -> None:
    kind, _, llm = made
    prompt = TEXT[:20]
    if kind == "longrope":
        assert len(tokens(llm, [prompt])[0]) == NEW
        return
    [out] = llm.generate(prompt, replace(GREEDY, max_tokens=None))
    assert (len(out.outputs[0].token_ids), out.outputs[0].finish_reason) == (BORDER + 1 - 20, "length")
    with pytest.raises(PromptError, match=r"max_tokens must be at most 13 .* 20 tokens, got 14: .* dynamic"):
        llm.generate(prompt, replace(GREEDY, max_tokens=14))
