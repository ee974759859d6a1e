"""Writes docs/methods.md from the registries and the docstrings of what they name, docs/cli.md from the command line
itself, and docs/exactness.md from what is claimed of every method.

usage: python docs/generate.py
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from paceline import claims, registry
from paceline.cli.app import app
from paceline.diffusion import KINDS, METHODS, PARTS, part

HERE = Path(__file__).parent

CLI = """# The command line

Written by `python docs/generate.py` from the command line itself; `paceline VERB --help` prints the same flags.

    paceline generate "Once upon a time" --max-tokens 64
    paceline generate --file prompt.txt --model org/name --json
    echo "def add(a, b):" | paceline generate -s '{"method": "ngram", "num_speculative_tokens": 5}'
    paceline chat --temperature 0.7
    paceline demo
    paceline verify --model ./checkpoint --prompts prompts.txt
    paceline explain "def add(a, b):" --output replay.html
    paceline analyze acceptance "def add(a, b):" --html acceptance.html
    paceline tune --prompts prompts.txt --budget 120
    paceline doctor --model ./checkpoint
    paceline bench --quick --html report.html
    paceline bench compare before.json after.json
    paceline bench peers list
    paceline datastore build docs/ --output team.datastore

Text goes to standard output and everything else to standard error, so that pipes hold text only. On a terminal,
accepted guesses are coloured by the drafter that made them; `NO_COLOR` turns colours off. A prompt from a file or a
pipe is UTF-8 text; the newline that ends it is left out. What is not given on the command line comes from the
checkpoint's `generation_config.json`; where that says nothing, `generate` and `chat` decode greedily and write at most
256 tokens.

| exit code | meaning |
|---|---|
| 0 | fine |
| 1 | a check failed: texts differ (`demo`, `bench`), the claim does not hold (`verify`), a setup is wrong (`doctor`) |
| 2 | bad input: one line on standard error says what was wrong, what was found, what to do; earlier text is kept |
| 70 | a bug of ours, still one line; please report it |
| 130 | interrupted with Ctrl-C; the text so far is shown (with `--json`, the object so far) |
| 141 | the reader of a pipe went away |

`paceline --version` prints the version. `--log-level debug`, `info`, `warning` (the default) or `error` may stand
before or after the verb. `python -m paceline` is the same command.
"""


DIFFUSION = """Methods for diffusion language models, chosen by the key `method` of `diffusion_config`
(`LLM(diffusion_config=...)`, `paceline generate --diffusion-config`). Each is a composition of parts; every part can be
replaced by name, and every other key is an option of the parts chosen. What the table leaves out is as usual: schedule
`blocks`, score `confidence`, commit `quota`, no cache, no verification. A block-causal model takes the exact block
cache where nothing else is said. Papers mostly decode in blocks of 32 slots; under full attention the whole text is one
block here unless `block_length` says otherwise, since a text may have any length and blocks must divide it."""
USUAL = {"schedule": "blocks", "score": "confidence", "commit": "quota", "cache": "none", "verification": "none"}


def methods() -> str:
    """One section a method: what it is, options, exactness, needs, source."""
    note = "Written by `python docs/generate.py` from the registry; `paceline methods` prints the same facts."
    lines = ["# Methods", "", note, "", registry.STRICT_NOTE, ""]
    for family in registry.FAMILIES:
        lines += [f"## {family.capitalize()}", ""]
        for name, entry in registry.FAMILIES[family].items():
            lines += _section(family, name, entry)
    return "\n".join([*lines, *_diffusion()])


def _diffusion() -> list[str]:
    """The methods that decode diffusion language models, each a composition of parts."""
    lines = ["## Diffusion", "", DIFFUSION, "", "| method | writes | needs | parts | source |", "|---|---|---|---|---|"]
    for name, method in METHODS.items():
        chosen = {kind: getattr(method, kind) for kind in KINDS}
        parts = [f"{kind} `{chosen[kind]}`" for kind in KINDS if chosen[kind] not in (None, USUAL.get(kind))]
        parts += [f"modifier `{one}`" for one in method.modifiers] + [
            f"`{key}={value!r}`" for key, value in method.options.items()
        ]
        writes = "the static baseline's text" if method.lossless else "a text of its own"
        lines.append(
            f"| `{name}` | {writes} | {method.needs or 'nothing'} | {', '.join(parts) or 'as usual'} | {method.paper} |"
        )
    lines += ["", "### Parts of diffusion methods", ""]
    for kind, table in PARTS.items():
        for name in table:
            lines += [f"#### {kind} `{name}`", "", "```text", inspect.getdoc(part(kind, name)) or "", "```", ""]
    return lines


def _section(family: str, name: str, entry: registry.Entry) -> list[str]:
    found = registry.load(family, name)
    module = inspect.getdoc(inspect.getmodule(found)) or ""
    greedy, sampling = entry.exactness
    facts = [f"- Kind: {entry.kind}", f"- At temperature 0: {greedy}; above: {sampling}"]
    facts += [f"- Needs: {', '.join(entry.needs)}"] if entry.needs else []
    facts += [f"- Source: {entry.paper}"]
    if family == "drafters":
        facts += [
            f"- As published, and by default where it is named alone: "
            f"`{json.dumps({'method': name, **entry.published})}`"
        ]
    options = inspect.getdoc(found) or ""
    return [
        f"### `{name}`",
        "",
        module.split("\n\n")[0].replace("\n", " "),
        "",
        *facts,
        "",
        "```text",
        options,
        "```",
        "",
    ]


def cli() -> str:
    """The introduction above, and one section a verb with its flags, those of its own verbs included."""
    lines = [CLI]
    for name, command in _commands("paceline", typer.main.get_command(app)):
        lines += [f"## {name}", "", command.help, ""]
        panels: dict[str, list[str]] = {}
        for parameter in command.params:
            panel = getattr(parameter, "rich_help_panel", None) or "Options"
            panels.setdefault(panel, []).append(_flag(parameter))
        for panel, rows in panels.items():
            lines += [f"| {panel.lower()} | |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _commands(above: str, group: Any) -> Iterator[tuple[str, Any]]:
    """Every verb with its full name, a group before the verbs in it."""
    for name, command in group.commands.items():
        yield f"{above} {name}", command
        if hasattr(command, "commands"):
            yield from _commands(f"{above} {name}", command)


def _flag(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"| `{parameter.name.upper()}` | {parameter.help} |"
    names = ", ".join(f"`{name}`" for name in sorted(parameter.opts, key=len, reverse=True))
    shown = parameter.default is not None and not isinstance(parameter.default, bool | list)
    default = f" Default: `{parameter.default}`." if shown else ""
    return f"| {names} | {parameter.help}{default} |"


PAGES: dict[str, Callable[[], str]] = {"cli.md": cli, "methods.md": methods, "exactness.md": claims.page}
"""Name of a page -> what makes it."""

if __name__ == "__main__":
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), encoding="utf-8")
