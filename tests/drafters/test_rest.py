"""Retrieval: the longest match, the trie of what follows, its pruning, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datastores import Numbers, write, written
from toys import ToyRunner

from paceline import LLM, SamplingParams
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.retrieval import TRUST, Datastore, RestDrafter, longest_match
from paceline.errors import ConfigError, DrafterError
from paceline.tree import EMPTY_TREE, ROOT, Budget, TokenTree

VOCAB = 11


def drafter(
    documents: Sequence[Sequence[int]], *, shard_tokens: int = 4096, trees: bool = True, **options: Any
) -> RestDrafter:
    args = DrafterArgs(vocab_size=VOCAB, index=1, max_context=64, target=ToyRunner(VOCAB, trees=trees))  # type: ignore[arg-type]
    return RestDrafter(args, datastore=written(documents, shard_tokens), **options)


def propose(one: RestDrafter, text: Sequence[int], nodes: int = 16, depth: int = 4) -> TokenTree:
    states = one.begin([Context("r", list(text), len(text))])
    (tree,) = one.propose(states, [Budget(nodes, depth)], [EMPTY_TREE])
    tree.check(VOCAB, nodes)
    return tree


def paths(tree: TokenTree) -> list[list[int]]:
    return sorted([int(tree.tokens[i]) for i in tree.path(leaf)] for leaf in tree.leaves())


def test_the_longest_match_counts() -> None:
    one = drafter([[1, 2, 3, 4], [5, 2, 3, 6], [9, 5, 2, 3, 7]])
    assert paths(propose(one, [1, 2, 3])) == [[4]]
    assert paths(propose(one, [8, 5, 2, 3])) == [[6], [7]]
    assert paths(propose(one, [9, 5, 2, 3])) == [[7]]
    assert paths(propose(one, [8, 2, 3])) == [[4], [6], [7]]
    assert propose(one, [2, 8]) is EMPTY_TREE


def test_lengths_of_matches_are_kept_to() -> None:
    documents = [[1, 2, 3, 4], [2, 3, 5]]
    assert paths(propose(drafter(documents, max_match_length=2), [1, 2, 3])) == [[4], [5]]
    assert propose(drafter(documents, min_match_length=3), [9, 2, 3]) is EMPTY_TREE
    assert propose(drafter(documents), [9, 3]) is EMPTY_TREE
    assert paths(propose(drafter(documents, min_match_length=1), [9, 3])) == [[4], [5]]


def test_documents_do_not_run_into_each_other() -> None:
    one = drafter([[1, 2], [3, 4]], min_match_length=1)
    assert propose(one, [1, 2]) is EMPTY_TREE
    assert paths(propose(one, [1])) == [[2]]


@pytest.mark.parametrize("shard_tokens", [4096, 50])
def test_the_trie_is_that_of_all_places(shard_tokens: int) -> None:
    """Against a count by hand over every place, with the text in one shard and in many."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 4, 20).tolist() for _ in range(30)]
    one = drafter(documents, shard_tokens=shard_tokens, max_matches=1000)
    store = one.store
    pieces = [store.data[at : at + n].tolist() for at, _, n in store.shards.tolist()]
    for text in ([0, 1, 2, 3], [3, 3], [1, 0, 1, 0, 1]):
        tree = propose(one, text, nodes=500, depth=3)
        length = longest_match(store.data, store.shards, np.array(text, np.int32), 1)
        counts: Counter[tuple[int, ...]] = Counter()
        for ids in pieces:
            for i in range(len(ids) - length):
                if ids[i : i + length] == text[-length:]:
                    after = ids[i + length : i + length + 3]
                    after = after[: after.index(-1)] if -1 in after else after
                    counts.update(tuple(after[:n]) for n in range(1, len(after) + 1))
        found = {tuple(int(tree.tokens[i]) for i in tree.path(node)): node for node in range(len(tree))}
        assert set(found) == set(counts)
        for path, node in found.items():
            siblings = [
                float(tree.confidence[i]) / counts[(*path[:-1], int(tree.tokens[i]))] for i in _siblings(tree, node)
            ]
            assert np.allclose(siblings, siblings[0])


def _siblings(tree: TokenTree, node: int) -> list[int]:
    return tree.children(int(tree.parents[node]))


def test_chances_are_shares_times_trust() -> None:
    one = drafter([[1, 2, 3], [1, 2, 3], [1, 2, 4]])
    tree = propose(one, [1, 2])
    chance = {int(tree.tokens[i]): float(tree.confidence[i]) for i in tree.children(ROOT)}
    assert chance[3] == pytest.approx(2 * chance[4])
    assert chance[3] + chance[4] == pytest.approx(float(TRUST[1, 2]))


def test_the_most_likely_nodes_are_kept() -> None:
    documents = [[1, 2, 3, 3, 3], [1, 2, 3, 3, 4], [1, 2, 4, 5, 6], [1, 2, 3, 3, 3]]
    one = drafter(documents)
    whole = propose(one, [1, 2], nodes=100)
    for nodes in range(1, len(whole) + 1):
        tree = propose(one, [1, 2], nodes=nodes)
        assert len(tree) == nodes
        assert sorted(tree.reach()) == pytest.approx(sorted(whole.reach(), reverse=True)[:nodes][::-1])


def test_of_many_places_some_are_counted_by_their_share() -> None:
    documents = [[1, 2, 3]] * 300 + [[1, 2, 4]] * 100
    few, all_of_them = drafter(documents, max_matches=8), drafter(documents, max_matches=1000)
    a, b = propose(few, [1, 2]), propose(all_of_them, [1, 2])
    assert [int(t) for t in a.tokens] == [int(t) for t in b.tokens] == [3, 4]
    assert float(a.confidence[0] / a.confidence[1]) == pytest.approx(3.0)


def test_a_runner_of_chains_gets_the_likeliest_chain() -> None:
    documents = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [1, 2, 3, 4, 6, 8], [1, 2, 9]]
    tree = propose(drafter(documents, trees=False), [1, 2])
    assert tree.is_chain
    assert tree.tokens[:3].tolist() == [3, 4, 6]
    assert not propose(drafter(documents), [1, 2]).is_chain


def test_tokens_beyond_the_vocabulary_end_a_path(tmp_path: Path) -> None:
    path = write(tmp_path / "wide", [[1, 2, 3, 40, 4], [1, 2, 50]], tokenizer=Numbers(60))
    one = RestDrafter(DrafterArgs(vocab_size=VOCAB, index=0, max_context=64), datastore=str(path))
    assert paths(propose(one, [1, 2])) == [[3]]


def test_a_batch_is_drafted_like_its_parts() -> None:
    one = drafter([[1, 2, 3, 4], [5, 2, 3, 6]])
    texts = [[1, 2, 3], [7], [5, 2, 3], [2, 3]]
    states = one.begin([Context(str(i), list(text), len(text)) for i, text in enumerate(texts)])
    budgets = [Budget(16, 4), Budget(4, 4), Budget(0, 0), Budget(1, 1)]
    trees = one.propose(states, budgets, [EMPTY_TREE] * 4)
    assert [len(tree) for tree in trees] == [1, 0, 0, 1]
    assert trees[0].tokens.tolist() == [4]


def test_damaged_suffixes_do_no_harm(tmp_path: Path) -> None:
    """Opening does not read all of the file: places outside the text must not be followed."""
    path = write(tmp_path / "damaged", [[1, 2, 3, 1, 2, 4] * 10])
    start = int(Datastore(path).shards[0, 1])
    data = np.fromfile(path, np.int32)
    offset = len(data) - Datastore(path).file_bytes // 4 + 16384 + start
    for value in (-7, 2**31 - 1, 60):
        data[offset : offset + 61] = value
        data.tofile(path)
        propose(RestDrafter(DrafterArgs(vocab_size=VOCAB, index=0, max_context=64), datastore=str(path)), [1, 2])


@pytest.mark.parametrize(
    "options",
    [
        {"max_match_length": 0},
        {"max_match_length": 33},
        {"min_match_length": 0},
        {"min_match_length": 33},
        {"max_matches": 0},
        {"num_speculative_tokens": -1},
    ],
    ids=str,
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        drafter([[1, 2, 3]], **options)


def test_without_a_datastore_it_says_what_to_do() -> None:
    with pytest.raises(DrafterError, match="paceline datastore build"):
        RestDrafter(DrafterArgs(vocab_size=VOCAB, index=0, max_context=64))


def test_the_bundled_model_says_the_same_and_takes_what_is_there(tmp_path: Path) -> None:
    plain = LLM(speculative_config=None, dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompt = "def area(width, height):\n    return"
    (expected,) = plain.generate(prompt, params)
    known = list(plain.tokenizer.encode(prompt)) + list(expected.outputs[0].token_ids)
    path = write(tmp_path / "said", [known], tokenizer=plain.tokenizer)  # type: ignore[arg-type]
    other = plain.with_speculative_config({"method": "rest", "datastore": str(path), "num_speculative_tokens": 6})
    (found,) = other.generate(prompt, params)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.metrics.drafters["rest"].num_accepted_tokens > 12
    with pytest.raises(DrafterError, match="another tokenizer"):
        plain.with_speculative_config({"method": "rest", "datastore": written([[1, 2, 3]])})
