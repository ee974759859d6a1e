"""DiffuSpec: the path search against brute force; argmax drafting as a special case, tenants, exactness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters.denoisers import Says, Scripted, args, random_rows, rows_of_a_runner
from engine.harness import engine, run, tokens
from toys import ToyRunner

from paceline.config import SamplingParams
from paceline.controllers.policies.diffuspec import DiffuSpecController
from paceline.drafters import Context
from paceline.drafters.diffusion.diffuspec import NONE, DiffuSpecDrafter, best_path, lattice_of
from paceline.drafters.diffusion.trigram_counts import SMALLEST, TrigramCounts
from paceline.errors import ConfigError, DrafterError
from paceline.tree import EMPTY_TREE, Budget, TokenTree

VOCAB = 11
PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
ARGMAX: dict[str, Any] = {"path_weight": 1.0, "max_candidates": 1, "path_beam": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def drafter(says: Says, *, ends: tuple[int, ...] = (), **options: Any) -> DiffuSpecDrafter:
    return DiffuSpecDrafter(
        args(Scripted(says, VOCAB, ends=ends), VOCAB), **{"model": "toy", "draft_masks": 0, **options}
    )


def tree_of(one: DiffuSpecDrafter, text: Sequence[int] = PROMPT, nodes: int = 6, **context: Any) -> TokenTree:
    (state,) = one.begin([Context("r", list(text), len(text), **context)])
    (tree,) = one.propose([state], [Budget(nodes, nodes)], [EMPTY_TREE])
    tree.check(VOCAB, nodes)
    assert not tree.trials, "the tokens of a path are points"
    return tree


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_beam_one_of_one_candidate_is_argmax_drafting(temperature: float) -> None:
    says = random_rows(VOCAB)
    likeliest = [int(np.argmax(says(PROMPT, position))) for position in range(6)]
    assert tree_of(drafter(says, **ARGMAX), temperature=temperature).tokens.tolist() == likeliest
    assert tree_of(drafter(says, path_beam=5), temperature=temperature).tokens.tolist() != likeliest


def test_tri_grams_choose_among_what_the_denoiser_allows() -> None:
    """Each slot is torn between two tokens; text that was seen says which goes with which."""
    rows = [[0.0] * VOCAB for _ in range(4)]
    for row, pair in zip(rows, [(5, 3), (4, 6), (7, 1), (2, 8)], strict=True):
        row[pair[0]], row[pair[1]] = 0.52, 0.48

    def says(text: list[int], position: int) -> list[float]:
        return rows[position]

    assert tree_of(drafter(says, path_weight=1.0), nodes=4).tokens.tolist() == [5, 4, 7, 2]
    tree = tree_of(drafter(says), nodes=4)
    assert tree.tokens.tolist() == [3, 4, 1, 2]
    assert tree.confidence.tolist() == pytest.approx([0.48, 0.52, 0.48, 0.52])


def test_a_draft_ends_with_its_end_token() -> None:
    rows = [[0.01] * VOCAB for _ in range(6)]
    for position, row in enumerate(rows):
        row[position + 3 if position < 2 else 0] = 0.9
    tree = tree_of(drafter(lambda text, position: rows[position], ends=(0,)))
    assert tree.tokens.tolist() == [3, 4, 0]


def accepted(one: DiffuSpecDrafter, runner: ToyRunner, nodes: int = 4) -> tuple[int, int]:
    found = run(engine(runner, [one], nodes), [PROMPT], GREEDY)
    assert tokens(found) == tokens(run(engine(runner), [PROMPT], GREEDY))
    return found[0].metrics.num_accepted_tokens, found[0].metrics.num_draft_tokens


def test_the_target_itself_as_scorer_accepts_everything() -> None:
    """lambda = 0 and tri-grams counted from very much of the text of a target that looks two tokens back, at beam 1."""
    runner = ToyRunner(VOCAB, seed=3)
    one = drafter(random_rows(VOCAB), path_weight=0.0, candidate_mass=1.0, path_beam=1)
    counts = one.tables.of("")
    for a in range(VOCAB):
        for b in range(VOCAB):
            for token, p in enumerate(runner.logits([a, b]).double().softmax(-1).tolist()):
                for _ in range(round(200 * p)):
                    counts.learn([a, b, token], 2)
    stood, drafted = accepted(one, runner)
    assert stood == drafted > 40
    stood, drafted = accepted(drafter(random_rows(VOCAB), **ARGMAX), runner)
    assert stood < 0.5 * drafted


def test_k_min_equal_to_k_max_fixes_the_length() -> None:
    runner = ToyRunner(VOCAB, seed=3)
    lengths = []
    for k_min, k_max in ((5, 5), (2, 9)):
        one, seen = drafter(rows_of_a_runner(ToyRunner(VOCAB, seed=3, noise=0.05)), **ARGMAX), list[int]()
        propose = one.propose

        def noting(
            states: Any, budgets: Any, so_far: Any, propose: Any = propose, seen: list[int] = seen
        ) -> list[TokenTree]:
            trees: list[TokenTree] = propose(states, budgets, so_far)
            seen += [len(tree) for tree in trees]
            return trees

        one.propose = noting  # type: ignore[method-assign]
        run(engine(runner, [one], controller=DiffuSpecController(k_min=k_min, k_max=k_max)), [PROMPT], GREEDY)
        lengths.append(set(seen[:-2]))  # the end of the text cuts the last ones
    assert lengths[0] == {5}
    assert len(lengths[1]) > 1
    assert lengths[1] <= set(range(2, 10))


@pytest.mark.parametrize("says", [random_rows(VOCAB), rows_of_a_runner(ToyRunner(VOCAB, seed=3, noise=0.7))])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True)])
def test_the_text_is_that_of_plain_decoding(says: Says, params: SamplingParams) -> None:
    """A random denoiser, and one that resembles the target; with a seed, points give the very tokens."""
    runner, prompts = ToyRunner(VOCAB, seed=3), [PROMPT, [5], PROMPT * 3]
    found = run(engine(runner, [drafter(says)], 6), prompts, params)
    assert tokens(found) == tokens(run(engine(runner), prompts, params))
    assert found[0].metrics.num_draft_tokens > 0


def torn(text: list[int], position: int) -> list[float]:
    row = [0.0] * VOCAB
    row[5], row[6] = 0.55, 0.45
    return row


def test_tenants_do_not_learn_from_each_other() -> None:
    one = drafter(torn)
    for _ in range(3):
        tree_of(one, [7, 8, 6, 7, 8, 6], tenant="a")
    assert tree_of(one, [7, 8], 1, tenant="a").tokens.tolist() == [6]
    assert tree_of(one, [7, 8], 1, tenant="b").tokens.tolist() == [5]
    shared = drafter(torn, shared_tables=True)
    tree_of(shared, [7, 8, 6, 7, 8, 6], tenant="a")
    assert tree_of(shared, [7, 8], 1, tenant="b").tokens.tolist() == [6]


def test_a_file_teaches_every_tenant_and_tables_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("ghfghfghf")  # letters a.. are tokens 1..
    one = drafter(torn, ngram_file=str(file), tables=str(tmp_path / "tables"))
    assert tree_of(one, [7, 8], 1, tenant="b").tokens.tolist() == [6]
    one.tables.save()
    again = drafter(torn, tables=str(tmp_path / "tables"))
    assert tree_of(again, [7, 8], 1, tenant="b").tokens.tolist() == [6]
    assert tree_of(again, [7, 8], 1, tenant="c").tokens.tolist() == [5]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path_weight": 1.5}, r"path_weight must be in 0\.\.1, got 1\.5"),
        ({"candidate_mass": -0.1}, r"candidate_mass must be in 0\.\.1"),
        ({"max_candidates": 0}, "max_candidates must be an integer of 1 or more"),
        ({"path_beam": 0}, r"path_beam must be an integer in 1\.\.64"),
        ({"ngram_slots": 10}, "ngram_slots must be an integer in 4096"),
        ({"ngram_file": 3}, "ngram_file must be the name of a text file, got 3"),
        ({"draft_max_length": 0}, "draft_max_length must be"),
        ({"model": 3}, "must be the folder or hub id of a diffusion language model for method 'diffuspec', got 3"),
    ],
)
def test_wrong_options_are_rejected_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        drafter(torn, **options)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name in ("none", "bytes"):
        with pytest.raises(DrafterError, match=r"ngram_file '.*' cannot be read as UTF-8 text") as caught:
            drafter(torn, ngram_file=str(tmp_path / name))
        assert "\n" not in str(caught.value)


PATH_VOCAB, END = 5, 0
TEXT = [1, 2, 3, 4, 1, 2, 3, 1, 4, 2, 2, 3, 0, 1, 2, 3, 4]


def counts(text: Sequence[int] = TEXT) -> TrigramCounts:
    found = TrigramCounts(SMALLEST, PATH_VOCAB)
    found.learn(text)
    return found


def weights(*rows: Sequence[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def random_weights(seed: int, slots: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((slots, PATH_VOCAB)) * 1.5)


def kept(row: Sequence[float], mass: float, most: int, ends: Sequence[int] = ()) -> list[int]:
    tokens = lattice_of(weights(row), mass=mass, most=most, ends=ends).tokens[0]
    return [int(token) for token in tokens if token != NONE]


def test_a_slot_keeps_its_smallest_set_of_enough_mass() -> None:
    row = [0.05, 0.5, 0.25, 0.15, 0.05]
    assert kept(row, 0.5, 15) == [1]
    assert kept(row, 0.7, 15) == [1, 2]
    assert kept(row, 0.8, 15) == [1, 2, 3]
    assert kept(row, 0.8, 2) == [1, 2]
    assert kept(row, 0.0, 15) == [1]
    assert sorted(kept(row, 1.0, 15)) == [0, 1, 2, 3, 4]


def test_end_tokens_stay_and_nothing_follows_them() -> None:
    assert kept([0.05, 0.5, 0.25, 0.15, 0.05], 0.7, 15, [END]) == [1, 2, END]
    assert kept([0.3, 0.4, 0.2, 0.06, 0.04], 0.95, 15, [END]) == [1, END]
    assert kept([0.3, 0.4, 0.2, 0.06, 0.04], 0.95, 15, [END, 4]) == [1, END, 4]
    assert kept([0.0, 0.6, 0.2, 0.1, 0.1], 0.7, 15, [END]) == [1, 2]  # forbidden by the rules of the request


@pytest.mark.parametrize("seed", range(5))
def test_the_path_of_beam_one_and_one_candidate_is_the_argmax(seed: int) -> None:
    rows = random_weights(seed, 7)
    for options in ({"mass": 0.8, "most": 1}, {"mass": 1.0, "most": 15}):
        lattice = lattice_of(rows, **options, ends=())  # type: ignore[arg-type]
        assert best_path(lattice, counts(), TEXT, lam=1.0, beam=1) == rows.argmax(-1).tolist()
    lattice = lattice_of(rows, mass=1.0, most=15, ends=())
    assert best_path(lattice, counts(), TEXT[-2:], lam=0.2, beam=3) != rows.argmax(-1).tolist()


def price(path: Sequence[int], rows: torch.Tensor, model: TrigramCounts, lam: float, ends: Sequence[int]) -> float:
    """Of a path over all slots, end tokens behind an end token; written from the definition."""
    log_p, text, total, over = rows.log_softmax(-1), [*TEXT], 0.0, False
    for slot, token in enumerate(path):
        if over:
            total += lam * float(log_p[slot, list(ends)].max())
            continue
        total += lam * float(log_p[slot, token]) + (1 - lam) * math.log(model.chance(text[-2], text[-1], token))
        text.append(token)
        over = token in ends
    return total


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("ends", [(), (END,)])
def test_a_wide_beam_finds_the_best_of_all_paths(lam: float, ends: tuple[int, ...]) -> None:
    for seed in range(4):
        rows, model = random_weights(seed, 3), counts()
        # under mass 1 and with no ends all tokens are candidates; with ends, those likelier than the end token
        log_p = rows.log_softmax(-1)
        allowed = [[t for t in range(PATH_VOCAB) if not ends or log_p[k, t] >= log_p[k, END]] for k in range(3)]
        paths = {tuple(p[: p.index(END) + 1] if ends and END in p else p): p for p in product(*allowed)}
        best = max(paths, key=lambda cut: price((*cut, *[END] * (3 - len(cut))), rows, model, lam, ends))
        found = best_path(lattice_of(rows, mass=1.0, most=15, ends=ends), model, TEXT[-2:], lam=lam, beam=64)
        assert tuple(found) == best


def test_a_narrow_beam_may_miss_it() -> None:
    """Negative control of the test above."""
    missed = 0
    for seed in range(20):
        lattice = lattice_of(random_weights(seed, 4), mass=1.0, most=15, ends=())
        wide, narrow = (best_path(lattice, counts(), TEXT[-2:], lam=0.4, beam=beam) for beam in (64, 1))
        missed += wide != narrow
    assert missed > 0


def test_the_path_stops_at_its_end() -> None:
    rows = weights([0.02, 0.9, 0.04, 0.02, 0.02], [0.9, 0.03, 0.03, 0.02, 0.02], [0.9, 0.05, 0.02, 0.02, 0.01])
    assert best_path(lattice_of(rows, mass=0.8, most=15, ends=[END]), counts([]), [], lam=1.0, beam=3) == [1, END]
    assert best_path(lattice_of(rows, mass=0.8, most=15, ends=[]), counts([]), [], lam=1.0, beam=3) == [1, END, END]


def test_an_end_that_the_denoiser_does_not_see_is_not_taken_for_being_short() -> None:
    rows = weights(*[[0.02, 0.3, 0.3, 0.19, 0.19]] * 12)
    assert len(best_path(lattice_of(rows, mass=0.8, most=15, ends=[END]), counts([]), [], lam=0.5, beam=5)) == 12


def test_rows_without_a_distribution_are_rejected() -> None:
    for bad in (float("nan"), float("-inf")):
        rows = weights([0.2] * 5, [0.2] * 5)
        rows[1] = bad
        with pytest.raises(DrafterError, match="NaN"):
            lattice_of(rows, mass=0.8, most=15, ends=[END])
