"""The dial's trees: ranks right with the chances that are told, policies as they are, the same mistakes as in
chains.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from bench.run.test_oracle import PROMPT, RECORD, drafter
from engine.harness import engine, run
from toys import ToyRunner

from paceline.bench.run.oracle import NEVER_ACCEPTED, CorruptedOracleDrafter, Noise, key_of
from paceline.config import SamplingParams
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.growth.policies import POLICIES
from paceline.errors import ConfigError
from paceline.tree import EMPTY_TREE, ROOT, Budget, TokenTree, best_shapes

SHAPE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)]"
OPTIONS: dict[str, dict[str, Any]] = {"levels": {"tree_width": 3}, "static": {"speculative_token_tree": SHAPE}}
PLACES = 20_000


def options(policy: str) -> dict[str, Any]:
    return {"tree_policy": policy, **OPTIONS.get(policy, {})}


def tree_of(one: CorruptedOracleDrafter, done: int = 0, budget: Budget | None = None) -> TokenTree:
    states = one.begin([Context("r", [*PROMPT, *RECORD[:done]], len(PROMPT))])
    (tree,) = one.propose(states, [budget or Budget(8, 8)], [EMPTY_TREE])
    return tree


def oracle(policy: str, **more: Any) -> CorruptedOracleDrafter:
    return drafter(**{"continuations": {PROMPT: RECORD}, "acceptance": 0.5, **options(policy), **more})


def standing(tree: TokenTree, done: int) -> int:
    """How many tokens of the record the tree holds from its root on."""
    node, count = ROOT, 0
    while (
        found := [child for child in tree.children(node) if tree.tokens[child] == RECORD[done + count]]
    ) and count < 8:
        node, count = found[0], count + 1
    return count


def same(a: TokenTree, b: TokenTree) -> bool:
    equal = all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in ("tokens", "parents", "depths", "sources")
    )
    return equal and bool(np.allclose(a.confidence, b.confidence, atol=1e-6))


def off_by(hits: int, expected: np.ndarray) -> float:
    """Standard deviations between a count and the sum of chances."""
    return abs(hits - expected.sum()) / float((expected * (1 - expected)).sum() ** 0.5 or 1.0)


@pytest.mark.parametrize("spread", [0.0, 1.0])
@pytest.mark.parametrize("acceptance", [0.3, 0.8])
def test_each_rank_is_right_as_often_as_is_told(acceptance: float, spread: float) -> None:
    """Independent coins: 4.5 standard deviations, exceeded by chance once in 150,000; the seed is fixed."""
    noise = Noise(acceptance, spread, None, 50)
    places = [noise.on(key_of(0, PROMPT), position) for position in range(PLACES)]
    chances = np.array([noise.told(place) for place in places])
    assert chances.mean() == pytest.approx(acceptance, abs=0.01)
    assert (chances.std() > 0.05) == (spread > 0)
    for rank in range(3):
        hits = sum(place.right == rank for place in places)
        told = chances * (1 - chances) ** rank
        assert off_by(hits, told) < 4.5
        assert off_by(hits, np.clip(1.3 * told, 0, 1)) > 4.5
    sure = chances > np.median(chances)
    if spread:  # the truth about each place, not only about all
        assert (
            off_by(sum(place.right == 0 for place, one in zip(places, sure, strict=True) if one), chances[sure]) < 4.5
        )


def test_what_is_never_right_is_not_at_any_rank() -> None:
    noise = Noise(0.0, 0.0, 0.97, 50)
    assert all(noise.on(3, position).right == NEVER_ACCEPTED for position in range(100))
    assert all(
        noise.on(3, position)._replace(right=0) == Noise(1.0, 0.0, None, 50).on(3, position)._replace(chance=0.0)
        for position in range(9)
    )


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_first_candidates_are_the_chain_of_the_dial(spread: float) -> None:
    """Up to the first mistake and with it; chains go on beside the record's path, trees know that they have left it."""
    chains, trees = (
        drafter(continuations={PROMPT: RECORD}, acceptance=0.5, spread=spread),
        oracle("static", spread=spread),
    )
    for done in range(30):
        chain, tree = tree_of(chains, done, Budget(4, 4)), tree_of(trees, done)
        line, stands = tree.path(int(tree.depths.argmax())), standing(chain, done)
        assert [int(tree.tokens[node]) for node in line[: stands + 1]] == chain.tokens.tolist()[: stands + 1]
        assert tree.confidence[line[0]] == chain.confidence[0]


@pytest.mark.parametrize("spread", [0.0, 1.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_siblings_differ_and_a_position_is_drafted_alike_from_everywhere(policy: str, spread: float) -> None:
    one = oracle(policy, spread=spread, acceptance=0.4)
    for done in range(60):
        tree = tree_of(one, done)
        tree.check(50, 8)
        assert same(tree, tree_of(one, done))
        taken = [node for node in tree.children(ROOT) if tree.tokens[node] == RECORD[done]]
        if taken:  # what hangs below the true token is what is proposed once it stands
            below = {int(tree.tokens[node]) for node in tree.children(taken[0])}
            first = {int(later.tokens[node]) for later in [tree_of(one, done + 1)] for node in later.children(ROOT)}
            assert below <= first or first <= below


@pytest.mark.parametrize("stop", [None, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_kept_trees_are_those_that_would_grow(policy: str, stop: int | None) -> None:
    """Chances that differ by next to nothing are grown anew each time, and the controller is asked the same
    questions.
    """
    asked: list[list[tuple[int, float]]] = [[], []]

    def budget(heard: list[tuple[int, float]], nodes: int) -> Budget:
        def go_on(level: int, reach: float, features: object) -> bool:
            heard.append((level, reach))
            return stop is None or level < stop

        shape = best_shapes([0.5, 0.3], nodes + 2)
        return Budget(nodes, 6, go_on, shape=shape) if policy == "ppd" else Budget(nodes, 6, go_on)

    kept, grown = oracle(policy), oracle(policy, spread=1e-9)
    for done, nodes in ((0, 6), (1, 12), (2, 6), (9, 12)):
        a, b = (tree_of(one, done, budget(heard, nodes)) for one, heard in zip((kept, grown), asked, strict=True))
        assert same(a, b)
        assert stop is None or a.max_depth < stop
    assert [level for level, _ in asked[0]] == [level for level, _ in asked[1]]
    assert [reach for _, reach in asked[0]] == pytest.approx([reach for _, reach in asked[1]], abs=1e-6)


def test_policies_are_told_apart() -> None:
    """With chances that differ from node to node, growing where they are high beats a shape that was fixed before."""
    shape = best_shapes([0.5 * 0.5**rank for rank in range(8)], 8).paths()
    fixed = oracle("static", spread=1.0, speculative_token_tree=shape)
    got = {name: sum(standing(tree_of(one, done), done) for done in range(600)) for name, one in (
        ("static", fixed), ("dyspec", oracle("dyspec", spread=1.0)), ("eagle2", oracle("eagle2", spread=1.0)),
    )}  # fmt: skip
    assert got["dyspec"] > 1.1 * got["static"]
    assert got["eagle2"] > 1.1 * got["static"]
    alike = {name: sum(standing(tree_of(one, done), done) for done in range(600)) for name, one in (
        ("static", oracle("static", speculative_token_tree=shape)), ("dyspec", oracle("dyspec")),
    )}  # fmt: skip
    assert alike["dyspec"] == pytest.approx(alike["static"], rel=0.05)


@pytest.mark.parametrize("policy", [*POLICIES, None])
def test_an_engine_with_trees_says_the_same(policy: str | None) -> None:
    runner, params = ToyRunner(50, seed=2), SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    (plain,) = run(engine(runner), [PROMPT], params)
    records = {PROMPT: plain.outputs[0].token_ids}
    for spread in (0.0, 1.0):
        more = {} if policy is None else options(policy)
        args = DrafterArgs(vocab_size=50, index=0, max_context=4096)
        one = CorruptedOracleDrafter(args, continuations=records, acceptance=0.6, spread=spread, **more)
        (found,) = run(engine(runner, [one], tokens=6), [PROMPT], params)
        assert found.outputs[0].token_ids == plain.outputs[0].token_ids
        assert found.metrics.num_accepted_tokens > 60


def test_limits() -> None:
    one = oracle("dyspec", num_speculative_tokens=3)
    assert len(tree_of(one)) == 3
    (tree,) = one.propose(one.begin([Context("r", [*PROMPT, *RECORD[:-2]], len(PROMPT))]), [Budget(8, 8)], [EMPTY_TREE])
    assert 0 < tree.max_depth <= 2
    assert tree_of(oracle("dyspec"), budget=Budget(8, 1)).max_depth == 1


@pytest.mark.parametrize("vocab", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_small_vocabularies(policy: str, vocab: int) -> None:
    args = DrafterArgs(vocab_size=vocab, index=0, max_context=100)
    one = CorruptedOracleDrafter(args, continuations={(0,): [0] * 9}, acceptance=0.3, spread=0.5, **options(policy))
    (tree,) = one.propose(one.begin([Context("r", [0], 1)]), [Budget(6, 3)], [EMPTY_TREE])
    tree.check(vocab, 6)


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_ends_of_the_dial(policy: str, acceptance: float) -> None:
    one = oracle(policy, acceptance=acceptance)
    found = [standing(tree_of(one, done), done) for done in range(20)]
    assert max(found) == 0 if acceptance == 0.0 else min(found) >= 2
    told = tree_of(one).confidence.tolist()
    assert max(told) == acceptance


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"spread": 1.5}, r"spread must be in 0\.\.1"),
        ({"tree_policy": "best"}, "tree_policy must be one of"),
        ({"tree_policy": "dyspec", "tree_width": 2}, "tree_width must be left out"),
        ({"tree_policy": "static"}, "speculative_token_tree must be given"),
    ],
)
def test_wrong_options_are_rejected(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        drafter(continuations={}, **wrong)


def test_places_do_not_depend_on_each_other() -> None:
    noise = Noise(0.5, 1.0, None, 50)
    chances = [noise.on(1, position).chance for position in range(5_000)]
    paths = [noise.below(noise.on(1, position), 9, 1).chance for position in range(5_000)]
    assert abs(np.corrcoef([a for a, _ in pairwise(chances)], [b for _, b in pairwise(chances)])[0, 1]) < 0.06
    assert abs(np.corrcoef(chances, paths)[0, 1]) < 0.06
