"""The device and the dtype that a model computes in."""

from __future__ import annotations

import logging

import torch

from paceline.config import DTYPES
from paceline.errors import ConfigError

log = logging.getLogger("paceline")


def resolve_device(device: str, *, name: str = "device") -> torch.device:
    """The device that is meant; "auto" is CUDA where there is one.

    Args:
        name: of the argument, for messages.
    Raises:
        ConfigError: not a device of this machine.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = device.partition(":")
    if kind not in {"cpu", "cuda"} or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise ConfigError(f"{name} must be auto, cpu, cuda or cuda:N, got {device!r}")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise ConfigError(
            f"{name}={device!r}, but PyTorch sees {count} CUDA devices; use {name}='cpu' or install a CUDA build"
        )
    return torch.device(device)


def resolve_dtype(dtype: str, declared: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in; "auto" is the checkpoint's. Warns of one that the device or its fastest passes do not
    have; which one is faster is for a measurement to say (paceline.doctor).

    Args:
        declared: the checkpoint's dtype by name; anything but the three known ones counts as float32.
    """
    name = dtype if dtype != "auto" else declared if declared in DTYPES else "float32"
    if device.type == "cpu" and name == "float16":
        log.warning(
            "float16 on a CPU is computed by PyTorch's operators; compiled passes take dtype='bfloat16' or 'float32'"
        )
    if device.type == "cuda" and name == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        log.warning("bfloat16 is emulated on this GPU; use dtype='float16' or 'float32'")
    resolved: torch.dtype = getattr(torch, name)
    return resolved
