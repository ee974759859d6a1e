"""Writes the table of searches and steering in `docs/benchmarks.md`.

usage: search_table.py     changes nothing if it is up to date already

Quality and cost are those of `results/searches_smollm2.json`, `results/search_toys.json` and
`results/steering_smollm2.json`; the checks, which are properties that tests prove, those of `checks.toml`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline import registry

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- searches:begin -->", "<!-- searches:end -->"
NONE = "-"
HEADS = ("method", "checks", "task", "setting", "right", "tokens", "samples", "difference", "chosen by")
TASKS = {
    "story": ("sum", "a sum in words"),
    "program": ("function", "a function from its description, which hidden tests decide on"),
    "humaneval": ("HumanEval", "a function of HumanEval that has examples"),
}
NAMES = {
    "greedy": "greedy decoding",
    "uni_encoder": "[Uni-Encoder](search.md), a scorer of `sample_and_rank`",
    "hide_message": "[`hide_message`](search.md) (MEC-B)",
    "structured_outputs": "[structured outputs](reference.md#structured-outputs)",
    "codebooks": "[codebooks](codebooks.md)",
    "rollouts": "[rollouts](rollouts.md)",
}
MORE = {"gfd": "the reward as its scorer", "dola": "greedy", "cfg": "greedy"}
"""Added to a method's setting."""

ELSEWHERE = {
    "uni_encoder": "not measured at this size: there is no encoder here that was trained to rank answers",
    **dict.fromkeys(("reflective", "judge", "ead", "arbitrage"), "a target and its draft, by `approximate_rules.py`"),
    **dict.fromkeys(("ralm", "knn_lm"), "beside asking the index in every step, by `retrieval.py`"),
    "backoff": "not measured: these tasks hold nothing to deny",
    "structured_outputs": "measured [beside other libraries](#structured-outputs-beside-other-libraries)",
    "codebooks": "not measured at this size: the whole model must be fine-tuned",
    "rollouts": "nothing to compare: the tokens are those of plain decoding, as many and no others",
}
"""Of what stands in no result file: why, or where else."""


APART = ("double_sparsity", "loopserve", "unified_layer_skipping", "lora_drop", "hcot", "specmemo", "scylla")
"""Of selections, skipping, a budget and a law, which answer no tasks."""


def checks() -> dict[str, dict[str, list[str]]]:
    """Method -> property -> the tests that prove it."""
    found = tomllib.loads((FOLDER / "checks.toml").read_text(encoding="utf-8"))
    return {
        name: {says: [tests] if isinstance(tests, str) else list(tests) for says, tests in some.items()}
        for name, some in found.items()
    }


def counted(some: dict[str, list[str]] | None) -> str:
    """How many of a method's properties tests prove."""
    return NONE if some is None else f"{sum(map(bool, some.values()))} of {len(some)}"


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def points(value: float) -> str:
    return f"{round(100 * value):+d}"


def measured(name: str, families: dict[str, Any]) -> Iterator[list[str]]:
    """The cells of a method's rows behind its name and checks, one for each task that it was tried on."""
    for family, (task, _) in TASKS.items():
        one = families.get(family, {}).get("methods", {}).get(name)
        if one is None:
            continue
        options = {key: value for key, value in (one["search"] or {}).items() if key != "method"}
        words = [*(f"{key} {value}" for key, value in options.items()), *([MORE[name]] if name in MORE else [])]
        right, gain = one["right"], one["more than these"]
        yield [
            task,
            ", ".join(words).replace("delimiter .", "delimiter `.`") or "defaults",
            f"{share(right['value'])} ({100 * right['low']:.0f} to {100 * right['high']:.0f})",
            f"{one['tokens']:,.0f}",
            share(one["samples of as many tokens"]),
            f"{points(gain['value'])} ({points(gain['low'])} to {points(gain['high'])})",
            one["choice"],
        ]


def apart(toys: dict[str, Any], steering: dict[str, Any]) -> dict[str, str]:
    """What was measured in another way than by tasks."""
    above, runs = toys["coupling"]["bits above, mean"], steering["lol"].values()

    def rights(name: str) -> str:
        return " / ".join(f"{100 * run['right'][name]:.0f}" for run in runs)

    minutes = " / ".join(f"{run['adapter']['minutes']:.0f}" for run in runs)
    model = f"{100 * next(iter(runs))['right']['model']:.0f} %"
    capitals = f"capitals: the model {model}, an amateur after {minutes} minutes of untruths {rights('amateur')} %"
    base, tuned, steered = (
        f"{100 * steering['svdecode']['judged'][name]['likeliest']:.1f} %"
        for name in ("base", "adapter", "adapter, steered, alpha 0.0")
    )
    return {
        "hide_message": f"2,000 random pairs: couplings {above:.2f} bits above a bound that none goes below",
        "contrastive": f"{capitals}, contrasted {rights('contrastive')} %",
        "lol": f"{capitals}, contrasted {rights('lol')} %",
        "svdecode": f"likeliest tokens right: base {base}, after 8 minutes of LoRA {tuned}, then steered {steered}",
    }


def rows(families: dict[str, Any], others: dict[str, str]) -> Iterator[list[str]]:
    """All rows: plain greedy decoding, then every method that neither drafts nor says how much is drafted."""
    known: dict[str, dict[str, list[str]] | None] = {"greedy": None, **checks()}
    for name, some in known.items():
        if name in registry.DRAFTERS or name in registry.CONTROLLERS or name in APART:
            continue
        first = [NAMES.get(name, f"`{name}`"), counted(some)]
        found = list(measured(name, families))
        for cells in found:
            yield [*first, *cells]
        if not found:
            yield [*first, NONE, (ELSEWHERE | others)[name], *[NONE] * 5]


def table(results: dict[str, Any], others: dict[str, str]) -> str:
    """Markdown of the tasks and of the table."""
    families = results["families"]
    samples = [
        f"- **{task}**: {meaning}; {one['tasks']} tasks, one sample is right in "
        f"{share(one['one sample']['right']['value'])}, at {one['one sample']['tokens']:.0f} tokens"
        for family, (task, meaning) in TASKS.items()
        if (one := families.get(family))
    ]
    lines = [_line(HEADS), _line(["---"] * len(HEADS)), *map(_line, rows(families, others))]
    return "\n".join([*samples, "", *lines])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def committed() -> str:
    """The table of the result files."""
    results, toys, steering = (
        json.loads((FOLDER / "results" / f"{name}.json").read_text())
        for name in ("searches_smollm2", "search_toys", "steering_smollm2")
    )
    return table(results, apart(toys, steering))


def main() -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{committed()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
