"""What a user may have meant by the name of a file that is not there."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path


def near_file(path: Path) -> str:
    """As in "; did you mean 'prompts.txt'?": the nearest name in the nearest folder that is there, or ""."""
    name = path.name
    for folder in path.parents:
        try:
            names = {file.name.lower(): file.name for file in folder.iterdir()}
        except (OSError, ValueError):
            name = folder.name
            continue
        near = get_close_matches(name.lower(), names, n=1)
        return f"; did you mean {str(folder / names[near[0]])!r}?" if near and names[near[0]] != name else ""
    return ""
