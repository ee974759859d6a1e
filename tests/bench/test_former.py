"""Names that moved are the same objects under their old path."""

from __future__ import annotations

import pytest

from paceline import bench, utils
from paceline.bench import former


def test_moved_names_are_those_of_their_new_home() -> None:
    assert {name: getattr(bench, name) for name in former.__all__} == {
        name: getattr(utils, name) for name in former.__all__
    }
    assert "in_turn" in former.__all__


def test_names_that_were_never_there_are_not_there() -> None:
    with pytest.raises(AttributeError, match="shown_faster"):
        bench.shown_faster  # noqa: B018
