"""Superposed decoding: one draft is greedy decoding, drafts begin with the likeliest tokens, scores are those of brute
force, and a mixture is computed as what it is.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lacking import without
from tiny_checkpoint import TARGET, TOKENIZER

from paceline import LLM, SamplingParams
from paceline.engine import RequestOutput
from paceline.errors import CapabilityError, ConfigError
from paceline.search import Branch, Found, Search, Steps
from paceline.search.methods.superposed import NGrams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = "Once upon a time"


def superposed(llm: LLM, how: SamplingParams = GREEDY, prompt: str = PROMPT, **options: Any) -> RequestOutput:
    (result,) = llm.generate(prompt, how, search={"method": "superposed", **options})
    result.raise_for_error()
    return result


def changed(n: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"n": n, "temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **more})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_draft_without_n_grams_is_greedy_decoding(dtype: str) -> None:
    llm = LLM(dtype=dtype, speculative_config=None)
    for prompt in (PROMPT, "def add(a, b):"):
        how = SamplingParams(temperature=0.0, max_tokens=40, logprobs=0)
        (plain,) = llm.generate(prompt, how)
        how.logprobs = None
        found = superposed(llm, how, prompt, num_drafts=1, alpha=0.0)
        assert found.outputs[0].token_ids == plain.outputs[0].token_ids
        assert found.outputs[0].finish_reason == plain.outputs[0].finish_reason
        rough = 1e-3 if dtype == "float32" else 0.3
        assert found.outputs[0].cumulative_logprob == pytest.approx(plain.outputs[0].cumulative_logprob, abs=rough)
        assert found.search is not None
        assert found.search.num_tokens == len(plain.outputs[0].token_ids)


class Mixtures(Search):
    """Feeds mixtures one after the other, and keeps the logits behind each."""

    name = "mixtures"
    fed: Sequence[dict[int, float]]
    logits: list[torch.Tensor]

    def steps(self, root: Branch) -> Steps[None]:
        branch, Mixtures.logits = root, []
        for one in Mixtures.fed:
            rows = yield [branch]
            Mixtures.logits.append(rows.logits[0])
            branch = branch.mixed(one)
        yield [branch]
        self.found = [Found(root.child(5, 0.0), 0.0)]


def behind(llm: LLM, fed: Sequence[dict[int, float]]) -> list[torch.Tensor]:
    Mixtures.fed = fed
    (result,) = llm.generate(PROMPT, GREEDY, search="tests.search.test_superposed:Mixtures")
    result.raise_for_error()
    return Mixtures.logits


def test_a_mixture_of_one_token_is_this_token_and_weights_count(llm: LLM) -> None:
    tokens = [30, 40, 50]
    logits = behind(llm, [{token: 1.0} for token in tokens])
    prompt = llm.tokenizer.encode(PROMPT)
    cache = llm.runner.open()
    plain = llm.runner.extend([cache], [[*prompt, *tokens]], all_logits=True).logits[len(prompt) - 1 :]
    llm.runner.release(cache)
    for one, other in zip(logits, plain, strict=False):
        torch.testing.assert_close(one, other.float(), atol=1e-3, rtol=1e-3)
    mixed = behind(llm, [{30: 0.5, 60: 0.5}, {40: 1.0}, {50: 1.0}])
    torch.testing.assert_close(mixed[0], logits[0])
    assert (mixed[1] - logits[1]).abs().max() > 0.1
    assert (mixed[2] - logits[2]).abs().max() > 1e-3, "what follows reads the mixture's keys and values"
    summed = behind(llm, [{30: 0.25, 60: 0.75}, {40: 1.0}])
    assert (summed[1] - mixed[1]).abs().max() > 1e-2


def test_a_familys_multiplier_of_embeddings_counts_once(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=6144, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, query_pre_attn_scalar=32, sliding_window=64, initializer_range=0.2,
        max_position_embeddings=128, bos_token_id=0, eos_token_id=3, pad_token_id=0,
    )  # fmt: skip
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    for name in TOKENIZER:
        shutil.copy(TARGET / name, tmp_path)
    gemma = LLM(str(tmp_path), dtype="float32", speculative_config=None)
    prompt, logits = gemma.tokenizer.encode(PROMPT), behind(gemma, [{30: 1.0}, {40: 1.0}])
    cache = gemma.runner.open()
    plain = gemma.runner.extend([cache], [[*prompt, 30, 40]], all_logits=True).logits[len(prompt) - 1 :]
    gemma.runner.release(cache)
    assert len(logits) == 2
    for one, other in zip(logits, plain, strict=False):
        torch.testing.assert_close(one, other.float(), atol=1e-3, rtol=1e-3)
    assert (logits[1] - plain[0]).abs().max() > 0.1


def test_the_drafts_begin_with_the_likeliest_tokens(llm: LLM) -> None:
    found = superposed(llm, changed(4, max_tokens=1), num_drafts=4, alpha=0.0)
    prompt = llm.tokenizer.encode(PROMPT)
    cache = llm.runner.open()
    logits = llm.runner.extend([cache], [prompt]).logits[0].float()
    llm.runner.release(cache)
    assert [one.token_ids[0] for one in found.outputs] == logits.topk(4).indices.tolist()
    model = (logits / 0.06).softmax(-1)
    kept = model.topk(12).values
    assert [one.score for one in found.outputs] == pytest.approx((kept / kept.sum()).log()[:4].tolist(), abs=1e-2)


def test_scores_are_those_of_brute_force(llm: LLM, tmp_path: Path) -> None:
    """Three steps found by hand: all extensions of all drafts, n-grams counted by looking through the texts."""
    file = tmp_path / "texts.txt"
    lines = ["Once upon a time there was a little girl.", "Once upon a time, in a big house, there lived a cat."]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    texts, prompt = [llm.tokenizer.encode(one) for one in lines], llm.tokenizer.encode(PROMPT)
    alpha, tau, weights = 0.4, 0.5, (0.2, 0.3, 0.1)

    def chance(text: list[int], token: int) -> float:
        total = 0.0
        for size, weight in enumerate(weights, 1):
            after = [t[i + size] for t in texts for i in range(len(t) - size) if t[i : i + size] == text[-size:]]
            total += weight * after.count(token) / len(after) if after else 0.0
        return total

    drafts: list[tuple[float, list[int]]] = [(0.0, [])]
    fed: list[dict[int, float]] = []
    for _ in range(3):
        row = behind(llm, [*fed, {5: 1.0}])[-1]
        kept = (row / tau).softmax(-1).topk(9)
        extended = []
        for total, tokens in drafts:
            chances = [chance([*prompt, *tokens], int(token)) for token in kept.indices]
            for p, token, other in zip(kept.values / kept.values.sum(), kept.indices, chances, strict=True):
                gain = (1 - alpha) * math.log(p) + (alpha * math.log(other) if other else -math.inf)
                gain = gain if any(chances) else (1 - alpha) * math.log(p) - 200
                extended.append((total + gain, [*tokens, int(token)]))
        drafts = sorted(extended, key=lambda one: -one[0])[:3]
        weight = torch.tensor([total for total, _ in drafts]).softmax(0)
        fed.append({})
        for share, (_, tokens) in zip(weight.tolist(), drafts, strict=True):
            fed[-1][tokens[-1]] = fed[-1].get(tokens[-1], 0.0) + share
    options = {"alpha": alpha, "mix_temperature": tau, "order_weights": weights, "texts": str(file)}
    found = superposed(llm, changed(3, max_tokens=3), **options)
    assert [one.token_ids for one in found.outputs] == [tokens for _, tokens in drafts]
    assert [one.score for one in found.outputs] == pytest.approx([total / 3 for total, _ in drafts], abs=1e-2)
    other = superposed(llm, changed(3, max_tokens=3), **{**options, "alpha": 0.0})
    assert [one.token_ids for one in other.outputs] != [one.token_ids for one in found.outputs]


def test_a_token_gains_by_the_model_and_by_the_n_grams(llm: LLM, tmp_path: Path) -> None:
    """Behind the prompt stands one token twice and another once; contexts of one token and of two say the same."""
    prompt, file, alpha = llm.tokenizer.encode(PROMPT), tmp_path / "texts.txt", 0.3
    twice, once = (llm.tokenizer.encode(PROMPT + end)[len(prompt)] for end in (" there", ","))
    file.write_text("\n".join([f"{PROMPT} there", f"{PROMPT} there", f"{PROMPT},"]) + "\n", encoding="utf-8")
    weights = (0.2, 0.3)
    how = {"order_weights": weights, "texts": str(file), "top_tokens": 1024, "mix_temperature": 1.0, "alpha": alpha}
    found = superposed(llm, changed(2, max_tokens=1), num_drafts=2, **how)
    kept = behind(llm, [{5: 1.0}])[0].softmax(-1).topk(1024)
    shares = dict(zip(kept.indices.tolist(), (kept.values / kept.values.sum()).tolist(), strict=True))
    expected = {
        token: (1 - alpha) * math.log(shares[token]) + alpha * math.log(sum(weights) * seen / 3)
        for token, seen in ((twice, 2), (once, 1))
    }
    assert {one.token_ids[0]: one.score for one in found.outputs} == pytest.approx(expected, abs=1e-3)


def drafts_by_hand(
    llm: LLM, steps: int, shares: Callable[[torch.Tensor], torch.Tensor]
) -> list[tuple[float, list[int]]]:
    """Three drafts without n-grams, likeliest first; the input of a step is the mean of their last tokens' embeddings,
    weighted by `shares` of their totals.
    """
    drafts: list[tuple[float, list[int]]] = [(0.0, [])]
    fed: list[dict[int, float]] = []
    for _ in range(steps):
        kept = behind(llm, [*fed, {5: 1.0}])[-1].softmax(-1).topk(9)
        extended = [
            (total + math.log(p), [*tokens, token])
            for total, tokens in drafts
            for p, token in zip((kept.values / kept.values.sum()).tolist(), kept.indices.tolist(), strict=True)
        ]
        drafts = sorted(extended, key=lambda one: -one[0])[:3]
        fed.append({})
        for share, (_, tokens) in zip(shares(torch.tensor([one for one, _ in drafts])).tolist(), drafts, strict=True):
            fed[-1][tokens[-1]] = fed[-1].get(tokens[-1], 0.0) + share
    return drafts


def test_drafts_count_in_the_mixture_by_their_totals(llm: LLM) -> None:
    expected = drafts_by_hand(llm, 5, lambda totals: totals.softmax(0))
    found = superposed(llm, changed(3, max_tokens=5), alpha=0.0, mix_temperature=1.0)
    assert [one.token_ids for one in found.outputs] == [tokens for _, tokens in expected]
    scores = [total / 5 for total, _ in expected]
    assert [one.score for one in found.outputs] == pytest.approx(scores, abs=2e-3)
    for wrong in (lambda totals: torch.full((3,), 1 / 3), lambda totals: (totals / 5).softmax(0)):
        others = [total / 5 for total, _ in drafts_by_hand(llm, 5, wrong)]
        assert max(abs(one - other) for one, other in zip(scores, others, strict=True)) > 2e-2


def test_drafts_cost_the_passes_of_one_and_keep_to_the_parameters(llm: LLM) -> None:
    found = superposed(llm, changed(3))
    assert found.search is not None
    assert found.search.num_tokens == found.search.num_passes == 12
    assert len({tuple(one.token_ids) for one in found.outputs}) == 3
    banned = found.outputs[0].token_ids[0]
    kept = superposed(llm, changed(3, logit_bias={banned: -100.0}))
    assert all(banned not in one.token_ids for one in kept.outputs)
    both = llm.generate([PROMPT, "def add(a, b):"], changed(3), search="superposed")
    assert [one.token_ids for one in both[0].outputs] == [one.token_ids for one in found.outputs]
    cut = superposed(llm, changed(3), budget_tokens=4)
    assert [len(one.token_ids) for one in cut.outputs] == [3, 3, 3]


def test_n_grams_count_what_follows() -> None:
    table = NGrams([[1, 2, 3], [1, 2, 4], [2, 3]], longest=2)
    assert table.chances([1, 2], [3, 4, 5], [0.5, 0.25]) == pytest.approx([0.5 * 2 / 3 + 0.125, 0.5 / 3 + 0.125, 0.0])
    assert table.chances([9], [3], [0.5, 0.25]) == [0.0]


def test_what_cannot_be_done_is_rejected_by_name(llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="texts: cannot read"):
        superposed(llm, texts=str(tmp_path / "none.txt"))
    with pytest.raises(ConfigError, match="top_tokens must be an integer in 3"):
        superposed(llm, top_tokens=2)
    with pytest.raises(ConfigError, match="order_weights must be a list"):
        superposed(llm, order_weights="abc")
    monkeypatch.setattr(llm.engine.parts, "runner", without(llm.runner, "embed"))
    with pytest.raises(CapabilityError, match="search method 'superposed' needs a model that takes embeddings"):
        superposed(llm)
