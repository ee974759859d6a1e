"""Files to be written: what cannot be is refused before the work, nothing is left behind, and flags are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import outputs
from paceline.errors import ConfigError

LOCKED = pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which no file can be made")


def test_a_place_to_write_is_left_as_it_was(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    outputs.must_be_writable("--html", mine)
    outputs.must_be_writable("--html", tmp_path / "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


def test_other_places_are_rejected(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path, "must be a file, got the folder"),
        (tmp_path / "no" / "x", "must lie in a folder that exists"),
        (tmp_path / ("x" * 300), "cannot be written"),
    ):
        with pytest.raises(ConfigError, match=f"^--html .*{words}"):
            outputs.must_be_writable("--html", path)


@LOCKED
def test_a_folder_in_which_nothing_can_be_made() -> None:
    with pytest.raises(
        ConfigError, match=r"^--html '/proc/x' cannot be written \(No such file or directory\); name another file$"
    ):
        outputs.must_be_writable("--html", Path("/proc/x"))


def test_what_fails_on_the_way_names_its_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--output '.*' cannot be written"), outputs.writing("--output", tmp_path):
        tmp_path.write_text("a folder")
    with pytest.raises(ValueError, match=r"^mine$"), outputs.writing("--output", tmp_path):
        raise ValueError("mine")


def test_only_files_of_an_earlier_run_are_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    for text in ("", '{"format": "a run"}'):
        mine.write_text(text)
        outputs.must_be_own("--json", mine, mark='"a run"', what="a document")
    outputs.must_be_own("--json", Path("/dev/null"), mark='"a run"', what="a document")
    with pytest.raises(ConfigError, match=r"^--json '.*mine' exists and is not a page; name another file"):
        outputs.must_be_own("--json", mine, mark="a page", what="a page")


def test_only_pages_of_the_verb_are_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><meta mine>")
    outputs.must_be_page("--html", page, mark="<meta mine>", command="explain", force=False)
    outputs.must_be_page("--html", page, mark="<meta other>", command="explain", force=True)
    with pytest.raises(ConfigError, match="is not a page of `paceline explain`; add --force"):
        outputs.must_be_page("--html", page, mark="<meta other>", command="explain", force=False)
