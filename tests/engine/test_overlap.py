"""Work beside a scoring pass: waited for whatever comes, billed, and taken in by verifiers as one trial more."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from threading import Event, get_ident
from typing import Any

import pytest
import torch
from adversaries import Adversary
from engine.harness import engine, run, tokens
from interrupts import bytecodes, interrupt
from toys import ToyRunner

from paceline import registry
from paceline.config import SamplingParams
from paceline.drafters import Ahead, DraftedToken, DrafterArgs
from paceline.drafters.draft_model.pearl import PearlDrafter
from paceline.engine import step_clock
from paceline.engine.overlap import SCORING_ALONE, AheadTask, DraftingAhead, Helper, with_longer_draft, with_none
from paceline.engine.step_clock import StepClock
from paceline.errors import DrafterError
from paceline.sampling import KeyedDraws
from paceline.tree import EMPTY_TREE, TokenTree

VOCAB = 5
LOW, HIGH = torch.tensor([0.2, 0.2, 0.2, 0.2, 0.2]), torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
FILES = (
    "engine/overlap.py",
    "engine/loop.py",
    "engine/scoring.py",
    "engine/drafter_set.py",
    "draft_model/pearl.py",
    "draft_model/pearl_state.py",
)


class Working(Adversary):
    """A drafter that only works ahead."""

    name, works_ahead = "working", True

    def __init__(self, work: Callable[[], Any], threads: int = 0) -> None:
        self.work, self.threads = work, threads

    def ahead(self, states: Any, trees: Any) -> Ahead:
        return Ahead(lambda: [self.work() for _ in states], self.threads)


def beside(drafter: Any, trees: list[TokenTree], dropped: list[Any], helper: Helper | None = None) -> DraftingAhead:
    task = AheadTask(
        0,
        drafter,
        {i: object() for i in range(len(trees))},
        lambda position, error: dropped.append((position, str(error))),
    )
    return DraftingAhead(helper or Helper(), [task], trees, VOCAB)


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def test_the_work_runs_on_another_thread_with_threads_of_its_own(threads: int) -> None:
    seen: list[tuple[int, int]] = []

    def work() -> None:
        seen.append((get_ident(), torch.get_num_threads()))

    with beside(Working(work, 1), [EMPTY_TREE], []) as around:
        assert torch.get_num_threads() == threads - 1
    assert torch.get_num_threads() == threads
    assert [count for _, count in seen] == [1]
    assert seen[0][0] != get_ident()
    assert around.longer == {}


def test_both_go_on_at_the_same_time_and_the_end_waits() -> None:
    scored, worked = Event(), Event()

    def work() -> DraftedToken:
        assert scored.wait(10), "the pass goes on while this works"
        worked.set()
        return DraftedToken(2, LOW)

    with beside(Working(work), [EMPTY_TREE, TokenTree.chain([1])], []) as around:
        scored.set()
    assert worked.is_set()
    assert sorted(around.longer) == [0, 1]
    assert (around.waits_for, SCORING_ALONE.waits_for) == (0, None)


@pytest.mark.parametrize(("waited_for", "drafting"), [(None, [1.0, 2.0]), (0, [1.5, 2.0]), (1, [1.0, 2.5])])
def test_what_the_verdicts_wait_for_is_time_of_the_drafter(
    waited_for: int | None, drafting: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, now = StepClock(), iter([10.0, 12.0, 12.5])
    monkeypatch.setattr(step_clock, "perf_counter", lambda: next(now))
    clock.drafted((1.0, 2.0), (0.0, 0.0))
    clock.scored()
    clock.joined(waited_for)
    assert clock.drafting == drafting


def test_an_error_of_the_pass_waits_for_the_work_too(threads: int) -> None:
    ended: list[bool] = []
    go = Event()

    def work() -> None:
        go.wait(10)
        ended.append(True)

    def score() -> None:
        with beside(Working(work, 1), [EMPTY_TREE], []):
            go.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score()
    assert ended == [True]
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("guess", "tree", "words"),
    [
        (DraftedToken(VOCAB, LOW), EMPTY_TREE, "must lie in"),
        (DraftedToken(1, LOW[:2]), EMPTY_TREE, "has a row of"),
        (DraftedToken(1, LOW), TokenTree.build([1, 2], [-1, -1]), "branches"),
    ],
)
def test_guesses_are_checked_before_a_verifier_sees_them(guess: DraftedToken, tree: TokenTree, words: str) -> None:
    dropped: list[Any] = []
    with beside(Working(lambda: guess), [tree], dropped) as around:
        pass
    assert around.longer == {}
    assert [position for position, _ in dropped] == [0]
    assert words in dropped[0][1]


def test_one_that_cannot_be_asked_is_dropped() -> None:
    class Broken(Working):
        def ahead(self, states: Any, trees: Any) -> Ahead:
            raise DrafterError("broken")

    dropped: list[Any] = []
    with beside(Broken(lambda: None), [EMPTY_TREE] * 2, dropped):
        pass
    assert dropped == [(0, "broken"), (1, "broken")]


EXACT = [name for name, entry in registry.VERIFIERS.items() if entry.exactness[1] != "approximate" and name != "greedy"]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("drafted", [[], [3], [3, 1]])
def test_a_verdict_ends_with_the_token_behind_the_tree(name: str, drafted: list[int]) -> None:
    """Where p = q it always stands and no token follows it; where p gives it nothing it never does."""
    verifier = registry.load("verifiers", name)()
    tree = TokenTree.chain(drafted)
    made = with_longer_draft(tree, DraftedToken(4, LOW))
    scored = torch.stack([torch.log(torch.eye(VOCAB)[token] + 1e-30) for token in drafted] + [torch.log(LOW)])
    for rows in (scored, [*scored]):
        for seed in range(20):
            given = with_none(rows, made)
            (verdict,) = verifier.verify([made], [given], [KeyedDraws(seed, 7)])
            assert verdict.tokens == (*drafted, 4)
            assert verdict.path == tuple(range(len(drafted)))
    other = torch.cat((scored[:-1], torch.log(HIGH).unsqueeze(0)))
    (verdict,) = verifier.verify([made], [with_none(other, made)], [KeyedDraws(0, 7)])
    assert verdict.tokens == (*drafted, 2), "negative control: another distribution"


def test_the_row_behind_a_tree_holds_no_distribution() -> None:
    made = with_longer_draft(EMPTY_TREE, DraftedToken(4, LOW))
    for rows in (torch.log(LOW).unsqueeze(0), [torch.log(LOW)]):
        given = with_none(rows, made)
        assert torch.equal(given[0], torch.log(LOW))
        assert all(math.isnan(one) for one in given[1].tolist())


def live(target: ToyRunner, draft: ToyRunner) -> Any:
    args = DrafterArgs(vocab_size=VOCAB, index=0, max_context=4096, target=target, load_runner=lambda name: draft)
    return engine(target, [PearlDrafter(args, model="toy", num_speculative_tokens=3, overlap=True)], 3)


def test_ctrl_c_at_any_bytecode_leaves_nothing_behind(threads: int) -> None:
    target = ToyRunner(VOCAB, seed=3)
    prompts, random_one = [[1, 2, 3], [4, 4]], random.Random(0)
    want = tokens(run(engine(target, [], 0), prompts, GREEDY))

    def generation(made: Any) -> None:
        try:
            run(made, prompts, GREEDY)
        except KeyboardInterrupt:
            made.fail_started(KeyboardInterrupt())
            raise

    def fresh() -> tuple[Any, ToyRunner]:
        draft = ToyRunner(VOCAB, seed=3, noise=0.5)
        return live(target, draft), draft

    count = bytecodes(lambda: generation(fresh()[0]), FILES)
    positions = set()
    for at in random_one.sample(range(count), 60):
        made, draft = fresh()
        positions.add(interrupt(lambda made=made: generation(made), FILES, at).split(":")[0])  # type: ignore[misc]
        assert torch.get_num_threads() == threads
        assert tokens(run(made, prompts, GREEDY)) == want
        assert draft.open_caches == 0
    assert any("DraftingAhead" in position or "Helper" in position for position in positions)
    assert len(positions) > 10


@pytest.mark.parametrize("drafts", [True, False])
def test_only_drafters_that_work_ahead_begin_a_thread(drafts: bool) -> None:
    target = ToyRunner(VOCAB, seed=3)
    made = live(target, ToyRunner(VOCAB, seed=3, noise=0.5)) if drafts else engine(target, [], 0)
    run(made, [[1, 2]], GREEDY)
    assert (made.parts.drafter_set.helper.pool is not None) == drafts
