"""`paceline serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import open_llm, with_flags
from paceline.cli.terminal import remark, say, set_log_level
from paceline.errors import ConfigError
from paceline.utils import choice, integer

PANEL = "Server"


@with_flags(sampling=False, diffusion=True)
def command(
    *,
    positional: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder or hub id; default: the bundled model.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.", rich_help_panel=PANEL)] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port; 0 takes a free one.", rich_help_panel=PANEL)] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option("--served-model-name", help="Name of the model; may be repeated.", rich_help_panel=PANEL),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", help="Sequences that are decoded together.", rich_help_panel=PANEL)
    ] = 16,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key", help="Key that clients must give; may be repeated. Or PACELINE_API_KEY.", rich_help_panel=PANEL
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="File with one key a line.", rich_help_panel=PANEL)
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host", help="Name that the Host header may have, beside --host.", rich_help_panel=PANEL
        ),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option("--chat-template", help="File with a chat template.", rich_help_panel=PANEL)
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option("--tool-call-parser", help="hermes, llama3_json, mistral or pythonic.", rich_help_panel=PANEL),
    ] = None,
    strict_schemas: Annotated[
        bool,
        typer.Option("--strict-schemas", help="Reject JSON schemas that cannot be enforced.", rich_help_panel=PANEL),
    ] = False,
    vllm_metrics: Annotated[
        bool, typer.Option("--vllm-metrics", help="Metrics under vLLM's own names.", rich_help_panel=PANEL)
    ] = False,
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", help="Requests that may wait; more are answered 429.", rich_help_panel=PANEL)
    ] = 256,
    request_timeout: Annotated[
        float, typer.Option("--request-timeout", help="Seconds that a request may take.", rich_help_panel=PANEL)
    ] = 600.0,
    given: dict[str, Any],
) -> None:
    """Serve a model with OpenAI's API."""
    try:
        from paceline.serving import FORMATS, Limits, Server, create_app, read_keys
    except ImportError as error:
        raise ConfigError(f"`paceline serve` needs {error.name}; pip install 'paceline[serve]'") from None
    from paceline.async_llm import AsyncLLM

    integer("--port", port, 0, 65535)
    if tool_call_parser is not None:
        choice("--tool-call-parser", tool_call_parser, tuple(FORMATS))
    if positional is not None and "model" in given:
        raise ConfigError("give the model as an argument or with --model, not both")
    keys = read_keys(api_key or (), api_key_file)
    limits = Limits(max_waiting=max_waiting, max_seconds=request_timeout)
    template = None if chat_template is None else _read(chat_template)
    server = Server(host, port)
    given |= {"model": positional} if positional is not None else {}
    set_log_level("info")
    llm = open_llm(given | {"max_num_seqs": max_num_seqs}, diffusion=True)
    names = served_model_name or [str(given.get("model", "bundled"))]
    app = create_app(
        AsyncLLM(llm),
        names=names,
        limits=limits,
        keys=keys,
        hosts=hosts_of(host, allowed_host or ()),
        tool_format=tool_call_parser,
        chat_template=template,
        strict_schemas=strict_schemas,
        metrics_prefix="vllm" if vllm_metrics else "paceline",
    )
    if host not in ("127.0.0.1", "localhost", "::1") and not keys:
        remark(f"everybody who reaches {host} may use this server: it has no --api-key")
    say(f"Serving {names[0]} on http://{'[' + host + ']' if ':' in host else host}:{server.port}/v1 (Ctrl-C stops)")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    server.run(app)
    llm.close()


def hosts_of(host: str, more: list[str] | tuple[()]) -> list[str] | None:
    """Names that the Host header may have: on a loopback address those of this machine, else all, or those given."""
    local = ["127.0.0.1", "localhost", "::1", "[::1]"]
    if host in local:
        return [*local, *(name.lower() for name in more)]
    return [host.lower(), *local, *(name.lower() for name in more)] if more else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {str(file)!r} cannot be read ({error})") from None
