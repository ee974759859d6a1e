"""Retrieval beside a draft: pruned by the draft's first tokens, fused with its tree, and nothing where nothing is
found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datastores import write, written
from engine.harness import engine, run
from tools.gtest import ERROR, g_test
from toys import ToyRunner

from paceline import LLM, SamplingParams
from paceline.controllers.policies import FixedController
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.retrieval import RestDrafter
from paceline.drafters.retrieval.rasd import RasdDrafter
from paceline.errors import ConfigError
from paceline.registry import load
from paceline.tree import COLUMNS, EMPTY_TREE, Budget, TokenTree, Trial, merge

VOCAB = 11
DOCUMENTS = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 7, 8], [1, 2, 9, 4, 4]]
TEXT = [1, 2]
ARGS = DrafterArgs(vocab_size=VOCAB, index=4, max_context=64)


def propose(
    one: RasdDrafter | RestDrafter, so_far: TokenTree, text: Sequence[int] = TEXT, nodes: int = 30
) -> TokenTree:
    states = one.begin([Context("r", list(text), len(text))])
    (tree,) = one.propose(states, [Budget(nodes, 6)], [so_far])
    tree.check(VOCAB, nodes)
    return tree


def rasd(documents: Sequence[Sequence[int]] = DOCUMENTS, **options: Any) -> RasdDrafter:
    return RasdDrafter(ARGS, datastore=written(documents), **options)


def rest(documents: Sequence[Sequence[int]] = DOCUMENTS) -> RestDrafter:
    return RestDrafter(ARGS, datastore=written(documents))


def same(a: TokenTree, b: TokenTree) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in COLUMNS)


def first_tokens(tree: TokenTree) -> list[int]:
    return sorted(int(tree.tokens[node]) for node in tree.children(-1))


def accepted(tree: TokenTree, truth: Sequence[int]) -> int:
    """Tokens that a greedy target that says `truth` takes."""
    node, count = -1, 0
    for token in truth:
        after = [child for child in tree.children(node) if tree.tokens[child] == token]
        if not after:
            return count
        node, count = after[0], count + 1
    return count


def test_a_datastore_without_a_match_leaves_the_drafts_tree_as_it_is() -> None:
    draft = TokenTree.build([3, 5, 6], [-1, 0, -1], confidence=[0.5, 0.9, 0.2])
    for empty in ([[10]], [[5, 5, 5]]):
        found = propose(rasd(empty), draft)
        assert found is EMPTY_TREE
        assert same(merge([draft, found]), draft)
    assert not same(merge([draft, propose(rasd(), draft)]), draft)


def test_identical_trees_fuse_to_one() -> None:
    draft = propose(rest(), EMPTY_TREE)
    fused = merge([draft, propose(rasd(), draft)])
    assert all(np.array_equal(getattr(fused, name), getattr(draft, name)) for name in ("tokens", "parents", "sources"))


def test_branches_that_the_draft_finds_unlikely_are_cut() -> None:
    draft = TokenTree.build([3, 9, 5], [-1, -1, -1], confidence=[0.6, 0.3, 0.05])
    assert first_tokens(propose(rest(), draft)) == [3, 7, 9]
    assert first_tokens(propose(rasd(), draft)) == [3, 9]
    assert first_tokens(propose(rasd(prune_top_k=1), draft)) == [3]
    assert first_tokens(propose(rasd(prune_top_k=0), draft)) == [3, 7, 9]
    assert first_tokens(propose(rasd(), EMPTY_TREE)) == [3, 7, 9]


def test_the_drafts_chances_rank_the_branches() -> None:
    liked = TokenTree.build([9, 3], [-1, -1], confidence=[0.9, 0.05])
    tree = propose(rasd(), liked, nodes=1)
    assert tree.tokens.tolist() == [9]
    assert propose(rest(), liked, nodes=1).tokens.tolist() == [3]


def test_a_drawn_draft_prunes_by_its_distribution_and_not_by_its_draw() -> None:
    row = torch.zeros(VOCAB)
    row[[7, 9, 10]] = torch.tensor([0.5, 0.3, 0.2])
    trees = [TokenTree.build([x], [-1], confidence=[0.3], trials={-1: [Trial(0, row)]}) for x in (7, 10)]
    found = [propose(rasd(), tree) for tree in trees]
    assert first_tokens(found[0]) == [7, 9]
    assert same(found[0], found[1])
    assert not found[0].trials


def test_the_fused_tree_takes_at_least_as_much_as_either() -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 5, 12).tolist() for _ in range(40)]
    one, longer = rasd(documents), 0
    for _ in range(200):
        text, truth = rng.integers(0, 5, 6).tolist(), rng.integers(0, 5, 6).tolist()
        draft = merge(
            [TokenTree.chain(rng.integers(0, 5, 3).tolist()), TokenTree.chain(truth[: int(rng.integers(0, 3))])]
        )
        found = propose(one, draft, text)
        fused = merge([draft, found])
        alone = max(accepted(draft, truth), accepted(found, truth))
        assert accepted(fused, truth) >= alone
        longer += accepted(fused, truth) > accepted(draft, truth)
    assert longer > 5


@pytest.mark.parametrize("value", [-1, 2000, "3"])
def test_options_are_checked(value: object) -> None:
    with pytest.raises(ConfigError, match="prune_top_k"):
        rasd(prune_top_k=value)


@pytest.mark.parametrize("options", [{}, {"tree_width": 3, "num_speculative_tokens": 2}])
def test_beside_a_draft_model_the_bundled_model_says_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    """The datastore holds what is said, so that nothing that is refused hides a mistake in what is taken."""
    plain = LLM(speculative_config=None, dtype="float32")
    prompts = ["def area(width, height):\n    return", "SELECT name FROM"]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    expected = plain.generate(prompts, params)
    known = [
        [*plain.tokenizer.encode(text), *one.outputs[0].token_ids] for text, one in zip(prompts, expected, strict=True)
    ]
    path = write(tmp_path / "said", known, tokenizer=plain.tokenizer)  # type: ignore[arg-type]
    methods: list[dict[str, Any]] = [{"method": "rasd", "datastore": str(path)}]
    methods += [{"method": "draft_model", **options}]
    other = plain.with_speculative_config({"method": methods, "num_speculative_tokens": 8})
    found = other.generate(prompts, params)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
    assert all(sum(one.metrics.drafters[name].num_accepted_tokens for one in found) for name in ("draft_model", "rasd"))


SMALL, LENGTH, PROMPT = 6, 3, [1, 2, 1, 2, 3, 1, 2]


class Careless(FixedController):
    """Wrong: leaves a tree whole where the draws fell on what was found, so that it is small enough."""

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        cut = super().select(trees)
        return [
            tree if len(tree) <= self.num_speculative_tokens else less for tree, less in zip(trees, cut, strict=True)
        ]


def p_value(controller: type[FixedController], outputs: int) -> float:
    """Of drawn drafts that share a fixed number of nodes with retrieved ones, against the target's distribution."""
    target, draft = (ToyRunner(SMALL, order=2, sharpness=1.5, noise=noise) for noise in (0.0, 0.3))
    documents = [[*PROMPT, *draft.greedy(PROMPT, LENGTH)]]
    made = []
    for index, (name, options) in enumerate(
        [("draft_model", {"model": "toy"}), ("rasd", {"datastore": written(documents)})]
    ):
        args = DrafterArgs(vocab_size=SMALL, index=index, max_context=64, target=target, load_runner=lambda name: draft)
        made.append(load("drafters", name)(args, **options))
    live = engine(target, made, controller=controller(2, drafters=("draft_model", "rasd")))
    params = SamplingParams(temperature=0.9, max_tokens=LENGTH, n=64, ignore_eos=True)
    requests = run(live, [PROMPT] * (outputs // 64), params, seed=1)
    taken = {
        name: sum(one.metrics.drafters[name].num_accepted_tokens for one in requests)
        for name in live.parts.drafter_set.names
    }
    assert min(taken.values()) > outputs / 50, taken
    counts = Counter(tuple(output.token_ids) for request in requests for output in request.outputs)
    distribution = {}
    for output in product(range(SMALL), repeat=LENGTH):
        rows = [(target.logits([*PROMPT, *output[:i]]).double() / 0.9).softmax(-1) for i in range(LENGTH)]
        distribution[output] = prod(float(row[token]) for row, token in zip(rows, output, strict=True))
    return g_test([counts[output] for output in distribution], list(distribution.values()))


def test_sharing_a_fixed_number_of_nodes_keeps_the_distribution() -> None:
    assert p_value(FixedController, 1280) > ERROR


def test_the_check_catches_a_share_that_looks_at_what_was_drawn() -> None:
    assert p_value(Careless, 1280) < ERROR
