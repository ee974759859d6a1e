"""A checkpoint folder read with NumPy alone: its configuration, and its tensors as stored or as float32."""

import json
from math import pi
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

STORED: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


class Weights:
    """The tensors of a checkpoint folder, read lazily by name.

    Args:
        folder: holds config.json and one or more safetensors files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config: dict[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        self._where: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            self._where.update(
                {name: (path, 8 + size, entry) for name, entry in header.items() if name != "__metadata__"}
            )

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._where)

    def stored(self, name: str) -> tuple[NDArray[Any], str]:
        """The tensor's bits and their type: F32, F16, or BF16 as unsigned 16-bit integers."""
        path, base, entry = self._where[name]
        kind = entry["dtype"]
        if kind not in STORED:
            raise ValueError(f"{name} is stored as {kind}; the converters take {', '.join(STORED)}")
        start, end = entry["data_offsets"]
        flat = np.memmap(path, STORED[kind], "r", base + start, ((end - start) // STORED[kind].itemsize,))
        return flat.reshape(entry["shape"]), kind

    def f32(self, name: str) -> NDArray[np.float32]:
        """The tensor as float32, exactly (every stored type fits)."""
        data, kind = self.stored(name)
        if kind == "BF16":
            return (data.astype(np.uint32) << 16).view(np.float32)
        return data.astype(np.float32)


def rope_factors(rope: dict[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
    """By what each rotary frequency is divided, head_dim / 2 numbers.

    Raises:
        ValueError: a scaling other than none, linear and llama3.
    Source: the long-context scaling of Llama 3.1 (The Llama 3 Herd of Models, arXiv:2407.21783).
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    half = head_dim // 2
    if kind == "default":
        return (1.0,) * half
    if kind == "linear":
        return (float(rope["factor"]),) * half
    if kind != "llama3":
        raise ValueError(
            f"rope scaling {kind!r} is not known to the peers' converters; they take default, linear, llama3"
        )
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    old = float(rope["original_max_position_embeddings"])
    found = []
    for i in range(half):
        turns = old / (2 * pi * theta ** (2 * i / head_dim))
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)  # 1: unscaled, 0: divided by the factor
        found.append(1.0 / (kept + (1.0 - kept) / factor))
    return tuple(found)
