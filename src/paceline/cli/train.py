"""`paceline train`: a head that drafts for a model, from prompts to weights and a report."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.interrupts import TerminatedToo
from paceline.cli.options import open_llm, with_flags
from paceline.cli.terminal import counted, remark, say
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.training import Trained


@with_flags(sampling=False)
def command(
    method: Annotated[
        str,
        typer.Argument(
            help="eagle3, eagle, hydra++, hydra, medusa, medusa2, mlp_speculator, draft_model, kangaroo or layer_skip; "
            "lora for an adapter, codebooks for a model that speaks in codes."
        ),
    ],
    *,
    data: Annotated[
        list[Path], typer.Option("--data", metavar="FILE", help="Prompts, as `paceline bench` reads them; repeatable.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Where the head goes.")],
    texts: Annotated[
        bool, typer.Option("--texts", help="Learn the files' texts as they are, without answers of the model.")
    ] = False,
    most_prompts: Annotated[
        int | None, typer.Option("--most-prompts", min=2, help="Prompts taken from each file; all by default.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=4, max=8192, help="Tokens of an answer.")] = 256,
    sampled_share: Annotated[
        float, typer.Option("--sampled-share", min=0.0, max=1.0, help="Answers drawn at temperature 0.8.")
    ] = 0.25,
    draft_vocab_size: Annotated[
        int, typer.Option("--draft-vocab-size", min=16, help="Tokens that the head can draft.")
    ] = 8192,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Of the model, for draft_model: 0,4,9; a fifth of them by default.")
    ] = None,
    hidden_size: Annotated[
        int | None,
        typer.Option("--hidden-size", min=64, help="Of a small Llama, for draft_model without --layers; 64, 128, ..."),
    ] = None,
    num_layers: Annotated[int, typer.Option("--num-layers", min=1, max=64, help="Of that Llama.")] = 1,
    exit_layer: Annotated[
        int | None,
        typer.Option("--exit-layer", min=1, help="Layers that draft, for kangaroo (2) and layer_skip (a quarter)."),
    ] = None,
    rank: Annotated[int, typer.Option("--rank", min=1, max=1024, help="Of lora's changes.")] = 16,
    alpha: Annotated[float, typer.Option("--alpha", help="Of lora: changes count alpha / rank times.")] = 32.0,
    target_modules: Annotated[
        str | None, typer.Option("--target-modules", help="Of lora: q_proj,v_proj; all matrices by default.")
    ] = None,
    codebook_size: Annotated[
        int, typer.Option("--codebook-size", min=2, max=65536, help="Of codebooks: codes of each.")
    ] = 1024,
    codes: Annotated[int, typer.Option("--codes", min=1, help="Of codebooks: codes that make a state.")] = 8,
    sites: Annotated[
        str, typer.Option("--sites", help="Of codebooks: modules of every layer that have one.")
    ] = "attention,mlp",
    depths: Annotated[
        int | None, typer.Option("--depths", min=1, max=16, help="Tokens ahead; the method's number by default.")
    ] = None,
    minutes: Annotated[
        float, typer.Option("--minutes", min=0.1, max=100_000.0, help="Time for training, answers not counted.")
    ] = 20.0,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Steps, in place of minutes.")] = None,
    row_tokens: Annotated[
        int, typer.Option("--row-tokens", min=16, max=65536, help="Longest text, and tokens of a packed row.")
    ] = 512,
    batch_rows: Annotated[int, typer.Option("--batch-rows", min=1, max=4096, help="Rows of a step.")] = 4,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", help="Peak; the method's by default.")
    ] = None,
    eval_steps: Annotated[
        int, typer.Option("--eval-steps", min=1, help="Steps between two judgements, which choose the best state.")
    ] = 100,
    feature_cache_gib: Annotated[
        float, typer.Option("--feature-cache-gib", min=0.0, max=4096.0, help="Memory for the model's states.")
    ] = 2.0,
    feature_disk_gib: Annotated[
        float,
        typer.Option(
            "--feature-disk-gib", min=0.0, max=65536.0, help="Space on disk for them: computed before training begins."
        ),
    ] = 0.0,
    feature_folder: Annotated[
        Path | None, typer.Option("--feature-folder", help="Where on disk, for all runs with the same model.")
    ] = None,
    speed_prompts: Annotated[
        int, typer.Option("--speed-prompts", min=0, max=1000, help="Test prompts on which it is timed in the end.")
    ] = 8,
    given: dict[str, Any],
) -> None:
    """Train a head that drafts for a model, or an adapter of it; run again after a stop, it goes on where it was."""
    from paceline.training import LEARN_TEXTS, Fitting, TrainConfig, accelerator, launched_device, standing, train

    if given.pop("speculative_config", None) is not None:
        raise ConfigError("the model's answers are drafted as is fastest; leave --speculative-config out")
    if given.get("quantization") not in (None, "none"):
        raise ConfigError(f"train needs full weights, got --quantization {given['quantization']}; leave it out")
    if method == "lora" and "lora" in given:
        raise ConfigError(f"lora trains an adapter of the model itself, got --lora {given['lora']} too; leave it out")
    if (device := launched_device()) is not None:
        given.setdefault("device", device)
    fitting = Fitting(
        minutes=minutes, steps=steps, row_tokens=row_tokens, batch_rows=batch_rows, learning_rate=learning_rate,
        eval_steps=eval_steps, seed=given.get("seed") or 0,
    )  # fmt: skip
    config = TrainConfig(
        method=method, data=tuple(data), texts=texts or method in LEARN_TEXTS, most_prompts=most_prompts,
        max_tokens=max_tokens,
        sampled_share=sampled_share, draft_vocab_size=draft_vocab_size, depths=depths,
        layers=None if layers is None else numbers(layers), hidden_size=hidden_size, num_layers=num_layers,
        exit_layer=exit_layer, rank=rank, alpha=alpha,
        target_modules=None if target_modules is None else tuple(target_modules.split(",")),
        codebook_size=codebook_size, codes=codes, sites=tuple(sites.split(",")),
        feature_cache_bytes=int(feature_cache_gib * 2**30),
        feature_disk_bytes=int(feature_disk_gib * 2**30), feature_folder=feature_folder, fitting=fitting,
    )  # fmt: skip
    llm = open_llm(given)
    try:
        with TerminatedToo():
            found = train(llm, config, output, command=shlex.join(["paceline", *sys.argv[1:]]),
                          speed_prompts=speed_prompts)  # fmt: skip
    except KeyboardInterrupt:
        kept = standing(output)
        remark(f"kept in {output}: {kept}; the same command goes on" if kept else "the same command begins again")
        raise
    if accelerator().is_main_process:
        for line in drafter_words(found) if found.speculative_config else adapter_words(found, given):
            say(line)


def drafter_words(found: Trained) -> Iterator[str]:
    """What a drafter can do, of how many texts that is, and how it is used."""
    from paceline.training import figures, interval_words, of_texts

    interval = interval_words(figures(found.test, drafts=True))
    yield (
        f"On {of_texts(found.test)} a chain of {counted(len(found.test.acceptance), 'draft')} now gives "
        f"{found.test.length:.2f} tokens a pass{interval}; {found.before.length:.2f} before. {_report(found)}"
    )
    if found.speed is not None:
        yield _timed(found.speed)
    model = "..." if found.model is None else f"-m {found.model}"
    yield f"Use it: paceline generate {model} -s '{json.dumps(found.speculative_config)}'"


def adapter_words(found: Trained, given: Mapping[str, Any]) -> Iterator[str]:
    """What an adapter, or a model of its own, can do, of how many texts that is, and how it is used."""
    from paceline.training import figures, interval_words, of_texts

    after, before = (one.acceptance[0] for one in (found.test, found.before))
    interval = interval_words(figures(found.test, drafts=False), share=True)
    yield (
        f"Of the tokens of {of_texts(found.test)}, {after:.1%} are now the likeliest ones{interval}; {before:.1%} "
        f"before. {_report(found)}"
    )
    model = f"-m {given['model']} " if "model" in given else ""
    use = f"generate {model}--lora {found.folder}"
    if found.model is not None:
        use = f"codebooks show {found.model} 'Once upon a time'"
    yield f"Use it: paceline {use}"


def _report(found: Trained) -> str:
    return f"Neither the weights nor the choice of the best state have seen them. Report: {found.folder}/report.html"


def _timed(speed: Mapping[str, Any]) -> str:
    """How much faster than plain decoding it was, and on how many prompts."""
    from paceline.training import over_words

    chain, auto = (speed[name]["over_plain"] for name in ("chain", "auto"))
    why = f" ({chain['no_interval']})" if chain and "no_interval" in chain else ""
    return (
        f"Timed on {counted(speed['prompts'], 'test prompt')}{why}: {over_words(chain)} times plain decoding with "
        f"{counted(speed['drafts'], 'draft')} a step, {over_words(auto)} times under controller auto."
    )


def numbers(text: str) -> tuple[int, ...]:
    """Of a list such as 0,4,9.

    Raises:
        ConfigError: something else.
    """
    try:
        return tuple(int(one) for one in text.split(","))
    except ValueError:
        raise ConfigError(f"--layers must be numbers with commas between, such as 0,4,9, got {text!r}") from None
