"""Options are checked against the types that a constructor declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from paceline.errors import ConfigError
from paceline.utils import check_types
from paceline.utils.validation import declared

if TYPE_CHECKING:
    from nowhere import Something


class Part:
    """Has options of every kind that is checked, and two that are not."""

    def __init__(
        self,
        count: int = 3,
        share: float | None = 0.5,
        on: bool = False,
        name: str | Path | None = None,
        shape: Literal["chain", "tree"] = "chain",
        ids: Sequence[int] = (),
        rows: Sequence[Sequence[int]] | None = None,
        table: Mapping[str, Any] | None = None,
        rule: Callable[[int], int] | None = None,
        odd: int = None,  # type: ignore[assignment]  # noqa: RUF013 (what a third party may write)
        free: Any = None,
        other: Something | None = None,
    ) -> None:
        """Nothing."""


FINE: list[dict[str, Any]] = [
    {
        "count": 1,
        "share": 1,
        "on": True,
        "name": "x",
        "shape": "tree",
        "ids": [1],
        "rows": [[1], (2,)],
        "table": {},
        "rule": abs,
    },
    {
        "share": None,
        "name": Path("x"),
        "rows": None,
        "rule": None,
        "odd": None,
        "free": object(),
        "other": 5,
        "unknown": 5,
    },
]


@pytest.mark.parametrize("options", FINE)
def test_values_of_the_declared_types(options: dict[str, Any]) -> None:
    check_types(Part, options)


WRONG: list[tuple[str, Any, str]] = [
    ("count", 1.5, "an integer, got 1.5"),
    ("count", True, "an integer, got True"),
    ("count", None, "an integer, got None"),
    ("count", "3", "an integer, got '3'"),
    ("count", 10**25, f"an integer, got {10**25}"),
    ("share", "x", "a number, got 'x'"),
    ("share", float("nan"), "a number, got nan"),
    ("on", 1, "True or False, got 1"),
    ("name", 5, "a string or a path, got 5"),
    ("shape", 5, "one of 'chain', 'tree', got 5"),
    ("ids", "12", "a list of integers, got '12'"),
    ("ids", [1.5], "a list of integers, got [1.5]"),
    ("rows", [[1], ["x"]], "a list, got [[1], ['x']]"),
    ("table", [1], "a dict, got [1]"),
    ("rule", 5, "a function, got 5"),
]


@pytest.mark.parametrize(("key", "value", "rule"), WRONG)
def test_values_of_other_types_are_named(key: str, value: Any, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_types(Part, {key: value})
    assert str(caught.value) == f"{key} must be {rule}"


def test_ranges_stand_beside_types() -> None:
    check_types(Part, {"share": 0.5, "ids": [2]}, {"share": (0, 1), "ids": (0, 2)})
    for key, value, rule in (("share", 1.5, "a number in 0..1"), ("ids", [1, 3], "a list of integers in 0..2")):
        with pytest.raises(ConfigError, match=f"{key} must be {rule}, got"):
            check_types(Part, {key: value}, {"share": (0, 1), "ids": (0, 2)})


def test_what_is_not_understood_is_left_alone() -> None:
    assert not {"free", "other", "self"} & set(declared(Part))
    assert declared(dict) == {}
