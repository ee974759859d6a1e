"""Checks what a wheel holds: the package alone, its typing, pages and bundled models with it, in under 25 MB.

usage: python .ci/check_wheel.py WHEEL
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

LARGEST = 25_000_000
"""Bytes."""

NEEDED = ("py.typed", "engine/__init__.pyi", "bundled/README.md", "serving/pages/", "explain/pages/", "bench/run/")
"""Beginnings of paths in the package, of files that are no modules."""


def problems(wheel: Path) -> list[str]:
    """What is wrong with a wheel, in words; nothing where it is as it should be."""
    size = wheel.stat().st_size
    found = [f"{size:,} bytes; the limit is {LARGEST:,}"] if size > LARGEST else []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    strange = [name for name in names if not re.match(r"paceline/|paceline-[^/]+\.dist-info/", name)]
    found += [f"not of the package: {name}" for name in strange]
    found += [f"made by running: {name}" for name in names if "__pycache__" in name]
    found += [f"missing: {one}" for one in NEEDED if not any(name.startswith(f"paceline/{one}") for name in names)]
    found += [f"leads nowhere on an index: {one}" for one in re.findall(r"\]\((?!https?://|#)[^)]+\)", metadata)]
    return found


if __name__ == "__main__":
    told = problems(Path(sys.argv[1]))
    print("\n".join(told) or "the wheel is as it should be")
    sys.exit(1 if told else 0)
