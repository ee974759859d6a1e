"""Command lines of the recipes' scripts: a flag that several of them take is described once.

In:  a table of flags, a script's own defaults. Out: an argparse parser. Not here: flags of one script alone, what flags
do.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Flags = Mapping[str, Mapping[str, Any]]

FLAGS: Flags = {
    "corpus": {"type": Path, "default": Path("build/corpus"), "help": "what prepare.py made (%(default)s)"},
    "target": {"type": Path, "default": Path("build/target"), "help": "what train.py made (%(default)s)"},
    "data": {"type": Path, "help": "folder with the data sets; without it they are fetched"},
    "cache": {"type": Path, "default": Path("build/data"), "help": "where fetched files are kept (%(default)s)"},
    "out": {"type": Path, "help": "what to write (%(default)s)"},
    "width": {"type": int, "help": "of the model (%(default)s)"},
    "heads": {"type": int, "help": "on queries (%(default)s)"},
    "kv_heads": {"type": int, "default": 1, "help": "on keys and values (%(default)s)"},
    "mlp": {"type": int, "help": "width of the MLP (%(default)s)"},
    "tokens": {"type": int, "help": "most tokens to train on (%(default)s)"},
    "minutes": {"type": float, "help": "most minutes to train for (%(default)s)"},
    "measure_every": {"type": int, "help": "steps between held-out measurements (%(default)s)"},
    "longest": {"type": int, "help": "most tokens of a prompt (%(default)s)"},
    "new_tokens": {"type": int, "help": "most tokens of an answer (%(default)s)"},
    "batch": {"type": int, "default": 16, "help": "texts that are computed together (%(default)s)"},
    "length": {"type": int, "default": 512, "help": "tokens of a window (%(default)s)"},
    "rate": {"type": float, "help": "peak of the learning rate (%(default)s)"},
    "seed": {"type": int, "help": "of everything that is drawn (%(default)s)"},
    "device": {"default": "auto", "help": "cpu, cuda, or auto: a GPU if there is one (%(default)s)"},
}
"""Flags of the bundled pair, by their names in Python, as `add_argument` takes them."""


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a script's docstring as it stands."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_flags(parser: argparse.ArgumentParser, *names: str, known: Flags = FLAGS, **defaults: Any) -> None:
    """Add flags of a table: those of `names` as they stand there, then those of `defaults` with a default of their
    own.
    """
    for name in (*names, *defaults):
        own = {"default": defaults[name]} if name in defaults else {}
        parser.add_argument(f"--{name.replace('_', '-')}", **{**known[name], **own})
