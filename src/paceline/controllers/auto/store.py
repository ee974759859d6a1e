"""What measured costs belong to, and where they are kept."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.utils import Store, user_cache
from paceline.version import __version__

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from paceline.models import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class CostKey:
    """What a measurement depends on; another value in any field is another file.

    Attributes:
        fingerprint: the model's shape (`ModelInfo.fingerprint`).
        device, dtype, passes: where, in what and by what it computes (`ModelInfo.passes`).
        threads: of PyTorch on the CPU.
        torch, paceline: versions.
        kernels: a number of the compiled passes' sources, 0 where there are none: others have other prices.
    """

    fingerprint: str
    device: str
    dtype: str
    passes: str
    threads: int
    torch: str
    paceline: str
    kernels: int = 0

    @classmethod
    def of(cls, info: ModelInfo) -> CostKey:
        """The key of a loaded model in this process, with PyTorch's present number of threads."""
        import torch

        device = str(info.device)
        if info.device.type == "cuda":
            device += " " + torch.cuda.get_device_name(info.device)
        else:
            device += " " + torch.backends.cpu.get_cpu_capability()
        return cls(
            fingerprint=info.fingerprint,
            device=device,
            dtype=str(info.dtype).removeprefix("torch."),
            passes=info.passes,
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            paceline=__version__,
            kernels=_kernels() if info.device.type == "cpu" else 0,
        )


@functools.cache
def _kernels() -> int:
    try:
        from paceline.models.cpu import source_number
    except (ImportError, OSError, AttributeError):  # a broken numba shows as any of them: passes are PyTorch's
        return 0
    return source_number()


@dataclass(frozen=True, slots=True)
class MemoryKey:
    """What estimates belong to; another value in any field is another file.

    Attributes:
        costs: machine, versions and shape of the target.
        model: name of the target.
        methods: drafters with their options, as text.
    """

    costs: CostKey
    model: str
    methods: str


class CostStore(Store):
    """One file of measured costs, or of something else that was learned.

    Args:
        key: what they belong to, a dataclass of plain values.
        directory: folder of the files; None is the user's, for costs.
    """

    def __init__(self, key: DataclassInstance, directory: Path | None = None) -> None:
        super().__init__(key, directory or user_cache("costs"))
