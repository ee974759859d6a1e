"""Candidates are ranked as if each had been scored alone, by the model, another one, a function or a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError, PacelineError, UnsupportedModelError
from paceline.search.scoring import candidate_logprobs
from paceline.search.scoring.uni_encoder import UniEncoder, candidate_mask
from tests.tiny_tokenizers import wordpiece

PROMPT = "def fib(n):"
SAMPLED = SamplingParams(n=8, temperature=1.2, max_tokens=16, seed=7)


def alone(llm: LLM, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of tokens behind a prompt, by a pass of their own."""
    cache = llm.runner.open()
    logits = llm.runner.extend([cache], [[*prompt, *tokens]], all_logits=True).logits.float().log_softmax(-1)
    llm.runner.release(cache)
    return torch.stack([logits[len(prompt) - 1 + i, token] for i, token in enumerate(tokens)])


def test_one_pass_scores_every_candidate_as_if_alone(llm: LLM) -> None:
    prompt = llm.tokenizer.encode(PROMPT)
    candidates = [[5, 6, 7], [5, 6, 8, 9], [30], [5, 6, 7], [40] * 300, [41] * 300]
    calls: list[int] = []
    score = llm.runner.score

    def counted(*args: Any, **named: Any) -> Any:
        calls.append(1)
        return score(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.runner, "score", counted)
        found = candidate_logprobs(llm.runner, prompt, candidates[:4])
        assert len(calls) == 1
        found = candidate_logprobs(llm.runner, prompt, candidates)
        assert len(calls) == 3, "what does not fit into a pass takes another"
    for one, tokens in zip(found, candidates, strict=True):
        torch.testing.assert_close(one, alone(llm, prompt, tokens), atol=2e-4, rtol=1e-4)
    wrong = alone(llm, [*prompt, 5], [6, 7])
    assert (found[0][1:] - wrong).abs().max() < 1e-3 < (found[0][:2] - wrong).abs().max()


def test_a_runner_without_trees_scores_a_sequence_for_each(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, candidates = llm.tokenizer.encode(PROMPT), [[5, 6, 7], [5, 6, 8, 9], [30], []]
    whole = candidate_logprobs(llm.runner, prompt, candidates)
    monkeypatch.setattr(llm.runner, "capabilities", replace(llm.runner.capabilities, trees=False))
    cache = llm.runner.open()
    llm.runner.extend([cache], [prompt])
    before = llm.runner.memory.used  # type: ignore[attr-defined]
    for one, other in zip(candidate_logprobs(llm.runner, prompt, candidates, cache=cache), whole, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)
    assert llm.runner.memory.used == before  # type: ignore[attr-defined]
    assert cache.length == len(prompt)
    llm.runner.release(cache)


def test_the_likeliest_sample_comes_first_and_equal_ones_count_once(llm: LLM) -> None:
    (plain,) = llm.generate(PROMPT, SAMPLED)
    (ranked,) = llm.generate(PROMPT, SAMPLED, search={"method": "sample_and_rank", "num_samples": 8})
    ranked.raise_for_error()
    prompt = ranked.prompt_token_ids
    assert prompt is not None
    means = {tuple(one.token_ids): float(alone(llm, prompt, one.token_ids).mean()) for one in plain.outputs}
    best = sorted(means, key=lambda tokens: -means[tokens])
    assert [tuple(one.token_ids) for one in ranked.outputs] == best != list(means)
    assert [one.score for one in ranked.outputs] == pytest.approx([means[tokens] for tokens in best], abs=1e-3)
    assert ranked.search is not None
    lengths = sum(len(one.token_ids) for one in ranked.outputs)
    assert ranked.search.num_tokens > lengths, "the ranking's rows count"
    (single,) = llm.generate(PROMPT, SAMPLED, search={"method": "sample_and_rank", "num_samples": 1})
    assert single.outputs[0].token_ids == plain.outputs[0].token_ids


def length(texts: Sequence[str]) -> list[float]:
    return [float(len(text)) for text in texts]


def test_functions_and_other_models_rank(llm: LLM) -> None:
    for scorer in (length, "tests.search.test_sample_and_rank:length"):
        (ranked,) = llm.generate(PROMPT, SAMPLED, search={"method": "sample_and_rank", "scorer": scorer})
        sizes = [len(one.text) for one in ranked.outputs]
        assert sizes == sorted(sizes, reverse=True)
    search = {"method": "sample_and_rank", "num_samples": 8, "scorer": {"model": "bundled/draft"}}
    (ranked,) = llm.generate(PROMPT, SAMPLED, search=search)
    ranked.raise_for_error()
    judge = LLM("bundled/draft", dtype="float32", speculative_config=None)
    prompt = judge.tokenizer.encode(PROMPT)
    expected = [
        float(alone(judge, prompt, judge.tokenizer.encode(PROMPT + one.text)[len(prompt) :]).mean())
        for one in ranked.outputs
    ]
    assert [one.score for one in ranked.outputs] == pytest.approx(expected, abs=1e-3)
    (own,) = llm.generate(PROMPT, SAMPLED, search={"method": "sample_and_rank", "num_samples": 8})
    assert [one.token_ids for one in own.outputs] != [one.token_ids for one in ranked.outputs]


# ------------------------------------------------------------------------------------------------ encoders


def encoder(folder: Path, labels: int = 1, *, pooler: bool = False) -> Path:
    """A random checkpoint of BertForSequenceClassification, as it is or without its pooler."""
    torch.manual_seed(labels)
    tokenizer = wordpiece()
    config = transformers.BertConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=96, num_labels=labels, initializer_range=0.3,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if pooler or ".pooler." not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", cls_token="<s>", sep_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoder(tmp_path_factory.mktemp("encoder"))


def with_mask(folder: Path, mask: str) -> UniEncoder:
    model = UniEncoder.load(folder, "tiny")
    model.mask = mask
    return model


CONTEXT, CANDIDATES = [1, 9, 8, 7, 2], [[1, 20, 21, 2], [1, 30, 2], [1, 20, 5, 6, 2]]


def encoded(model: UniEncoder, tokens: Sequence[int], first: int, kinds: Sequence[int]) -> torch.Tensor:
    """States of one text under full attention, by transformers alone."""
    places = torch.arange(first, first + len(tokens))[None]
    states: torch.Tensor = model.encoder(
        input_ids=torch.tensor([list(tokens)]), position_ids=places, token_type_ids=torch.tensor([list(kinds)])
    ).last_hidden_state[0]
    return states


@torch.inference_mode()
def test_one_candidate_is_a_cross_encoder(folder: Path) -> None:
    model = with_mask(folder, "arrow")
    for one in CANDIDATES:
        states = encoded(model, [*CONTEXT, *one], 0, [0] * 5 + [1] * len(one))
        torch.testing.assert_close(model(CONTEXT, [one])[0], model.head(states[5:].mean(0))[0], atol=1e-5, rtol=1e-5)
    together = model(CONTEXT, CANDIDATES)
    assert (together[0] - model(CONTEXT, CANDIDATES[:1])[0]).abs() > 1e-4, "the context sees all candidates"


@torch.inference_mode()
def test_permuted_candidates_have_permuted_scores(folder: Path) -> None:
    model = with_mask(folder, "arrow")
    scores = model(CONTEXT, CANDIDATES)
    torch.testing.assert_close(model(CONTEXT, [CANDIDATES[i] for i in (2, 0, 1)]), scores[[2, 0, 1]])
    assert len({round(float(one), 4) for one in scores}) == 3


@torch.inference_mode()
def test_under_one_way_and_diagonal_masks_every_score_is_its_own(folder: Path) -> None:
    for mask in ("one_way", "diagonal"):
        model = with_mask(folder, mask)
        each = torch.cat([model(CONTEXT, [one]) for one in CANDIDATES])
        torch.testing.assert_close(model(CONTEXT, CANDIDATES), each, atol=1e-5, rtol=1e-5)
    for one, score in zip(CANDIDATES, each, strict=True):  # of a bi-encoder: the context does not count
        states = encoded(model, one, 5, [1] * len(one))
        torch.testing.assert_close(score, model.head(states.mean(0))[0], atol=1e-5, rtol=1e-5)
    arrow = candidate_mask([2, 1, 1])
    assert arrow.tolist() == [[True] * 4, [True] * 4, [True, True, True, False], [True, True, False, True]]
    assert candidate_mask([2, 1, 1], "one_way")[0].tolist() == [True, True, False, False]


def test_an_ordinary_cross_encoder_is_rejected_for_one_pass_and_ranks_by_pairs(llm: LLM, tmp_path: Path) -> None:
    """Its head was trained on the pooler's output. Control: without a pooler the same weights are a Uni-Encoder."""
    ordinary = encoder(tmp_path / "ordinary", pooler=True)
    search: dict[str, Any] = {"method": "sample_and_rank", "scorer": {"model": str(ordinary), "one_pass": True}}
    with pytest.raises(UnsupportedModelError, match="must have no pooler with one_pass, got bert") as caught:
        llm.generate(PROMPT, SAMPLED, search=search)
    assert "\n" not in str(caught.value)
    (ranked,) = llm.generate(PROMPT, SAMPLED, search={**search, "scorer": {"model": str(ordinary)}})
    judge = transformers.BertForSequenceClassification.from_pretrained(ordinary).eval()
    pair = transformers.AutoTokenizer.from_pretrained(ordinary)
    with torch.inference_mode():
        wanted = [float(judge(**pair(PROMPT, one.text, return_tensors="pt")).logits) for one in ranked.outputs]
    assert [one.score for one in ranked.outputs] == pytest.approx(wanted, abs=1e-4)
    same = UniEncoder.load(encoder(tmp_path / "same"), "same")
    assert torch.equal(same.head.weight, judge.classifier.weight)
    assert torch.equal(same.head.bias, judge.classifier.bias)
    own, other = same.encoder.state_dict(), judge.bert.state_dict()
    assert {name for name in other if name not in own} == {"pooler.dense.weight", "pooler.dense.bias"}
    assert all(torch.equal(own[name], other[name]) for name in own)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classifier.bias": None}, "lacks weights: classifier.bias"),
        ({"bert.encoder.layer.1.output.dense.weight": None}, "lacks weights: "),
        ({"num_labels": 3}, "is bert with 3 outputs; one_pass needs bert with one"),
    ],
    ids=str,
)
def test_incomplete_uni_encoders_get_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = encoder(tmp_path, labels=change.get("num_labels", 1))
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if k not in change}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(PacelineError, match=message) as caught:
        UniEncoder.load(folder, "tiny")
    assert "\n" not in str(caught.value)


def test_checkpoints_rank(llm: LLM, folder: Path, tmp_path: Path) -> None:
    two = encoder(tmp_path / "two", labels=2, pooler=True)
    pair = transformers.AutoTokenizer.from_pretrained(two)
    judge = transformers.BertForSequenceClassification.from_pretrained(two).eval()
    search = {"method": "sample_and_rank", "num_samples": 8}
    (ranked,) = llm.generate(PROMPT, SAMPLED, search={**search, "scorer": {"model": str(two), "label": 1}})
    ranked.raise_for_error()
    expected = []
    for one in ranked.outputs:
        with torch.inference_mode():
            logits = judge(**pair(PROMPT, one.text, return_tensors="pt")).logits
        expected.append(float(logits.log_softmax(-1)[0, 1]))
    assert [one.score for one in ranked.outputs] == pytest.approx(expected, abs=1e-4)
    assert len(set(expected)) > 4
    (ranked,) = llm.generate(PROMPT, SAMPLED, search={**search, "scorer": {"model": str(folder), "one_pass": True}})
    together = UniEncoder.load(folder, "tiny").scores(PROMPT, [one.text for one in ranked.outputs])
    assert [one.score for one in ranked.outputs] == pytest.approx(together, abs=1e-4)
    with pytest.raises(ConfigError, match="scorer label must be one of the outputs"):
        llm.generate(PROMPT, SAMPLED, search={**search, "scorer": {"model": str(two)}})


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"scorer": {"model": 3}}, "scorer model must be a folder or hub id"),
        ({"scorer": {"modle": "x"}}, "modle"),
        ({"scorer": {"model": "bundled/draft", "one_pass": True}}, "one_pass must be left out"),
        ({"scorer": {"model": "bundled/nothing"}}, "nothing"),
        ({"scorer": "no.such:thing"}, "scorer: cannot import"),
        ({"num_samples": 0}, "num_samples must be an integer"),
    ],
)
def test_bad_options_get_one_line(llm: LLM, search: dict[str, Any], message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        llm.generate(PROMPT, SAMPLED, search={"method": "sample_and_rank", **search})


def test_a_function_may_lie_in_the_current_folder(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_scores.py").write_text("def length(texts):\n    return [float(len(text)) for text in texts]\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (found,) = llm.generate(PROMPT, SAMPLED, search={"method": "sample_and_rank", "scorer": "own_scores:length"})
    assert found.outputs[0].text == max((one.text for one in found.outputs), key=len)
    assert found.outputs[0].score == len(found.outputs[0].text)


def test_a_function_that_gives_too_few_numbers_is_an_error_of_the_request(llm: LLM) -> None:
    search = {"method": "sample_and_rank", "scorer": lambda texts: [1.0]}
    (found,) = llm.generate(PROMPT, SAMPLED, search=search)
    assert "scorer must give a finite number for each of" in str(found.outputs[0].error)
