"""Grids of 4 x 4 digits: Latin squares and small sudokus, with blanks to be filled in.

In: a random generator, texts. Out: puzzles with a solution, whether a filled grid keeps the rules. Not here: prompts
(`bench.parallel_tasks`). A grid is a string of 16 characters, row by row, "1" to "4" or "_" for a blank.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import permutations

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
