"""Makes the pages of the site that follow from the code: a hook of MkDocs, which runs it at every build.

The pages of methods and of the command line, the API's fields, the exactness table and the tables of measured speeds
come from the registries, docstrings, signatures and `benchmarks/results`; README, CONTRIBUTING and CHANGELOG become
pages as they are. `methods.toml` adds to a method's page when it helps and what it lacks. Nothing that is made here is
committed, but for the table of request fields in `serving.md`, which people read in the repository too.

usage: mkdocs serve, mkdocs build --strict
       python docs/generate.py, which writes that table
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import paceline
from paceline import claims, registry
from paceline.config import EngineConfig

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = ROOT / "benchmarks" / "results"
INTERNAL = {"self", "args", "cost_model", "drafters", "memory", "models", "setting"}
"""Parameters of constructors that are no option of `speculative_config`."""

# Docstrings


def sections(doc: str) -> dict[str, str]:
    """Of a docstring: "" is what stands before the first heading (`Args:`, `Raises:`, ...)."""
    found, heading = {"": list[str]()}, ""
    for line in doc.splitlines():
        match = re.match(r"(Args|Attributes|Raises|Returns|Sources?):(.*)", line)
        heading, rest = (match[1], match[2]) if match else (heading, line)
        found.setdefault(heading, []).append(rest.strip() if heading else rest)
    return {name: "\n".join(lines).strip() for name, lines in found.items()}


def paragraphs(doc: str) -> list[str]:
    """The prose of a module's docstring, without what developers alone need and without its sources."""
    blocks = re.split(r"\n\s*\n", doc)
    return [" ".join(block.split()) for block in blocks if not re.match(r"(In|Sources?):", block)]


def prose(text: str) -> str:
    """Text of a docstring as Markdown: only code, emphasis and links of papers are marked up."""
    pieces = re.split(r"(`[^`]*`)", " ".join(text.split()))
    for index in range(0, len(pieces), 2):
        piece = re.sub(r"([\\\[\]_|])", r"\\\1", pieces[index]).replace("<", "&lt;")
        piece = re.sub(r"\*(?![A-Za-z][\w -]*\*)(?<!\w\*)", r"\\*", piece)
        piece = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", piece)
        pieces[index] = re.sub(r"(https://github\.com/[\w./-]*\w)", r"<\1>", piece)
    return "".join(pieces)


def described(text: str, names: Iterable[str]) -> list[tuple[list[str], str]]:
    """What a section `Args:` says of some names, those that share an entry together."""
    known = sorted({*names, *INTERNAL}, key=len, reverse=True)
    one = f"(?:{'|'.join(map(re.escape, known))})"
    joined = " ".join(text.split())
    marks = list(re.finditer(rf"(?:^|(?<=[.;] ))({one}(?:, {one})*): ", joined))
    found = []
    for mark, following in zip_longest(marks, marks[1:]):
        end = following.start() if following else len(joined)
        found.append((mark[1].split(", "), joined[mark.end() : end].strip()))
    return found


def entries(text: str, defaults: Mapping[str, Any], *, pointers: bool = True) -> list[str]:
    """A definition list of names with their defaults, in the order of the text; names without a description end it.

    Args:
        pointers: keep entries that only say where else to look.
    """
    lines, left = list[str](), list(defaults)
    for names, meaning in described(text, defaults):
        left = [name for name in left if name not in names]
        if not INTERNAL.isdisjoint(names) or (meaning.startswith("see `") and not pointers):
            continue
        shown = prose(re.sub(r"^[a-z]+(?=[ ,.:])", lambda word: word[0].capitalize(), meaning))
        lines += [f"{_code(names)}{_defaults([defaults[name] for name in names])}", f":   {shown}", ""]
    return [*lines, f"And {_code(left)}.", ""] if left else lines


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _defaults(values: Sequence[Any]) -> str:
    """Of names that share an entry, where each of them has a default."""
    if any(value is None or value is inspect.Parameter.empty for value in values):
        return ""
    shown = [repr(value) for value in values]
    return f" (default {_code(shown if len(set(shown)) > 1 else shown[:1])})"


def options(found: Any) -> dict[str, Any]:
    """Options of a method's class and their defaults."""
    parameters = inspect.signature(found).parameters.values()
    return {one.name: one.default for one in parameters if one.name not in INTERNAL and one.kind is not one.VAR_KEYWORD}


# Methods


def advice() -> dict[str, Any]:
    return tomllib.loads((HERE / "methods.toml").read_text(encoding="utf-8"))


def methods() -> dict[str, str]:
    """Path -> page, of every drafter, verifier, controller and group of diffusion methods."""
    known = advice()
    pages = {"methods/index.md": index(known)}
    for family, entry_of in registry.FAMILIES.items():
        for name, entry in entry_of.items():
            pages[where(family, name)] = method(family, name, entry, known.get(family, {}).get(name, {}))
    return pages | diffusion(known["diffusion"])


def where(family: str, name: str) -> str:
    """The page of a method; drafters, which most readers look for, stand at the top."""
    return f"methods/{name}.md" if family == "drafters" else f"methods/{family}/{name}.md"


def summary(family: str, name: str) -> str:
    return prose(told_of(family, name)[0])


def told_of(family: str, name: str) -> list[str]:
    """What is said of a method, in paragraphs: by its module, or where a module holds several, by its class."""
    found = registry.load(family, name)
    if family == "steerings":
        title = paragraphs(inspect.getdoc(inspect.getmodule(found)) or name)[0]
        return [title, *paragraphs(re.split(r"\n(?:Args|Raises):", inspect.getdoc(found) or name)[0])]
    if family == "searches":
        return [one for one in paragraphs(re.split(r"\n(?:Args|Raises):", inspect.getdoc(found) or name)[0]) if one]
    return paragraphs(inspect.getdoc(inspect.getmodule(found)) or name)


def index(known: Mapping[str, Any]) -> str:
    """All methods in tables."""
    lines = ["# Methods", "", (HERE / "methods_intro.md").read_text(encoding="utf-8")]
    heads = {
        "drafters": ("Drafters", "propose tokens. Key `method`."),
        "verifiers": ("Verifiers", "decide which drafted tokens are accepted. Key `acceptance_method`."),
        "controllers": ("Controllers", "decide how much is drafted. Key `controller`."),
        "searches": (
            "Searches",
            "go on with several texts at once ([searching](../search.md)). Key `method` of `search`.",
        ),
        "steerings": (
            "Steering",
            "changes the distribution of the tokens ([steering](../steering.md)). Key `method` of `steering`.",
        ),
        "kv_selections": (
            "Selections of keys and values",
            "attend to a part of long texts, which is approximate. Key `method` of `kv_selection`.",
        ),
        "skippings": (
            "Skipping",
            "leaves out a part of the passes, which is approximate. Key `method` of `skipping`.",
        ),
    }
    for family, (title, text) in heads.items():
        lines += [f"## {title}", "", f"{title} {text}", "", "| name | what it does |", "|---|---|"]
        for name in registry.FAMILIES[family]:
            page = where(family, name).removeprefix("methods/")
            lines.append(f"| [`{name}`]({page}) | {summary(family, name)} |")
        lines.append("")
    lines += ["## Diffusion language models", "", "Key `method` of `diffusion_config`.", ""]
    lines += ["| group | methods |", "|---|---|"]
    for group in groups(known["diffusion"]):
        names = ", ".join(f"`{name}`" for name in group["methods"])
        lines.append(f"| [{group['title']}](diffusion/{group['page']}.md) | {names} |")
    return "\n".join([*lines, "", "Parts and their options: [all parts](diffusion/parts.md).", ""])


def method(family: str, name: str, entry: registry.Entry, told: Mapping[str, str]) -> str:
    """The page of one method."""
    found = registry.load(family, name)
    module = told_of(family, name)
    parts = sections(inspect.getdoc(found) or "")
    lines = [f"# {name}", "", prose(module[0]), ""]
    lines += [f"**When it helps.** {told['helps']}", ""] if "helps" in told else []
    lines += [f"**Limits.** {told['limits']}", ""] if "limits" in told else []
    lines += ["```bash", command(family, name, entry, told), "```", "", "## Facts", "", *facts(family, name, entry)]
    if len(module) > 1:
        lines += ["", "## How it works", ""] + [line for text in module[1:] for line in (prose(text), "")]
    if choices := options(found):
        lines += ["", "## Options", "", *entries(parts.get("Args", ""), choices)]
    if "Raises" in parts:
        lines += ["", f"**Errors.** {prose(parts['Raises'])}"]
    return "\n".join([*lines, "", *proven(name), *measured(name if family == "drafters" else None), ""])


def proven(name: str) -> list[str]:
    """Properties of a method that tests prove."""
    known = tomllib.loads((ROOT / "benchmarks" / "checks.toml").read_text(encoding="utf-8")).get(name, {})
    lines = [f"- {says[0].upper()}{says[1:]}." for says, tests in known.items() if tests]
    return ["## What tests prove", "", *lines, ""] if lines else []


def command(family: str, name: str, entry: registry.Entry, told: Mapping[str, str]) -> str:
    """An example that can be typed; where a method needs a checkpoint of the user's, its name is a placeholder."""
    if family == "searches":
        wanted = {"method": name, **json.loads(told.get("config", "{}"))}
        return f"paceline generate \"def fibonacci(n):\" --temperature 0.8 \\\n    --search '{json.dumps(wanted)}'"
    if family == "steerings":
        wanted = {"method": name, **json.loads(told.get("config", "{}"))}
        return f"paceline generate \"def fibonacci(n):\" --steering '{json.dumps(wanted)}'"
    if family == "skippings":
        wanted = json.dumps({"method": name, **json.loads(told["config"])})
        asked = f'paceline generate "What is 17 times 3?"{told.get("flags", "")}'
        return f"{told['before']}\n{asked} \\\n    --skipping '{wanted}'"
    if family == "kv_selections":
        wanted = json.dumps({"method": name, **json.loads(told["config"])})
        before = f"{told['before']}\n" if "before" in told else ""
        return f"{before}paceline generate --file long.txt \\\n    --kv-selection '{wanted}'"
    key = {"drafters": "method", "verifiers": "acceptance_method", "controllers": "controller"}[family]
    published = entry.published if family == "drafters" and "method" not in entry.published else {}
    config = {key: name, **published, **json.loads(told.get("config", "{}"))}
    ordered = dict(sorted(config.items(), key=lambda item: (item[0] != "method", item[0] != key)))
    return f"paceline generate \"def fibonacci(n):\"{told.get('flags', '')} \\\n    -s '{json.dumps(ordered)}'"


def facts(family: str, name: str, entry: registry.Entry) -> list[str]:
    """What is declared of a method."""
    greedy, sampled = entry.exactness
    lines = [f"- Kind: {entry.kind}"] if family == "drafters" else []
    if family in ("drafters", "verifiers", "kv_selections", "skippings"):
        lines.append(
            f"- Exactness at temperature 0: {greedy}; above it: {sampled} ([exactness]({up(family)}exactness.md))"
        )
    lines += [f"- Needs: {prose(', '.join(entry.needs))}"] if entry.needs else []
    lines += [f"- {'Paper' if 'arXiv' in entry.paper else 'Source'}: {prose(entry.paper)}"]
    if family == "drafters":
        config = json.dumps({"method": name, **entry.published})
        lines += [f"- Settings as published, used when it is named alone: `{config}`"]
    return lines


def up(family: str) -> str:
    return "../" if family == "drafters" else "../../"


def measured(name: str | None) -> list[str]:
    """A table of what a drafter brought on SmolLM2, where it was measured."""
    made = json.loads((RESULTS / "methods.json").read_text())
    chosen = [key for key, config in made["settings"].items() if isinstance(config, dict) and config["method"] == name]
    if not chosen:
        return []
    lines = ["## Measured", "", f"Speed over plain decoding, {made['weights']}; {machine(made)}.", ""]
    lines += ["| prompts | drafted tokens | over plain (95 %) | tokens per pass |", "|---|---|---|---|"]
    for prompts, by_setting in made["screening"].items():
        for key in chosen:
            one, number = by_setting[key], made["settings"][key].get("num_speculative_tokens", "as it pays")
            gain = f"{one['over plain']:.2f} ({one['low']:.2f} to {one['high']:.2f})"
            lines.append(f"| {prompts} | {number} | {gain} | {one['tokens_per_pass']:.2f} |")
    return [*lines, "", "More in [benchmarks](../benchmarks.md)."]


def machine(made: Mapping[str, Any]) -> str:
    run = made["provenance"]
    return f"{run['cpu']}, {run['threads']} threads, batch 1, temperature 0, {run['date'][:10]}"


# Diffusion


def groups(told: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Groups of diffusion methods as `methods.toml` has them; what it does not know is a group of its own."""
    from paceline.diffusion import METHODS

    named = {name for group in told for name in group["methods"]}
    others = [name for name in METHODS if name not in named]
    more = [{"page": "others", "title": "Others", "text": "", "methods": others}] if others else []
    return [*told, *more]


def diffusion(told: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Pages of the groups, and one of all parts."""
    pages = {}
    for group in groups(told):
        lines = [f"# {group['title']}", "", group["text"].strip(), ""]
        for name in group["methods"]:
            lines += diffusion_method(name)
        pages[f"methods/diffusion/{group['page']}.md"] = "\n".join(lines)
    return pages | {"methods/diffusion/parts.md": parts_page()}


def diffusion_method(name: str) -> list[str]:
    """One method: a composition of parts."""
    from paceline.diffusion import KINDS, METHODS, Method, part

    method, usual = METHODS[name], Method("")
    chosen = [(kind, getattr(method, kind)) for kind in KINDS if getattr(method, kind) != getattr(usual, kind)]
    chosen += [("modifier", one) for one in method.modifiers]
    lines = [f"## {name}", ""]
    for kind, one in chosen:
        lines += [f"- {kind} `{one}`: {prose(paragraphs(inspect.getdoc(part(kind, one)) or '')[0])}"]
    lines += [] if chosen else ["- the default parts only"]
    lines += [f"- with `{json.dumps(dict(method.options))}`"] if method.options else []
    lines += [f"- Needs: {method.needs}"] if method.needs else []
    lines += ["- Lossless: writes the text of `static`"] if method.lossless else []
    return [*lines, f"- Paper: {prose(method.paper)}", ""]


def parts_page() -> str:
    """Every part with its options."""
    from paceline.diffusion import PARTS, part

    lines = ["# Parts of diffusion methods", "", "Each can be named in `diffusion_config` by the key of its kind; its"]
    lines += ["options are given beside it.", ""]
    for kind, table in PARTS.items():
        lines += [f"## {kind.capitalize()}", ""]
        for name in table:
            found = part(kind, name)
            told = sections(inspect.getdoc(found) or "")
            lines += [f"### {kind} {name}", ""]
            lines += [line for text in paragraphs(told[""]) for line in (prose(text), "")]
            lines += entries(told.get("Args", ""), options(found)) if "Args" in told else []
    names = {f"`{target.split(':')[1]}`": f"`{name}`" for table in PARTS.values() for name, target in table.items()}
    return re.sub(r"`[A-Z]\w+`", lambda match: names.get(match[0], match[0]), "\n".join(lines))


# The command line, the API


def cli() -> str:
    """The introduction, and one section per command with its options, those of its own commands included."""
    import typer

    from paceline.cli.app import app

    lines = [(HERE / "cli_intro.md").read_text(encoding="utf-8"), ""]
    shared: dict[str, set[Row]] = {}
    for name, command in _commands("paceline", typer.main.get_command(app)):
        lines += [f"## {name}", "", prose(command.help), ""]
        told = shared.get(name.rpartition(" ")[0], set())
        rows = [row for row in _rows(command) if row not in told]
        if len(getattr(command, "commands", ())) > 1 and not command.params:
            inner = [_rows(one) for one in command.commands.values()]
            rows = [row for row in inner[0] if all(row in others for others in inner)]
            shared[name] = set(rows)
            lines += ["All of its commands have these:", ""] if rows else []
        for panel in dict.fromkeys(panel for panel, _ in rows):
            lines += [f"**{panel}**", "", *(text for one, text in rows if one == panel)]
    return "\n".join(lines)


Row = tuple[str, str]
"""A panel of the help, and what is told of a flag in it."""


def _rows(command: Any) -> list[Row]:
    shown = (one for one in command.params if not getattr(one, "hidden", False))
    return [(getattr(one, "rich_help_panel", None) or "Options", _flag(one)) for one in shown]


def _commands(above: str, group: Any) -> Iterator[tuple[str, Any]]:
    """Every command with its full name, a group before the commands in it."""
    for name, command in group.commands.items():
        yield f"{above} {name}", command
        if hasattr(command, "commands"):
            yield from _commands(f"{above} {name}", command)


def _flag(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`\n:   {prose(parameter.help or '')}\n"
    names = ", ".join(f"`{name}`" for name in sorted(parameter.opts, key=len, reverse=True))
    shown = parameter.default is not None and not isinstance(parameter.default, bool | list)
    default = f" (default `{parameter.default}`)" if shown else ""
    return f"{names}{default}\n:   {prose(parameter.help or '')}\n"


def fields(name: str) -> str:
    """The arguments or attributes of a public class; those that are described elsewhere are left to the page."""
    found = getattr(paceline, name)
    told = sections(inspect.getdoc(found) or "")
    text = told["Args" if name == "LLM" else "Attributes"]
    elsewhere = {field.name for field in dataclasses.fields(EngineConfig)} if name == "LLM" else set()
    given = {one.name: one.default for one in inspect.signature(found).parameters.values() if one.name not in elsewhere}
    plain = (int, float, str) if name in ("LLM", "SamplingParams") else ()
    shown = {key: value if isinstance(value, plain) else None for key, value in given.items()}
    return "\n".join(entries(text, shown, pointers=False))


def exactness() -> str:
    """The claims of every drafter under every rule of verification, rows that are alike together."""
    rows: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for verifier in claims.verifiers():
        for drafter in registry.DRAFTERS:
            found = tuple(claims.claim(drafter, verifier, mode) for mode in claims.MODES)
            rows.setdefault(found, {}).setdefault(drafter, []).append(verifier)
    lines = [
        "| drafters | rules above temperature 0 | temperature 0 | above it | above it, with a seed |",
        "|---" * 5 + "|",
    ]
    for found, group in rows.items():
        for rules in dict.fromkeys(map(tuple, group.values())):
            drafters = [name for name, theirs in group.items() if tuple(theirs) == rules]
            names = "every drafter" if len(drafters) == len(registry.DRAFTERS) else _listed(drafters)
            lines.append(f"| {names} | {_listed(rules)} | {' | '.join(found)} |")
    under = f"Every claim holds under each sampling parameter: {_listed(claims.PARAMETERS)}."
    rejected = f"These parameters are rejected with an error that names them: {_listed(claims.REFUSED)}."
    return "\n".join([*lines, "", registry.STRICT_NOTE, "", under, "", rejected])


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def request_fields() -> str:
    """Fields that clients of the server send and that ask for nothing, or have another name here."""
    from paceline.serving import field_table

    lines = ["| fields | requests | taken | other values |", "|---|---|---|---|"]
    for names, apis, taken, told in field_table():
        nothing = f"null, {taken}" if taken else "null"
        lines.append(f"| {_listed(names)} | {', '.join(apis)} | {prose(nothing)} | {prose(told)} |")
    return "\n".join(lines)


def with_request_fields(page: str) -> str:
    """The page of the server with the table of request fields as it is now."""
    before, _, rest = page.partition("| fields | requests |")
    after = rest.partition("\n\n")[2]
    return f"{before}{request_fields()}\n\n{after}"


# Benchmarks


def speeds() -> str:
    """What `auto` and the fastest fixed setting bring on published prompts."""
    made = json.loads((RESULTS / "methods.json").read_text())
    lines = ["| prompts | plain | `auto` | `auto` over plain (95 %) | fastest fixed setting |", "|---|---|---|---|---|"]
    for prompts, found in made["final"].items():
        auto, plain = found["auto"], found["plain"]["tokens_per_second"]
        fixed = {key: one for key, one in found.items() if isinstance(made["settings"][key], dict) and key != "auto"}
        best = max(fixed, key=lambda key: fixed[key]["over plain"])
        gain = f"**{auto['over plain']:.2f}** ({auto['low']:.2f} to {auto['high']:.2f})"
        fastest = f"{fixed[best]['over plain']:.2f} (`{best}`)"
        lines.append(f"| {prompts} | {plain:.0f} | {auto['tokens_per_second']:.0f} | {gain} | {fastest} |")
    return "\n".join([*lines, "", f"Tokens/s; {made['weights']}; {machine(made)}."])


def screening() -> str:
    """The speed-up of every setting, the best of each method's, on published prompts."""
    made = json.loads((RESULTS / "methods.json").read_text())
    sets = list(made["screening"])
    lines = [f"| method | {' | '.join(sets)} |", "|---" * (1 + len(sets)) + "|"]
    rows: dict[str, list[float]] = {}
    for key, config in made["settings"].items():
        if isinstance(config, dict) and isinstance(config["method"], str):
            row = [made["screening"][one][key]["over plain"] for one in sets]
            rows[config["method"]] = [max(pair) for pair in zip(rows.get(config["method"], row), row, strict=True)]
    for name, row in sorted(rows.items(), key=lambda item: -sum(item[1])):
        shown = f"`{name}`" if name == "auto" else f"[`{name}`](methods/{name}.md)"
        lines.append(f"| {shown} | {' | '.join(f'{one:.2f}' for one in row)} |")
    return "\n".join(lines)


# The site


def example(name: str) -> str:
    """A module of this folder."""
    return f"```python\n{(HERE / f'{name}.py').read_text(encoding='utf-8')}```"


MADE: dict[str, Callable[..., str]] = {
    "example": example,
    "exactness": exactness,
    "fields": fields,
    "speeds": speeds,
    "screening": screening,
}
"""What stands for `<!-- made: NAME ARGUMENT -->` in a page."""


def pages() -> dict[str, str]:
    """Path in the site -> Markdown of every page that is made."""
    root = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
    return (
        methods() | {"cli.md": cli()} | {page: moved((ROOT / name).read_text("utf-8")) for page, name in root.items()}
    )


def moved(text: str) -> str:
    """A page of the repository's root as one of the site: links to what is not in the site become plain text."""
    text = re.sub(r"(?<!!)\[([^\]]+)\]\((?:src|recipes|benchmarks|tests)/[^)]*\)", r"\1", text)
    text = re.sub(r"\]\((README|CONTRIBUTING|CHANGELOG)\.md", lambda match: f"]({match[1].lower()}.md", text)
    text = text.replace("](readme.md", "](index.md").replace("](benchmarks/results/", "](images/results/")
    return text.replace("](docs/", "](")


def filled(text: str) -> str:
    """A page with what is made in its places."""
    return re.sub(r"<!-- made: (\w+) ?(\w*) -->", lambda m: MADE[m[1]](*filter(None, [m[2]])), text)


def on_config(config: Any) -> Any:
    """The methods' part of the navigation."""
    told = groups(advice()["diffusion"])
    families = {family: [{name: where(family, name)} for name in table] for family, table in registry.FAMILIES.items()}
    menu: list[Any] = ["methods/index.md"]
    menu += [{family.capitalize().replace("Kv_", "KV "): entry} for family, entry in families.items()]
    menu += [{"Diffusion": [{one["title"]: f"methods/diffusion/{one['page']}.md"} for one in told]}]
    menu[-1]["Diffusion"].append({"All parts": "methods/diffusion/parts.md"})
    for item in config["nav"]:
        if "Methods" in item:
            item["Methods"] = menu
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages, and the plots of benchmarks/results."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    for plot in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, f"images/results/{plot.name}", abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What is made within a page."""
    return filled(markdown)


if __name__ == "__main__":
    server = HERE / "serving.md"
    server.write_text(with_request_fields(server.read_text("utf-8")), "utf-8")
