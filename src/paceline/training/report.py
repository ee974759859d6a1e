"""The report of a training run: report.json for programs, report.html with the curves for people."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from paceline.training.loop import Curve

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }}
body {{ max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; margin: 1rem 0 }} th, td {{ padding: .2rem .8rem; text-align: right }}
th:first-child, td:first-child {{ text-align: left }} tr + tr {{ border-top: 1px solid #8884 }}
img {{ max-width: 100%; background: #fff }} pre {{ overflow-x: auto; padding: 1rem; background: #8881 }}
</style></head><body><h1>{title}</h1>
{judged}{speed}{plot}<h2>Where it comes from</h2><pre>{facts}</pre></body></html>
"""

DRAFTS = """<p>On held-out texts of the target, a chain of {depths} drafts gives <b>{length:.2f}</b> tokens a pass
(at best, after {step} steps; {first:.2f} before training). {minutes:.0f} minutes of training.</p>
<table><tr><th>draft</th>{depth_cells}</tr><tr><th>before training</th>{before_cells}</tr>
<tr><th>after it</th>{after_cells}</tr></table>
<p>Each cell: the share of drafts that are right where all before them are.</p>
"""

TEXTS = """<p>Of the tokens of held-out texts, <b>{share:.1%}</b> are the likeliest ones (at best, after {step} steps;
{first:.1%} before training). {minutes:.0f} minutes of training.</p>
"""


def write_report(
    folder: Path,
    settings: Mapping[str, Any],
    curve: Curve,
    facts: Mapping[str, Any],
    speed: Mapping[str, Any] | None,
    *,
    drafts: bool = True,
) -> None:
    """Write both files into a head's folder; the plot is left out where matplotlib is not installed.

    Args:
        drafts: it is a head; otherwise what is judged is how well texts are predicted.
        settings: of the run. facts: where the head comes from. speed: of `measured`, where it was timed.
    """
    best, first = curve.best, curve.judged[0]
    found = {
        "method": settings["method"],
        "acceptance": best.acceptance,
        "tokens_per_pass": best.length,
        "before": {"acceptance": first.acceptance, "tokens_per_pass": first.length},
        "steps": best.step,
        "minutes": curve.seconds / 60,
        "speed": speed,
        "curve": [asdict(one) | {"tokens_per_pass": one.length} for one in curve.judged],
        "settings": settings,
        "provenance": facts,
    }
    (folder / "report.json").write_text(json.dumps(found, indent=2) + "\n")
    page = PAGE.format(
        title=f"{escape(settings['method'])} for {escape(str(facts['target']['name']))}",
        judged=_judged(curve)
        if drafts
        else TEXTS.format(
            share=best.acceptance[0], step=best.step, first=first.acceptance[0], minutes=curve.seconds / 60
        ),
        plot=_plot(curve),
        speed="" if speed is None else _speed(speed),
        facts=escape(json.dumps({"provenance": facts, "settings": settings}, indent=2)),
    )
    (folder / "report.html").write_text(page, encoding="utf-8")


def _judged(curve: Curve) -> str:
    """What a head can do, before and after training."""
    best, first = curve.best, curve.judged[0]

    def cells(shares: list[float]) -> str:
        return "".join(f"<td>{share:.2f}</td>" for share in shares)

    return DRAFTS.format(
        depths=len(best.acceptance),
        length=best.length,
        step=best.step,
        first=first.length,
        minutes=curve.seconds / 60,
        depth_cells="".join(f"<th>{depth}</th>" for depth in range(1, len(best.acceptance) + 1)),
        before_cells=cells(first.acceptance),
        after_cells=cells(best.acceptance),
    )


def _speed(found: Mapping[str, Any]) -> str:
    """A table of what was timed."""
    names = {"plain": "plain decoding", "chain": f"{found['drafts']} drafts", "auto": "as many as pay (auto)"}
    rows = []
    for key, name in names.items():
        one, over = found[key], found[key].get("over_plain")
        rate = one["tokens_per_second"]
        cells = [
            name,
            f"{rate['value']:.0f}" if rate else "",
            f"{over['value']:.2f} ({over['low']:.2f} to {over['high']:.2f})" if over else "",
            f"{one['tokens_per_pass']:.2f}" if "tokens_per_pass" in one else "",
            f"{one['equal']} of {found['prompts']}" if "equal" in one else "",
        ]
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    heads = ("", "tokens/s", "over plain (95 % interval)", "tokens a pass", "answers as plain decoding's")
    return (
        f"<h2>Speed</h2><p>Greedy, {found['prompts']} held-out prompts in turn, {found['max_tokens']} tokens each.</p>"
        f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"
        + "".join(f"<tr>{row}</tr>" for row in rows)
        + "</table>\n"
    )


def _plot(curve: Curve) -> str:
    """The learning curves as an image element, or nothing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "<p>Install matplotlib to see the learning curves here.</p>\n"
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    tokens = [one.tokens / 1000 for one in curve.judged]
    for depth in range(len(curve.judged[0].acceptance)):
        left.plot(tokens, [one.acceptance[depth] for one in curve.judged], label=f"draft {depth + 1}")
    left.set(xlabel="thousand tokens trained", ylabel="right where all before are", ylim=(0, 1))
    left.legend(fontsize=8)
    right.plot(tokens[1:], [one.loss for one in curve.judged[1:]], color="#d98c3f")
    right.set(xlabel="thousand tokens trained", ylabel="training loss")
    for axis in (left, right):
        axis.grid(color="#eeeeee")
    data = io.BytesIO()
    figure.savefig(data, format="svg")
    return f'<img alt="Learning curves" src="data:image/svg+xml;base64,{base64.b64encode(data.getvalue()).decode()}">\n'
