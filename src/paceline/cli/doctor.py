"""`paceline doctor`: checks a setup, a line a check as soon as it ends, and a block for a report; exit 0 when fine, 1
when something is wrong.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from paceline.cli.figures import size_words
from paceline.cli.methods import left_out
from paceline.cli.options import open_llm, with_flags
from paceline.cli.prompts import Prompts, checked_prompts, read_prompts
from paceline.cli.terminal import counted, progress_bar, say, stages, wrapped
from paceline.config import SpeculativeConfig

if TYPE_CHECKING:
    from paceline.doctor import Diagnosis, PassFacts, Visit
    from paceline.llm import LLM
    from paceline.profiles import Profile

FORMS: Final = {
    "compiled": "compiled passes",
    "operators": "PyTorch's operators",
    "strict operators": "PyTorch's operators in their strict form",
}
"""Values of `ModelInfo.passes` on a CPU, in words."""

PROBED = 3
"""Prompts of the probes."""


@with_flags(sampling=False)
def command(
    *,
    prompts: Prompts = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also list methods that auto left out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
    flag_values: dict[str, Any],
) -> None:
    """Check machine, checkpoints and drafters, and say what is wrong and what to do about it."""
    texts = {} if prompts is None else dict(islice(read_prompts(prompts).items(), PROBED))
    chosen = SpeculativeConfig.parse(flag_values.pop("speculative_config", None))
    llm = open_llm(flag_values | {"speculative_config": "null"}, timed=True, speech=True)
    profile = _profile(llm, flag_values) if chosen is None else None
    config = chosen or (profile and profile.speculative) or SpeculativeConfig()
    from paceline.doctor import visit

    items = _prompts(llm) if prompts is None else checked_prompts(llm, prompts, texts)
    with progress_bar() as bar:
        report = visit(llm, config, items, stages(bar), lambda found: None if as_json else say_checks(found))
    print(json.dumps(report.to_dict(llm)) if as_json else words(report, llm, verbose=verbose, profile=profile))
    raise typer.Exit(0 if report.diagnosis.healthy else 1)


def _profile(llm: LLM, flag_values: dict[str, Any]) -> Profile | None:
    """The profile that the other commands use for this model."""
    from paceline.profiles import Conditions, find, switched_on

    return (
        find(Conditions.of(llm.runner.info, llm.folder), threads=flag_values.get("threads")) if switched_on() else None
    )


def _prompts(llm: LLM) -> list[Any]:
    """A few bundled prompts, of different tasks."""
    from paceline.cli.verify import bundled

    prompts = bundled(llm)
    return prompts[:: max(1, len(prompts) // PROBED)][:PROBED]


def say_checks(found: Diagnosis) -> None:
    """A line for each check: OK, or what is wrong and what to do, hints last."""
    complained = {name for name, _ in found.findings}
    lines = [f"OK     {name}" for name in found.asked if name not in complained]
    for name, one in sorted(found.findings, key=lambda pair: pair[1].hint):
        lines.append(f"{'HINT ' if one.hint else 'WRONG'}  {name}: {one.what}. To do: {one.do}.")
    for line in lines:
        say(line, indent=_indent(line))


def words(report: Visit, llm: LLM, *, verbose: bool, profile: Profile | None = None) -> str:
    """The figures, the verdict and the block for a report, no wider than the terminal."""
    from paceline.doctor import about, form_of

    facts, diagnosis = report.facts, report.diagnosis
    threads = facts.machine.threads
    lines = [
        "",
        f"{llm.runner.info.name} ({form_of(llm, facts)} on {facts.target.device}, {counted(threads, 'thread')})",
        *([] if facts.passes is None else _passes(facts.passes)),
        *([str(profile)] if profile is not None else []),
        *(_probed(probe) for probe in facts.probes),
        *([] if facts.memory is None else [_memory(facts.memory, llm.runner.info.max_context)]),
    ]
    wrong = sum(not one.hint for _, one in diagnosis.findings)
    hints = len(diagnosis.findings) - wrong
    verdict = "nothing is wrong" if not wrong else f"{wrong} thing{'s are' if wrong > 1 else ' is'} wrong"
    lines.append(
        f"{len(diagnosis.asked)} checks: {verdict}" + (f", {hints} hint{'s' if hints > 1 else ''}" if hints else "")
    )
    if verbose:
        lines += left_out()
    lines += ["", "To report a problem, paste this:"]
    block = [f"    {name:<10} {value}" for name, value in about(llm, facts)]
    return "\n".join([text for line in lines for text in wrapped([line], _indent(line))] + block)


def _passes(passes: PassFacts) -> list[str]:
    """What runs the target and why, what a pass takes, and what the same shape costs in other forms."""
    from paceline.models.passes import eligibility

    took = ", ".join(f"{1e3 * seconds:.3g} ms for {counted(rows, 'row')}" for rows, seconds in passes.seconds.items())
    why = f"{passes.instructions}, self-test passed; {eligibility.SWITCH}=off has PyTorch's operators run it"
    why = why if passes.lacks is None else f"compiled passes do not run it: {passes.lacks}"
    lines = [f"{FORMS[passes.passes]} on {passes.processor} ({why}): {took}"]
    if passes.forms:
        forms = (
            f"{form.passes} {form.dtype} {' and '.join(f'{1e3 * seconds:.3g}' for seconds in form.seconds.values())}"
            for form in passes.forms
        )
        few = " and ".join(str(rows) for rows in passes.forms[0].seconds)
        part = f"{counted(passes.layers, 'layer')} of this shape"
        judged = " (other programs were in the way: not judged)" if passes.crowded else ""
        lines.append(f"CPU time of {part} on one thread, ms for {few} rows: {'; '.join(forms)}{judged}")
    return lines


def _memory(use: Any, context: int) -> str:
    """What is predicted of the memory."""
    drafts = f", {size_words(use.drafts)} of draft models' weights" if use.drafts else ""
    return (
        f"memory, predicted: {size_words(use.weights)} of weights{drafts}; a text of {counted(context, 'token')} takes "
        f"{size_words(use.caches)}, its drafts {size_words(use.speculation)} more"
    )


def _indent(line: str) -> str:
    return " " * 7 if line.startswith(("WRONG", "HINT", "OK ")) else "  "


def _probed(probe: Any) -> str:
    """What a probe saw, in one line, and how the drafter was set up."""
    return _seen(probe) + (f"; {probe.note}" if probe.note else "")


def _seen(probe: Any) -> str:
    hits, number = sum(token.hit for token in probe.drafted_tokens), len(probe.drafted_tokens)
    if not number:
        return f"probe of {probe.drafter}: nothing drafted"
    return (
        f"probe of {probe.drafter}: {hits} of {number} drafted tokens accepted, "
        f"{1e3 * probe.draft_seconds:.2g} ms to draft one"
    )
