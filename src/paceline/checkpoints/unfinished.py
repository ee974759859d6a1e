"""Folders in which a training has begun and not ended."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from paceline.checkpoints.tokenizer import read_json
from paceline.errors import CheckpointError

RUN_SETTINGS: Final = Path("run", "training.json")
"""In the folder of what is trained: what its run is made of, and the command that goes on with it."""

RUN_FINISHED: Final = Path("run", "finished")
"""There once the result is written, whatever it is; earlier versions left no such mark."""

WRITTEN: Final = (str(RUN_FINISHED), "config.json", "adapter_config.json")
"""Signs of a result, each written last: that mark, and what a model, a head or a draft model, and an adapter have."""


def refuse_unfinished(folder: Path) -> None:
    """Reject a folder of a training that has not written its result.

    Raises:
        CheckpointError: with how to go on.
    """
    if not (folder / RUN_SETTINGS).is_file() or any((folder / name).is_file() for name in WRITTEN):
        return
    command = read_json(folder / RUN_SETTINGS).get("command")
    how = f"go on with `{command}`" if command else "start it again, with the same settings"
    raise CheckpointError(f"the training of {folder} has not finished; {how}, or name another folder")
