"""A generation replayed step by step: as data, as figures and sentences of the whole, and as one HTML page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from paceline.utils import FloatArray, interval_apart

if TYPE_CHECKING:
    from paceline.config import SamplingParams
    from paceline.engine import Prompt
    from paceline.llm import LLM

Data = dict[str, Any]

FEW: Final = 5
"""Fewer steps than this prove nothing."""

TIMED: Final = 20
"""Fewer steps than this prove nothing about time."""

FAILED_FIRST, ALL_ACCEPTED, EMPTY, DEAR_DRAFT, OVERHEAD, MISSED = 0.4, 0.3, 0.25, 0.35, 0.15, 0.05
"""Shares from which on a sentence is written: drafted steps whose first token was rejected, drafted steps in which all
was accepted, steps without drafts, drafting in the time, all but drafting and scoring in the time, cut tokens that
came in all tokens.
"""


def summarize_replay(data: Data) -> Data:
    """Figures and sentences about a replay.

    Returns:
        steps, tokens, drafted (tokens that a drafter had proposed), mean_acceptance_length, tokens_per_second (over the
        steps' own time: neither prefill nor recording); `seconds` by prefill, draft, score, verify, commit, other, and
        `draft_seconds` by drafter; `acceptance`: per drafter, per depth from 1 on, steps with a scored token there
        and steps in which one was accepted; `nodes`: number by status; `found` and `advice`: sentences.
    """
    steps, metrics = data["steps"], data["output"]["metrics"]
    names = ("draft", "score", "verify", "commit", "other")
    status: dict[str, int] = {}
    for node in _all_nodes(steps):
        status[node["status"]] = status.get(node["status"], 0) + 1
    seconds = {name: sum(step["seconds"][name] for step in steps) for name in names}
    summary: Data = {
        "steps": len(steps),
        "tokens": len(data["tokens"]),
        "drafted": sum(token["source"] is not None for token in data["tokens"]),
        "mean_acceptance_length": metrics["mean_acceptance_length"],
        "tokens_per_second": len(data["tokens"]) / (sum(seconds.values()) or math.inf),
        "seconds": {"prefill": data["prefill_seconds"]} | seconds,
        "draft_seconds": [_of_drafter(steps, i, "seconds") for i in range(len(data["drafters"]))],
        "acceptance": [_by_depth(steps, i) for i in range(len(data["drafters"]))],
        "nodes": status,
    }
    summary["found"] = list(_found(data, summary))
    summary["advice"] = list(_advice(data, summary)) or [
        "Nothing stands out: no single change promises much for this text."
    ]
    return summary


def _all_nodes(steps: Sequence[Data]) -> Iterator[Data]:
    for step in steps:
        yield from step["nodes"]


def scored(node: Data) -> bool:
    """Whether the target computed a row for this candidate."""
    return node["status"] not in ("cut", "probe")


def _of_drafter(steps: Sequence[Data], index: int, key: str) -> float:
    return float(sum(step["drafters"][index][key] for step in steps if step["drafters"][index] is not None))


def _by_depth(steps: Sequence[Data], source: int) -> list[list[int]]:
    """Per depth: steps with a scored token of this drafter, steps in which one of them was accepted."""
    counts: list[list[int]] = []
    for step in steps:
        tried: dict[int, bool] = {}
        for node in step["nodes"]:
            if scored(node) and (node["source"] == source or source in node.get("also", ())):
                tried[node["depth"]] = tried.get(node["depth"], False) or node["status"] in ("accepted", "ended")
        counts += [[0, 0] for _ in range(max(tried, default=0) - len(counts))]
        for depth, accepted in tried.items():
            counts[depth - 1][0] += 1
            counts[depth - 1][1] += accepted
    return counts


def _found(data: Data, summary: Data) -> Iterator[str]:
    """What happened."""
    tokens, steps, drafted = summary["tokens"], summary["steps"], summary["drafted"]
    if not tokens:
        yield "No token was generated."
        return
    yield (
        f"{_count(tokens, 'token')} took {_count(steps, 'pass', 'passes')} of the target; {drafted} of them "
        f"({_percent(drafted, tokens)}) had been drafted. The mean acceptance length is "
        f"{summary['mean_acceptance_length']:.2f}."
    )
    for index, name in enumerate(data["drafters"]):
        used = sum(step["drafters"][index] is not None for step in data["steps"])
        if not used:
            yield f"{name} was never used."
            continue
        tried, accepted = _of_drafter(data["steps"], index, "scored"), _of_drafter(data["steps"], index, "accepted")
        first = summary["acceptance"][index][0] if summary["acceptance"][index] else [0, 0]
        yield (
            (
                f"{name} was used in {used} of {_count(steps, 'step')}; of its {tried:.0f} scored tokens "
                f"{accepted:.0f} were accepted"
            )
            + (f", at the first position in {first[1]} of {first[0]} steps." if first[0] else ".")
        )
    for name, words in data.get("learning", {}).items():  # which replays of earlier versions do not say
        yield f"{name} drafts with {words}."
    usual = _usual(data["steps"])
    total = sum(usual)
    yield _on_what_counts(data, summary)
    if total > 0:
        score, draft, rest = usual
        yield (
            f"Scoring took {_percent(score, total)} of a usual step's time, drafting {_percent(draft, total)}, "
            f"all else {_percent(rest, total)}."
        )
        yield from _on_one_step(data["steps"])


def _on_what_counts(data: Data, summary: Data) -> str:
    """Which time the speed counts, and which it does not."""
    own = sum(value for name, value in summary["seconds"].items() if name != "prefill")
    return (
        f"The steps took {_milliseconds(own)}, {summary['tokens_per_second']:.4g} tokens/s. Not counted are the prompt "
        f"({_milliseconds(data['prefill_seconds'])}) and recording this page between the steps "
        f"({_milliseconds(data['record_seconds'])}); `paceline bench` measures speed."
    )


def _usual(steps: Sequence[Data]) -> tuple[float, float, float]:
    """Seconds of scoring, drafting and all else in a usual step: medians, drafting by the share of the steps that
    drafted.
    """
    drafts = [step["seconds"]["draft"] for step in steps if any(one is not None for one in step["drafters"])]
    share = len(drafts) / len(steps)
    score, rest = median(step["seconds"]["score"] for step in steps), median(_rest(step) for step in steps)
    return score, share * median(drafts) if drafts else 0.0, rest


def _on_one_step(steps: Sequence[Data]) -> Iterator[str]:
    """Where one step holds most of what is neither drafting nor scoring, and that is much."""
    longest, rest = max(range(len(steps)), key=lambda i: _rest(steps[i])), sum(map(_rest, steps))
    much = rest >= OVERHEAD * sum(sum(step["seconds"].values()) for step in steps)
    if much and len(steps) >= FEW and _rest(steps[longest]) > rest / 2:
        yield (
            f"Most of the remaining time was step {longest + 1} alone, {1e3 * _rest(steps[longest]):.0f} ms: the "
            "controller measured what scoring costs, or the machine was busy with something else."
        )


def _rest(step: Data) -> float:
    return float(sum(value for name, value in step["seconds"].items() if name not in ("draft", "score")))


def _advice(data: Data, summary: Data) -> Iterator[str]:
    """What would help."""
    for name, why in data["output"]["metrics"]["dropped_drafters"].items():
        yield f"{name} was dropped: {why}. Fix that first."
    if data.get("refused"):  # which replays of earlier versions do not say
        yield "Drafts are refused: this model takes every token in a pass of its own, so that they would save nothing."
        return
    if not data["drafters"]:
        yield (
            "This is plain decoding: with a speculative_config, drafters propose tokens, and a pass can yield several "
            "of them."
        )
        return
    drafted = [step for step in data["steps"] if any(scored(node) for node in step["nodes"])]
    if len(drafted) >= FEW:
        yield from _on_first_tokens(drafted)
        balance = _balance(data["steps"], drafted) if len(data["steps"]) >= TIMED else None
        if balance is not None:
            yield _on_balance(balance)
        if balance is None or balance.gain[1] >= 1.0:
            yield from _on_full_acceptance(drafted)
    yield from _on_cuts(data, summary)
    yield from _on_empty_steps(data["steps"], drafted)
    yield from _on_time(data)


def _on_first_tokens(drafted: Sequence[Data]) -> Iterator[str]:
    failed = sum(
        not any(n["depth"] == 1 and n["status"] in ("accepted", "ended") for n in step["nodes"]) for step in drafted
    )
    if failed >= FAILED_FIRST * len(drafted):
        yield (
            f"In {failed} of {len(drafted)} drafted steps even the first drafted token was rejected: a drafter that "
            "knows this kind of text better would help more than longer drafts."
        )


def _on_full_acceptance(drafted: Sequence[Data]) -> Iterator[str]:
    full = [step for step in drafted if not any(node["status"] in ("rejected", "unreached") for node in step["nodes"])]
    if len(full) < ALL_ACCEPTED * len(drafted):
        return
    ends = [_end(step) for step in full]
    causes = [
        (ends.count("budget"), "the budget"),
        (ends.count("stop"), "the controller"),
        (ends.count("cut"), "selection"),
    ]
    reasons = [f"{cause} ended {number} of them" for number, cause in causes if number]
    yield (
        f"In {len(full)} of {len(drafted)} drafted steps every scored token was accepted: longer drafts may pay"
        + (f" ({', '.join(reasons)})." if reasons else ", though the drafters proposed no more.")
    )


def _end(step: Data) -> str:
    """What kept a draft from being longer."""
    if any(node["status"] == "cut" for node in step["nodes"]):
        return "cut"
    used = [one for one in step["drafters"] if one is not None and one["proposed"]]
    if any(one["stop"] is not None for one in used):
        return "stop"
    return (
        "budget"
        if any(one["deepest"] >= one["depth"] or one["proposed"] >= one["nodes"] for one in used)
        else "drafter"
    )


@dataclass(frozen=True, slots=True)
class _Balance:
    """Whether drafting paid.

    Attributes:
        cost: time of a usual step with drafts, in usual steps without.
        tokens: that a step with drafts brought.
        gain: 95 % interval of the speed with drafts over the speed without.
    """

    cost: float
    tokens: float
    gain: tuple[float, float]


def _balance(steps: Sequence[Data], drafted: Sequence[Data]) -> _Balance | None:
    """What drafting cost and brought, drafting that found nothing not counted; None where too few steps drafted
    nothing.
    """
    plain = [
        sum(s["seconds"].values()) - s["seconds"]["draft"]
        for s in steps
        if not any(scored(node) for node in s["nodes"])
    ]
    if len(plain) < FEW:
        return None
    steps_of = [(sum(step["seconds"].values()), step["count"]) for step in drafted]
    return _Balance(
        cost=median(seconds for seconds, _ in steps_of) / median(plain),
        tokens=fmean(count for _, count in steps_of),
        gain=interval_apart([np.array(plain), np.array(steps_of, dtype=np.float64)], _gain),
    )


def _gain(plain: FloatArray, drafted: FloatArray) -> FloatArray:
    """Speed with drafts over speed without, of resampled seconds (d, n) and seconds with tokens (d, n, 2)."""
    usual = np.median(drafted[..., 0], axis=1) / drafted[..., 1].mean(axis=1)
    return np.asarray(np.median(plain, axis=1) / usual)


def _on_balance(found: _Balance) -> str:
    paid = "which shows neither that drafting paid nor that it did not"
    if found.gain[0] > 1.0:
        paid = "so drafting paid"
    elif found.gain[1] < 1.0:
        paid = "so drafting did not pay; a cheaper drafter or shorter drafts are needed"
    return (
        f"A step with drafts took {found.cost:.2f} times one without and brought {found.tokens:.2f} tokens instead of "
        f"1, {paid}."
    )


def _on_cuts(data: Data, summary: Data) -> Iterator[str]:
    missed = [sum("missed" in node for node in step["nodes"]) for step in data["steps"]]
    if sum(missed) >= max(MISSED * summary["tokens"], FEW):
        yield (
            f"In {_count(sum(map(bool, missed)), 'step')} selection cut drafted tokens that the output then followed, "
            f"{_count(sum(missed), 'token')} in all: with more nodes scored a step, some of them would have been "
            "accepted at little cost."
        )


def _on_empty_steps(steps: Sequence[Data], drafted: Sequence[Data]) -> Iterator[str]:
    empty = [step for step in steps if not any(scored(node) for node in step["nodes"])]
    if len(empty) < max(EMPTY * len(steps), FEW):
        return
    cut = sum(bool(step["nodes"]) for step in empty)
    unused = sum(all(one is None for one in step["drafters"]) for step in empty)
    parts = [(unused, "no drafter was used"), (len(empty) - cut - unused, "nothing was found"), (cut, "all was cut")]
    why = ", ".join(f"in {number} {what}" for number, what in parts if number)
    yield (
        f"{len(empty)} of {len(steps)} steps had no drafts: {why}. Another kind of drafter beside these could fill "
        "them."
    )


def _on_time(data: Data) -> Iterator[str]:
    steps = data["steps"]
    if len(steps) < TIMED or not (total := sum(usual := _usual(steps))):
        return
    if usual[1] >= DEAR_DRAFT * total:
        dearest = max(range(len(data["drafters"])), key=lambda i: _usual_of_drafter(steps, i))
        yield (
            f"Drafting took {_percent(usual[1], total)} of a usual step's time, most of it "
            f"{data['drafters'][dearest]}: "
            "a cheaper drafter or shorter drafts would help."
        )
    share = median(_rest(step) / (sum(step["seconds"].values()) or 1.0) for step in steps)
    if share >= OVERHEAD:
        yield (
            f"{_percent(share, 1)} of a usual step went into neither drafting nor scoring; a larger model hides "
            f"that share."
        )


def _usual_of_drafter(steps: Sequence[Data], index: int) -> float:
    """Seconds that a drafter usually took, times the steps that used it."""
    seconds = [step["drafters"][index]["seconds"] for step in steps if step["drafters"][index] is not None]
    return len(seconds) * median(seconds) if seconds else 0.0


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}\N{NO-BREAK SPACE}ms" if seconds < 1 else f"{seconds:.3g}\N{NO-BREAK SPACE}s"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}".replace("%", "\N{NO-BREAK SPACE}%")


WARM_UP: Final = 48
"""Most tokens of the run before the recorded one."""

APART: Final = "paceline explain: warm-up"
"""The tenant of that run."""

PAGES = Path(__file__).parent / "pages"
EXPLAIN_MARK = '<meta name="generator" content="paceline explain">'
"""Stands in every page, so that one may be told from a file that is something else."""

_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def rendered(template: Path, mark: str, **shown: Any) -> str:
    """A page, in which names may break behind signs.

    Args:
        template: may use those beside it and those of PAGES.
        mark: a line that tells whose page it is. shown: by the template.
    """
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup, escape

    pages = Environment(
        loader=FileSystemLoader([template.parent, PAGES]), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    pages.filters["breakable"] = lambda name: Markup(re.sub("([_+(,=])", r"\1<wbr>", str(escape(name))))
    return pages.get_template(template.name).render(mark=Markup(mark), **shown)


class Replay:
    """What happened in one generation.

    Args:
        data: the layout of `Recorder`; `summary` (see `summarize_replay`) is added.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data if "summary" in data else data | {"summary": summarize_replay(data)}

    @property
    def text(self) -> str:
        """The generated text."""
        return str(self.data["output"]["text"])

    @property
    def sentences(self) -> list[str]:
        """What was found, and what would help."""
        return [*self.data["summary"]["found"], *self.data["summary"]["advice"]]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return self.data

    def to_html(self) -> str:
        """One page without any outside part, ASCII in its data, for every current browser.

        It takes a theme from its address (`?theme=dark`, `?theme=light`) and a step (`#12`).
        """
        from markupsafe import Markup

        return rendered(PAGES / "explain.html", EXPLAIN_MARK, data=Markup(embedded(self.data)))


def warm_up(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    """Decode the beginning of an answer, so that what happens at first use (compiling, measuring costs) is over.

    That is done by an engine of its own around the same weights, and for a tenant of its own: no table, no cache and no
    controller of the run to come learns from it.

    Raises:
        ConfigError, PromptError: as `Recorder.run`.
    """
    from paceline.explain.recorder import check

    check(params)
    apart = (
        dict(prompt)
        if isinstance(prompt, Mapping)
        else {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    )
    most = WARM_UP if params.max_tokens is None else min(params.max_tokens, WARM_UP)
    short = replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
    other = llm.with_speculative_config(llm.speculative and llm.speculative.without_learning())
    with closing(other.stream({**apart, "cache_salt": APART}, short)) as chunks:
        for _ in chunks:
            pass


def embedded(data: Any) -> str:
    """JSON for a script element: ASCII, without a character that HTML could take for markup.

    Raises:
        ValueError: NaN or infinity in the data.
    """
    return json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)
