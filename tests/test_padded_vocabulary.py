"""Ids that are no tokens of the tokenizer are never generated, although the model has the largest logits for them.

The right tokens are those of transformers where these ids are suppressed; transformers itself generates them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_padded import END, ROWS, TOKENS, write
from transformers import AutoModelForCausalLM

from benchmarks.stand_ins import written_head
from paceline import LLM, SamplingParams
from paceline.errors import CheckpointError, ConfigError, PromptError
from paceline.models import load_runner
from paceline.models.heads import HeadConfig
from paceline.search import Branch
from paceline.tree import EMPTY_TREE, TokenTree

HOLES = (65, 66, 90, 200, 255)
PROMPTS = ["abc abc abc", "x"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.5, seed=3, n=4, max_tokens=24, ignore_eos=True)
OPEN: dict[str, Any] = {"dtype": "float32", "threads": 1, "profile": False}
KINDS: dict[str, dict[str, Any]] = {"head": {}, "tied": {"tied": True}, "holes": {"holes": HOLES}}
ABSENT = {"head": (), "tied": (), "holes": HOLES}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp(kind), **KINDS[kind])


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, speculative_config=None, **OPEN)


def of_transformers(folder: Path, ids: list[int], suppressed: list[int] | None) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    given = torch.tensor([ids])
    made = model.generate(
        given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=24, eos_token_id=None,
        pad_token_id=END, suppress_tokens=suppressed,
    )  # fmt: skip
    found: list[int] = made[0, len(ids) :].tolist()
    return found


def tokens(llm: LLM, params: SamplingParams = GREEDY, **more: Any) -> list[list[int]]:
    found = llm.generate(PROMPTS, params, **more)
    assert not [one.error for request in found for one in request.outputs if one.error]
    return [one.token_ids for request in found for one in request.outputs]


def test_the_tokens_are_those_of_transformers_without_these_ids(folder: Path, kind: str, llm: LLM) -> None:
    absent = [*ABSENT[kind], *range(TOKENS, ROWS)]
    for text, found in zip(PROMPTS, tokens(llm), strict=True):
        ids = llm.tokenizer.encode(text)
        assert found == of_transformers(folder, ids, absent)
        assert not set(absent).isdisjoint(of_transformers(folder, ids, None)), "transformers generates them"


def assert_tokens(found: list[list[int]], kind: str) -> None:
    every = {token for text in found for token in text}
    assert max(every) < TOKENS
    assert every.isdisjoint(ABSENT[kind])


DRAFTS: list[Any] = ["ngram", "suffix", "token_recycling", {"method": "draft_model", "model": None}]


def test_no_draft_changes_that(folder: Path, kind: str, llm: LLM) -> None:
    plain, drawn = tokens(llm), tokens(llm, SAMPLED)
    for given in DRAFTS:
        config = {**given, "model": str(folder)} if isinstance(given, dict) else given
        drafting = llm.with_speculative_config(config)
        assert tokens(drafting) == plain, given
        found = tokens(drafting, SAMPLED)
        assert_tokens(found, kind)
        if config == "ngram":
            assert found == drawn


def test_searches_steering_and_structured_outputs_neither(llm: LLM, kind: str) -> None:
    many = [
        tokens(llm, search={"method": "beam", "beam_width": 3}),
        tokens(llm, SamplingParams(temperature=0.0, max_tokens=8, steering={"method": "cfg", "guidance_scale": 2.0})),
        tokens(llm, SamplingParams(temperature=1.5, seed=1, max_tokens=24, structured_outputs={"regex": "[a-z]{9}"})),
    ]
    for found in many:
        assert_tokens(found, kind)


@pytest.mark.parametrize("obeyed", [True, False])
def test_mixtures_of_drafts_hold_tokens_that_the_rules_allow(
    llm: LLM, kind: str, obeyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control is a search that does not ask them."""
    fed, inner = [], Branch.mixed

    def mixed(self: Branch, mixture: Mapping[int, float]) -> Branch:
        fed.append(set(mixture))
        return inner(self, mixture)

    monkeypatch.setattr(Branch, "mixed", mixed)
    if not obeyed:
        unruled = "paceline.search.methods.superposed.shaped"
        monkeypatch.setattr(unruled, lambda _, logits: (logits.log_softmax(-1), {}))
    letters = {llm.tokenizer.encode(letter)[0] for letter in "defg"}
    bounds: list[tuple[dict[str, Any], set[int]]] = [
        ({}, set(range(TOKENS)) - set(ABSENT[kind])),
        ({"structured_outputs": {"regex": "[d-g]{6}"}}, letters),
        ({"bad_words": ["d", "e"]}, set(range(TOKENS)) - set(ABSENT[kind]) - set(llm.tokenizer.encode("de"))),
    ]
    for more, allowed in bounds:
        fed.clear()
        llm.generate("de", SamplingParams(temperature=0.0, max_tokens=6, **more), search="superposed")
        if kind == "holes" or obeyed or "structured_outputs" in more:
            assert all(one <= allowed for one in fed) == obeyed
        assert fed


def test_logprobs_are_those_without_the_rows_beyond(folder: Path, llm: LLM) -> None:
    """Ids among the tokens have logprobs of the model, as have tokens that a rule forbids."""
    (request,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=1, logprobs=5))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        row = model(torch.tensor([llm.tokenizer.encode(PROMPTS[0])])).logits[0, -1, :TOKENS].log_softmax(-1)
    (found,) = request.outputs[0].logprobs
    assert sorted(found) == sorted({*row.topk(5).indices.tolist(), *request.outputs[0].token_ids})
    for token, one in found.items():
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)


@pytest.mark.parametrize(
    "given", [{"allowed_token_ids": [97, 0]}, {"logit_bias": {0: 1.0}}, {"stop_token_ids": [0]}], ids=str
)
@pytest.mark.parametrize("beyond", [True, False])
def test_parameters_that_name_such_an_id_are_rejected(llm: LLM, kind: str, given: dict[str, Any], beyond: bool) -> None:
    (name,) = given
    ids = [TOKENS, ROWS - 1] if beyond else ABSENT[kind]
    for wrong in ids:
        value = {wrong: 1.0} if name == "logit_bias" else [97, wrong]
        rule = rf"hold token ids in 0\.\.{TOKENS - 1}" if beyond else "hold ids of the tokenizer's tokens"
        with pytest.raises(ConfigError, match=rf"{name} must {rule}, got {wrong}"):
            llm.generate("a", SamplingParams(max_tokens=1, **{name: value}))
    llm.generate("a", SamplingParams(max_tokens=1, **given))
    with pytest.raises(PromptError, match=rf"integers in 0\.\.{TOKENS - 1}, got {TOKENS}"):
        llm.generate({"prompt_token_ids": [97, TOKENS]}, GREEDY)


@pytest.mark.parametrize("way", ["compiled", "eager", "strict", "int8", "transformers"])
def test_every_runner_leaves_the_rows_out(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path)
    more: dict[str, Any] = {
        "strict": {"exactness": "strict"}, "int8": {"quantization": "int8"}, "transformers": {"native": False},
    }.get(way, {})  # fmt: skip
    if way == "eager":
        monkeypatch.setattr("paceline.models.runners.native.fits", lambda *_, **__: False)
    whole, cut = (load_runner(folder, dtype="float32", tokens=n, **more) for n in (None, TOKENS))
    rows = []
    for runner in (whole, cut):
        cache = runner.open()
        runner.extend([cache], [[97, 98, 99]])
        rows.append(runner.score([cache], [100], [EMPTY_TREE]))
    assert rows[1].logits.shape == (1, TOKENS)
    assert torch.allclose(rows[0].logits[:, :TOKENS], rows[1].logits, atol=1e-4)
    assert int(rows[0].logits.argmax()) >= TOKENS > int(rows[1].logits.argmax())
    for found in rows:
        assert found.best is None or list(found.best) == found.logits.argmax(-1).tolist()
    assert (cut.info.vocab_size, cut.info.stored_rows) == (TOKENS, ROWS)
    assert whole.info.stored_rows is None
    assert cut.info.fingerprint == whole.info.fingerprint


@pytest.mark.parametrize("way", ["native", "transformers"])
def test_a_token_without_a_row_is_named(tmp_path: Path, way: str) -> None:
    """Passes would read from beyond the embedding."""
    runner = load_runner(write(tmp_path), dtype="float32", tokens=TOKENS, native=way == "native")
    embedded = TOKENS if way == "native" else ROWS  # transformers keeps all rows
    message = rf"was fed token {{}}, and its ids lie in 0\.\.{embedded - 1}; use a model"
    cache = runner.open()
    runner.extend([cache], [[97, embedded - 1]])
    for wrong in (embedded, -1):
        with pytest.raises(ConfigError, match=message.format(wrong)):
            runner.extend([cache], [[98, wrong]])
        with pytest.raises(ConfigError, match=message.format(wrong)):
            runner.score([cache], [wrong], [EMPTY_TREE])
        with pytest.raises(ConfigError, match=message.format(wrong)):
            runner.score([cache], [98], [TokenTree.chain([97, wrong])])
    assert runner.score([cache], [98], [TokenTree.chain([97])]).logits.isfinite().all()


def test_a_draft_model_that_lacks_a_token_of_the_text_is_told_so(tmp_path: Path) -> None:
    folder, small = write(tmp_path / "target"), write(tmp_path / "draft", vocab_size=TOKENS - 20, pad_token_id=0)
    llm = LLM(folder, speculative_config={"method": "draft_model", "model": str(small)}, **OPEN)
    low = SamplingParams(temperature=0.0, max_tokens=8, allowed_token_ids=[97, 98, 99])
    found, beside = llm.generate([[97, TOKENS - 5], [97, 98]], low)
    (why,) = found.metrics.dropped_drafters.values()
    assert f"the text holds token {TOKENS - 5}, and draft model" in why
    assert f"has only {TOKENS - 20} tokens" in why
    assert not beside.metrics.dropped_drafters
    assert found.outputs[0].error is beside.outputs[0].error is None


def test_an_end_token_is_a_token_wherever_it_is_declared(tmp_path: Path) -> None:
    """A tokenizer that does not know it would otherwise have texts without an end."""
    folder, end = write(tmp_path), 300
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    llm = LLM(folder, speculative_config=None, **OPEN)
    assert llm.runner.info.vocab_size == end + 1
    params = SamplingParams(temperature=0.0, max_tokens=4, logit_bias={end: 100.0})
    assert [one.outputs[0].finish_reason for one in llm.generate(PROMPTS, params)] == ["stop", "stop"]
    with pytest.raises(ConfigError, match="logit_bias must hold ids of the tokenizer's tokens, got 299"):
        llm.generate("a", SamplingParams(max_tokens=1, logit_bias={299: 1.0}))


@pytest.mark.parametrize("size", [ROWS, TOKENS])
@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_heads_fit_that_were_made_for_all_rows_or_for_the_tokens(tmp_path: Path, method: Any, size: int) -> None:
    folder = write(tmp_path)
    layer = {"num_attention_heads": 2, "intermediate_size": 96, "max_position_embeddings": 128}
    more: dict[str, Any] = {"num_heads": 2} if method == "medusa" else {"layer": layer}
    config = HeadConfig(method=method, hidden_size=64, vocab_size=size, draft_vocab_size=size, **more)
    head = {"method": method, "model": written_head(config)}
    llm = LLM(folder, speculative_config=head, **OPEN)
    (found,) = llm.generate(PROMPTS[0], GREEDY)
    assert found.metrics.num_draft_tokens
    assert not found.metrics.dropped_drafters
    assert [found.outputs[0].token_ids] == tokens(llm.with_speculative_config(None))[:1]


def test_heads_of_another_size_do_not_fit(tmp_path: Path) -> None:
    config = HeadConfig(method="medusa", hidden_size=64, vocab_size=ROWS - 1, draft_vocab_size=ROWS - 1, num_heads=2)
    with pytest.raises(CheckpointError, match=f"is for vocab_size {ROWS - 1}, but .* has {TOKENS}"):
        LLM(write(tmp_path), speculative_config={"method": "medusa", "model": written_head(config)}, **OPEN)
