"""Rules along paths: every row is what a state that advanced along the row's path gives, and what the slow reference
says.
"""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processors import by_all_tokens, unlike_the_last
from sampling.slow_rules import (
    STOPS,
    TEXTS,
    VOCAB,
    WORDS,
    params_strategy,
    parents_strategy,
    random_logits,
    slow_edits,
    slow_kept,
)

from paceline.config import SamplingParams
from paceline.sampling import Rules
from paceline.tree import EMPTY_TREE, TokenTree

SLACK = 1e-5  # float32 against float64 on the edge of the nucleus


class RootCounts(Rules):
    """Wrong on purpose: every node is judged by the root's counts and tail."""

    def apply(self, logits: torch.Tensor, tree: TokenTree) -> torch.Tensor:
        return self.apply_paths(logits, [()] * len(logits))


def tree_of(nodes: Sequence[tuple[int, int]]) -> TokenTree:
    return TokenTree.build([token for _, token in nodes], [parent for parent, _ in nodes]) if nodes else EMPTY_TREE


def path_tokens(tree: TokenTree, node: int) -> list[int]:
    return [int(tree.tokens[i]) for i in tree.path(node)]


def rows_equal_advanced_states(rules: Rules, logits: torch.Tensor, tree: TokenTree) -> bool:
    rows = rules.apply(logits, tree)
    for node in range(-1, len(tree)):
        twin = rules.fork()
        twin.advance(path_tokens(tree, node))
        if not torch.equal(rows[node + 1 : node + 2], twin.apply(logits[node + 1 : node + 2], EMPTY_TREE)):
            return False
    return True


CASE = {
    "params": params_strategy(),
    "prompt": TEXTS,
    "output": TEXTS,
    "stops": STOPS,
    "words": WORDS,
    "nodes": parents_strategy(),
    "seed": st.integers(0, 2**31),
    "ties": st.booleans(),
}


@settings(max_examples=200, deadline=None)
@given(**CASE)
def test_a_nodes_row_is_the_root_row_of_a_state_that_advanced_along_its_path(
    params, prompt, output, stops, words, nodes, seed, ties
) -> None:
    rules = Rules(params, vocab_size=VOCAB, prompt=prompt, stop_ids=stops, bad_word_ids=words)
    rules.advance(output)
    tree = tree_of(nodes)
    logits = torch.from_numpy(random_logits(seed, 1 + len(tree), ties=ties))
    before = logits.clone()
    assert rows_equal_advanced_states(rules, logits, tree)
    paths = [path_tokens(tree, node) for node in range(-1, len(tree))]
    assert torch.equal(rules.apply_paths(logits, paths), rules.apply(logits, tree))
    assert torch.equal(logits, before), "the caller's logits were written to"


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(temperature=0.0, repetition_penalty=1.3), ()),
        (SamplingParams(temperature=0.0, frequency_penalty=0.7), ()),
        (SamplingParams(temperature=0.8, presence_penalty=0.7, top_p=0.9), ()),
        (SamplingParams(temperature=0.0, min_tokens=3), ()),
        (SamplingParams(temperature=0.0), ((1, 2),)),
        (SamplingParams(temperature=0.0, logits_processors=[unlike_the_last]), ()),
        (SamplingParams(temperature=0.8, logits_processors=[by_all_tokens]), ()),
    ],
)
def test_the_check_catches_rows_judged_by_the_roots_counts(params: SamplingParams, words: tuple) -> None:
    logits = torch.from_numpy(random_logits(0, 4, ties=False))
    tree = TokenTree.chain([1, 1, 2])
    for kind, fine in ((Rules, True), (RootCounts, False)):
        rules = kind(params, vocab_size=VOCAB, prompt=[4], stop_ids=[7], bad_word_ids=words)
        rules.advance([3])
        assert rows_equal_advanced_states(rules, logits, tree) == fine


@settings(max_examples=200, deadline=None)
@given(**CASE)
def test_rows_agree_with_the_slow_reference(params, prompt, output, stops, words, nodes, seed, ties) -> None:
    rules = Rules(params, vocab_size=VOCAB, prompt=prompt, stop_ids=stops, bad_word_ids=words)
    rules.advance(output)
    tree = tree_of(nodes)
    logits = random_logits(seed, 1 + len(tree), ties=ties)
    rows = rules.apply(torch.from_numpy(logits), tree)
    assert rows.dtype == torch.float32
    for node, row in zip(range(-1, len(tree)), rows.numpy(), strict=True):
        check_row(row, logits[node + 1], params, prompt, [*output, *path_tokens(tree, node)], stops, words)


def check_row(row, logits, params, prompt, output, stops, words) -> None:
    expected = slow_edits(logits, params, prompt, output, stops, words)
    if params.greedy:
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5)
        return
    scaled = expected / params.temperature
    kept = {int(t) for t in np.flatnonzero(row > -math.inf)}
    if not np.isfinite(scaled).any():
        assert not kept
        return
    np.testing.assert_allclose(row[sorted(kept)], scaled[sorted(kept)], rtol=1e-5, atol=1e-5)
    scaled = row_values(scaled)
    p, low = params.top_p, params.min_p
    fewest = slow_kept(scaled, top_k=params.top_k, top_p=p - SLACK if p < 1 else 1.0, min_p=min(1.0, low * (1 + SLACK)))
    most = slow_kept(scaled, top_k=params.top_k, top_p=min(1.0, p + SLACK), min_p=low * (1 - SLACK))
    edge = min((scaled[token] for token in kept), default=math.inf)
    tied = {
        token for token in range(len(scaled)) if abs(scaled[token] - edge) <= 1e-5 * abs(edge)
    }  # rounding may part them
    assert fewest - tied <= kept <= most | tied


def row_values(scaled: np.ndarray) -> np.ndarray:
    """Rounded like float32, so that tokens which tie there tie here."""
    return scaled.astype(np.float32).astype(np.float64)


@settings(max_examples=100, deadline=None)
@given(params=params_strategy(), prompt=TEXTS, output=TEXTS, more=TEXTS, words=WORDS, seed=st.integers(0, 2**31))
def test_rewind_undoes_advance_and_forks_are_independent(params, prompt, output, more, words, seed) -> None:
    rules = Rules(params, vocab_size=VOCAB, prompt=prompt, stop_ids=[0], bad_word_ids=words)
    rules.advance(output)
    tree = TokenTree.build([1, 2, 1], [-1, 0, 1])
    logits = torch.from_numpy(random_logits(seed, 4, ties=False))
    before = rules.apply(logits, tree)
    twin = rules.fork()
    twin.advance(more)
    after = twin.apply(logits, tree)
    assert torch.equal(rules.apply(logits, tree), before)
    rules.advance(more)
    assert torch.equal(rules.apply(logits, tree), after)
    rules.rewind(len(more))
    assert torch.equal(rules.apply(logits, tree), before)
    assert torch.equal(twin.apply(logits, tree), after)
    rules.advance(list(reversed(more)))
    rules.rewind(len(more) + len(output))
    fresh = Rules(params, vocab_size=VOCAB, prompt=prompt, stop_ids=[0], bad_word_ids=words)
    assert torch.equal(rules.apply(logits, tree), fresh.apply(logits, tree))


def test_the_check_catches_a_rewind_that_forgets_the_counts() -> None:
    class Forgetful(Rules):
        def rewind(self, count: int) -> None:
            del self._generated[len(self._generated) - count :]

    logits = torch.from_numpy(random_logits(0, 1, ties=False))
    for kind, fine in ((Rules, True), (Forgetful, False)):
        rules = kind(SamplingParams(temperature=0.0, frequency_penalty=0.5), vocab_size=VOCAB, prompt=[])
        before = rules.apply(logits, EMPTY_TREE)
        rules.advance([1, 1])
        rules.rewind(2)
        assert torch.equal(rules.apply(logits, EMPTY_TREE), before) == fine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_do_not_depend_on_the_rows_beside_them_at_real_sizes(dtype: torch.dtype) -> None:
    params = SamplingParams(temperature=0.7, top_k=4000, top_p=0.9, min_p=1e-4, repetition_penalty=1.1, max_tokens=None)
    rules = Rules(params, vocab_size=40_009, prompt=range(50, 2000))
    tree = TokenTree.chain([3, 60, 3, 9])
    logits = torch.from_numpy(random_logits(1, 5, ties=False, vocab=40_009)).to(dtype)
    assert rows_equal_advanced_states(rules, logits, tree)
    assert torch.equal(rules.apply(logits, tree), rules.apply(logits.float(), tree))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_rows_equal_advanced_states_and_agree_with_the_cpu() -> None:
    params = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=900,
        frequency_penalty=0.3,
        min_tokens=4,
        logit_bias={5: 2.0},
        allowed_token_ids=range(0, 10_007, 3),
        logits_processors=[unlike_the_last],
    )
    rules = Rules(params, vocab_size=10_007, prompt=[1, 2], stop_ids=[9], bad_word_ids=[(3,), (1, 4)])
    rules.advance([6, 1])
    tree = TokenTree.build([1, 4, 1, 7], [-1, 0, 0, 2])
    logits = torch.from_numpy(random_logits(2, 5, ties=False, vocab=10_007))
    assert rows_equal_advanced_states(rules, logits.cuda(), tree)
    torch.testing.assert_close(rules.apply(logits.cuda(), tree).cpu(), rules.apply(logits, tree))
