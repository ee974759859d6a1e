"""Tables for a terminal: they fit, figures stay in one piece, stars mean something."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from bench.documents import cell, document, estimate, load_run, peer
from rich.console import Console

from paceline.bench.report import table
from paceline.utils import ENOUGH

SETTINGS = ("plain", "auto", "ngram", "token_recycling", "suffix+draft_model", "ngram(num_speculative_tokens=15)")
TASKS = ("coding", "extraction", "humanities", "reasoning", "summarization", "translation", "writing")


def printed(found: dict[str, Any], width: int = 80) -> list[str]:
    text = StringIO()
    console = Console(file=text, width=width, highlight=False)
    for one in table.document_tables(found, width):
        console.print(one)
    return text.getvalue().splitlines()


def many() -> dict[str, Any]:
    return document([cell(name, 1.0 + 0.1 * i, tasks=TASKS) for i, name in enumerate(SETTINGS)])


def test_settings_and_tasks_fit_into_eighty_characters() -> None:
    lines = printed(many())
    assert max(map(len, lines)) <= 80
    assert any("1.10 [0.99, 1.21]" in line for line in lines)
    assert any("reasoning" in line and "extraction" in line for line in lines)
    assert sum("speed-up by task" in line for line in lines) == 2


@pytest.mark.parametrize("width", [50, 60, 75])
def test_narrow_terminals_lose_no_column(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = many()
    found["cells"] = found["cells"][:2]
    lines = printed(found, width)
    assert max(map(len, lines)) <= width
    assert any(line.split()[-1] == "yes" for line in lines if line.strip())
    if width < 65:
        monkeypatch.setattr(table, "NARROW", 0)
        assert not any(line.split()[-1] == "yes" for line in printed(found, width) if line.strip())


def test_load_peers_and_failures_fit_too() -> None:
    runs = [load_run(name, rate, failed=2) for name in ("plain", "suffix+draft_model") for rate in (1.0, 2.0)]
    others = [peer("openvino-genai", "ngram(num_speculative_tokens=16)", 60.0, failed=1)]
    lines = printed(document([cell("plain"), cell("ngram", 1.2, failed=1)], load=runs, peers=others))
    assert max(map(len, lines)) <= 80
    assert any("0.60 [0.54, 0.66]" in line for line in lines)
    assert any("0.01/0.015/0.03" in line for line in lines)
    assert sum("under load, rate" in line for line in lines) == 2
    assert "".join(lines).count("1 of 4") == 2
    assert not any("1 of 4" in line for line in printed(many()))


def test_tasks_that_nobody_measured_alone_are_left_out() -> None:
    found = many()
    for one in found["cells"]:
        one["tasks"][1] |= {"speedup": None}
    assert not any("extraction" in line for line in printed(found))
    for one in found["cells"]:
        one["tasks"] = [task | {"speedup": None} for task in one["tasks"]]
    assert not any("speed-up by task" in line for line in printed(found))


@pytest.mark.parametrize(("units", "star"), [(ENOUGH, True), (ENOUGH - 1, False)])
def test_a_star_needs_enough_prompts(units: int, star: bool) -> None:
    assert table.starred(estimate(1.5) | {"n": units}) == ("1.50*" if star else "1.50 ")
    assert table.starred(estimate(1.05) | {"n": units}) == "1.05 "


def test_traces_that_were_scaled_are_said() -> None:
    runs = [load_run("plain", 1.0, length_scale=0.25), load_run("ngram", 1.0, length_scale=0.25)]
    lines = list(table.document_remarks(document([cell("plain")], load=runs)))
    assert sum("trace: all lengths are scaled by 0.25" in line for line in lines) == 1
    assert not any(
        "scaled" in line for line in table.document_remarks(document([cell("plain")], load=[load_run("plain", 1.0)]))
    )


def test_no_column_of_a_load_is_cut_off_where_times_are_short() -> None:
    times = dict.fromkeys(("p50", "p90", "p99", "mean", "max"), 0.0063421)
    runs = [load_run("token_recycling", 1.0, latency=times, time_to_first_token=times, inter_token_latency=times)]
    lines = printed(document([cell("plain")], load=runs))
    assert any("0.0063/0.0063/0.0063" in line for line in lines)
    assert any(line.rstrip().endswith("failed") for line in lines)
    assert max(map(len, lines)) <= 80
