"""Command lines of the recipes' scripts: a flag that several of them take is described once."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import paceline
from lab.diffusion import TASKS

BUNDLED = Path(paceline.__file__).parent / "bundled"
"""Where the package has its models."""
FLAGS: Mapping[str, Mapping[str, Any]] = {
    "corpus": {"type": Path, "default": Path("build/corpus"), "help": "what prepare made (%(default)s)"},
    "target": {"type": Path, "default": Path("build/target"), "help": "what train made (%(default)s)"},
    "model": {
        "type": Path,
        "default": BUNDLED / "diffusion",
        "help": "folder or training state (the bundled plain model)",
    },
    "data": {"type": Path, "help": "folder with the data sets; without it they are fetched"},
    "cache": {"type": Path, "default": Path("build/data"), "help": "where fetched files are kept (%(default)s)"},
    "out": {"type": Path, "required": True, "help": "what to write; a run that was cut short goes on from there"},
    "answers": {"type": Path, "required": True, "help": "what `answers` wrote"},
    "width": {"type": int, "help": "of the model (%(default)s)"},
    "heads": {"type": int, "help": "on queries (%(default)s)"},
    "kv_heads": {"type": int, "default": 1, "help": "on keys and values (%(default)s)"},
    "mlp": {"type": int, "help": "width of the MLP (%(default)s)"},
    "tokens": {"type": int, "help": "most tokens to train on (%(default)s)"},
    "tasks": {"nargs": "+", "default": list(TASKS), "choices": TASKS, "help": "all by default"},
    "method": {"type": json.loads, "help": "of decoding, as JSON (%(default)s)"},
    "minutes": {"type": float, "help": "most minutes to train for (%(default)s)"},
    "most_steps": {"type": int, "default": 1_000_000, "help": "steps to train for at most (%(default)s)"},
    "measure_every": {"type": int, "help": "steps between held-out measurements (%(default)s)"},
    "report": {"type": float, "help": "minutes between reports (%(default)s)"},
    "longest": {"type": int, "help": "most tokens of a prompt (%(default)s)"},
    "new_tokens": {"type": int, "help": "most tokens of an answer (%(default)s)"},
    "batch": {"type": int, "help": "texts that are computed together (%(default)s)"},
    "length": {"type": int, "help": "tokens of a window, or slots of a canvas after the prompt (%(default)s)"},
    "lengths": {"type": int, "nargs": "+", "help": "slots of canvases after the prompt (%(default)s)"},
    "block_length": {"type": int, "help": "slots of a block (%(default)s)"},
    "items": {"type": int, "help": "different training items of each task (%(default)s)"},
    "count": {"type": int, "help": "items of each task (%(default)s)"},
    "temperature": {"type": float, "help": "that logits are divided by (%(default)s)"},
    "beta": {"type": float, "help": "weight of the loss's second term (%(default)s)"},
    "rate": {"type": float, "help": "peak of the learning rate (%(default)s)"},
    "threads": {"type": int, "default": 1, "help": "of the processor (%(default)s)"},
    "seed": {"type": int, "default": 0, "help": "of everything that is drawn (%(default)s)"},
    "device": {"default": "auto", "help": "cpu, cuda, or auto: a GPU if there is one (%(default)s)"},
}
"""By their names in Python, as `add_argument` takes them."""


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a script's docstring as it stands."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_flags(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """Add flags of the table: those of `names` as they stand there, then those of `defaults` with a default of their
    own.
    """
    for name in (*names, *defaults):
        own = {"default": defaults[name], "required": False} if name in defaults else {}
        parser.add_argument(f"--{name.replace('_', '-')}", **{**FLAGS[name], **own})
