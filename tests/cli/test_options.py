"""Flags are the fields of the configuration classes; their page in the documentation is what --help says."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from command import Command

from paceline import SamplingParams
from paceline.cli import options
from paceline.cli.app import app
from paceline.config import EngineConfig, options_of

ROOT = Path(__file__).parent.parent.parent
UNFLAGGED = {"detokenize", "skip_special_tokens", "logits_processors", "structured_outputs", "output_kind"}
"""Fields that make no sense where text is printed, that cannot be typed, or that have flags of their own."""


def flags(command: str) -> set[str]:
    command = typer.main.get_command(app).commands[command]
    return {name for parameter in command.params for name in getattr(parameter, "opts", [])}


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_sampling_parameter_has_a_flag(command: str) -> None:
    names = {field.name for field in fields(SamplingParams)} - UNFLAGGED
    assert {"--" + name.replace("_", "-") for name in names} <= flags(command)
    assert {name for name, one in options_of(SamplingParams).items() if one.help} == names
    assert {"--json-schema", "--regex", "--grammar"} <= flags(command)


@pytest.mark.parametrize("command", ["generate", "chat", "demo", "verify"])
def test_every_verb_with_a_model_takes_the_same_flags_for_it(command: str) -> None:
    wanted = {"--model", "-m", "--speculative-config", "-s", "--revision", "--trust-remote-code", "--log-level"}
    engine = {flag.typed for flag in options.flags_of(EngineConfig, "Model")}
    assert wanted | engine | {"--dtype", "--kv-cache-memory-bytes"} <= flags(command)


def test_the_size_of_a_batch_reaches_the_engine() -> None:
    assert options.engine_options({"max_num_seqs": 3, "port": 1}) == {"max_num_seqs": 3}


def test_the_page_of_the_command_line_names_every_flag() -> None:
    path = ROOT / "docs" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate_docs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.cli()
    named = set().union(*(flags(command) for command in ("generate", "chat", "methods", "demo", "verify"))) - {"prompt"}
    assert not [name for name in named if f"`{name}`" not in page]


def test_help_shows_what_the_page_shows(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = run("generate", "--help").out
    texts = [one.help for one in options_of(SamplingParams).values()]
    assert "Keep this many most likely tokens; 0 keeps all." in texts
    assert all(text in shown for text in texts)


def test_what_is_typed_becomes_a_value_and_nothing_else_is_given() -> None:
    """Numbers and lists of numbers are numbers, what is text stays text."""
    typed = {
        "--temperature": ("0", 0.0),
        "--max-tokens": ("0", 0),
        "--stop-token-ids": ("1", [1]),
        "--stop": ("1", ["1"]),
        "--dtype": ("5", "5"),
        "--ignore-eos": (None, True),
    }
    found: dict[str, object] = {}

    @options.with_flags(sampling=True)
    def command(*, given: dict[str, object]) -> None:
        found.update(given)

    single = typer.Typer()
    single.command()(command)
    arguments = [word for flag, (text, _) in typed.items() for word in (flag, text) if word is not None]
    typer.main.get_command(single)(arguments, standalone_mode=False)
    expected = {flag[2:].replace("-", "_"): value for flag, (_, value) in typed.items()}
    assert found == expected
    assert {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in expected.items()
    }
