"""`paceline methods`: what the registries hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import with_log_level
from paceline.cli.terminal import console, listed, say, width, wrapped

if TYPE_CHECKING:
    from paceline.config import SpeculativeConfig
    from paceline.diffusion import Method
    from paceline.llm import LLM
    from paceline.registry import Entry

FAMILIES = {
    "drafters": 'Drafters propose tokens: speculative_config key "method"',
    "verifiers": 'Verifiers accept or reject them: key "acceptance_method" (greedy at temperature 0)',
    "controllers": 'Controllers decide how many are drafted: key "controller"',
    "searches": 'Searches go on with several texts at once: argument "search", key "method"',
    "steerings": 'Steering changes the distribution: sampling parameter "steering", key "method"',
    "kv_selections": 'Selections attend to a part of long texts: argument "kv_selection", key "method"',
    "skippings": 'Skipping leaves out a part of the passes: argument "skipping", key "method"',
}
EXACTNESS = {
    "controllers": "that of the drafters and the verifier",
    "searches": "texts are chosen, not drawn from the model's distribution",
    "steerings": "drafts keep the changed distribution, as they keep the model's",
}
"""Of families whose entries do not say it."""

UNSTATED = ("searches", "steerings")
"""Families whose rows of the JSON list have no exactness."""

AUTO = ("prediction", "grammar", "suffix", "draft_model")
"""What `auto` drafts with where a draft model is at hand."""

DIFFUSION = 'Diffusion language models: diffusion_config key "method"'


@with_log_level
def command(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False) -> None:
    """List drafters, verifiers, controllers and methods of diffusion decoding: kind, exactness, needs, paper."""
    from paceline import registry
    from paceline.diffusion import METHODS

    tables = {family: registry.table(family) for family in registry.FAMILIES}
    if as_json:
        rows = [_row(family, name, entry) for family, table in tables.items() for name, entry in table.items()]
        print(json.dumps(rows + [_diffusion_row(name, method) for name, method in METHODS.items()]))
        return
    from rich.text import Text

    screen, columns = console(), width()
    for family, table in tables.items():
        for line in wrapped([FAMILIES.get(family, family)]):
            screen.print(Text(line, style="bold"), soft_wrap=True)
        for name, entry in table.items():
            screen.print(Text(f"  {name}", style="green"), soft_wrap=True)
            for line in describe(family, entry, columns):
                screen.print(Text(line), soft_wrap=True)
        screen.print()
    screen.print(Text(DIFFUSION, style="bold"))
    for name, method in METHODS.items():
        screen.print(Text(f"  {name}", style="green"), soft_wrap=True)
        for line in describe_diffusion(method, columns):
            screen.print(Text(line), soft_wrap=True)
    screen.print()
    drafts = f"`auto` drafts with {', '.join(AUTO[:-1])} and, where there is one, {AUTO[-1]}"
    say(registry.STRICT_NOTE, "", drafts, *left_out(), indent="  ")


def in_use(llm: LLM) -> list[str]:
    """Lines that say what decodes, and which profile chose it."""
    config = llm.speculative
    if config is None:
        lines = ["method: none, plain decoding"]
    elif not llm.runner.capabilities.drafts:
        lines = ["method: none, drafts are refused: this model takes every token in a pass of its own"]
    elif config.method == "auto":
        lines = [f"method: auto, which drafts with {listed(llm.drafter_methods)}{_settings(config)}"]
    else:
        lines = [f"method: {listed(llm.drafter_methods)}{_settings(config)}"]
    drafter_set = llm.engine.parts.drafter_set
    lines += [
        f"{name}: {drafter.note}"
        for name, drafter in zip(drafter_set.names, drafter_set.drafters, strict=True)
        if drafter.note
    ]
    for name in ("kv_selection", "skipping"):
        if (named := getattr(llm.config, name)) is not None:
            lines.append(f"{name}: {named if isinstance(named, str) else json.dumps(dict(named))}, approximate")
    if llm.profile is not None:
        lines.append(str(llm.profile))
    return lines


def _settings(config: SpeculativeConfig) -> str:
    """What is not a default."""
    values = {
        field.name: getattr(config, field.name) for field in fields(config) if field.name not in ("method", "options")
    }
    usual = {field.name: field.default for field in fields(config)}
    chosen = {key: value for key, value in values.items() if value != usual[key]} | dict(config.options)
    return "".join(f", {key} {value}" for key, value in chosen.items())


def left_out() -> list[str]:
    """How many drafters `auto` leaves out for each of two reasons, in a short line each."""
    from paceline import registry

    others = [entry.needs for name, entry in registry.table("drafters").items() if name not in AUTO]
    named = sum(any(_to_name(need) for need in needs) for needs in others)
    return [
        f"left out: {named} drafters that need a model or file of yours (`paceline methods`)",
        f"left out: {len(others) - named} drafters that pay on some models only (`paceline tune` tries them)",
    ]


def _to_name(need: str) -> bool:
    """Whether a user has to give what a method needs; the rest is asked of the model and the machine."""
    from paceline.registry import ABILITIES

    return need not in ABILITIES and not need.startswith("memory for ")


def _row(family: str, name: str, entry: Entry) -> dict[str, Any]:
    greedy, sampled = entry.exactness
    return {
        "name": name,
        "family": family,
        "kind": entry.kind,
        "exactness_greedy": None if family in UNSTATED else greedy,
        "exactness_sampling": None if family in UNSTATED else sampled,
        "needs": list(entry.needs),
        "paper": entry.paper,
    }


def describe(family: str, entry: Entry, width: int) -> list[str]:
    """What the registry says of one method, in lines of at most `width` columns (words are never cut)."""
    greedy, sampled = entry.exactness
    exactness = (
        f"{greedy}, at every temperature" if greedy == sampled else f"{greedy} at temperature 0; {sampled} above"
    )
    values = {
        "kind": entry.kind,
        "exactness": EXACTNESS.get(family, exactness),
        "needs": needs(entry),
        "paper": entry.paper or "none",
    }
    return _lines(values, width)


def needs(entry: Entry) -> str:
    """Say in words what a method needs."""
    from paceline.registry import ABILITIES

    able = [ABILITIES[need] for need in entry.needs if need in ABILITIES]
    others = [need for need in entry.needs if need not in ABILITIES]
    return "; ".join([*([f"a model that {listed(able)}"] if able else []), *others]) or "nothing"


def _diffusion_row(name: str, method: Method) -> dict[str, Any]:
    needs = [method.needs] if method.needs else []
    return {"name": name, "family": "diffusion", "lossless": method.lossless, "needs": needs, "paper": method.paper}


def describe_diffusion(method: Method, width: int) -> list[str]:
    """The same of a method of diffusion decoding."""
    lossless = "equal to the static baseline's" if method.lossless else "may differ from the static baseline's"
    return _lines({"text": lossless, "needs": method.needs or "nothing", "paper": method.paper}, width)


def _lines(values: Mapping[str, str], width: int) -> list[str]:
    lines = []
    for key, value in values.items():
        indent = f"    {key:<11}"
        lines += wrap(
            value, width, initial_indent=indent, subsequent_indent=" " * len(indent), break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
    return lines
