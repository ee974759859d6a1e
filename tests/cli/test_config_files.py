"""Flags of `paceline serve` from a file and from the environment: which of them wins, and what is rejected."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from command import Command

from paceline.config import ServerConfig
from paceline.errors import ConfigError

Given = Callable[..., tuple[ServerConfig, dict[str, Any]]]


class Unbound:
    """Stands in for a server, and listens nowhere."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config

    def not_ready(self) -> Any:
        return nullcontext()


@pytest.fixture
def given(run: Command, monkeypatch: pytest.MonkeyPatch) -> Given:
    """What a command line asks for: of the server, and of the model."""
    servers: list[Unbound] = []
    models: list[dict[str, Any]] = []

    def made(config: ServerConfig) -> Unbound:
        servers.append(Unbound(config))
        return servers[-1]

    def opened(flag_values: dict[str, Any], **_: Any) -> Any:
        models.append(flag_values)
        raise ConfigError("enough")

    monkeypatch.setattr("paceline.serving.Server", made)
    monkeypatch.setattr("paceline.cli.serve.open_llm", opened)
    monkeypatch.setattr("paceline.cli.serve.log_json", lambda: None)

    def asked(*arguments: str) -> tuple[ServerConfig, dict[str, Any]]:
        assert run("serve", *arguments).line == "enough"
        return servers[-1].config, models[-1]

    return asked


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "serve.yaml"


def test_a_file_gives_flags_under_their_names(given: Given, file: Path) -> None:
    file.write_text("""
# names with dashes or underscores
model: org/name
max-num-seqs: 4
port: 9000
drain_timeout: 1.5
served-model-name: [one, two]
allowed_host: a.example
log-requests: true
lenient-fields: false
speculative-config: {method: ngram, num_speculative_tokens: 3}
""")
    server, model = given("--config", str(file))
    assert (server.port, server.drain_timeout, server.served_model_name) == (9000, 1.5, ("one", "two"))
    assert (server.allowed_host, server.log_requests, server.lenient_fields) == (("a.example",), True, False)
    assert model == {
        "model": "org/name",
        "max_num_seqs": 4,
        "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}',
    }
    server, model = given()
    assert (server.port, model) == (8000, {"max_num_seqs": 16}), "the control, without the file"


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    given: Given, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("max_waiting: 1\nmax_n: 1\nmax_prompts: 1\nmax_num_seqs: 1\nmodel: of/the-file\n")
    for name in ("MAX_N", "MAX_PROMPTS", "MAX_NUM_SEQS"):
        monkeypatch.setenv(f"PACELINE_{name}", "2")
    server, model = given("--config", str(file), "--max-prompts", "3")
    assert (server.max_waiting, server.max_n, server.max_prompts, server.max_request_tokens) == (1, 2, 3, None)
    assert model == {"model": "of/the-file", "max_num_seqs": 2}
    assert given("typed/name", "--config", str(file))[1]["model"] == "typed/name"
    monkeypatch.setenv("PACELINE_MODEL", "of/the-environment")
    assert given("--config", str(file))[1]["model"] == "of/the-environment"
    assert given("--model", "typed/name", "--config", str(file))[1]["model"] == "typed/name"
    monkeypatch.setenv("PACELINE_CONFIG", str(file))
    assert given()[0].max_waiting == 1


def test_variables_of_switches_and_of_lists(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_LOG_REQUESTS", "1")
    monkeypatch.setenv("PACELINE_SERVED_MODEL_NAME", "one two")
    monkeypatch.setenv("PACELINE_LENIENT_FIELDS", "false")
    monkeypatch.setenv("PACELINE_PORT", "")
    server, _ = given()
    assert (server.log_requests, server.served_model_name, server.lenient_fields) == (True, ("one", "two"), False)
    assert server.port == 8000, "an empty variable is none"


def test_every_flag_has_a_variable(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    from paceline.cli.app import app

    command: Any = typer.main.get_command(app)
    parameters = [one for one in command.commands["serve"].params if one.opts[0].startswith("-")]
    variables = {one.name: one.envvar for one in parameters}
    assert {name for name, variable in variables.items() if variable is None} == {"api_key", "admin_key"}
    assert variables["ssl_certfile"] == "PACELINE_SSL_CERTFILE"
    assert variables["log_level"] == "PACELINE_LOG_LEVEL"
    switches = {f"PACELINE_{name}" for name in ("PROFILE", "COMPILED", "CACHE_DIR", "CACHE_GB", "HOME")}
    assert not switches & set(variables.values()), "variables that mean something else"
    others = {one.envvar for one in command.commands["generate"].params if one.opts[0].startswith("-")}
    assert others == {None}, "of this command alone"


WRONG = {
    "unknown": ("prot: 9000", "does not know 'prot'; did you mean port"),
    "unknown, with a dash": ("max-waitin: 3", "does not know 'max_waitin'; did you mean max_waiting"),
    "itself": ("config: other.yaml", "does not know 'config'"),
    "twice": ("max-n: 3\nmax_n: 4", "must hold each flag once, got max_n again"),
    "twice alike": ("port: 3\nport: 4", "'port' occurs twice"),
    "number": ("port: many", "--port must be an integer, got 'many'"),
    "switch": ("log_requests: 3", "log_requests in --config"),
    "no switch": ("tool_call_parser: true", "tool_call_parser in --config"),
    "nothing": ("speculative_config:", 'leave it out, or write "null"'),
    "range": ("port: 70000", "port must be an integer in 0..65535"),
    "a list": ("- port", "must hold names of flags with their values"),
    "no yaml": ("port: [", "--config must be YAML"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_in_a_file_is_named(run: Command, file: Path, case: str) -> None:
    text, line = WRONG[case]
    file.write_text(text)
    found = run("serve", "--config", str(file))
    assert found.code == 2
    assert line in found.line


def test_a_file_that_is_not_there_is_named(run: Command, file: Path) -> None:
    assert "--config must be a text file that can be read" in run("serve", "--config", str(file)).line


def test_an_empty_file_gives_nothing(given: Given, file: Path) -> None:
    file.write_text("# nothing yet\n")
    assert given("--config", str(file))[0] == given()[0]


def test_a_wrong_variable_is_said_in_one_line(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_MAX_WAITING", "many")
    assert "--max-waiting must be an integer, got 'many'" in run("serve").line
    monkeypatch.delenv("PACELINE_MAX_WAITING")
    monkeypatch.setattr("paceline.serving.Server", _stopped)
    assert run("serve").line == "enough", "the control, without"


def _stopped(_: ServerConfig) -> Any:
    raise ConfigError("enough")
