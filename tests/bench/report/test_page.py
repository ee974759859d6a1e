"""The report: everything of a document is in it, whatever is missing is left out, any text is shown as text.

Pictures are kept as PACELINE_ARTIFACTS says (see `browser`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from bench.documents import cell, difference, document, equality, estimate, load_run, peer, row, withheld
from browser import FOUND, look, picture
from explain.replays import NASTY

from paceline.bench.drawing import Axis, PlotSeries, inline
from paceline.bench.report import REPORT_MARK, document_remarks, write_report
from paceline.bench.report.page import report_html
from paceline.bench.run.document import check_document
from paceline.utils import ENOUGH

browser = pytest.mark.skipif(FOUND is None, reason="no chromium or google-chrome on this machine")
HOSTILE = "</script><script>window.broken = true</script><img src=x onerror='window.broken = true'>{{ 7 * 7 }}\ud800"


def full() -> dict[str, Any]:
    """Two batch sizes, two temperatures, load, peers, failures and differences."""
    others = [cell(n, g, batch=b) for b in (1, 4) for n, g in (("plain", 1.0), ("ngram", 1.8), ("auto", 0.7))]
    found = document(
        [*others, cell("plain", temperature=0.8), withheld("ngram", "3 of 8 outputs differ", temperature=0.8)],
        load=[load_run(name, rate) for name in ("plain", "ngram") for rate in (1.0, 4.0)],
        peers=[peer("llama.cpp"), peer("transformers", "ngram", 150.0)],
        peers_skipped=[{"name": "vllm", "why": "no environment; run `python -m lab peers install vllm`"}],
        bandwidth={"bytes_per_second": 4e10, "method": "a sum", "samples": [4e10]},
    )
    check_document(found)
    return found


def hostile() -> dict[str, Any]:
    """Hostile names everywhere, nulls wherever the schema allows them, failures and differences."""
    failed = row(HOSTILE, error=HOSTILE, tokens=0, latency=None, time_to_first_token=None)
    broken = withheld(
        HOSTILE,
        HOSTILE,
        failed=4,
        rows=[failed] * 3,
        notes=[HOSTILE],
        equality=equality(0, [difference(HOSTILE, near_tie=False)] * 60),
    )
    broken["limit"] |= dict.fromkeys(("floor_tokens_per_second", "share_of_step", "share_of_score"))
    broken["memory"] |= {"rss_peak_bytes": None}
    broken["time_split"] = dict.fromkeys(broken["time_split"], 0.0)
    many = [cell(f"{name} {'x' * 90} {i}", 1 + i, tasks=(HOSTILE, "b")) for i, name in enumerate([*NASTY, *"abcdefgh"])]
    lost = peer(
        HOSTILE,
        HOSTILE,
        None,
        comparable=False,
        reason=HOSTILE,
        equality=None,
        equal_share=None,
        version=None,
        precision=None,
        threads=None,
        failed=4,
    )
    lost["rows"][0] |= {"error": HOSTILE, "tokens": 0}
    found = document(
        [cell("plain"), broken, *many], peers=[lost], interrupted=True, skipped=[{"name": HOSTILE, "why": HOSTILE}]
    )
    found["provenance"] |= {"command": HOSTILE}
    found["model"] |= {"name": HOSTILE, "random": True}
    found["load"] = [load_run(HOSTILE, 1.0, workload=HOSTILE, failed=1)]
    found["load"][0]["rows"][0] |= {"error": HOSTILE, "latency": None, "time_to_first_token": None}
    check_document(found)
    return found


def test_everything_of_a_document_is_in_the_page() -> None:
    page = report_html(full())
    for text in (
        "Best: ngram",
        "1.80x",
        "1.80 [1.62, 1.98]",
        "No speed for ngram on bundled, temperature 0.8, batch 1: 3 of 8 outputs differ",
        "Speed-up over plain decoding, by task",
        "Acceptance by position",
        "Time split",
        "Share of the limit",
        "Inter-token latency",
        "Time to first token",
        "Tokens per second by batch size",
        "Latency by arrival rate",
        "Other engines: bundled, temperature 0, batch 1",
        "llama.cpp plain",
        "80 [72, 88]",
        "Our fastest setting here: ngram.",
        "5.00 (of 1)",
        "python -m lab peers install vllm",
        "40.0 GB/s (a sum)",
    ):
        assert text.replace("'", "&#39;") in page, text
    assert page.count('class="faster"') == page.count('class="slower"') == 2
    assert REPORT_MARK in page[:1000]
    assert page.startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("low", "n", "shown"), [(1.05, ENOUGH, True), (0.98, ENOUGH, False), (1.05, ENOUGH - 1, False)]
)
def test_the_best_setting_is_one_that_is_shown_to_be_faster(low: float, n: int, shown: bool) -> None:
    gain = {**estimate(1.2), "low": low, "high": 1.5, "n": n}
    made = document([cell("plain"), cell("ngram", 1.2) | {"speedup": gain}, cell("auto", 1.0)], peers=[peer("p")])
    page, told = report_html(made), list(document_remarks(made))
    assert ("1.20 (of 5)" in page) is (n < ENOUGH)  # no interval of so few
    assert (f"1.20 [{low:.2f}, 1.50]" in page) is (n >= ENOUGH)
    assert ("Best: ngram" in page) is shown
    assert ("No setting shown faster than plain" in page) is not shown
    assert f"Our fastest setting here: {'ngram' if shown else 'plain'}." in page
    assert ("no setting shown faster than plain decoding." in told) is not shown
    assert page.count('class="whisker"') == 9 + (n >= ENOUGH), "one more than of the other bars"


@pytest.mark.parametrize("n", [ENOUGH - 1, ENOUGH])
def test_lines_over_batches_have_ends_where_there_are_enough_prompts(n: int) -> None:
    cells = [cell(name, *more, batch=batch) for name, more in (("plain", ()), ("ngram", (1.2,))) for batch in (1, 4)]
    rate = {**estimate(80.0), "low": 72.0, "high": 88.0, "n": n}
    page = report_html(document([one | {"tokens_per_second": rate} for one in cells]))
    plot = page[page.index('aria-label="Tokens per second by batch size"') :].partition("</svg>")[0]
    assert plot.count('id="point-') == 4
    assert plot.count('id="LineCollection_') == (4 if n >= ENOUGH else 0)


def test_energy_stands_there_for_every_setting_that_was_metered() -> None:
    metered = {"source": "RAPL", "reason": None, "joules": 2.0}
    cells = [
        cell(name) | {"energy": {**metered, "joules_per_token": each}}
        for name, each in (("plain", 0.5), ("ngram", 0.25))
    ]
    unmetered = cell("auto") | {
        "energy": {"source": None, "reason": "no meter", "joules": None, "joules_per_token": None}
    }
    assert "joules a token (RAPL): plain 0.5, ngram 0.25<" in report_html(document([*cells, unmetered]))
    assert "not measured: no meter" in report_html(document([unmetered]))


@pytest.mark.parametrize(
    ("made", "absent"),
    [
        (
            document(),
            (
                "Settings<",
                "Time split",
                "Batch sizes",
                "Other engines:",
                "Under load",
                "<svg",
                "Failures",
                "Differences",
            ),
        ),
        (
            document([cell("plain")]),
            ("Speed-up over", "Acceptance by position", "Batch sizes", "Other engines:", "Best:"),
        ),
        (
            document([cell("plain", rows=[], tokens=0), withheld("a", "all differ", drafters=[])]),
            ("Acceptance by", "Speed-up over"),
        ),
        (document(load=[load_run("plain", 1.0)]), ("Settings</h2>", "Batch sizes", "Nothing was measured")),
    ],
)
def test_what_is_missing_is_left_out(made: dict[str, Any], absent: tuple[str, ...]) -> None:
    check_document(made)
    page = report_html(made)
    assert not [text for text in absent if text in page]
    assert "How it was measured" in page
    assert "None" not in re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.S)


def test_nothing_in_the_page_points_outside_and_texts_are_escaped() -> None:
    page = report_html(hostile()).replace("<wbr>", "")
    assert page.count("<script>") == page.count("</script>") == 1
    assert "<img" not in page
    assert "{{ 7 * 7 }}" in page
    outside = r"@import|url\((?!#)|\bfetch\(|XMLHttpRequest|innerHTML|https?://|\b(src|href)=(?!\"#|[^<]*&gt;)"
    assert not re.search(outside, page)
    assert "default-src 'none'" in page
    assert "and 20 more, in the JSON document" not in page  # sixty equal differences are one line


def test_long_names_break_at_their_joints() -> None:
    page = report_html(document([cell("plain"), cell("suffix+token_recycling(<b>_x)")]))
    assert "suffix+<wbr>token_<wbr>recycling(<wbr>&lt;b&gt;_<wbr>x)" in page
    assert "<b>_x" not in page


def test_it_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    write_report(full(), path)
    before = path.read_text(encoding="utf-8")
    assert before == report_html(full())
    with pytest.raises(KeyError):
        write_report({"cells": []}, path)
    assert path.read_text(encoding="utf-8") == before
    assert [one.name for one in tmp_path.iterdir()] == ["r.html"]


def test_plots_leave_out_what_cannot_be_drawn() -> None:
    axes, nan = (Axis(label="x", log=True), Axis(label="y")), float("nan")
    nothing = [PlotSeries(name="a", colour="--d0", points=[(0.0, 1.0), (1.0, nan), (nan, 1.0), (-1.0, 1.0)])]
    assert inline("t", nothing, *axes) == ""
    points = [(1.0, 5.0), (2.0, nan), (4.0, 6.0, 5.0, 7.0)]
    made = inline("<t>", [PlotSeries(name="<a>", colour="--d0", points=points, hollow=frozenset({0}))], *axes)
    assert re.findall(r'id="point-0-(\d)"', made) == ["0", "2"]
    assert "<t>" not in made
    assert "stroke: var(--d0)" in made
    assert not re.findall(r"#0a0b[0-9a-f]{2}", made), "every colour is one of the page's theme"
    assert made == inline("<t>", [PlotSeries(name="<a>", colour="--d0", points=points, hollow=frozenset({0}))], *axes)


LOOK = """
const report = () => {
  for (const one of document.querySelectorAll("details")) one.open = true;
  const before = document.documentElement.dataset.theme;
  document.getElementById("theme").click();
  return {
    plots: document.querySelectorAll("svg.plot").length, rows: document.querySelectorAll(".headline tbody tr").length,
    themes: [before, document.documentElement.dataset.theme], text: document.body.innerText.includes("<script>"),
    fits: document.documentElement.scrollWidth <= window.innerWidth,
    spilt: [...document.querySelectorAll(".track span")].filter((one) => {
      const outer = one.parentElement.getBoundingClientRect(), inner = one.getBoundingClientRect();
      return inner.left < outer.left - 2 || inner.right > outer.right + 3;
    }).length,
  };
};
"""


@browser
def test_a_browser_shows_any_text_as_text(tmp_path: Path) -> None:
    made = hostile()
    seen = look(report_html(made), tmp_path, LOOK, "?theme=dark")
    assert (seen.faults, seen.loaded, seen.console, seen.broken) == ([], [], [], False)
    assert seen.told["themes"] == ["dark", "light"]
    assert seen.told["rows"] == len(made["cells"]) + 1
    assert seen.told["text"]
    assert seen.told["fits"]
    assert seen.told["spilt"] == 0


@browser
def test_pictures_are_kept_of_both_widths(tmp_path: Path) -> None:
    page = report_html(full())
    for name, address, size in [
        ("report-light", "?theme=light", (1280, 2600)),
        ("report-narrow", "?theme=dark", (400, 3200)),
    ]:
        assert picture(page, tmp_path, name, address, size).stat().st_size > 20_000
