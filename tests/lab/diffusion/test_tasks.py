"""The tasks: right answers are right, wrong ones are not; what one step reaches equals the closed forms."""

from itertools import permutations, product
from math import factorial

import numpy as np
import pytest

from lab.diffusion import (
    TASKS,
    Item,
    is_latin,
    is_sudoku,
    items,
    parse_grid,
    parse_queue,
    solutions,
    split_of,
    squares,
    sudokus,
    written,
)
from paceline.diffusion import Canvas, ConfiguredMethod, decode
from paceline.errors import ConfigError
from tests.diffusion.toys import Joint, permutation


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_right_and_blanks_around_do_not_count(task: str) -> None:
    for item in items(task, split="test", count=10):
        assert item.prompt.endswith(" =>")
        assert item.answer.startswith(" ")
        assert item.right(item.answer)
        assert item.right(f"{item.answer.strip()}\n")
        wrong = (item.answer + ".", item.answer[:-1], item.answer.replace(" ", "  "), "", item.answer + ", Zed")
        assert not any(item.right(text) for text in wrong)


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_disjoint_and_the_seed_decides(task: str) -> None:
    train, test = items(task, split="train", count=40, seed=1), items(task, split="test", count=20, seed=1)
    assert not {i.prompt for i in train} & {i.prompt for i in test}
    assert {split_of(i.prompt) for i in train} == {"train"}
    assert items(task, split="train", count=40, seed=1) == train
    assert items(task, split="train", count=40, seed=2) != train
    assert len({i.prompt for i in train}) == 40


def asked(task: str, queue: str, *facts: object) -> Item:
    return Item(task, "", "", (tuple(queue.split(", ")), *facts))


def test_the_input_is_no_shuffle_of_itself() -> None:
    item = asked("shuffle", "Bob, Tom, Mary")
    right = [", ".join(p) for p in permutations(["Bob", "Tom", "Mary"]) if item.right(", ".join(p))]
    assert len(right) == 5
    assert not item.right("Bob, Tom, Mary")
    assert not item.right("Bob, Bob, Mary")


def test_anything_at_random_accepts_every_place_and_nothing_else() -> None:
    names = ["Bob", "Tom", "Mary", "Sam"]
    for task, count, accepted in (("insert_random", 4, 4), ("remove_random", 2, 3), ("replace_random", 3, 3)):
        item = asked(task, "Bob, Tom, Mary", None, "Sam")
        assert sum(item.right(", ".join(p)) for p in product(names, repeat=count)) == accepted


def test_a_place_that_is_given_leaves_one_answer() -> None:
    queue = "Bob, Tom, Mary"
    assert asked("insert_index", queue, 2, "Sam").right("Bob, Sam, Tom, Mary")
    assert not asked("insert_index", queue, 2, "Sam").right("Sam, Bob, Tom, Mary")
    assert asked("remove_index", queue, 3, "Sam").right("Bob, Tom")
    assert asked("replace_index", queue, 1, "Sam").right("Sam, Tom, Mary")
    assert asked("sort", queue).right("Bob, Mary, Tom")


def test_sentences_use_the_words_once() -> None:
    item = Item("sentence", "", "", (tuple(sorted(["Bob", "Tom", "red", "box"])),))
    assert item.right("Bob gave Tom a red box.")
    assert item.right("Tom gave Bob a red box.")
    for text in (
        "Bob gave Bob a red box.",
        "Bob has a red box.",
        "Bob gave Tom a box red.",
        "Bob gave Tom a red box",
        "Bob gave Sam a red box.",
    ):
        assert not item.right(text)


def test_queues_are_parsed_strictly() -> None:
    assert parse_queue("Bob, Tom") == ("Bob", "Tom")
    assert all(parse_queue(text) is None for text in ("Bob,Tom", "Bob, Tom,", "bob, Tom", "", "Bob  Tom"))


def test_grids() -> None:
    assert (len(squares()), len(sudokus())) == (576, 288)
    assert parse_grid(written(sudokus()[0])) == sudokus()[0]
    assert is_sudoku("1234341221434321")
    assert is_latin("1234234134124123")
    assert not is_sudoku("1234234134124123")
    assert not is_latin("1234123412341234")
    for item in items("sudoku", split="test", count=10):
        assert len(solutions(str(item.facts[0]), sudokus())) == 1
    for item in items("latin", split="test", count=10):
        assert len(solutions(str(item.facts[0]), squares())) > 1


def test_unknown_names_are_rejected() -> None:
    with pytest.raises(ConfigError, match="the task must be one of copy"):
        items("juggle", split="test", count=1)
    with pytest.raises(ConfigError, match="train or test"):
        items("copy", split="dev", count=1)  # type: ignore[arg-type]


def distribution(texts: list[tuple[int, ...]], symbols: int) -> np.ndarray:
    joint = np.zeros((symbols,) * len(texts[0]))
    for text in texts:
        joint[text] += 1 / len(texts)
    return joint


def fraction(steps: int, n: int = 3, samples: int = 100) -> float:
    """Of valid permutations, drawn at temperature 1 by an exact denoiser in so many steps."""
    toy: Joint = permutation(n)
    good = 0
    for seed in range(samples):
        canvas = Canvas.of((), n, mask_token_id=toy.mask_token_id)
        method = {"method": "random", "temperature": 1.0, "denoising_steps": steps}
        [outcome] = decode([canvas], toy, [ConfiguredMethod(method).parts(toy, canvas, seed=seed)])
        good += sorted(outcome.canvas.output) == list(range(n))
    return good / samples


def answers(item: Item, names: list[str], count: int) -> list[tuple[int, ...]]:
    """Every queue of so many of the names that answers the item, by brute force."""
    return [p for p in product(range(len(names)), repeat=count) if item.right(", ".join(names[i] for i in p))]


@pytest.mark.parametrize(
    ("task", "count", "right"),
    [("shuffle", 3, 5), ("insert_random", 4, 4), ("remove_random", 2, 3), ("replace_random", 3, 3)],
)
def test_one_slot_a_step_answers_every_random_task(task: str, count: int, right: int) -> None:
    """An exact denoiser never goes wrong a slot at a time, whichever it starts with; all slots at once do."""
    names = ["Bob", "Tom", "Mary", "Sam"]
    item = asked(task, "Bob, Tom, Mary", None, "Sam")
    fine = answers(item, names, count)
    assert len(fine) == right
    toy, scores = Joint(distribution(fine, len(names))), []
    for steps in (count, 1):
        method, canvas = (
            {"method": "random", "temperature": 1.0, "denoising_steps": steps},
            Canvas.of((), count, mask_token_id=4),
        )
        runs = [
            decode([canvas], toy, [ConfiguredMethod(method).parts(toy, canvas, seed=seed)])[0] for seed in range(30)
        ]
        scores.append([item.right(", ".join(names[i] for i in run.canvas.output)) for run in runs])
    assert all(scores[0])
    assert not all(scores[1])


def test_one_step_is_right_by_luck_and_one_slot_a_step_always() -> None:
    expected = factorial(3) / 27
    assert (
        abs(fraction(1) - expected) < 4 * (expected * (1 - expected) / 100) ** 0.5
    )  # once in 16,000 seeds; ours are fixed
    assert fraction(3) == 1.0
