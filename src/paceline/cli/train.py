"""`paceline train`: a head that drafts for a model, from prompts to weights and a report."""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from paceline import registry
from paceline.cli.interrupts import TerminatedToo
from paceline.cli.options import flags_of, open_llm, with_flags
from paceline.cli.terminal import counted, remark, say
from paceline.config import options_of
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.training import TrainConfig, Trained, Trainer


class Trainers(TyperGroup):
    """A command a trainer, made when it is asked for: its flags are the fields of the trainer's configuration class."""

    @property
    def commands(self) -> dict[str, Any]:
        """All of them, by name."""
        return {name: command_of(name) for name in registry.table("trainers")}

    @commands.setter
    def commands(self, commands: object) -> None:
        """None are added."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(registry.table("trainers"))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return command_of(cmd_name)


app = typer.Typer(name="train", cls=Trainers, add_completion=False)


@app.callback()
def _group() -> None:
    """Train a head that drafts for a model, or an adapter of it; run again after a stop, it goes on where it was."""


def command_of(method: str) -> Any:
    """Make the command of a trainer.

    Raises:
        ConfigError: an unknown method.
    """
    from paceline.training import Fitting, trainer

    kind = trainer(method)
    method_flags = (*flags_of(kind.config_class, None, defaults=True), *flags_of(Fitting, None, defaults=True))

    @with_flags(sampling=False, more=method_flags)
    def command(
        *,
        output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Where the head goes.")],
        speed_prompts: Annotated[
            int,
            typer.Option("--speed-prompts", min=0, max=1000, help="Test prompts on which it is timed in the end."),
        ] = 8,
        flag_values: dict[str, Any],
    ) -> None:
        fitting = Fitting(**{name: flag_values.pop(name) for name in options_of(Fitting) if name in flag_values})
        options = {name: flag_values.pop(name) for name in options_of(kind.config_class) if name in flag_values}
        run(kind, kind.config_class(method=method, **options, fitting=fitting), flag_values, output, speed_prompts)

    paper = registry.lookup("trainers", method).paper
    command.__doc__ = f"Train as in {paper}." if paper else (inspect.getdoc(kind) or "").split("\n\n")[0]
    single = typer.Typer(add_completion=False)
    single.command(method)(command)
    return get_command(single)


def run(
    method: type[Trainer], config: TrainConfig, flag_values: dict[str, Any], output: Path, speed_prompts: int
) -> None:
    """Train, and say what was made.

    Args:
        flag_values: what was typed of the model.
    """
    from paceline.training import accelerator, launched_device, standing, train

    if flag_values.pop("speculative_config", None) is not None:
        raise ConfigError("the model's answers are drafted as is fastest; leave --speculative-config out")
    if flag_values.get("quantization") not in (None, "none"):
        raise ConfigError(f"train needs full weights, got --quantization {flag_values['quantization']}; leave it out")
    if not (method.drafts or method.replaces_target) and "lora" in flag_values:
        alone = f"{config.method} learns of the model alone"
        raise ConfigError(f"{alone}, got --lora {flag_values['lora']} too; leave it out")
    method.check_data(config.files())
    if (device := launched_device()) is not None:
        flag_values.setdefault("device", device)
    llm = open_llm(flag_values, speech=method.reads_sources)
    try:
        with TerminatedToo():
            trained = train(llm, config, output, command=shlex.join(["paceline", *sys.argv[1:]]),
                          speed_prompts=speed_prompts)  # fmt: skip
    except KeyboardInterrupt:
        kept = standing(output)
        remark(f"kept in {output}: {kept}; the same command goes on" if kept else "the same command begins again")
        raise
    if accelerator().is_main_process:
        model = flag_values.get("model")
        chat = " --chat" if llm.tokenizer.has_chat_template else ""
        if trained.speculative_config:
            speaks = llm.source is not None and llm.source.reads == "input_features"
            verb = "transcribe speech.wav" if speaks else "generate"
            command = f"paceline {verb}{_named(trained.model or model)}{chat} -s {_quoted(trained)}"
            lines = drafter_words(trained, command)
        else:
            command = method.command(trained.folder, model)
            shown = command + chat if command.startswith("paceline generate") else command
            lines = likeliest_words(trained, shown, method.judged_as)
        for line in lines:
            say(line)


def _named(model: Path | str | None) -> str:
    """The flag that names a model; nothing for the bundled one."""
    return "" if model is None else f" -m {shlex.quote(str(model))}"


def _quoted(trained: Trained) -> str:
    return shlex.quote(json.dumps(trained.speculative_config))


def drafter_words(trained: Trained, command: str) -> Iterator[str]:
    """What a drafter can do, of how many texts that is, and the command that uses it."""
    from paceline.training import figures, interval_words, of_texts

    interval = interval_words(figures(trained.test, drafts=True))
    yield (
        f"On {of_texts(trained.test)} a chain of {counted(len(trained.test.acceptance), 'draft')} now gives "
        f"{trained.test.length:.2f} tokens a pass{interval}; {trained.before.length:.2f} before. {_report(trained)}"
    )
    if trained.stages:
        told = ", ".join(f"{name} {curve.tests[1].length:.2f}" for name, curve in trained.stages)
        bound = "" if trained.mbsu is None else f" Memory-bound speed-up: {trained.mbsu:.2f}."
        yield f"Tokens a pass after each stage: {told}.{bound}"
    if trained.speed is not None:
        yield _timed(trained.speed)
        over_plain = trained.speed["auto"]["over_plain"]
        if over_plain is not None and over_plain["value"] < 1.0:
            yield (
                "That is no gain: it was not faster than plain decoding here. Train it longer (--minutes) or on more "
                "prompts (--data) before you use it."
            )
    yield f"Use it: {command}"


def likeliest_words(trained: Trained, command: str, right: str = "now the likeliest ones") -> Iterator[str]:
    """How often what does not draft finds the likeliest token, of how many texts that is, and the command that uses it
    where there is one.
    """
    from paceline.training import figures, interval_words, of_texts

    after, before = (measured.acceptance[0] for measured in (trained.test, trained.before))
    interval = interval_words(figures(trained.test, drafts=False), share=True)
    yield (
        f"Of the tokens of {of_texts(trained.test)}, {after:.1%} are {right}{interval}; {before:.1%} "
        f"before. {_report(trained)}"
    )
    if command:
        yield f"Use it: {command}"


def _report(trained: Trained) -> str:
    return f"Neither the weights nor the choice of the best state have seen them. Report: {trained.folder}/report.html"


def _timed(speed: Mapping[str, Any]) -> str:
    """How much faster than plain decoding it was, and on how many prompts."""
    from paceline.training import over_words

    chain, auto = (speed[name]["over_plain"] for name in ("chain", "auto"))
    why = f" ({chain['no_interval']})" if chain and "no_interval" in chain else ""
    return (
        f"Timed on {counted(speed['prompts'], 'test prompt')}{why}: {over_words(chain)} times plain decoding with "
        f"{counted(speed['drafts'], 'draft')} a step, {over_words(auto)} times under controller auto."
    )
