"""`paceline verify`: checks on the user's own model that accelerated decoding gives the same output.

Exit 0 only if drafts were verified and the claim holds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.methods import in_use
from paceline.cli.options import open_llm, with_flags
from paceline.cli.prompts import Prompts, checked_prompts, read_prompts
from paceline.cli.terminal import counted, progress_bar, short, stages, wrapped

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.verify import Agreement, SamplingTest, VerifyReport


@with_flags(sampling=False)
def command(
    *,
    prompts: Prompts = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, max=4096, help="Maximum number of new tokens per prompt.")
    ] = 64,
    temperature: Annotated[
        float,
        typer.Option("--temperature", min=0.0, max=10.0, help="Temperature of the tests by sampling; 0 skips them."),
    ] = 1.0,
    samples: Annotated[int, typer.Option("--samples", min=0, max=128, help="Sampled outputs per prompt.")] = 8,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**53, help="First seed of the tests by sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
    flag_values: dict[str, Any],
) -> None:
    """Decode plainly and accelerated, and compare tokens at temperature 0 and distributions above."""
    texts = {} if prompts is None else read_prompts(prompts)
    flag_values["seed"] = seed
    llm = open_llm(flag_values)
    from paceline.verify import verify

    items = bundled(llm) if prompts is None else checked_prompts(llm, prompts, texts)
    with progress_bar() as bar:
        show = stages(bar)
        report = verify(
            llm, items, max_tokens=max_tokens, temperature=temperature, samples=samples, seed=seed, progress=show
        )
    if as_json:
        print(json.dumps(report.to_dict() | {"model": short(report.model), "verified": in_use(llm)}))
    else:
        print(words(report, in_use(llm)))
    raise typer.Exit(0 if report.holds else 1)


def bundled(llm: LLM) -> list[Any]:
    """The bundled prompts, as messages where the model has a chat template."""
    from paceline.bench import bundled_prompts

    texts = [prompt.prompt for prompt in bundled_prompts()]
    if llm.tokenizer.has_chat_template:
        return [{"prompt_token_ids": llm.chat_ids([{"role": "user", "content": text}])} for text in texts]
    return list(texts)


def words(report: VerifyReport, verified: Sequence[str] = ()) -> str:
    """The report in a few lines, no wider than the terminal, as far as words go.

    Args:
        verified: lines that name what was verified beside the model.
    """
    from paceline.verify import APPROXIMATE, IN_DISTRIBUTION

    rate = report.near_ties / report.positions if report.positions else 0.0
    lines = [f"{report.model} ({report.dtype})", *verified, f"exactness: {report.exactness}"]
    lines += [f"claimed: {report.claimed[0]} at temperature 0, {report.claimed[1]} above"]
    lines += _agreement("temperature 0", report.greedy)
    lines.append(f"  near ties at {rate:.2%} of positions; mean acceptance length {report.mean_acceptance_length:.2f}")
    if report.drafted is not None:
        lines += _agreement("temperature 0, drafts in every step", report.drafted)
    above = f"temperature {report.temperature:g}"
    if report.seeded is not None:
        note = " (not part of the claim)" if report.claimed[1] == IN_DISTRIBUTION else ""
        lines += _agreement(f"{above}, equal seeds{note}", report.seeded)
    for name, distribution in (("accelerated", report.distribution), ("plain (control)", report.plain_distribution)):
        if distribution is not None:
            lines += _distribution(
                f"{above}, {name}", distribution, approximate=report.claimed[1] == APPROXIMATE and name == "accelerated"
            )
    lines.append(f"{counted(report.drafted_tokens, 'drafted token')} verified")
    if report.plain_distribution is not None and not report.plain_distribution.holds:
        lines.append("the control deviates too, so this test proves nothing; try another --seed")
    return "\n".join(wrapped([*lines, report.conclusion], "  "))


def _agreement(name: str, agreement: Agreement) -> list[str]:
    lines = [f"{name}: {agreement.identical} of {agreement.outputs} outputs identical ({agreement.tokens} tokens)"]
    if agreement.differences:
        lines[0] += (
            f", {len(agreement.differences) - agreement.wrong} differ at near ties only "
            f"({agreement.near_ties} in all), {agreement.wrong} elsewhere"
        )
    for index, differences in agreement.differences.items():
        for d in differences:
            kind = "a near tie" if d.near_tie else "NOT a near tie"
            where = f"  output {index}, token {d.position}: {d.plain} against {d.fast}"
            lines.append(f"{where}, top-2 gap {d.gap:.4g}, epsilon {d.epsilon:.4g}: {kind}")
    return lines


def _distribution(name: str, distribution: SamplingTest, *, approximate: bool) -> list[str]:
    if distribution.holds:
        verdict = "no deviation from the model's own distribution"
    elif approximate:
        verdict = "deviates from the model's own distribution, as an approximate rule may"
    else:
        verdict = "DEVIATES from the model's own distribution"
    return [
        f"{name}: {verdict}",
        f"  {distribution.tokens} tokens, p-value {distribution.p_value:.3g} "
        f"(a false alarm has probability {distribution.error:g})",
    ]
