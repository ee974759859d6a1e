"""Flags are the fields of the configuration classes; their page in the documentation is what --help says."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import typer
from command import Command

from paceline import SamplingParams
from paceline.cli import options
from paceline.cli.app import app
from paceline.config import (
    REQUIRED,
    EngineConfig,
    ServerConfig,
    SpeculativeConfig,
    ThinkParams,
    check_options,
    documented,
    option,
    options_of,
)
from paceline.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
UNFLAGGED = {"detokenize", "skip_special_tokens", "logits_processors", "structured_outputs", "output_kind"}
"""Fields that make no sense where text is printed, that cannot be typed, or that have flags of their own."""


def flags(command: str) -> set[str]:
    command = typer.main.get_command(app).commands[command]
    shown = (parameter for parameter in command.params if not getattr(parameter, "hidden", False))
    return {name for parameter in shown for name in getattr(parameter, "opts", [])}


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
    def command(*, flag_values: dict[str, object]) -> None:
        found.update(flag_values)

    single = typer.Typer()
    single.command()(command)
    arguments = [word for flag, (text, _) in typed.items() for word in (flag, text) if word is not None]
    typer.main.get_command(single)(arguments, standalone_mode=False)
    expected = {flag[2:].replace("-", "_"): value for flag, (_, value) in typed.items()}
    assert found == expected
    assert {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in expected.items()
    }


def test_llama_cpps_names_of_flags_mean_ours(run: Command) -> None:
    asked = ("generate", "Once", "--seed", 3, "--max-tokens", 12, "--dtype", "float32", "--threads", 1)
    drawn = run(*asked, "--temp", 1.5)
    assert (drawn.code, drawn.out) == (0, run(*asked, "--temperature", 1.5).out)
    assert drawn.out != run(*asked, "--temperature", 0).out
    both = run(*asked, "--temp", 1, "--temperature", 1)
    assert (both.code, both.line) == (2, "--temp and --temperature mean the same; give one of them")
    assert run(*asked, "--temp", "warm").line == "--temp must be a number, got 'warm'"
    talk = ("chat", "--max-tokens", 4, "--dtype", "float32", "--threads", 1)
    told = run(*talk, "-sys", "Be brief.", stdin="/system\n")
    assert (told.code, told.err) == (0, run(*talk, "--system", "Be brief.", stdin="/system\n").err)
    assert "Be brief." in told.err


@documented
@dataclass(frozen=True, kw_only=True)
class OwnConfig:
    """A configuration.

    Raises:
        ConfigError: a wrong one.
    """

    files: Sequence[Path] = option(REQUIRED, "Some files.", metavar="FILE")
    layers: tuple[int, ...] | None = option(None, "Some layers.", doc="Layers, ascending.")
    cache_bytes: int = option(2**30, "Memory.", flag="cache_gib", unit=2**30, low=0)
    share: float = option(0.5, "A share.", low=0.0, high=1.0, rule="be in 0..1")
    sorts: bool = option(True, "Sort them.")
    hidden: int | None = option(None, doc="No flag.", low=1)
    gain: float = option(1.0, doc="No flag and no rule.", low=0, high=10)
    rate: float | None = option(None, doc="The same.", low=0.0, open_low=True)

    def __post_init__(self) -> None:
        check_options(self)


def typed_of(words: list[str]) -> dict[str, object]:
    """What a command with the flags of `OwnConfig` is given."""
    found: dict[str, object] = {}

    @options.with_flags(sampling=False, more=options.flags_of(OwnConfig, None, defaults=True))
    def command(*, flag_values: dict[str, object]) -> None:
        found.update(flag_values)

    single = typer.Typer()
    single.command()(command)
    typer.main.get_command(single)(words, standalone_mode=False)
    return found


def test_a_field_is_a_flag_a_check_and_a_line_of_the_docstring() -> None:
    words = ["--files", "a", "--files", "b", "--layers", "0,4", "--cache-gib", "0.5", "--no-sorts", "--share", "1"]
    typed = typed_of(words)
    assert typed == {"files": [Path("a"), Path("b")], "layers": (0, 4), "cache_bytes": 2**29, "share": 1.0,
                     "sorts": False}  # fmt: skip
    assert OwnConfig(**typed).hidden is None
    assert typed_of(["--files", "a"]) == {"files": [Path("a")], "cache_bytes": 2**30, "share": 0.5, "sorts": True}
    assert "    layers: Layers, ascending.\n    cache_bytes: Memory." in (OwnConfig.__doc__ or "")
    flagged = {flag.name for flag in options.flags_of(OwnConfig, None)}
    assert set(options_of(OwnConfig)) - flagged == {"hidden", "gain", "rate"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"share": 2}, "share must be in 0..1, got 2"),
        ({"cache_bytes": None}, "cache_bytes must be an integer of 0 or more, got None"),
        ({"hidden": 0}, "hidden must be an integer of 1 or more, got 0"),
        ({"sorts": 1}, "sorts must be True or False, got 1"),
        ({"gain": 10.5}, r"gain must be a number in 0\.\.10, got 10\.5"),
        ({"rate": 0}, "rate must be a number above 0, got 0"),
        ({"hidden": 1.5}, r"hidden must be an integer of 1 or more, got 1\.5"),
    ],
)
def test_a_value_is_checked_as_its_field_declares(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OwnConfig(files=[], **given)


def test_a_float_among_default_and_limits_is_a_number() -> None:
    found = OwnConfig(files=[], gain=2.5, rate=0.5)
    assert (found.gain, found.rate, OwnConfig(files=[]).gain) == (2.5, 0.5, 1.0)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--layers", "0,x"], "--layers must be numbers with commas between, such as 0,4,9, got '0,x'"),
        (["--cache-gib", "inf"], "--cache-gib must be a number, got 'inf'"),
        (["--max-model-len", "1.5"], "--max-model-len must be an integer, got '1.5'"),
    ],
)
def test_what_is_no_number_is_named_with_its_flag(words: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        typed_of(["--files", "a", *words])


@pytest.mark.parametrize("config", [EngineConfig, SamplingParams, ServerConfig, SpeculativeConfig, ThinkParams])
def test_every_field_of_a_configuration_is_documented_where_it_is_declared(config: type) -> None:
    lines = (config.__doc__ or "").splitlines()
    named = {line.strip().partition(":")[0] for line in lines if line.startswith("    ")}
    assert {field.name for field in fields(config) if not field.name.startswith("_")} <= named
    assert "nothing" not in named  # what is no field


def test_a_default_from_a_factory_is_shared_by_no_two_objects() -> None:
    first, second = SpeculativeConfig(), SpeculativeConfig()
    assert first.options == second.options == {}
    assert first.options is not second.options
    assert first.method is second.method


def test_an_error_names_what_the_fields_belong_to() -> None:
    with pytest.raises(ConfigError, match=r"^think max_tokens must be an integer in 1"):
        ThinkParams(max_tokens=0)
    with pytest.raises(ConfigError, match=r"^num_speculative_tokens must be an integer in 0"):
        SpeculativeConfig(num_speculative_tokens=-1)
