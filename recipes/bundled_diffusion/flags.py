"""Flags that several scripts of this recipe take, described once.

In:  a script's own defaults. Out: flags of its parser. Not here: flags of one script alone, what flags do.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from model import BUNDLED
from pair import Flags, add_flags, new_parser

from paceline.bench.diffusion import TASKS

__all__ = ["FLAGS", "add", "new_parser"]

FLAGS: Flags = {
    "model": {"type": Path, "default": BUNDLED, "help": "a model's folder or training state (the bundled plain one)"},
    "corpus": {
        "type": Path,
        "default": Path("../bundled_pair/build/corpus"),
        "help": "what prepare.py made (%(default)s)",
    },
    "out": {"type": Path, "required": True, "help": "what to write, and to go on from where it was cut short"},
    "answers": {"type": Path, "required": True, "help": "what `answers` wrote"},
    "tasks": {"nargs": "+", "default": list(TASKS), "choices": TASKS, "help": "all by default"},
    "method": {"type": json.loads, "help": "of decoding, as JSON (%(default)s)"},
    "length": {"type": int, "help": "slots of a canvas after the prompt (%(default)s)"},
    "lengths": {"type": int, "nargs": "+", "help": "slots of canvases after the prompt (%(default)s)"},
    "block_length": {"type": int, "help": "slots of a block (%(default)s)"},
    "items": {"type": int, "help": "different training items of each task (%(default)s)"},
    "count": {"type": int, "help": "test items of each task (%(default)s)"},
    "minutes": {"type": float, "help": "minutes of processor time at most (%(default)s)"},
    "most_steps": {"type": int, "default": 1_000_000, "help": "steps to train for at most (%(default)s)"},
    "report": {"type": float, "help": "minutes between reports (%(default)s)"},
    "temperature": {"type": float, "help": "that logits are divided by (%(default)s)"},
    "beta": {"type": float, "help": "weight of the loss's second term (%(default)s)"},
    "batch": {"type": int, "default": 32, "help": "texts that are computed together (%(default)s)"},
    "rate": {"type": float, "help": "peak of the learning rate (%(default)s)"},
    "threads": {"type": int, "default": 1, "help": "of the processor (%(default)s)"},
    "seed": {"type": int, "default": 0, "help": "of everything that is drawn (%(default)s)"},
}
"""By their names in Python, as `add_argument` takes them."""


def add(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """Add flags of the table: those of `names` as they stand there, then those of `defaults` with a default of their
    own.
    """
    add_flags(parser, *names, known=FLAGS, **defaults)
