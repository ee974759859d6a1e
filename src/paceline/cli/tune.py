"""`paceline tune`: measures which method and settings, or with --tree which static tree, are fastest here, keeps the
choice as a profile, and reports what it gains.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import outputs, tune_search, tune_steering
from paceline.cli.figures import bytes_of, size_words
from paceline.cli.interrupts import INTERRUPTED, TerminatedToo
from paceline.cli.options import model_path, open_llm, with_flags
from paceline.cli.prompts import Prompts, checked_prompts, read_prompts
from paceline.cli.terminal import counted, progress_bar, width, wrapped
from paceline.cli.verify import bundled
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.tune import Interval, TreeTuning, Tuning

EXAMPLE = """-s '{"method": "medusa", "model": "FOLDER"}'"""

NO_SEARCH = "no search can find "
"""How the reason of a method begins that needs something of the user's."""

SHOWN = 8
"""Settings in the table."""

NAMED = 6
"""Settings in a remark."""

SCATTER = 2.0
"""Upper over lower bound of a gain from which on a remark is made."""

FEW_STEPS = 100
"""Steps below which the chances of a tree are no good estimates."""

LATE = 1.15
"""Time over budget from which on a remark is made."""


Chat = Annotated[bool, typer.Option("--chat", help="Treat each prompt as a user's message (chat template).")]
DraftModels = Annotated[
    list[str] | None, typer.Option("--draft-model", metavar="MODEL", help="A draft model to try; may be repeated.")
]
Budget = Annotated[
    float, typer.Option("--budget", min=1.0, max=86400.0, metavar="SECONDS", help="Time for the search.")
]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", min=1, max=4096, help="Maximum number of new tokens per prompt.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, max=1024, help="Prompts decoded together.")]
Steering = Annotated[
    str | None,
    typer.Option("--steering", metavar="METHOD", help="Find the strength of svdecode on --prompts with answers."),
]
Search = Annotated[
    str | None, typer.Option("--search", metavar="METHOD", help="Find the threshold of adadec on texts (--prompts).")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", metavar="FILE", help="With --steering or --search: where what was found is kept, as JSON."
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", help="Find the fastest within this memory, weights included, as 2GB or 500MiB."
    ),
]
Tree = Annotated[
    bool, typer.Option("--tree", help="Find the static tree of the heads that --speculative-config names.")
]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="With --tree: a page that draws the tree.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite FILE even if it is not such a page.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Measure and report, but keep no profile.")]
Json = Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")]


@with_flags(sampling=False)
def command(
    *,
    prompts: Prompts = None,
    chat: Chat = False,
    draft_model: DraftModels = None,
    budget: Budget = 120.0,
    max_tokens: MaxTokens = 128,
    batch_size: BatchSize = 1,
    steering: Steering = None,
    search: Search = None,
    output: Output = None,
    memory: Memory = None,
    tree: Tree = False,
    html: Html = None,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    flag_values: dict[str, Any],
) -> None:
    """Find the fastest method and settings for a model on this machine, and keep them for later runs."""
    if steering is not None and search is not None:
        raise ConfigError("--steering and --search find different things; give one of them")
    if steering is not None:
        tune_steering.run(flag_values, steering, prompts, output, as_json=as_json)
        return
    if search is not None:
        tune_search.run(flag_values, search, prompts, output, as_json=as_json)
        return
    if output is not None:
        raise ConfigError("--output keeps what --steering or --search finds; add one of them, or leave --output out")
    if memory is not None and tree:
        raise ConfigError("--memory is for the search over all settings; leave --tree or --memory out")
    size = None if memory is None else bytes_of("--memory", memory)
    config, texts = flag_values.pop("speculative_config", None), {} if prompts is None else read_prompts(prompts)
    drafter = _drafter(config, tree=tree, draft_model=draft_model, html=html, force=force)
    _find(draft_model or [])
    llm = open_llm(flag_values | {"speculative_config": "null"}, timed=True)
    options: dict[str, Any] = {"budget": budget, "max_tokens": max_tokens, "batch_size": batch_size}
    items, shaped = bundled(llm) if prompts is None else checked_prompts(llm, prompts, texts, chat=chat), None
    if drafter is None:
        drafts = draft_model or default_drafts(flag_values)
        tuning = _measure(llm, items, flag_values, drafts=drafts, memory=size, **options)
    else:
        shaped = _measure_tree(llm, items, flag_values, drafter, **options)
        tuning = shaped.tuning
        if html is not None:
            _write(html, shaped)
    path = tuning.profile.save() if tuning.profile is not None and not dry_run else None
    if as_json:
        print(json.dumps((shaped or tuning).to_dict() | {"path": path and str(path)}))
    else:
        print(words(tuning, path) if shaped is None else tree_words(shaped, path))
    raise typer.Exit(INTERRUPTED if tuning.interrupted else 0)


def _drafter(
    config: str | None, *, tree: bool, draft_model: list[str] | None, html: Path | None, force: bool
) -> dict[str, Any] | None:
    """What drafts the tree that is to be found; None without --tree.

    Raises:
        ConfigError: flags that do not go together, no drafter of static trees, or a file that is something else.
    """
    if not tree:
        if config is not None:
            raise ConfigError("tune chooses the speculative_config itself; leave --speculative-config out")
        if html is not None:
            raise ConfigError("--html draws the tree that --tree finds; add --tree, or leave --html out")
        return None
    if config is None:
        raise ConfigError(f"--tree finds the tree of heads that you name; add {EXAMPLE}")
    if draft_model:
        raise ConfigError("--draft-model is not available with --tree; name what drafts with --speculative-config")
    from paceline.tune import TREE_MARK, drafter_of

    drafter = drafter_of(config)
    if html is not None:
        outputs.must_be_page("--html", html, mark=TREE_MARK, command="tune --tree", force=force)
    return drafter


def _find(drafts: Sequence[str]) -> None:
    """Reject a draft model that is not there before anything is measured; one that does not fit fails in the search."""
    from paceline.checkpoints import resolve

    for name in drafts:
        resolve(name)


def default_drafts(flag_values: dict[str, Any]) -> list[str]:
    """The draft that ships with the bundled model."""
    from paceline.llm import BUNDLED

    return [] if "model" in flag_values else [str(BUNDLED / "draft")]


def _measure(llm: LLM, items: list[Any], flag_values: dict[str, Any], **options: Any) -> Tuning:
    """Tune behind a progress bar that runs from 0 to the budget."""
    import psutil

    from paceline.tune import tune

    folder = model_path(flag_values) if "model" in flag_values else default_folder()
    cores = 0 if "threads" in flag_values else psutil.cpu_count(logical=False) or 0
    with _bar(options["budget"]) as show:
        return tune(llm, folder, items, cores=cores, progress=show, **options)


def _measure_tree(
    llm: LLM, items: list[Any], flag_values: dict[str, Any], drafter: dict[str, Any], **options: Any
) -> TreeTuning:
    """The same for the tree of one drafter."""
    from paceline.tune import tune_tree

    folder = model_path(flag_values) if "model" in flag_values else default_folder()
    with _bar(options["budget"]) as show:
        return tune_tree(llm, folder, items, drafter, progress=show, **options)


def _write(html: Path, tuning: TreeTuning) -> None:
    from paceline.tune import tree_html

    with outputs.writing("--html", html):
        html.write_text(tree_html(tuning), encoding="utf-8")


def default_folder() -> Path:
    """Give the folder of the bundled model."""
    from paceline.llm import BUNDLED

    return BUNDLED / "target"


@contextmanager
def _bar(budget: float) -> Iterator[Callable[[str, float], None]]:
    """A bar on standard error, where that is a terminal; until its end SIGTERM keeps what was found, as Ctrl-C does."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    whole = TextColumn("of {task.total:.0f} s")
    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn(), whole
    with TerminatedToo(), progress_bar(*columns) as bar:
        task = bar.add_task("warming up", total=budget)
        yield lambda what, seconds: bar.update(task, description=what[:46], completed=seconds)


def words(tuning: Tuning, path: Path | None) -> str:
    """The findings in sentences, no wider than the terminal."""
    lines = [*_head(tuning), *([*_table(tuning), ""] if tuning.settings else []), *_remarks(tuning)]
    return "\n".join([*lines, *wrapped([*_verdict(tuning), *_memory(tuning)]), *_kept(tuning, path)])


def tree_words(tree_tuning: TreeTuning, path: Path | None) -> str:
    """Say in sentences what was found of a static tree."""
    race, best = tree_tuning.tuning, tree_tuning.best
    counts = (
        f"By {counted(tree_tuning.steps, 'step')} with large trees, the model takes ranks 0 to 3 of the first drafted "
        f"token with chances {' '.join(f'{chance:.2f}' for chance in tree_tuning.chances[0][:4])}."
    )
    counts += " That is little to go by: give more --budget, or more prompts." if tree_tuning.steps < FEW_STEPS else ""
    shape = (
        f"The best tree has {counted(len(best.shape), 'node')}, by level: {', '.join(map(str, best.by_level))}. "
        "Its configuration:"
    )
    lines = [*_head(race), *wrapped([counts]), "", *_tree_table(tree_tuning), "", *_remarks(race)]
    kept = ["No profile was written."] if path is None else _kept(race, path)
    lines += [*wrapped(_tree_verdict(tree_tuning)), *kept, "", *wrapped([shape])]
    return "\n".join([*lines, f"-s '{json.dumps(tree_tuning.speculative_config)}'"])


def _tree_table(tree_tuning: TreeTuning) -> list[str]:
    """A line for each raced tree, and one for `auto`."""
    race = tree_tuning.tuning
    lines = [f"{'':13}{'tokens a pass':>17}{'times plain':>17}", f"nodes levels{' expected   found' * 2}  runs"]
    for tree in tree_tuning.trees:
        row = f"{len(tree.shape):>5} {tree.levels:>6} {tree.expected_tokens:>9.2f} {_figure(tree.tokens_per_pass)}"
        row += f" {tree.expected_gain:>8.2f} {_figure(tree.gain)} {tree.pairs:>5}"
        lines.append(row + ("  best" if tree is tree_tuning.best else ""))
    if (auto := race.settings.get("auto")) is not None:
        lines.append(
            f"{'auto':>12}{'':10} {_figure(race.tokens_per_pass['auto'])}{'':9} {_figure(auto[0])} {auto[1]:>5}"
        )
    return lines


def _figure(value: float | None) -> str:
    return f"{'-' if value is None else format(value, '.2f'):>7}"


def _tree_verdict(tree_tuning: TreeTuning) -> list[str]:
    """What was measured of the best, where it was chosen or nothing could be."""
    race = tree_tuning.tuning
    if race.gain is None or race.best is None or race.in_search or race.profile is not None:
        return _verdict(race)
    said = (
        "The best tree is " + ("slower" if race.gain.high < 1.0 else "not shown to be faster") + " than plain decoding"
    )
    if race.best.words(race.threads) == "auto":
        said = "auto, which decodes without a profile, was faster than every tree"
    return [f"{said}: {_figures(race, race.gain)}.", *_on_time(race), *_near_ties(race)]


def _head(tuning: Tuning) -> list[str]:
    """What was measured, where and how long."""
    batch = f", {tuning.batch_size} at once" if tuning.batch_size > 1 else ""
    head = (
        f"{tuning.model} ({tuning.dtype} on {tuning.device}, {counted(tuning.threads, 'thread')}), "
        f"{counted(tuning.prompts, 'prompt')}{batch}, temperature 0, {tuning.seconds:.0f} s"
    )
    return [*wrapped([head]), ""]


def _remarks(tuning: Tuning) -> list[str]:
    """What failed, and what was not tried."""
    remarks = [f"failed: {name}: {why}" for name, why in tuning.rejected.items()]
    remarks += _skipped(tuning)
    remarks += _untried(tuning.left_out, "for which the budget is too short; give more --budget")
    remarks += _untried(tuning.beyond, "less promising than those that the search starts with")
    return [*wrapped(remarks, "  "), ""] if remarks else []


def _skipped(tuning: Tuning) -> list[str]:
    """Methods that were not tried, a remark for each kind of reason."""
    named = {name: why for name, why in tuning.skipped.items() if why.startswith(NO_SEARCH)}
    groups: dict[str, list[str]] = {}
    for name, why in tuning.skipped.items():
        if name not in named:
            groups.setdefault(why, []).append(name)
    lines = [f"not tried: {', '.join(names)}: {why}" for why, names in groups.items()]
    if named:
        lines.append(
            f"not tried, since each needs a model or a file that you name (`paceline methods` shows which, "
            f"`paceline bench -s` measures them): {', '.join(named)}"
        )
    return lines


def _untried(settings: Sequence[str], why: str) -> list[str]:
    if not settings:
        return []
    more = f", and {len(settings) - NAMED} more (--json names them)" if len(settings) > NAMED else ""
    return [f"not tried: {counted(len(settings), 'setting')} {why}: {'; '.join(settings[:NAMED])}{more}"]


def _table(tuning: Tuning) -> list[str]:
    """The best settings of the search."""
    rows = list(tuning.settings.items())[:SHOWN]
    room = min(max(len(name) for name, _ in rows), width() - 24)
    lines = [f"{'in the search':<{room}}  gain  paired runs"]
    lines += [f"{name[:room]:<{room}} {gain:4.2f}x  {pairs:>11}" for name, (gain, pairs) in rows]
    rest = len(tuning.settings) - len(rows)
    return [*lines, *([f"and {rest} slower"] if rest else [])]


def _verdict(tuning: Tuning) -> list[str]:
    """What was chosen, what it gains, with which confidence."""
    from paceline.utils import ENOUGH

    lines = []
    if tuning.interrupted:
        lines.append("Interrupted; what follows rests on the measurements so far.")
    if tuning.best is None or tuning.gain is None:
        return [*lines, "No setting could be measured: undecided, auto remains the default."]
    gain, best = tuning.gain, tuning.best.words(tuning.threads)
    figures = _figures(tuning, gain)
    confidence = f" It is faster with a confidence of {_percent(gain.confidence)}." if gain.items >= ENOUGH else ""
    if tuning.chosen is None:
        why = (
            "the same runs chose it, so that they flatter it"
            if tuning.in_search
            else "too few runs"
            if tuning.gain.low > 1.0 or tuning.gain.high < 1.0
            else "no setting is shown to be faster than plain decoding"
        )
        lines.append(f"Undecided, auto remains the default: the search preferred {best}, {figures}; {why}.")
    elif tuning.chosen == tuning.best:
        lines.append(f"Chosen: {best}. It decodes at {figures}.{confidence}")
    else:
        lines.append(
            f"Chosen: plain decoding (off). The setting that the search preferred ({best}) is slower: {figures}."
        )
    if gain.high > SCATTER * gain.low:
        lines.append(
            "The runs scatter widely: give more --budget, and check with `paceline doctor` whether something keeps "
            "cores busy."
        )
    return [*lines, *_on_time(tuning), *_near_ties(tuning)]


def _memory(tuning: Tuning) -> list[str]:
    """What the best has held of the memory, and how later runs keep to it."""
    if tuning.memory is None:
        return []
    plain = (
        f"Of {size_words(tuning.memory['budget'])}, plain decoding takes {size_words(tuning.memory['plain']['total'])}"
    )
    best = tuning.best and tuning.memory["settings"].get(tuning.best.words(tuning.threads))
    if not best:
        return [f"{plain}."]
    limit = f"--speculative-memory-bytes {best['speculative_memory_bytes']}"
    return [
        f"{plain}, the best setting has held {size_words(best['held'])}, with trees of up to {best['nodes']} nodes; "
        f"later runs keep to it with {limit}."
    ]


def _near_ties(tuning: Tuning) -> list[str]:
    first = "differ from plain decoding, each for the first time at a near tie."
    return [f"{tuning.near_ties} of {tuning.compared} outputs {first}"] if tuning.near_ties else []


def _figures(tuning: Tuning, gain: Interval) -> str:
    return gain_words(asdict(gain), tuning.batch_size)


def gain_words(gain: Mapping[str, Any], batch_size: int) -> str:
    """A gain with its interval, or why it has none, and what it rests on.

    Args:
        gain: the fields of `paceline.tune.Interval`.
    Raises:
        KeyError, TypeError, ValueError: they are none.
    """
    from paceline.utils import ENOUGH, no_interval

    item, items = ("prompt", "prompts") if batch_size == 1 else ("batch", "batches")
    ends = f"95 % interval {gain['low']:.2f} to {gain['high']:.2f}"
    return (
        f"{gain['median']:.2f} times plain decoding ({ends if gain['items'] >= ENOUGH else no_interval(items)}, "
        f"{counted(gain['pairs'], 'paired run')} on {counted(gain['items'], item)})"
    )


def _on_time(tuning: Tuning) -> list[str]:
    """Where the budget did not allow what was asked for, or was not enough."""
    lines = []
    if tuning.max_tokens is not None and tuning.asked_tokens is not None and tuning.max_tokens < tuning.asked_tokens:
        lines.append(
            f"Prompts were decoded to {counted(tuning.max_tokens, 'token')} instead of {tuning.asked_tokens}, so that "
            f"the runs fit "
            "into the budget; give more --budget for a choice by longer outputs."
        )
    if tuning.seconds > LATE * tuning.budget > 0:
        lines.append(
            f"It took {tuning.seconds:.0f} s instead of {tuning.budget:.0f}: fewer runs would have shown nothing."
        )
    return lines


def _kept(tuning: Tuning, path: Path | None) -> list[str]:
    if path is None:
        return ["No profile was written." + (" Run it again to choose." if tuning.profile is None else "")]
    lines = [f"Profile: {path}"]
    if tuning.profile is not None:
        name = tuning.profile.name
        lines += wrapped([f"`paceline profile show {name}` shows it, `paceline profile remove {name}` removes it."])
    return [*lines, "LLM(...) and the commands use it where no speculative_config is given."]


def _percent(share: float) -> str:
    return "more than 99.9 %" if share > 0.999 else "less than 0.1 %" if share < 0.001 else f"{100 * share:.1f} %"
