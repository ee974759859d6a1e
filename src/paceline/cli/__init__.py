"""The command line: one module per command, and what several of them use.

Only this package prints. It measures and decodes nothing itself: what a command works out comes from `paceline.llm`,
`paceline.bench` and the packages beside it. `main` is the entry, and ends the process on Ctrl-C while the rest is
imported; `app` holds the table of commands and turns whatever ends one into a line and an exit code. Shared are
`options` (flags made from the fields of the configuration classes), `prompts` (what is read), `outputs` (files that are
written) and `terminal` (wrapped text, log records, progress).

The names below are for other programs that print as this one does. They are imported on first use: `main` must be in
charge before anything else is there.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, whose import would take longer than all of this
if TYPE_CHECKING:
    from typing import Any

    from paceline.cli.app import run
    from paceline.cli.bench import command as bench_command
    from paceline.cli.bench_documents import OUTPUT, Output
    from paceline.cli.interrupts import INTERRUPTED, AtOnce, TerminatedToo, raise_from_now_on
    from paceline.cli.options import reject_diffusion, with_log_level
    from paceline.cli.outputs import must_be_own, must_be_writable, writing
    from paceline.cli.terminal import progress_bar, say, spinner, stages

__all__ = [
    "INTERRUPTED",
    "OUTPUT",
    "AtOnce",
    "Output",
    "TerminatedToo",
    "bench_command",
    "must_be_own",
    "must_be_writable",
    "progress_bar",
    "raise_from_now_on",
    "reject_diffusion",
    "run",
    "say",
    "spinner",
    "stages",
    "with_log_level",
    "writing",
]

_HOMES = {
    "INTERRUPTED": "interrupts",
    "OUTPUT": "bench_documents",
    "AtOnce": "interrupts",
    "Output": "bench_documents",
    "TerminatedToo": "interrupts",
    "must_be_own": "outputs",
    "must_be_writable": "outputs",
    "progress_bar": "terminal",
    "raise_from_now_on": "interrupts",
    "reject_diffusion": "options",
    "run": "app",
    "say": "terminal",
    "spinner": "terminal",
    "stages": "terminal",
    "with_log_level": "options",
    "writing": "outputs",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "bench_command":
        return import_module("paceline.cli.bench").command
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline.cli' has no attribute {name!r}")
    return getattr(import_module(f"paceline.cli.{_HOMES[name]}"), name)
