"""`python -m lab bench`: `paceline bench` with other engines on the same prompts, in turn with our settings."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import bench_command

if TYPE_CHECKING:
    from lab.peers import PeersInTurn, WantedPeer
    from paceline.bench.run import Progress
    from paceline.llm import LLM

PEERS_HELP = (
    "Other engines on the same prompts, in turn with ours: all, NAME, NAME:METHOD separated by commas, or JSON with "
    "options; may be repeated. `python -m lab peers list` shows them."
)

Peers = Annotated[
    list[str] | None, typer.Option("--peers", metavar="all|NAME,NAME", help=PEERS_HELP, rich_help_panel="Peers")
]
PeerUrl = Annotated[
    str | None,
    typer.Option(
        "--peer-url",
        metavar="URL",
        help="An OpenAI-compatible endpoint, as http://host:8000/v1.",
        rich_help_panel="Peers",
    ),
]
PeerModel = Annotated[
    str | None,
    typer.Option("--peer-model", metavar="NAME", help="Name of the model at that endpoint.", rich_help_panel="Peers"),
]


def command(
    *,
    context: typer.Context,
    peers: Peers = None,
    peer_url: PeerUrl = None,
    peer_model: PeerModel = None,
    **flags: Any,
) -> None:
    """Decode prompts with every method, plainly and by other engines, in turn, and say what each gains."""
    from lab.peers import parse_peers

    wanted = parse_peers(peers or [], peer_url, peer_model, lora=flags.get("lora"))
    context.obj = partial(_open, wanted)
    bench_command(context=context, **flags)


def _open(
    wanted: list[WantedPeer], llm: LLM, draft: str | None, progress: Progress
) -> AbstractContextManager[PeersInTurn]:
    from lab.peers import PeersInTurn

    return PeersInTurn(llm, wanted, draft=draft, progress=progress)


def _with_flags_of_bench() -> None:
    """`command` takes the flags of `paceline bench` too."""
    own = inspect.signature(command, eval_str=True).parameters
    named = [own[name] for name in ("peers", "peer_url", "peer_model")]
    parameters = [*inspect.signature(bench_command).parameters.values(), *named]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


_with_flags_of_bench()
