"""The report of a training run: report.json for programs, report.html with the curves for people."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from typing import Any

from paceline.training.judging import Evaluated, Judged
from paceline.training.splits import NO_INTERVAL
from paceline.training.trained import Trained
from paceline.utils import ENOUGH, replacing

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

DRAFTS = """<p>On {seen}, a chain of {depths} drafts gives <b>{figure}</b> tokens a pass{interval};
{first} before training. It is the state after {step} steps; {minutes:.1f} minutes of training.</p>
<table><tr><th>draft</th>{depth_cells}</tr><tr><th>before training</th>{before_cells}</tr>
<tr><th>after it</th>{after_cells}</tr></table>
<p>Each cell: the share of drafts that are right where all before them are, and of how many drafts that is.</p>
"""

TEXTS = """<p>Of {seen}, <b>{figure}</b> are right{interval}; {first} before training. It is the
state after {step} steps; {minutes:.1f} minutes of training.</p>
"""

UNSEEN = "which neither the weights nor the choice of the best state have seen"


def write_report(trained: Trained, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Write both files into the folder of what was trained; the plot is left out where matplotlib is not installed.

    Args:
        settings: of the run. facts: where the head comes from.
    """
    drafts, curve = bool(trained.speculative_config), trained.curve
    report = {
        "method": settings["method"],
        **figures(trained.test, drafts=drafts),
        "before": figures(trained.before, drafts=drafts),
        "texts": {name: asdict(size) for name, size in trained.sizes.items()},
        "steps": curve.best.step,
        "minutes": curve.seconds / 60,
        "stages": [
            {"name": name, "steps": one.best.step, **figures(one.tests[1], drafts=drafts)}
            for name, one in trained.stages
        ],
        "relative_size": trained.relative_size,
        "mbsu": trained.mbsu,
        "speed": trained.speed,
        "curve": [_judged(judgement, drafts=drafts) for judgement in curve.judged],
        "settings": settings,
        "provenance": facts,
    }
    with replacing(trained.folder / "report.json") as fresh:
        fresh.write_text(json.dumps(report, indent=2) + "\n")
    page = PAGE.format(
        title=f"{escape(settings['method'])} for {escape(str(facts['target']['name']))}",
        judged=_tested(trained, drafts=drafts) + _stages(trained),
        plot=_plot(trained, drafts=drafts),
        speed="" if trained.speed is None else _speed(trained.speed),
        facts=escape(json.dumps({"provenance": facts, "settings": settings}, indent=2)),
    )
    with replacing(trained.folder / "report.html") as fresh:
        fresh.write_text(page, encoding="utf-8")


def figures(evaluated: Evaluated, *, drafts: bool) -> dict[str, Any]:
    """JSON-ready, with what they rest on: how often drafts are right, and tokens a pass; or, of what drafts nothing,
    how many tokens are the likeliest.
    """
    ends = None if evaluated.interval is None else [round(end - (not drafts), 6) for end in evaluated.interval]
    interval = {"no_interval": NO_INTERVAL} if ends is None else {"interval": ends}
    rest = {**interval, "test_texts": evaluated.texts, "test_tokens": evaluated.tokens}
    if not drafts:
        return {"right": evaluated.acceptance[0], **rest}
    return {"acceptance": evaluated.acceptance, "drafts": evaluated.drafts, "tokens_per_pass": evaluated.length, **rest}


def _judged(judgement: Judged, *, drafts: bool) -> dict[str, Any]:
    """A point of the curve."""
    kept = asdict(judgement)
    shares = kept.pop("acceptance")
    return kept | ({"acceptance": shares, "tokens_per_pass": judgement.length} if drafts else {"right": shares[0]})


def interval_words(figure: Mapping[str, Any], *, share: bool = False) -> str:
    """As in " (95 % interval 1.20 to 1.45)" of what `figures` or `figure` gives, or in brackets why there is none."""
    if "no_interval" in figure:
        return f" ({figure['no_interval']})"
    low, high = figure.get("interval") or (figure["low"], figure["high"])
    ends = (f"{end:.1%}" if share else f"{end:.2f}" for end in (low, high))
    return f" (95 % interval {' to '.join(ends)})"


def over_words(ratio: Mapping[str, Any] | None) -> str:
    """A ratio of `figure`'s, with its interval where it has one."""
    if ratio is None:
        return "not measured"
    return f"{ratio['value']:.2f}{interval_words(ratio) if 'low' in ratio else ''}"


def of_texts(evaluated: Evaluated) -> str:
    """As in "24 test texts (3100 tokens)"."""
    return f"{evaluated.texts} test text{'s' * (evaluated.texts != 1)} ({evaluated.tokens} tokens)"


def _tested(trained: Trained, *, drafts: bool) -> str:
    """What it can do, before and after training."""
    test, before, best = trained.test, trained.before, trained.curve.best

    def cells(evaluated: Evaluated) -> str:
        pairs = zip(evaluated.acceptance, evaluated.drafts, strict=True)
        return "".join(f"<td>{share:.2f} of {count}</td>" if count else "<td>of none</td>" for share, count in pairs)

    form = DRAFTS if drafts else TEXTS
    return form.format(
        seen=f"{of_texts(test)}, {UNSEEN}" if drafts else f"the tokens of {of_texts(test)}, {UNSEEN}",
        depths=len(test.acceptance),
        figure=f"{test.length:.2f}" if drafts else f"{test.acceptance[0]:.1%}",
        first=f"{before.length:.2f}" if drafts else f"{before.acceptance[0]:.1%}",
        interval=interval_words(figures(test, drafts=drafts), share=not drafts),
        step=best.step,
        minutes=trained.curve.seconds / 60,
        depth_cells="".join(f"<th>{depth}</th>" for depth in range(1, len(test.acceptance) + 1)),
        before_cells=cells(before),
        after_cells=cells(test),
    )


def _stages(trained: Trained) -> str:
    """What each stage brought, on the same texts; and what a pass with drafts is worth where memory is what counts."""
    if not trained.stages:
        return ""
    heads, rows = "".join(f"<th>draft {depth + 1}</th>" for depth in range(len(trained.test.acceptance))), []
    for name, tested in (("before", trained.before), *((name, curve.tests[1]) for name, curve in trained.stages)):
        cells = "".join(f"<td>{share:.2f}</td>" for share in tested.acceptance)
        rows.append(f"<tr><td>{escape(name)}</td><td>{tested.length:.2f}</td>{cells}</tr>")
    bound = "" if trained.mbsu is None else f"<p>Memory-bound speed-up: {trained.mbsu:.2f}.</p>\n"
    return f"<h2>Stages</h2><table><tr><th>after</th><th>tokens a pass</th>{heads}</tr>{''.join(rows)}</table>\n{bound}"


def _speed(speed: Mapping[str, Any]) -> str:
    """A table of what was timed."""
    names = {"plain": "plain decoding", "chain": f"{speed['drafts']} drafts", "auto": "as many as pay (auto)"}
    rows, prompts = [], speed["prompts"]
    for key, name in names.items():
        timed, rate = speed[key], speed[key]["tokens_per_second"]
        cells = [
            name,
            f"{rate['value']:.0f}" if rate else "",
            "" if key == "plain" else over_words(timed["over_plain"]).replace("95 % interval ", ""),
            f"{timed['tokens_per_pass']:.2f}" if "tokens_per_pass" in timed else "",
            f"{timed['equal']} of {prompts}" if "equal" in timed else "",
        ]
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    over = "over plain" if prompts < ENOUGH else "over plain (95 % interval)"
    heads = ("", "tokens/s", over, "tokens a pass", "answers as plain decoding's")
    why = f" {NO_INTERVAL[0].upper()}{NO_INTERVAL[1:]}." if prompts < ENOUGH else ""
    return (
        f"<h2>Speed</h2><p>Greedy, {prompts} test prompt{'s' * (prompts != 1)} in turn, {speed['max_tokens']} tokens "
        f"each.{why}</p><table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"
        + "".join(f"<tr>{row}</tr>" for row in rows)
        + "</table>\n"
    )


def _plot(trained: Trained, *, drafts: bool) -> str:
    """The learning curves as an image element, or nothing."""
    curve, size = trained.curve, trained.sizes["validation"]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "<p>Install matplotlib to see the learning curves here.</p>\n"
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    tokens = [judgement.tokens / 1000 for judgement in curve.judged]
    for depth in range(len(curve.judged[0].acceptance)):
        label = f"draft {depth + 1}" if drafts else "tokens"
        left.plot(tokens, [judgement.acceptance[depth] for judgement in curve.judged], marker=".", label=label)
    what = "right where all before are" if drafts else "are the likeliest"
    left.set(xlabel="thousand tokens trained", ylabel=what, ylim=(0, 1))
    left.legend(fontsize=8)
    right.plot(tokens[1:], [judgement.loss for judgement in curve.judged[1:]], marker=".", color="#d98c3f")
    right.set(xlabel="thousand tokens trained", ylabel="training loss")
    for axis in (left, right):
        axis.grid(color="#eeeeee")
    data = io.BytesIO()
    figure.savefig(data, format="svg")
    image = base64.b64encode(data.getvalue()).decode()
    return (
        f'<img alt="Learning curves" src="data:image/svg+xml;base64,{image}">\n<p>Left: on {size.texts} validation '
        f"texts ({size.tokens} tokens), by which the best state was chosen, so that they flatter it.</p>\n"
    )
