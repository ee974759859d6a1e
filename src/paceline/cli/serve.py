"""`paceline serve`: a server with OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import typer

from paceline.cli.options import SERVER_HELP, open_llm, with_flags
from paceline.cli.terminal import remark, say, set_log_level
from paceline.config import LOOPBACK, ServerConfig
from paceline.errors import ConfigError


@with_flags(sampling=False, diffusion=True, server=SERVER_HELP)
def command(
    *,
    positional: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder or hub id; default: the bundled model.")
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", help="Sequences that are decoded together.", rich_help_panel="Server")
    ] = 16,
    given: dict[str, Any],
) -> None:
    """Serve a model with OpenAI's and Anthropic's APIs."""
    try:
        from paceline.serving import Server, create_app, read_keys
    except ImportError as error:
        raise ConfigError(f"`paceline serve` needs {error.name}; pip install 'paceline[serve]'") from None
    from paceline.async_llm import AsyncLLM

    if positional is not None and "model" in given:
        raise ConfigError("give the model as an argument or with --model, not both")
    own = {name: given.pop(name) for name in SERVER_HELP if name in given}
    given |= {"model": positional} if positional is not None else {}
    config = ServerConfig(**{"served_model_name": [str(given.get("model", "bundled"))], **own})
    if config.host not in LOOPBACK and not any(read_keys(config)):
        remark(f"everybody who reaches {config.host} may use this server: it has no --api-key")
    server = Server(config)
    set_log_level("info")
    llm = open_llm(given | {"max_num_seqs": max_num_seqs}, diffusion=True)
    app = create_app(AsyncLLM(llm), config)
    say(f"Serving {config.served_model_name[0]} on {server.url}/v1, live page at {server.url}/ (Ctrl-C stops)")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    server.run(app)
    llm.close()
