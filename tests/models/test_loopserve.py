"""Selection by what the last tokens attended to: whole where everything is kept, a planted key found, drafts as tokens
one by one, what was left out back again; and prompts along lines that hold the share they must.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny_llama import CPU, close, runner_of, tiny_llama, tokens
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from paceline.errors import ConfigError
from paceline.models.attention.attention_lines import lines_of
from paceline.models.attention.loopserve import AnsweringStep, LoopServe
from paceline.models.attention.segments import Segment
from paceline.models.attention.tree_attention import Masks
from paceline.models.runners import NativeRunner
from paceline.models.spec import AttentionShape
from paceline.models.state.arena import Arena
from paceline.models.state.recent_queries import QueriesCache
from paceline.tree import EMPTY_TREE, TokenTree

TEXT = tokens(120, seed=3)
PROMPT = 90


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def selecting(model: LlamaForCausalLM, **options: Any) -> NativeRunner:
    options = {"tokens": 24, "interval": 4, "observed": 4, "coverage": 1.0} | options
    return runner_of(model, selection=LoopServe(**options))


def opened(runner: NativeRunner, chunk: int = PROMPT) -> QueriesCache:
    """A sequence that has read the prompt."""
    cache = runner.open()
    for start in range(0, PROMPT, chunk):
        runner.extend([cache], [TEXT[start : min(start + chunk, PROMPT)]])
    return cache  # type: ignore[return-value]  # as the selection makes them


def decoded(runner: NativeRunner, width: int = 1, cache: Any = None) -> torch.Tensor:
    """(30, v) logits behind the prompt, in chains of `width`."""
    cache, rows = cache or opened(runner), []
    for at in range(cache.length, 120, width):
        part = TEXT[at : at + width]
        rows.append(runner.score([cache], part[:1], [TokenTree.chain(part[1:]) if width > 1 else EMPTY_TREE]).logits)
        runner.commit([cache], [range(len(part) - 1)])
    return torch.cat(rows)


def test_where_all_is_kept_it_is_full_attention_to_the_bit(model: LlamaForCausalLM) -> None:
    plain = runner_of(model, compiled=False)
    whole = decoded(plain, cache=opened(plain))
    assert torch.equal(decoded(selecting(model, tokens=120, coverage=0.5)), whole)
    assert not close(decoded(selecting(model)), whole, 0.1), "the control"


def test_a_prompt_is_read_whole_where_lines_must_hold_everything(model: LlamaForCausalLM) -> None:
    def read(runner: NativeRunner) -> torch.Tensor:
        return runner.extend([opened(runner, 30)], [TEXT[PROMPT:]], all_logits=True).logits

    whole = read(runner_of(model, compiled=False))
    assert torch.equal(read(selecting(model, coverage=1.0)), whole)
    assert close(read(selecting(model, coverage=1 - 1e-7, sampled=500)), whole, 1e-3)
    assert not close(read(selecting(model, coverage=0.3)), whole, 0.1), "the control"


def test_lines_hold_the_share_they_must_and_one_less_does_not() -> None:
    generator, places = torch.Generator().manual_seed(0), torch.tensor([3, 20, 33, 39])
    scores = 4 * torch.randn(2, 3, 4, 40, generator=generator)
    scores.masked_fill_(torch.arange(40) > places[:, None], -torch.inf)
    shares = scores.softmax(-1)
    distances = (places[:, None] - torch.arange(40)).clamp(min=0)

    def held(columns: torch.Tensor, diagonals: torch.Tensor) -> torch.Tensor:
        """(2, 3) of the attention on these lines."""
        read = columns[..., None, :] | diagonals[..., distances]
        return (shares * read).sum((-1, -2)) / 4

    before = torch.zeros(2, 3)
    for coverage in (0.5, 0.9, 1.0):
        columns, diagonals = lines_of(shares, places, coverage)
        assert bool((held(columns, diagonals) >= coverage - 1e-6).all())
        assert bool(diagonals[..., 0].all())
        taken = (columns.sum(-1) + diagonals.sum(-1)).float()
        assert bool((taken > before).all()), "the control: a larger share takes more lines"
        before = taken
        if coverage == 1.0:
            continue
        mass = torch.cat((shares.sum(-2), shares.new_zeros(2, 3, 40)), -1)
        mass[..., 40:].scatter_add_(-1, distances.flatten().expand(2, 3, -1), shares.flatten(-2))
        lines = torch.cat((columns, diagonals), -1)
        mass[..., 40] = 0  # the row's own position, which always stays
        least = mass.masked_fill(~lines | (mass == 0), torch.inf).argmin(-1, keepdim=True)
        fewer = lines.scatter(-1, least, torch.zeros_like(least, dtype=torch.bool))
        assert bool((held(*fewer.split(40, -1)) < coverage).all()), "the control: the last line was needed"


@torch.inference_mode()
def attended(model: LlamaForCausalLM, first: int) -> torch.Tensor:
    """(2, 90) what tokens first .. 89 of the prompt attend to in layer 0, summed by kv head, by transformers' parts."""
    inner, own = model.model, model.model.layers[0].self_attn
    x = inner.embed_tokens(torch.tensor([TEXT[:PROMPT]]))
    normed = inner.layers[0].input_layernorm(x)
    q, k = (part(normed).view(1, PROMPT, -1, 16).transpose(1, 2) for part in (own.q_proj, own.k_proj))
    q, k = apply_rotary_pos_emb(q, k, *inner.rotary_emb(x, torch.arange(PROMPT)[None]))
    scores = torch.einsum("hgqd,hkd->hgqk", q[0].view(2, 2, PROMPT, 16), k[0]) / 4
    future = torch.ones(PROMPT, PROMPT, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1)[:, :, first:].sum((1, 2))


def test_chosen_once_it_is_what_the_prompts_last_queries_attend_to(model: LlamaForCausalLM) -> None:
    for chunk in (PROMPT, 11):  # the queries come from several chunks
        runner = selecting(model, interval=None, observed=8)
        cache = opened(runner, chunk)
        decoded(runner, cache=cache)
        assert {layer: list(kept) for layer, kept in cache.choices.items()} == {0: [90], 1: [90], 2: [90]}
        sums = attended(model, PROMPT - 8).clone()
        sums[:, PROMPT - 8 :] = torch.inf
        best = sums.topk(24).indices.sort().values
        assert torch.equal(cache.choices[0][90], best)
        assert not torch.equal(attended(model, PROMPT - 4).topk(24).indices.sort().values, best), "the control"


def test_what_was_left_out_can_return(model: LlamaForCausalLM) -> None:
    runner = selecting(model)
    cache = opened(runner)
    seen = list[set[int]]()
    for token in TEXT[PROMPT:]:
        runner.score([cache], [token], [EMPTY_TREE])
        runner.commit([cache], [()])
        seen.append(set(cache.choices[1][max(cache.choices[1])][0].tolist()))
    assert len({frozenset(one) for one in seen}) == 8  # thirty tokens, a choice for every four
    returned = [late - before for before, late in pairwise(seen)]
    assert any(min(one) < PROMPT for one in returned if one)


def test_chains_choose_as_tokens_one_by_one(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one = decoded(selecting(model))
    assert close(decoded(selecting(model), width=7), one_by_one)  # borders within a chain
    border = LoopServe.border
    monkeypatch.setattr(LoopServe, "border", lambda self, first, position: border(self, first, position // 7 * 7))
    assert not close(decoded(selecting(model), width=7), one_by_one, 0.01), "the control: another border"


def test_batches_choose_as_texts_alone(model: LlamaForCausalLM) -> None:
    runner = selecting(model)
    caches = [opened(runner), runner.open()]
    runner.extend(caches[1:], [TEXT[:40]])
    both = runner.score(caches, [TEXT[90], TEXT[40]], [EMPTY_TREE] * 2).logits
    assert close(both[:1], decoded(runner)[:1])
    alone = runner.open()
    runner.extend([alone], [TEXT[:40]])
    assert close(both[1:], runner.score([alone], [TEXT[40]], [EMPTY_TREE]).logits)


def behind_a_branch(runner: NativeRunner) -> torch.Tensor:
    """(22, v) logits behind a branch of a tree whose nodes lie on both sides of a border."""
    cache = opened(runner)
    tree = TokenTree.build([1, TEXT[91], 2, TEXT[92], TEXT[93], 3, TEXT[94]], [-1, -1, 0, 1, 3, 3, 4])
    rows = runner.score([cache], [TEXT[90]], [tree]).logits
    runner.commit([cache], [[1, 3, 4, 6]])
    return torch.cat((rows[[0, 2, 4, 5, 7]], decoded(runner, cache=cache)))


def test_queries_follow_what_is_accepted(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one = decoded(selecting(model))
    assert close(behind_a_branch(selecting(model)), one_by_one)
    scored = QueriesCache.scored
    monkeypatch.setattr(
        QueriesCache, "scored", lambda self, layer, inputs: scored(self, layer, list(range(len(inputs))))
    )
    assert not close(behind_a_branch(selecting(model)), one_by_one, 0.01), "the control: the first inputs' queries"


def test_what_is_taken_back_is_forgotten(model: LlamaForCausalLM) -> None:
    """Back behind a border that was passed, and a fork beside."""
    one_by_one, runner = decoded(selecting(model)), selecting(model)
    cache = opened(runner)
    for token in TEXT[PROMPT:97]:
        runner.score([cache], [token], [EMPTY_TREE])
        runner.commit([cache], [()])
    fork = runner.fork(cache)
    for token in (1, 2, 3):
        runner.score([cache], [token], [EMPTY_TREE])
        runner.commit([cache], [()])
    runner.truncate(cache, 97)
    assert close(decoded(runner, cache=cache), one_by_one[7:])
    assert close(decoded(runner, cache=fork), one_by_one[7:])
    cache = opened(runner)
    runner.extend([cache], [TEXT[PROMPT:97]])
    assert not close(decoded(runner, cache=cache), one_by_one[7:], 0.01), "the control: borders behind known tokens"


def planted(asked: float) -> torch.Tensor:
    """What two heads attend to of 100 tokens, the 40th of which has a key like the query and values of 1.

    Args:
        asked: how often the query counts in those before it.
    """
    shape = AttentionShape(1, 2, 32, 32**-0.5, None, (None,), (0,))
    arena, generator = Arena(1, 2, 32, dtype=torch.float32, device=CPU), torch.Generator().manual_seed(0)
    method = LoopServe(tokens=12, observed=4)
    method.layers = frozenset([0])
    cache = method.cache(arena, 0)
    cache.reserve(101)
    kept = arena.layers[0][cache.base : cache.base + 100]
    kept.copy_(torch.randn(kept.shape, generator=generator))
    kept[:, 2:] = 0
    query = 2 * torch.randn(2, 32, generator=generator)
    kept[40, :2], kept[40, 2:] = 2 * query, 1.0
    cache.length = 96
    cache.note_known(0, (asked * query).expand(4, 1, 2, 32))
    cache.length, cache.scratch = 100, 1
    cache.begin_scored()
    step = AnsweringStep(method, shape, Masks(torch.float32, CPU), Segment(cache, 1), cache)
    return step.attend(0, torch.cat((query, torch.zeros(4, 32))).unsqueeze(0))


def test_a_planted_key_is_found_and_by_other_queries_it_is_not() -> None:
    found = planted(1.0)
    assert torch.allclose(found, torch.ones_like(found), atol=1e-3)
    assert planted(-1.0).max() < 0.1, "the control"


def test_what_cannot_be_chosen_by_is_refused() -> None:
    for options, why in (
        ({"tokens": 8}, r"tokens must be at least observed = 16, got 8"),
        ({"interval": 0}, r"interval must be an integer in 1\.\."),
        ({"coverage": 1.5}, r"coverage must lie in 0\.\.1, got 1\.5"),
        ({"sampled": 0}, "sampled must be an integer of 1 or more, got 0"),
    ):
        with pytest.raises(ConfigError, match=why):
            LoopServe(**options)
