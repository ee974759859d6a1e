"""The table of commands."""

from __future__ import annotations

import typer

from lab.commands import bench, diffusion, peers, structured

app = typer.Typer(
    name="lab",
    help="Paceline beside other engines and libraries.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(peers.app, name="peers")
app.command("bench")(bench.command)
app.command("structured")(structured.command)
app.command("diffusion")(diffusion.command)
