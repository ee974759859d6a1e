"""What goes through the pipes between a server and its trainer: a header in JSON, and tensors as safetensors.

    8 bytes: length of the header | 8 bytes: length of the tensors | header | tensors

Lengths are unsigned and little-endian. Nothing in a message is code.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO, Final

from safetensors.torch import load, save
from torch import Tensor

SIZES: Final = struct.Struct("<QQ")
NO_TENSORS: Final[Mapping[str, Tensor]] = {}

Message = tuple[dict[str, Any], dict[str, Tensor]]


def send(pipe: BinaryIO, header: Mapping[str, Any], tensors: Mapping[str, Tensor] = NO_TENSORS) -> None:
    """Write a message.

    Args:
        tensors: contiguous, on the CPU.
    Raises:
        OSError: nobody reads the pipe any more.
    """
    words, numbers = json.dumps(header).encode(), save(dict(tensors)) if tensors else b""
    pipe.write(SIZES.pack(len(words), len(numbers)) + words)
    pipe.write(numbers)
    pipe.flush()


def receive(pipe: BinaryIO) -> Message:
    """Read a message: its header and its tensors.

    Raises:
        EOFError: nobody writes to the pipe any more.
    """
    words, numbers = SIZES.unpack(_exactly(pipe, SIZES.size))
    header: dict[str, Any] = json.loads(_exactly(pipe, words))
    return header, load(_exactly(pipe, numbers)) if numbers else {}


def _exactly(pipe: BinaryIO, count: int) -> bytes:
    """So many bytes of a buffered pipe."""
    found = pipe.read(count)
    if len(found) < count:
        raise EOFError("the other end of the pipe was closed")
    return found
