"""What was measured, on disk: one small JSON file for each key."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger("paceline")

FORMAT = 7


class Store:
    """One file of measurements, or of something else that was learned.

    Args:
        key: what they belong to, a dataclass of plain values.
        directory: folder of the files.
    """

    def __init__(self, key: DataclassInstance, directory: Path) -> None:
        self.key = asdict(key)
        text = json.dumps(self.key, sort_keys=True)
        self.path = directory / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def load(self) -> dict[str, Any] | None:
        """The stored document, or None where the file is missing, broken or another key's (logged)."""
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("the stored measurements in %s cannot be read (%s); measuring again", self.path, error)
            return None
        if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("key") != self.key:
            logger.info("the stored measurements in %s are of another version or model; measuring again", self.path)
            return None
        costs = document.get("costs")
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
