"""The table of tri-grams, the search over it, and what the drafter may and may not learn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys import ToyRunner

from paceline import LLM, SamplingParams
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.common.tables import OtherOptionError
from paceline.drafters.lookup import AdedDrafter
from paceline.drafters.lookup.aded import WAYS, TrigramTable, find_trigram, search_tree
from paceline.errors import ConfigError, DrafterError
from paceline.tree import EMPTY_TREE, Budget, TokenTree, Verdict

VOCAB = 50
RANDOM = np.random.default_rng(0).integers(0, 6, 2000).tolist()


def table(text: Sequence[int], rows: int = 1024, width: int = 8) -> TrigramTable:
    found = TrigramTable(rows, width, VOCAB)
    found.learn(text)
    return found


def followers(one: TrigramTable, first: int, second: int) -> dict[int, float]:
    row = find_trigram(one.rows, first, second)
    return (
        {} if row < 0 else {int(t): float(w) for t, w in zip(one.rows[2][row], one.rows[3][row], strict=True) if t >= 0}
    )


def drafter(*, trees: bool = True, **options: Any) -> AdedDrafter:
    return AdedDrafter(
        DrafterArgs(vocab_size=VOCAB, index=1, max_context=64, target=ToyRunner(VOCAB, trees=trees)), **options
    )  # type: ignore[arg-type]


def begin(one: AdedDrafter, text: Sequence[int], tenant: str = "") -> Any:
    return one.begin([Context("r", list(text), len(text), tenant=tenant)])[0]


def propose(one: AdedDrafter, state: Any, nodes: int = 12, depth: int = 6) -> TokenTree:
    (tree,) = one.propose([state], [Budget(nodes, depth)], [EMPTY_TREE])
    tree.check(VOCAB, nodes)
    return tree


def test_rows_count_followers_and_forget_slowly() -> None:
    one = table([1, 2, 3, 1, 2, 3, 1, 2, 4])
    assert followers(one, 1, 2) == pytest.approx({3: 0.9 * (0.9 + 1.0), 4: 1.0})
    assert followers(one, 3, 1) == pytest.approx({2: 1.9})
    assert followers(one, 2, 4) == {}


def test_the_weakest_follower_goes() -> None:
    one = table([1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2, 5], width=2)
    assert set(followers(one, 1, 2)) == {3, 5}


def test_the_table_is_bounded_and_drops_what_is_oldest() -> None:
    """A table of all pairs, a small one of the newest; both take the memory that they took when they were empty."""
    rng = np.random.default_rng(1)
    text = rng.integers(0, VOCAB, 20_000).tolist()
    small, large = TrigramTable(64, 2, VOCAB), TrigramTable(8192, 2, VOCAB)
    before = small.nbytes
    for one in (small, large):
        one.learn(text)
    assert small.nbytes == before == 64 * (16 + 2 * 8)
    assert len(small.to_arrays()["pairs"]) == 64
    assert len(large.to_arrays()["pairs"]) > 2000
    newest = large.rows[1].max()
    assert small.rows[1].min() > newest - 2000


def test_tables_are_kept_and_rejected() -> None:
    one, other = table(RANDOM, rows=64, width=3), TrigramTable(64, 3, VOCAB)
    other.read_arrays(one.to_arrays())
    pairs = [(a, b) for a in range(6) for b in range(6)]
    assert any(followers(one, *pair) for pair in pairs)
    assert all(followers(one, *pair) == followers(other, *pair) for pair in pairs)
    arrays = {name: np.array(array) for name, array in one.to_arrays().items()}
    wrong = [
        {},
        arrays | {"weights": arrays["weights"].astype(np.float64)},
        arrays | {"times": arrays["times"][1:]},
        arrays | {"followers": arrays["followers"] + VOCAB},
        arrays | {"pairs": arrays["pairs"] - 2**60},
        arrays | {"weights": arrays["weights"] * np.nan},
        arrays | {"times": arrays["times"] * 0},
        arrays | {"times": arrays["times"] + (2**63 - 1 - arrays["times"].max())},
        arrays | {"times": arrays["times"] + (2**62 + 1 - arrays["times"].max())},
        arrays | {"followers": np.full_like(arrays["followers"], 7)},
    ]
    for found in wrong:
        with pytest.raises(ValueError, match=r"must|is missing"):
            TrigramTable(64, 3, VOCAB).read_arrays(found)


def test_the_latest_times_and_empty_places_are_no_damage() -> None:
    """Places without a follower are alike; a table goes on counting from the last time that is taken."""
    one, other = table([1, 2, 3], rows=64, width=3), TrigramTable(64, 3, VOCAB)
    arrays = dict(one.to_arrays())
    assert arrays["followers"].tolist() == [[3, -1, -1]]
    other.read_arrays(arrays | {"times": np.array([2**62])})
    other.learn([1, 2, 3, 1, 2, 4])
    assert other.rows[1].max() > 2**62
    assert followers(other, 1, 2) == pytest.approx({3: 0.9 * 1.9, 4: 1.0})


@pytest.mark.parametrize("exploration", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("depth", [1, 3, 8])
def test_visits_of_children_sum_to_those_of_their_parent_but_one(exploration: float, depth: int) -> None:
    links, _, visits, size = search_tree(table(RANDOM).rows, 1, 2, (200, depth), exploration)
    assert visits[0] == 200
    inner = [node for node in range(size) if links[node, 3] > 0]
    assert len(inner) > (0 if depth == 1 else 2)
    for node in inner:
        children = range(links[node, 2], links[node, 2] + links[node, 3])
        assert sum(int(visits[child]) for child in children) == visits[node] - 1
        assert all(links[child, 1] == node and links[child, 4] == links[node, 4] + 1 for child in children)
    assert max(int(links[node, 4]) for node in range(size)) <= depth


def greedy(one: TrigramTable, first: int, second: int, depth: int) -> list[int]:
    path = [first, second]
    while len(path) < depth + 2:
        found = followers(one, path[-2], path[-1])
        if not found:
            break
        path.append(max(found, key=lambda token: found[token]))
    return path[2:]


def test_without_exploration_it_is_greedy_drafting() -> None:
    one = drafter(exploration=0.0)
    state = begin(one, RANDOM)
    tree = propose(one, state, nodes=5, depth=5)
    assert tree.is_chain
    assert tree.tokens.tolist() == greedy(one.tables.of(""), *RANDOM[-2:], 5)
    assert not propose(drafter_with(RANDOM, exploration=1.0)[0], state, nodes=5, depth=5).is_chain


def drafter_with(text: Sequence[int], **options: Any) -> tuple[AdedDrafter, Any]:
    one = drafter(**options)
    return one, begin(one, text)


def test_more_exploration_makes_wider_trees() -> None:
    widths = [
        len(propose(*drafter_with(RANDOM, exploration=weight), nodes=24).children(-1)) for weight in (0.0, 0.3, 3.0)
    ]
    assert widths[0] == 1
    assert widths == sorted(widths)
    assert widths[2] > widths[0]


def test_likely_nodes_are_kept_under_a_budget() -> None:
    """The tree of the search holds nearly as much chance as the best tree of its size."""
    one, state = drafter_with(RANDOM, simulations=1000)
    wide = propose(one, state, nodes=400, depth=3)
    best = np.sort(wide.reach())[::-1][:10].sum()
    assert propose(one, state, nodes=10, depth=3).reach().sum() > 0.8 * best


def take(tree: TokenTree, text: Sequence[int], truth: Sequence[int]) -> Verdict:
    """What a greedy target does that goes on with `truth`."""
    node, path = -1, []
    for token in truth:
        after = [child for child in tree.children(node) if tree.tokens[child] == token]
        if not after:
            break
        path.append(node := after[0])
    return Verdict(tuple(path), tuple(truth[: len(path)]), truth[len(path)])


def test_periodic_text_is_fully_accepted_after_one_period() -> None:
    period = [3, 1, 4, 1, 5, 9, 2, 6]
    truth = period * 12
    one, state = drafter_with([7, 8])
    done, lengths = 0, []
    while done < 60:
        tree = propose(one, state, nodes=4, depth=4)
        verdict = take(tree, state.context.tokens, truth[done:])
        state.context.tokens.extend(verdict.tokens)
        one.observe([state], [tree], [verdict], None)
        done += len(verdict.tokens)
        lengths.append((done, len(verdict.accepted)))
    assert all(count == 0 for at, count in lengths if at <= len(period))
    assert all(count == 4 for at, count in lengths if at > len(period) + 8)


def test_rejected_drafts_are_not_learned() -> None:
    one, state = drafter_with([1, 2, 3, 1, 2])
    for next_token in (9, 1, 2):
        tree = propose(one, state)
        state.context.tokens.append(next_token)
        one.observe([state], [tree], [Verdict((), (), next_token)], None)
    only_text = table([1, 2, 3, 1, 2, 9, 1, 2])
    for pair in [(a, b) for a in range(10) for b in range(10)]:
        assert followers(one.tables.of(""), *pair) == pytest.approx(followers(only_text, *pair))
    learned_wrong = table([1, 2, 3, 1, 2, 3])  # what it had been if the refused 3 were counted
    assert followers(learned_wrong, 1, 2) != pytest.approx(followers(one.tables.of(""), 1, 2))


def test_tokens_are_counted_once_over_forks_and_repeated_calls() -> None:
    one, state = drafter_with([1, 2, 3, 1, 2])
    twin = one.fork(state, Context("t", [1, 2, 3, 1, 2], 5))
    for each in (state, twin, state):
        propose(one, each)
    one.end([state, twin])
    assert followers(one.tables.of(""), 1, 2) == pytest.approx({3: 1.0})


def test_tenants_learn_apart_unless_told_otherwise(tmp_path: Path) -> None:
    for shared in (False, True):
        one = drafter(shared_tables=shared, tables=str(tmp_path / str(shared)))
        begin(one, [1, 2, 3, 1, 2], "a")
        tree = propose(one, begin(one, [1, 2], "b"))
        assert (tree is EMPTY_TREE) != shared
        one.tables.save()
        kept = drafter(shared_tables=shared, tables=str(tmp_path / str(shared)))
        assert propose(kept, begin(kept, [1, 2], "a")).tokens.tolist()[:1] == [3]
    with pytest.raises(DrafterError, match="cannot be read"):
        drafter(table_width=3, tables=str(tmp_path / "False"))


def test_tables_of_another_width_are_called_that_and_not_damaged(tmp_path: Path) -> None:
    one = drafter(tables=str(tmp_path))
    begin(one, [1, 2, 3, 1, 2], "a")
    path = one.tables.save()
    with pytest.raises(DrafterError) as caught:
        drafter(table_width=3, tables=str(tmp_path))
    assert str(caught.value) == (
        f"the tables in {str(path)!r} cannot be read with table_width 3: they were stored with table_width 8; "
        "set the same value or choose another folder"
    )
    assert propose(again := drafter(tables=str(tmp_path)), begin(again, [1, 2], "a")).tokens.tolist()[:1] == [3]
    for table_rows in (WAYS, 2**17):
        assert len(drafter(table_rows=table_rows, tables=str(tmp_path)).tables) == 1


@pytest.mark.parametrize("width", [0, 5])
def test_damage_is_damage_at_any_width(width: int) -> None:
    arrays = {name: np.array(array) for name, array in table(RANDOM, rows=64, width=5).to_arrays().items()}
    torn = arrays | {name: arrays[name][:, :width] for name in ("followers", "weights")}
    with pytest.raises(ValueError, match=r"missing|finite") as caught:
        TrigramTable(64, 3, VOCAB).read_arrays(torn | {"weights": torn["weights"] - 1e9})
    assert not isinstance(caught.value, OtherOptionError)


def test_a_runner_of_chains_gets_chains() -> None:
    one, state = drafter_with(RANDOM, trees=False)
    assert propose(one, state).is_chain
    assert len(propose(one, state)) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"table_rows": WAYS - 1},
        {"table_width": 0},
        {"simulations": 0},
        {"exploration": -1.0},
        {"exploration": float("nan")},
        {"num_speculative_tokens": -2},
        {"shared_tables": 1},
        {"tables": ""},
    ],
    ids=str,
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        drafter(**options)


def test_the_bundled_model_says_the_same() -> None:
    plain = LLM(speculative_config=None, dtype="float32")
    other = plain.with_speculative_config({"method": "aded", "num_speculative_tokens": 6})
    prompts = ["def add(a, b):\n    return a + b\n\ndef", "one two one two one"]
    for params in (
        SamplingParams(temperature=0.0, max_tokens=24),
        SamplingParams(temperature=0.8, seed=3, max_tokens=24),
    ):
        expected, found = plain.generate(prompts, params), other.generate(prompts, params)
        assert [a.outputs[0].token_ids for a in found] == [b.outputs[0].token_ids for b in expected]
