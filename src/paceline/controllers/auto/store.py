"""What was measured, on disk: one small JSON file a machine, model and version."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.utils import user_cache
from paceline.version import __version__

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from paceline.models import ModelInfo

logger = logging.getLogger("paceline.controllers")

FORMAT = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class CostKey:
    """What a measurement depends on; another value in any field is another file.

    Attributes:
        fingerprint: the model's shape (`ModelInfo.fingerprint`).
        device, dtype: where and in what it computes.
        threads: of PyTorch on the CPU.
        torch, paceline: versions.
    """

    fingerprint: str
    device: str
    dtype: str
    threads: int
    torch: str
    paceline: str

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
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            paceline=__version__,
        )


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


class CostStore:
    """One file of measured costs, or of something else that was learned.

    Args:
        key: what they belong to, a dataclass of plain values.
        directory: folder of the files; None is the user's, for costs.
    """

    def __init__(self, key: DataclassInstance, directory: Path | None = None) -> None:
        self.key = asdict(key)
        text = json.dumps(self.key, sort_keys=True)
        self.path = (directory or user_cache("costs")) / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def load(self) -> dict[str, Any] | None:
        """The stored document, or None where the file is missing, broken or another key's (logged)."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("the stored measurements in %s cannot be read (%s); measuring again", self.path, error)
            return None
        if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("key") != self.key:
            logger.info("the stored measurements in %s are of another version or model; measuring again", self.path)
            return None
        costs = found.get("costs")
        return costs if isinstance(costs, dict) else None

    def save(self, costs: dict[str, Any]) -> None:
        """Write the document in one piece: a reader sees the old file or the new one.

        A failure is logged, not raised.
        """
        temporary = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"format": FORMAT, "key": self.key, "costs": costs})
            with tempfile.NamedTemporaryFile(
                "w", dir=self.path.parent, suffix=".tmp", delete=False, encoding="utf-8"
            ) as file:
                temporary = Path(file.name)
                file.write(text)
            temporary.replace(self.path)
        except OSError as error:
            logger.warning("the measurements cannot be stored in %s (%s)", self.path, error)
            if temporary is not None:
                temporary.unlink(missing_ok=True)
