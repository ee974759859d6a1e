"""What tells checkpoints apart without reading them whole."""

from __future__ import annotations

import hashlib
from pathlib import Path

SAMPLE = 1 << 16
"""Bytes that are read at the beginning, in the middle and at the end of a file."""


def digest_of(folder: Path, more: str = "") -> str:
    """16 hex digits of a checkpoint: its config.json, and name, size and sampled bytes of its weight files.

    Args:
        folder: or a GGUF file. more: a text that the digest depends on too.
    """
    digest = hashlib.sha256(more.encode())
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for path in [folder] if folder.is_file() else sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for start in sorted({0, max(0, size // 2), max(0, size - SAMPLE)}):
                file.seek(start)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:16]
