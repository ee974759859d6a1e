"""`paceline serve`: a server with OpenAI's and Anthropic's APIs, on one engine or on replicas."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from paceline.cli.config_files import use_config
from paceline.cli.interrupts import raise_from_now_on
from paceline.cli.options import Flag, engine_options, flags_of, open_llm, with_flags
from paceline.cli.terminal import counted, log_json, say, set_log_level
from paceline.config import (
    LOOPBACK,
    LearnConfig,
    ReplicaConfig,
    ServerConfig,
    SpeculativeConfig,
    cores,
    options_of,
)
from paceline.errors import ConfigError
from paceline.utils import json_value, local_ray, need_ray

if TYPE_CHECKING:
    from paceline.serving import Server

logger = logging.getLogger("paceline.serving")

MEMORY: Final = Path("/dev/shm")
"""Files in it are in memory, where the system has it."""

Model = Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder or hub id; default: the bundled model.")]
MaxNumSeqs = Annotated[
    int,
    typer.Option(
        "--max-num-seqs",
        help="Sequences that are decoded together.",
        rich_help_panel="Server",
        envvar="PACELINE_MAX_NUM_SEQS",
        show_envvar=False,
    ),
]
ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="YAML with names of flags and their values.",
        is_eager=True,
        callback=use_config,
        envvar="PACELINE_CONFIG",
        show_envvar=False,
    ),
]


LEARN: Final = Flag(
    "learn", "Draft models and heads learn from the requests; settings: learn in -s.", bool, panel="Model"
)
"""Of `speculative_config`, which may have settings of it in the flag's place."""


@with_flags(
    sampling=False,
    diffusion=True,
    server=options_of(ServerConfig),
    more=(LEARN, *flags_of(ReplicaConfig, "Replicas")),
    environment=True,
)
def command(
    *,
    context: typer.Context,
    positional: Model = None,
    max_num_seqs: MaxNumSeqs = 16,
    config: ConfigFile = None,
    flag_values: dict[str, Any],
) -> None:
    """Serve a model with OpenAI's and Anthropic's APIs.

    A flag that is not typed is read from the environment, --max-waiting as PACELINE_MAX_WAITING, and then from the file
    of --config.
    """
    try:
        from paceline.serving import Server
    except ImportError as error:
        raise ConfigError(f"`paceline serve` needs {error.name}; pip install '.[serve]' in a checkout") from None

    typed = context.get_parameter_source("model")
    if positional is not None and typed is not None and typed.name == "COMMANDLINE":
        raise ConfigError("give the model as an argument or with --model, not both")
    flag_values |= {"model": positional} if positional is not None else {}
    flag_values |= {"max_num_seqs": max_num_seqs} | _learning(flag_values)
    server_config, replica_config = _server_config(flag_values), _replica_config(flag_values)
    server = Server(server_config)
    _begin_log(server_config)
    if replica_config is None:
        code = _serve_one(server, flag_values, server_config)
    else:
        code = _serve_replicas(server, flag_values, server_config, replica_config)
    raise typer.Exit(code)


def _begin_log(config: ServerConfig) -> None:
    """Log a line of JSON for each event, and warn where anybody may use the server."""
    from paceline.serving import read_keys

    set_log_level("info")
    log_json()
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    if config.uds is None and config.host not in LOOPBACK and not any(read_keys(config)):
        logger.warning("everybody who reaches %s may use this server: it has no --api-key", config.host)


def _learning(flag_values: dict[str, Any]) -> dict[str, Any]:
    """The `speculative_config` with `learn`, where the flag was typed, which is taken out.

    Raises:
        ConfigError: nothing is to be drafted, or a configuration that cannot be read.
    """
    if not flag_values.pop("learn", False):
        return {}
    config = SpeculativeConfig.parse(flag_values.get("speculative_config", "auto"))
    if config is None:
        raise ConfigError("--learn needs drafts; leave it out, or name a draft model or a head with -s")
    return {"speculative_config": replace(config, learn=config.learn or LearnConfig())}


def _server_config(flag_values: dict[str, Any]) -> ServerConfig:
    """How requests are answered; its options are taken out of those for the model."""
    options = {name: flag_values.pop(name) for name in options_of(ServerConfig) if name in flag_values}
    if "allowed_origins" in options:
        options["allowed_origins"] = _listed(options["allowed_origins"])
    return ServerConfig(**{"served_model_name": [str(flag_values.get("model", "bundled"))], **options})


def _replica_config(flag_values: dict[str, Any]) -> ReplicaConfig | None:
    """How many replicas there are, taken out of the options for the model; None where no flag asks for any.

    Raises:
        ConfigError: Ray is not installed.
    """
    prefix_routing = flag_values.pop("prefix_routing")
    scaled = {name: flag_values.pop(name) for name in options_of(ReplicaConfig) if name in flag_values}
    if not scaled:
        return None
    replica_config = ReplicaConfig(**scaled, prefix_routing=prefix_routing)
    need_ray(f"--{next(iter(scaled)).replace('_', '-')}")
    return replica_config


def _listed(typed: list[str]) -> list[Any]:
    """What was typed for a flag that may be repeated, of which each may be a JSON list too.

    Raises:
        ConfigError: no such list.
    """
    origins: list[Any] = []
    for text in typed:
        value = json_value("--allowed-origins", text) if text.startswith("[") else text
        origins += value if isinstance(value, list) else [value]
    return origins


def _serve_one(server: Server, flag_values: dict[str, Any], config: ServerConfig) -> int:
    with server.not_ready() as told:
        from paceline.async_llm import AsyncLLM
        from paceline.serving import check_files, create_app, warm_up

        check_files(config)
        llm = open_llm(flag_values, diffusion=True, speech=True)
        app = create_app(AsyncLLM(llm), config)
        told.doing = "warming up"
        warm_up(llm)
    where = f"{server.url}/v1, live page at {server.url}/" if config.uds is None else server.url
    say(f"Serving {config.served_model_name[0]} on {where} (Ctrl-C stops)")
    code = server.run(app)
    llm.close()
    return code


def _serve_replicas(
    server: Server, flag_values: dict[str, Any], config: ServerConfig, replica_config: ReplicaConfig
) -> int:
    """Until a signal comes; the code to exit with.

    Raises:
        ConfigError: options that several machines cannot share, or a model that cannot be loaded.
    """
    if config.batch_folder is not None:
        raise ConfigError("--batch-folder is for one engine; leave it out with --replicas")
    options, elsewhere = engine_options(flag_values), replica_config.ray_address is not None
    if elsewhere and "threads" not in options:
        raise ConfigError("--ray-address needs --threads: how many cores its machines have is not known here")
    raise_from_now_on()
    threads = replica_config.threads(options.get("threads"))
    with ExitStack() as life:
        with server.not_ready():
            shared = life.enter_context(_shared_responses(config, elsewhere=elsewhere))
            life.enter_context(
                local_ray(max(cores(), threads * replica_config.most), replica_config.ray_address, show_logs=True)
            )
            from paceline.serving import check_files, front_app, ray_app

            check_files(shared)
            fleet = life.enter_context(ray_app.replicated(options, shared, replica_config))
            app = front_app(fleet, shared, shared_responses=not elsewhere)
        number = f"{counted(replica_config.replicas, 'replica')} of {counted(threads, 'thread')}"
        where = f"{server.url}/v1" if config.uds is None else server.url
        say(f"Serving {config.served_model_name[0]} on {where} with {number} (Ctrl-C stops)")
        return server.run(app)


@contextmanager
def _shared_responses(config: ServerConfig, *, elsewhere: bool) -> Iterator[ServerConfig]:
    """The configuration with a file of stored responses that all replicas share, in memory where none is given.

    Args:
        elsewhere: the replicas are on several machines, which share none.
    Raises:
        ConfigError: a file that cannot be shared, or no memory that can.
    """
    if elsewhere:
        if config.response_file is not None:
            raise ConfigError("--response-file is on one machine; leave it out with --ray-address")
        yield config
    elif config.response_file is not None:
        yield config
    elif not MEMORY.is_dir():
        raise ConfigError(f"--replicas needs a --response-file here, since there is no {MEMORY}")
    else:
        with tempfile.TemporaryDirectory(prefix="paceline-", dir=MEMORY) as folder:
            yield replace(config, response_file=str(Path(folder) / "responses"))
