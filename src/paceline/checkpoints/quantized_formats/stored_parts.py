"""The tensors that a quantised matrix is stored as, and checks of them that say in one line what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from paceline.checkpoints.checkpoint import TensorEntry
from paceline.checkpoints.quantized_formats.integer_matrix import Reader, StoredMatrix
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.utils import shortened


@dataclass(frozen=True, slots=True)
class StoredParts:
    """The tensors of one linear map: `entries` by the last part of their names, behind `stem` and `separator`."""

    stem: str
    entries: Mapping[str, TensorEntry]
    separator: str = "."

    def name(self, part: str) -> str:
        return f"{self.stem}{self.separator}{part}"

    def need(self, part: str, dtypes: tuple[str, ...], dims: int | None = None) -> tuple[int, ...]:
        """The shape of a part.

        Raises:
            CheckpointError: it is not there, or of another dtype or number of dimensions.
        """
        entry = self.entries.get(part)
        if entry is None:
            there = next(iter(self.entries.values()))
            raise CheckpointError(
                f"{there.file} or another file of its folder lacks {self.name(part)}; download the checkpoint again"
            )
        if entry.dtype not in dtypes or (dims is not None and len(entry.shape) != dims):
            form = " or ".join(dtypes) + ("" if dims is None else f" with {dims} dimensions")
            raise CheckpointError(
                f"{entry.file}: {self.name(part)} is {entry.dtype} {entry.shape}, it must be {form}; its configuration "
                "and weights do not belong together"
            )
        return entry.shape

    def need_shape(self, part: str, *shapes: tuple[int, ...]) -> None:
        """Raise CheckpointError where a part has none of these shapes."""
        entry = self.entries[part]
        if entry.shape not in shapes:
            raise CheckpointError(
                f"{entry.file}: {self.name(part)} has shape {entry.shape}, but the other tensors of this map ask for "
                f"{shapes[0]}; download the checkpoint again"
            )


class Format(Protocol):
    """A format of quantised checkpoints.

    Attributes:
        label: its name in messages. marks: parts of which a quantised matrix has one at least. parts: all that a matrix
            may have. others: what stands beside them for activations and caches, and is not read. separator: between a
            map's name and a part. weight: the part whose name the matrix goes by. is_rounded: see `Checkpoint`.
    """

    @property
    def label(self) -> str: ...

    @property
    def marks(self) -> frozenset[str]: ...

    @property
    def parts(self) -> frozenset[str]: ...

    @property
    def others(self) -> frozenset[str]: ...

    @property
    def separator(self) -> str: ...

    @property
    def weight(self) -> str: ...

    @property
    def is_rounded(self) -> bool: ...

    @property
    def ignores(self) -> str:
        """What the configuration asks for and is not done, in words; "" for nothing."""
        ...

    def matrix(self, stored: StoredParts, read: Reader) -> StoredMatrix:
        """A matrix out of its parts.

        Raises:
            CheckpointError: parts that are missing, or do not fit each other or the configuration.
            UnsupportedModelError: a layout that is not read.
        """
        ...


class OfLinearMaps:
    """What formats have in common that store parts of a linear map behind its name."""

    separator: Final = "."
    weight: Final = "weight"
    is_rounded: Final = True


FLOATS = ("F16", "BF16", "F32")

INSTEAD = "use a GGUF file of this model, or its bfloat16 checkpoint with quantization='int8' or 'int4'"


def whole_number(settings: Mapping[str, Any], key: str, label: str, default: int | None = None) -> int:
    """A whole number of a configuration.

    Raises:
        CheckpointError: it is missing, or something else.
    """
    value = settings.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(
            f"the configuration of {label} weights: {key!r} must be a whole number, got {shortened(value)}; "
            "download config.json again"
        )
    return value


def refuse(label: str, what: str) -> UnsupportedModelError:
    """The error for a variant of a format that is not read."""
    return UnsupportedModelError(f"weights in {label} with {what} are not supported; {INSTEAD}")
