"""The page of an analysis: every line in its own look, every figure in a table, no fault in a browser in either
theme.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from browser import FOUND, look, picture
from tools.toy_vector import P, Q

from paceline.bench.acceptance import ACCEPTANCE_MARK, Analysis, acceptance_html, analyze_acceptance
from paceline.bench.acceptance.page import marks

NOTE = "What <b>it</b> means."


def analysis() -> Analysis:
    return analyze_acceptance(np.stack([P, Q]), np.stack([Q, P]), (1, 2, 3), (2, 4, 8))


def test_every_line_has_its_own_look_and_every_figure_stands_in_a_table() -> None:
    found = analysis()
    text = acceptance_html(found, NOTE)
    assert ACCEPTANCE_MARK in text
    assert "What &lt;b&gt;it&lt;/b&gt; means." in text
    for figure, rows, form in zip(
        text.split('<section class="panel">')[1:], (found.acceptance, found.tokens), (".4f", ".3f"), strict=False
    ):
        looks = re.findall(r'style="stroke:var\((--\w+)\)" stroke-width="2.4"( stroke-dasharray="[^"]*")?', figure)
        assert len(looks) == len(set(looks)) == len(rows) == figure.count('id="series-')
        for name, values in rows.items():
            cells = "".join(f"<td>{one}</td>" for one in (name, *(format(value, form) for value in values)))
            assert cells in figure


@pytest.mark.parametrize(
    ("places", "marked"),
    [((4,), [4]), ((1, 2, 3, 4), [1, 2, 3, 4]), ((1, 2, 30, 31, 32), [1, 2, 30]), ((2, 1024), [2, 1024])],
)
def test_marks_do_not_run_into_each_other(places: tuple[int, ...], marked: list[float]) -> None:
    assert marks(places) == marked


@pytest.mark.skipif(FOUND is None, reason="needs Chromium")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_has_no_complaint(tmp_path: Path, theme: str) -> None:
    told = (
        "function report() { return [document.documentElement.dataset.theme, document.documentElement.scrollWidth "
        "- innerWidth]; }"
    )
    seen = look(acceptance_html(analysis(), NOTE), tmp_path, told, f"?theme={theme}")
    assert (seen.faults, seen.loaded) == ([], [])
    assert seen.told[0] == theme
    assert seen.told[1] <= 0
    assert (
        picture(acceptance_html(analysis(), NOTE), tmp_path, f"acceptance-{theme}", f"?theme={theme}", (390, 1400))
        .stat()
        .st_size
        > 20_000
    )
