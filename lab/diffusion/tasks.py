"""Tasks with exact answers that tell what deciding several slots at once costs.

Some tasks have one right answer (copy, reverse, sort, anything at a given place, sudoku): slots can be decided
together. Others leave a choice that all slots must agree on (shuffle, anything at random, a Latin square, a sentence
from words): deciding slots apart from each other breaks them. The lists are queues of people in a waiting line; their
names are one token each in the bundled models.
Source: ParallelBench (arXiv:2510.04767), whose prompts are longer and whose names have several tokens.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any, Literal

from paceline.utils import integer, need

DIGITS = "1234"
ROWS = tuple(tuple(range(4 * r, 4 * r + 4)) for r in range(4))
COLUMNS = tuple(tuple(range(c, 16, 4)) for c in range(4))
BOXES = tuple(tuple(4 * (r + i) + c + j for i in (0, 1) for j in (0, 1)) for r in (0, 2) for c in (0, 2))
GRID = re.compile(r"[1-4] [1-4] [1-4] [1-4]( / [1-4] [1-4] [1-4] [1-4]){3}")


def written(grid: str) -> str:
    """ "1 2 3 4 / 2 1 4 3 / ..." """
    return " / ".join(" ".join(grid[i] for i in row) for row in ROWS)


def parse_grid(text: str) -> str | None:
    """The grid of a text as `written` writes it, without blanks; None for anything else."""
    return re.sub("[ /]", "", text) if GRID.fullmatch(text) else None


def is_latin(grid: str) -> bool:
    """Every digit once in each row and column."""
    return _keeps(grid, (*ROWS, *COLUMNS))


def is_sudoku(grid: str) -> bool:
    """Every digit once in each row, column and box of 2 x 2."""
    return _keeps(grid, (*ROWS, *COLUMNS, *BOXES))


def _keeps(grid: str, units: Sequence[tuple[int, ...]]) -> bool:
    return all({grid[i] for i in unit} == set(DIGITS) for unit in units)


@cache
def squares() -> tuple[str, ...]:
    """All 576 Latin squares of order 4."""
    rows = ["".join(p) for p in permutations(DIGITS)]
    return tuple(_stacks(rows))


def _stacks(rows: list[str], above: str = "") -> Iterator[str]:
    """Stacks of four rows that share no digit in a column."""
    if len(above) == 16:
        yield above
        return
    for row in rows:
        if all(digit not in above[column::4] for column, digit in enumerate(row)):
            yield from _stacks(rows, above + row)


@cache
def sudokus() -> tuple[str, ...]:
    """All 288 sudokus of order 4."""
    return tuple(filter(is_sudoku, squares()))


def solutions(given: str, grids: Sequence[str]) -> list[str]:
    """Those of `grids` that agree with what is given."""
    fixed = [(i, digit) for i, digit in enumerate(given) if digit != "_"]
    return [grid for grid in grids if all(grid[i] == digit for i, digit in fixed)]


def _blanked(grid: str, kept: Sequence[int]) -> str:
    return "".join(digit if i in kept else "_" for i, digit in enumerate(grid))


def latin_puzzle(rng: random.Random) -> tuple[str, str]:
    """Three to five given cells that leave a choice, and one Latin square that agrees with them."""
    while True:
        full = rng.choice(squares())
        given = _blanked(full, rng.sample(range(16), rng.randint(3, 5)))
        if len(solutions(given, squares())) > 1:
            return given, full


def sudoku_puzzle(rng: random.Random) -> tuple[str, str]:
    """Six to ten given cells with exactly one solution, and that solution."""
    while True:
        full = rng.choice(sudokus())
        given = _blanked(full, rng.sample(range(16), rng.randint(6, 10)))
        if len(solutions(given, sudokus())) == 1:
            return given, full


NAMES = (
    *("Bayes", "Bill", "Bob", "Carl", "Don", "Edward", "Gauss", "Henry", "Holmes", "Jack", "James"),
    *("Jan", "John", "Luc", "Mark", "Mary", "May", "Rich", "Sam", "Tom", "Warwick", "York"),
)
COLOURS = ("black", "blue", "brown", "green", "red", "white")
THINGS = (
    "bag",
    "ball",
    "bed",
    "bird",
    "book",
    "bottle",
    "box",
    "cake",
    "car",
    "card",
    "cat",
    "coin",
    "cup",
    "dog",
    "door",
)
SHORTEST, LONGEST = 3, 6
TEST_SHARE = 8
"""One prompt in so many belongs to the test split, whatever the seed."""

Split = Literal["train", "test"]
Facts = tuple[Any, ...]
"""What a scorer needs to know of a question: the queue, the place, the name; or the grid."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question.

    Attributes:
        task: its name in `TASKS`.
        prompt: ends with " =>".
        answer: one right answer, which begins with a space.
        facts: what its scorer needs.
    """

    task: str
    prompt: str
    answer: str
    facts: Facts

    def right(self, text: str) -> bool:
        """Whether a text is a right answer; blanks around it do not count, anything else does."""
        return TASKS[self.task].right(text.strip(), self.facts)


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of question.

    Attributes:
        make: draws an item.
        right: whether a stripped text answers the facts.
        determined: there is one right answer.
    """

    make: Callable[[random.Random], Item]
    right: Callable[[str, Facts], bool]
    determined: bool


def items(task: str, *, split: Split, count: int, seed: int = 0) -> list[Item]:
    """Distinct items of a task; train and test never share a prompt, whatever their seeds.

    Raises:
        ConfigError: no such task or split, or a count below 1.
    """
    need(task in TASKS, "the task", f"be one of {', '.join(TASKS)}", task)
    need(split in ("train", "test"), "the split", "be train or test", split)
    integer("the count of items", count, 1)
    rng, found = random.Random(f"{seed} {task} {split}"), dict[str, Item]()
    while len(found) < count:
        item = TASKS[task].make(rng)
        if split_of(item.prompt) == split:
            found.setdefault(item.prompt, item)
    return list(found.values())


def split_of(prompt: str) -> Split:
    """Which split a prompt belongs to."""
    return "test" if hashlib.sha256(prompt.encode()).digest()[0] % TEST_SHARE == 0 else "train"


def parse_queue(text: str) -> tuple[str, ...] | None:
    """The names of "A, B, C"; None for anything that is not exactly of this form."""
    names = tuple(text.split(", "))
    return names if all(re.fullmatch(r"[A-Z][a-z]+", name) for name in names) else None


def _queue(rng: random.Random, extra: int = 0) -> tuple[tuple[str, ...], list[str]]:
    """Names in a line, and others that are not in it."""
    length = rng.randint(SHORTEST, LONGEST)
    drawn = rng.sample(NAMES, length + extra)
    return tuple(drawn[:length]), drawn[length:]


def _item(task: str, order: str, queue: tuple[str, ...], answer: tuple[str, ...], *rest: object) -> Item:
    return Item(task, f"{order}: {', '.join(queue)} =>", " " + ", ".join(answer), (queue, *rest))


def _whole(task: str, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Task:
    """Tasks that turn a queue as a whole into another one."""

    def make(rng: random.Random) -> Item:
        queue, _ = _queue(rng)
        return _item(task, task, queue, change(queue))

    return Task(make, lambda text, facts: parse_queue(text) == change(facts[0]), True)


def _shuffle() -> Task:
    def make(rng: random.Random) -> Item:
        queue, _ = _queue(rng)
        answer = queue
        while answer == queue:
            answer = tuple(rng.sample(queue, len(queue)))
        return _item("shuffle", "shuffle", queue, answer)

    def right(text: str, facts: Facts) -> bool:
        queue, found = facts[0], parse_queue(text)
        return found is not None and found != queue and sorted(found) == sorted(queue)

    return Task(make, right, False)


def inserted(queue: tuple[str, ...], place: int, name: str) -> tuple[str, ...]:
    """`name` comes to stand at `place`, counted from 1."""
    return (*queue[: place - 1], name, *queue[place - 1 :])


def removed(queue: tuple[str, ...], place: int, name: str) -> tuple[str, ...]:
    """Without whoever stands at `place`; `name` plays no part."""
    return (*queue[: place - 1], *queue[place:])


def replaced(queue: tuple[str, ...], place: int, name: str) -> tuple[str, ...]:
    """`name` in place of whoever stands at `place`."""
    return (*queue[: place - 1], name, *queue[place:])


Change = Callable[[tuple[str, ...], int, str], tuple[str, ...]]
CHANGES: Mapping[str, tuple[Change, str, str]] = {
    "insert": (inserted, "insert {name} at {place}", "insert {name} anywhere"),
    "remove": (removed, "remove {place}", "remove any"),
    "replace": (replaced, "replace {place} with {name}", "replace any with {name}"),
}


def _places(kind: str, queue: tuple[str, ...]) -> range:
    return range(1, len(queue) + (2 if kind == "insert" else 1))


def _at(kind: str, *, chosen: bool) -> Task:
    """Changes at a place that is given (`chosen`), or at any."""
    change, at, anywhere = CHANGES[kind]
    task = f"{kind}_index" if chosen else f"{kind}_random"

    def make(rng: random.Random) -> Item:
        queue, [name] = _queue(rng, extra=1)
        place = rng.choice(_places(kind, queue))
        order = (at if chosen else anywhere).format(place=place, name=name)
        return _item(task, order, queue, change(queue, place, name), place if chosen else None, name)

    def right(text: str, facts: Facts) -> bool:
        queue, place, name = facts
        places = [place] if chosen else _places(kind, queue)
        return parse_queue(text) in {change(queue, p, name) for p in places}

    return Task(make, right, chosen)


def _sentence() -> Task:
    """Words to be brought into one sentence; with two people, either may be the giver."""

    def make(rng: random.Random) -> Item:
        people, colour, thing = rng.sample(NAMES, rng.randint(1, 2)), rng.choice(COLOURS), rng.choice(THINGS)
        words = [*people, colour, thing]
        rng.shuffle(words)
        said = f"{people[0]} gave {people[1]} a" if len(people) == 2 else f"{people[0]} has a"
        return Item(
            "sentence", f"sentence: {', '.join(words)} =>", f" {said} {colour} {thing}.", (tuple(sorted(words)),)
        )

    def right(text: str, facts: Facts) -> bool:
        found = re.fullmatch(r"([A-Z][a-z]+) (?:has|gave ([A-Z][a-z]+)) a ([a-z]+) ([a-z]+)\.", text)
        if found is None or found[3] not in COLOURS or found[4] not in THINGS:
            return False
        words: tuple[str, ...] = facts[0]
        return tuple(sorted(word for word in found.groups() if word is not None)) == words

    return Task(make, right, False)


def _grid(
    task: str, puzzle: Callable[[random.Random], tuple[str, str]], fine: Callable[[str], bool], *, determined: bool
) -> Task:
    """Grids of 4 x 4 digits with blanks, to be filled in."""

    def make(rng: random.Random) -> Item:
        given, full = puzzle(rng)
        return Item(task, f"{task}: {written(given)} =>", " " + written(full), (given,))

    def right(text: str, facts: Facts) -> bool:
        found, given = parse_grid(text), str(facts[0])
        return found is not None and fine(found) and all(g in ("_", f) for g, f in zip(given, found, strict=True))

    return Task(make, right, determined)


TASKS: Mapping[str, Task] = {
    "copy": _whole("copy", lambda queue: queue),
    "reverse": _whole("reverse", lambda queue: queue[::-1]),
    "sort": _whole("sort", lambda queue: tuple(sorted(queue))),
    "insert_index": _at("insert", chosen=True),
    "remove_index": _at("remove", chosen=True),
    "replace_index": _at("replace", chosen=True),
    "shuffle": _shuffle(),
    "insert_random": _at("insert", chosen=False),
    "remove_random": _at("remove", chosen=False),
    "replace_random": _at("replace", chosen=False),
    "sentence": _sentence(),
    "latin": _grid("latin", latin_puzzle, is_latin, determined=False),
    "sudoku": _grid("sudoku", sudoku_puzzle, is_sudoku, determined=True),
}
"""All tasks; those with one right answer are `determined`."""
