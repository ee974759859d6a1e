"""`paceline verify`: proves on the user's own model that accelerated decoding says the same; exit 0 only if the claim holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.demo import progress_bar
from paceline.cli.options import DEFAULT_SPEC, Model, Revision, Spec, Tokenizer, Trust, open_llm, with_flags
from paceline.cli.prompts import read_prompts

if TYPE_CHECKING:
    from paceline.bench.verify import Report
    from paceline.llm import LLM


@with_flags(sampling=False)
def command(
    *,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="Text, a prompt a line, or JSONL with a key prompt.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, max=4096, help="Most new tokens per prompt.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, max=10.0, help="Of the sampling test; 0 skips it.")] = 1.0,
    samples: Annotated[int, typer.Option("--samples", min=0, max=128, help="Sampled outputs per prompt.")] = 8,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**53, help="Of the sampling test.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one object.")] = False,
    model: Model = None,
    speculative_config: Spec = DEFAULT_SPEC,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Decode plainly and accelerated, at temperature 0 and above, and compare texts and laws."""
    from paceline.bench.verify import verify

    texts = None if prompts is None else read_prompts(prompts)
    given["seed"] = seed
    llm = open_llm(
        given,
        model=model,
        tokenizer=tokenizer,
        revision=revision,
        trust_remote_code=trust_remote_code,
        speculative_config=speculative_config,
    )
    items = bundled(llm) if texts is None else texts
    with progress_bar() as bar:
        tasks: dict[str, Any] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        report = verify(llm, items, max_tokens=max_tokens, temperature=temperature, samples=samples, seed=seed, progress=progress)
    print(json.dumps(report.to_dict()) if as_json else words(report))
    raise typer.Exit(0 if report.holds else 1)


def bundled(llm: LLM) -> list[Any]:
    """The bundled prompts, as messages where the model has a chat template."""
    from paceline.bench.demo import bundled_prompts

    texts = [prompt.prompt for prompt in bundled_prompts()]
    if llm.tokenizer.has_chat_template:
        return [{"prompt_token_ids": llm.chat_ids([{"role": "user", "content": text}])} for text in texts]
    return list(texts)


def words(report: Report) -> str:
    """The report in a few lines."""
    rate = report.near_ties / report.positions if report.positions else 0.0
    lines = [
        f"{report.model} ({report.dtype}): claimed {report.claimed[0]} at temperature 0, {report.claimed[1]} above",
        f"temperature 0: {report.identical} of {report.prompts} outputs identical ({report.tokens} tokens), "
        f"mean acceptance length {report.mean_acceptance_length:.2f}; near ties at {rate:.2%} of positions",
    ]
    for index, d in report.differences.items():
        kind = "a near tie" if d.near_tie else "NOT a near tie"
        lines.append(
            f"  prompt {index}: first difference at token {d.position} ({d.plain} against {d.fast}), top-2 gap {d.gap:.4g}, "
            f"epsilon {d.epsilon:.4g}: {kind}"
        )
    for name, law in (("accelerated", report.law), ("plain (control)", report.plain_law)):
        if law is not None:
            verdict = "no deviation" if law.holds else "DEVIATES"
            lines.append(
                f"temperature {report.temperature:g}, {name}: {verdict} from the model's own law, {law.tokens} tokens, "
                f"p-value {law.p_value:.3g} (a false alarm has probability {law.error:g})"
            )
    return "\n".join([*lines, "the claim holds" if report.holds else "THE CLAIM DOES NOT HOLD"])
