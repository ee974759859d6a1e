"""Training in several processes, a device each, as `accelerate launch` or `torchrun` starts them; usually one.

Gradients are averaged by accelerate. A head is put where its target is. Precision is the loop's own matter
(torch.autocast): accelerate fixes one for all runs of a process.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from accelerate import Accelerator

WAIT: Final = timedelta(days=7)
"""Longest that processes wait for the first one, which makes the answers."""


def accelerator() -> Accelerator:
    """Give accelerate's view of the processes of this run.

    Raises:
        ConfigError: accelerate is not installed.
    """
    try:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
    except ImportError:
        raise ConfigError("training needs accelerate; pip install '.[train]' in a checkout") from None
    handlers = [DistributedDataParallelKwargs(broadcast_buffers=False), InitProcessGroupKwargs(timeout=WAIT)]
    return Accelerator(cpu=launched() and not torch.cuda.is_available(), kwargs_handlers=handlers)


def launched() -> bool:
    """Whether this process may be one of several."""
    return "LOCAL_RANK" in os.environ


def launched_device() -> str | None:
    """The device of this process where it is one of several; None where it was not launched as such."""
    return str(accelerator().device).replace("cpu:0", "cpu") if launched() else None


def agreed(value: float) -> float:
    """What the first process says, for numbers that each measures for itself."""
    from accelerate.utils import broadcast_object_list

    first: float = broadcast_object_list([value])[0]
    return first
