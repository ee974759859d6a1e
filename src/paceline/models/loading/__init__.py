"""The old place of `paceline.checkpoints`, whose public names may be imported from here for one more release."""

from typing import Any

from paceline import checkpoints


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # as `__path__`, by which modules would be found here, and be there twice
        raise AttributeError(name)
    return getattr(checkpoints, name)


def __dir__() -> list[str]:
    return dir(checkpoints)
