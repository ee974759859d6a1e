"""`paceline verify`: proves on the user's own model that accelerated decoding says the same.

Exit 0 only if drafts were verified and the claim holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.demo import progress_bar
from paceline.cli.options import open_llm, with_flags
from paceline.cli.prompts import read_prompts

if TYPE_CHECKING:
    from paceline.bench.judge import Agreement, LawTest, VerifyReport
    from paceline.llm import LLM

WIDEST = 100


@with_flags(sampling=False)
def command(
    *,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="Text, a prompt a line, or JSONL with a key prompt."),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, max=4096, help="Most new tokens per prompt.")] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, max=10.0, help="Of the tests by sampling; 0 skips them.")
    ] = 1.0,
    samples: Annotated[int, typer.Option("--samples", min=0, max=128, help="Sampled outputs per prompt.")] = 8,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**53, help="First seed of the tests by sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one object.")] = False,
    given: dict[str, Any],
) -> None:
    """Decode plainly and accelerated, at temperature 0 and above, and compare tokens and laws."""
    texts = None if prompts is None else read_prompts(prompts)
    given["seed"] = seed
    llm = open_llm(given)
    from paceline.bench.judge import verify

    items = bundled(llm) if texts is None else texts
    with progress_bar() as bar:
        show = stages(bar)
        report = verify(
            llm, items, max_tokens=max_tokens, temperature=temperature, samples=samples, seed=seed, progress=show
        )
    print(json.dumps(report.to_dict()) if as_json else words(report))
    raise typer.Exit(0 if report.holds else 1)


def stages(bar: Any) -> Callable[[str, int, int], None]:
    """Shows (stage, done, total) on a progress bar, a line a stage."""
    tasks: dict[str, Any] = {}

    def progress(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bar.add_task(stage, total=total)
        bar.update(tasks[stage], completed=done)

    return progress


def bundled(llm: LLM) -> list[Any]:
    """The bundled prompts, as messages where the model has a chat template."""
    from paceline.bench import bundled_prompts

    texts = [prompt.prompt for prompt in bundled_prompts()]
    if llm.tokenizer.has_chat_template:
        return [{"prompt_token_ids": llm.chat_ids([{"role": "user", "content": text}])} for text in texts]
    return list(texts)


def words(report: VerifyReport) -> str:
    """The report in a few lines, no wider than the terminal, as far as words go."""
    from rich.console import Console

    rate = report.near_ties / report.positions if report.positions else 0.0
    lines = [f"{report.model} ({report.dtype})", f"exactness: {report.exactness}"]
    lines += [f"claimed: {report.claimed[0]} at temperature 0, {report.claimed[1]} above"]
    lines += _agreement("temperature 0", report.greedy)
    lines.append(f"  near ties at {rate:.2%} of positions; mean acceptance length {report.mean_acceptance_length:.2f}")
    if report.drafted is not None:
        lines += _agreement("temperature 0, guesses in every step", report.drafted)
    above = f"temperature {report.temperature:g}"
    if report.seeded is not None:
        note = " (not part of the claim)" if report.claimed[1] == "equal in law" else ""
        lines += _agreement(f"{above}, equal seeds{note}", report.seeded)
    for name, law in (("accelerated", report.law), ("plain (control)", report.plain_law)):
        if law is not None:
            lines += _law(
                f"{above}, {name}", law, approximate=report.claimed[1] == "approximate" and name == "accelerated"
            )
    lines.append(f"{report.guesses} guesses were verified")
    if report.plain_law is not None and not report.plain_law.holds:
        lines.append("the control deviates too, so this test of the law proves nothing; try another --seed")
    width = min(Console().width, WIDEST)
    wrapped = [wrap(line, width, **_manner(line)) for line in [*lines, report.conclusion]]
    return "\n".join(line for one in wrapped for line in one)


def _manner(line: str) -> dict[str, Any]:
    """How a long line goes on: two columns further in than it began."""
    indent = len(line) - len(line.lstrip()) + 2
    return {"subsequent_indent": " " * indent, "break_long_words": False, "break_on_hyphens": False}


def _agreement(name: str, found: Agreement) -> list[str]:
    lines = [f"{name}: {found.identical} of {found.outputs} outputs identical ({found.tokens} tokens)"]
    if found.differences:
        lines[0] += (
            f", {len(found.differences) - found.wrong} differ at near ties only ({found.near_ties} in all), "
            f"{found.wrong} elsewhere"
        )
    for index, differences in found.differences.items():
        for d in differences:
            kind = "a near tie" if d.near_tie else "NOT a near tie"
            where = f"  output {index}, token {d.position}: {d.plain} against {d.fast}"
            lines.append(f"{where}, top-2 gap {d.gap:.4g}, epsilon {d.epsilon:.4g}: {kind}")
    return lines


def _law(name: str, law: LawTest, *, approximate: bool) -> list[str]:
    if law.holds:
        verdict = "no deviation from the model's own law"
    elif approximate:
        verdict = "deviates from the model's own law, as an approximate rule may"
    else:
        verdict = "DEVIATES from the model's own law"
    return [
        f"{name}: {verdict}",
        f"  {law.tokens} tokens, p-value {law.p_value:.3g} (a false alarm has probability {law.error:g})",
    ]
