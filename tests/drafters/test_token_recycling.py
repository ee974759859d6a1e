"""Token Recycling: the template, its cut to a budget, what rows teach, whose table it is, and what a file of tables may
hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.harness import engine, run, tokens
from toys import ToyRunner

from paceline import SamplingParams
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.lookup import token_recycling
from paceline.drafters.lookup.token_recycling import (
    CANDIDATES,
    PLAIN_EVERY,
    RANK_CONFIDENCE,
    CandidateTable,
    TokenRecyclingDrafter,
    learn,
    static_template,
)
from paceline.errors import ConfigError, DrafterError
from paceline.tree import EMPTY_TREE, Budget, Scores, Shape, TokenTree, Verdict, from_paths

VOCAB = 32


def args(target: Any = None, vocab: int = VOCAB) -> DrafterArgs:
    return DrafterArgs(vocab_size=vocab, index=0, max_context=512, target=target)


def begun(drafter: TokenRecyclingDrafter, text: Sequence[int] = (1, 2), tenant: str = "") -> Any:
    (state,) = drafter.begin([Context("r", list(text), len(text), tenant=tenant)])
    return state


def proposal(drafter: TokenRecyclingDrafter, state: Any, nodes: int = 80, depth: int = 9) -> TokenTree:
    (tree,) = drafter.propose([state], [Budget(nodes, depth)], [EMPTY_TREE])
    tree.check(VOCAB, nodes)
    return tree


def taught(target: Any = None, **options: Any) -> tuple[TokenRecyclingDrafter, Any]:
    """A drafter that knows of every token: t is followed by t + 1, t + 2, ... in this order."""
    drafter = TokenRecyclingDrafter(args(target), **options)
    state = begun(drafter)
    state.table.candidates_vk[:] = (np.arange(VOCAB)[:, None] + 1 + np.arange(CANDIDATES)) % VOCAB
    return drafter, state


def test_the_template_is_the_papers() -> None:
    nodes = list(token_recycling.template_nodes())
    assert len(nodes) == len(set(nodes)) == 80
    assert [sum(len(node) == depth for node in nodes) for depth in range(1, 8)] == [8, 21, 25, 15, 8, 3, 0]
    assert all(node[:-1] in nodes for node in nodes if len(node) > 1), "parents are nodes"
    assert all((*node[:-1], node[-1] - 1) in nodes for node in nodes if node[-1]), "so are better siblings"
    assert {(0, 0, 7), (1, 1, 0), (0, 0, 0, 4), (3, 0, 0, 0), (0, 0, 0, 1, 0, 0)} <= set(nodes)
    assert not {(1, 4), (0, 1, 3), (1, 1, 0, 0), (0, 0, 0, 0, 0, 2)} & set(nodes)


def test_parents_come_first_and_the_most_likely_nodes_foremost() -> None:
    parent_n, rank_n, depth_n = static_template()
    assert (parent_n < np.arange(80)).all()
    reach: list[float] = []
    for parent, rank, depth in zip(parent_n.tolist(), rank_n.tolist(), depth_n.tolist(), strict=True):
        assert depth == (1 if parent < 0 else depth_n[parent] + 1)
        reach.append(RANK_CONFIDENCE[rank] * (1.0 if parent < 0 else reach[parent]))
    assert reach == sorted(reach, reverse=True)
    assert sum(RANK_CONFIDENCE) <= 1.0


def test_the_tree_holds_the_tables_candidates() -> None:
    drafter, state = taught()
    tree = proposal(drafter, state)
    assert len(tree) == 80
    for i, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
        above = 2 if parent < 0 else int(tree.tokens[parent])
        assert tree.confidence[i] == pytest.approx(RANK_CONFIDENCE[(token - above - 1) % VOCAB])


@pytest.mark.parametrize("nodes", [1, 2, 5, 12, 40, 79])
def test_a_smaller_budget_takes_the_best_part(nodes: int) -> None:
    """No choice of that many nodes of the whole tree has a greater expected number of accepted tokens."""
    drafter, state = taught()
    whole, part = proposal(drafter, state), proposal(drafter, state, nodes)
    assert len(part) == nodes
    assert part.reach().sum() == pytest.approx(np.sort(whole.reach())[::-1][:nodes].sum())


def test_depth_and_num_speculative_tokens_limit_the_tree() -> None:
    drafter, state = taught(num_speculative_tokens=20)
    assert len(proposal(drafter, state)) == 20
    flat = proposal(drafter, state, depth=1)
    assert (len(flat), flat.max_depth) == (8, 1)


def test_where_little_is_known_the_next_likely_nodes_take_the_place() -> None:
    drafter = TokenRecyclingDrafter(args())
    state = begun(drafter)
    state.table.candidates_vk[2] = np.arange(10, 18)
    assert proposal(drafter, state, 5).tokens.tolist() == [10, 11, 12, 13, 14]
    state.table.candidates_vk[13, :3] = 20, 21, 22
    assert sorted(proposal(drafter, state).tokens.tolist()) == [
        *range(10, 18),
        20,
        21,
    ]  # the template gives (3,) two children


SHAPE = from_paths([(7,), (7, 6), (0,), (0, 0), *((0,) * n for n in range(3, 9))])


def shaped(drafter: TokenRecyclingDrafter, state: Any, shape: Shape = SHAPE) -> set[tuple[int, ...]]:
    """Paths of the tree under a controller that has a shape in mind."""
    (tree,) = drafter.propose([state], [Budget(len(shape), 9, shape=shape)], [EMPTY_TREE])
    tree.check(VOCAB, len(shape))
    return {tuple(int(tree.tokens[i]) for i in tree.path(node)) for node in range(len(tree))}


def tokens_of(shape: Shape, root: int = 2) -> set[tuple[int, ...]]:
    """What `taught` makes of a shape: rank r after token t is t + 1 + r."""
    return {tuple(root + i + 1 + sum(ranks[: i + 1]) for i in range(len(ranks))) for ranks in shape.paths()}


def test_a_shape_that_the_controller_has_in_mind_is_filled() -> None:
    drafter, state = taught()
    assert shaped(drafter, state) == tokens_of(SHAPE)
    assert (10, 17) in shaped(drafter, state)
    assert (10, 17) not in {tuple(ranks) for ranks in template_paths(drafter, state)}, "the template has no such node"
    assert len(shaped(*taught(num_speculative_tokens=3))) == 3
    state.table.candidates_vk[10] = -1
    assert shaped(drafter, state) == tokens_of(SHAPE) - {(10, 17)}, "what is not known is left out"


def template_paths(drafter: TokenRecyclingDrafter, state: Any) -> list[list[int]]:
    tree = proposal(drafter, state)
    return [[int(tree.tokens[i]) for i in tree.path(node)] for node in range(len(tree))]


@pytest.mark.parametrize("shape", [SHAPE, from_paths([(0,), (8,)])])
def test_shapes_that_do_not_fit_give_way_to_the_template(shape: Shape) -> None:
    """Branches for a target that scores chains, and ranks that the table does not have."""
    drafter, state = taught(ToyRunner(VOCAB, trees=shape is not SHAPE))
    expected = {tuple(path) for path in template_paths(drafter, state)[: len(shape)]}
    assert shaped(drafter, state, shape) == expected


def test_a_new_table_says_nothing() -> None:
    drafter = TokenRecyclingDrafter(args())
    assert proposal(drafter, begun(drafter)) is EMPTY_TREE


def test_targets_that_score_chains_get_chains() -> None:
    tree = proposal(*taught(ToyRunner(VOCAB, trees=False)))
    assert tree.is_chain
    assert tree.tokens.tolist() == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("accepted", [(), (0,), (0, 2)])
def test_every_row_teaches_accepted_or_not(accepted: tuple[int, ...]) -> None:
    drafter = TokenRecyclingDrafter(args())
    state, rows = begun(drafter), torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    tree = TokenTree.build([5, 6, 7], [-1, -1, 0])
    verdict = Verdict(accepted, tuple(int(tree.tokens[i]) for i in accepted), 9)
    state.context.tokens.extend(verdict.tokens)
    drafter.observe([state], [tree], [verdict], Scores(rows, (0, 4)))
    for token, row in zip((2, 5, 6, 7), rows, strict=True):
        assert state.table.candidates_vk[token].tolist() == row.topk(CANDIDATES).indices.tolist()
    assert (state.table.candidates_vk[[0, 1, 9]] < 0).all()


def test_the_rows_check_catches_rows_that_teach_their_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows one place off."""
    monkeypatch.setattr(
        token_recycling, "learn", lambda table_vk, tokens_r, rows: learn(table_vk, tokens_r, rows.roll(1, 0))
    )
    with pytest.raises(AssertionError):
        test_every_row_teaches_accepted_or_not((0,))


def test_a_token_that_comes_twice_keeps_its_last_row() -> None:
    table_vk, rows = CandidateTable(VOCAB).candidates_vk, torch.randn(2, VOCAB)
    learn(table_vk, np.array([3, 3], np.int32), rows)
    assert table_vk[3].tolist() == rows[1].topk(CANDIDATES).indices.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocab", [5, 64, 200])
@pytest.mark.parametrize("shift", [-30.0, 0.0, 30.0])
def test_the_best_tokens_of_a_row(dtype: torch.dtype, vocab: int, shift: float) -> None:
    """Negative, mixed and positive logits, padded rows, rows wider than the vocabulary; ties go to the lower id."""
    generator = torch.Generator().manual_seed(vocab)
    for _ in range(5):
        wide = (torch.randn(3, vocab + 9, generator=generator) * 3 + shift).to(dtype)
        wide[:, vocab:] = 1000.0
        table_vk = CandidateTable(vocab).candidates_vk
        for logits in (wide[:, : vocab + 2], wide.clone(), wide.T.contiguous().T):
            for _ in range(2):  # the second time knows the first's candidates
                learn(table_vk, np.array([0, 1, 2], np.int32), logits)
                order_rv = wide[:, :vocab].float().argsort(dim=1, descending=True, stable=True).numpy()
                assert (table_vk[:3, : min(CANDIDATES, vocab)] == order_rv[:, :CANDIDATES]).all()
        assert vocab >= CANDIDATES or (table_vk[:3, vocab:] == -1).all()


def test_a_bigram_model_is_followed_to_the_full_depth() -> None:
    """Once every token has been seen, six tokens of a model that looks at one token only are accepted in every step."""
    runner = ToyRunner(VOCAB, order=1, seed=4)
    drafter = TokenRecyclingDrafter(args(runner))
    state = begun(drafter)
    learn(
        state.table.candidates_vk,
        np.arange(VOCAB, dtype=np.int32),
        torch.stack([runner.logits([t]) for t in range(VOCAB)]),
    )
    params = SamplingParams(temperature=0.0, max_tokens=35, ignore_eos=True)
    (request,) = run(engine(runner, [drafter], tokens=80), [[1, 2]], params)
    assert request.outputs[0].token_ids == runner.greedy([1, 2], 35)
    assert request.metrics.num_steps == 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_later_requests_gain_by_earlier_ones_and_say_the_same(temperature: float) -> None:
    runner = ToyRunner(VOCAB, order=1, seed=4)
    loop = engine(runner, [TokenRecyclingDrafter(args(runner))], tokens=24)
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    plain = tokens(run(engine(runner), [[1, 2]], params))
    first, second = run(loop, [[1, 2]], params), run(loop, [[1, 2]], params)
    assert tokens(first) == tokens(second) == plain
    assert first[0].metrics.dropped_drafters == {}
    assert second[0].metrics.num_steps <= first[0].metrics.num_steps < 40


def test_rows_of_plain_steps_teach_too() -> None:
    """Otherwise a controller that starts with plain steps would never get a draft."""
    runner = ToyRunner(VOCAB, order=1, seed=4)
    drafter = TokenRecyclingDrafter(args(runner))
    run(engine(runner, [drafter], tokens=0), [[1, 2]], SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True))
    state = begun(drafter)
    assert len(proposal(drafter, state))
    before = state.table.candidates_vk.copy()
    state.context.tokens.append(9)
    drafter.observe([state], [EMPTY_TREE], [Verdict((), (), 9)], Scores(-torch.arange(VOCAB).float()[None], (0, 1)))
    assert (state.table.candidates_vk == before).all(), "what is known stays in plain steps, so that they cost nothing"


def test_tables_are_kept_apart_saved_and_read_again(tmp_path: Path) -> None:
    drafter, state = taught(tables=str(tmp_path))
    state.table.candidates_vk[5:] = -1
    expected = proposal(drafter, state)
    assert proposal(drafter, begun(drafter, tenant="other")) is EMPTY_TREE
    path = drafter.tables.save()
    assert path.stat().st_size < 2000, "only what is known is written"
    again = TokenRecyclingDrafter(args(), tables=str(tmp_path))
    assert proposal(again, begun(again)).tokens.tolist() == expected.tokens.tolist()
    with pytest.raises(DrafterError, match="vocab_size"):
        TokenRecyclingDrafter(args(vocab=VOCAB + 1), tables=str(tmp_path))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DrafterError, match="cannot be read"):
        TokenRecyclingDrafter(args(), tables=str(tmp_path))


GOOD = np.arange(8, dtype=np.int32)[None]


@pytest.mark.parametrize(
    ("tokens", "candidates", "why"),
    [
        ([3], GOOD.astype(np.int64), "must be int32"),
        ([3], GOOD[:, :7], "shapes"),
        ([3, 4], GOOD, "shapes"),
        ([VOCAB], GOOD, "tokens must lie in 0.."),
        ([-1], GOOD, "tokens must lie in 0.."),
        ([3], GOOD + VOCAB - 7, "candidates must lie in -1.."),
        ([3], GOOD * 0, "twice"),
    ],
)
def test_files_that_would_break_a_tree_are_rejected(tokens: list[int], candidates: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        CandidateTable(VOCAB).read_arrays({"tokens": np.array(tokens, np.int32), "candidates": candidates})


def test_no_more_tenants_than_told() -> None:
    drafter = TokenRecyclingDrafter(args(), max_tenants=2)
    for name in "abc":
        begun(drafter, tenant=name)
    assert len(drafter.tables) == 2


@pytest.mark.parametrize(
    "options", [{"num_speculative_tokens": -1}, {"tables": 3}, {"shared_tables": 1}, {"max_tenants": 0}]
)
def test_bad_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"must be"):
        TokenRecyclingDrafter(args(), **options)


class Heard(TokenRecyclingDrafter):
    """Notes what it is told, and how much of the text it knows then."""

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__(args)
        self.lengths: list[int] = []

    def observe(self, states: Any, trees: Any, verdicts: Any, scores: Any) -> None:
        super().observe(states, trees, verdicts, scores)
        self.lengths.append(len(states[0].context.tokens))


class Curious(Heard):
    """Control: it wants to hear of every step."""

    plain_every = property(lambda self: 1, lambda self, value: None)  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Heard, Curious])
def test_once_plain_steps_have_nothing_new_one_in_some_is_told(kind: type[Heard]) -> None:
    runner = ToyRunner(4, order=1, seed=4)
    drafter = kind(args(runner, 4))
    run(engine(runner, [drafter], tokens=0), [[1, 2]], SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True))
    gaps = np.diff(drafter.lengths)
    assert (gaps[:16] == 1).all()
    assert set(gaps[-4:].tolist()) == ({1} if kind is Curious else {PLAIN_EVERY})
    state = begun(drafter)
    for _ in range(32):
        state.table.candidates_vk[:] = -1
        drafter.observe([state], [EMPTY_TREE], [Verdict((), (), 2)], Scores(torch.zeros(1, 4), (0, 1)))
    assert drafter.plain_every == 1, "tokens of which nothing was known"
