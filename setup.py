"""Makes the long description that a package index shows; everything else is in pyproject.toml.

README.md links to files beside it, which an index does not have. Where `[project.urls]` names a `Repository`, such
links and images become absolute; without one, links become their text with the file's name, and images are left out.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
RELATIVE = r"\((?!https?://|#)([^)\s]+)\)"
"""Where a link of Markdown leads, if it is a file beside the page."""


def long_description(readme: str, repository: str | None) -> str:
    """README.md as it can be read away from the repository.

    Args:
        readme: its Markdown.
        repository: address of the repository, on a host whose addresses of files are those of GitHub, or None.
    """
    if repository is None:
        without_images = re.sub(rf"^!\[[^\]]*\]{RELATIVE}\n\n?", "", readme, flags=re.MULTILINE)
        return re.sub(rf"\[([^\]]+)\]{RELATIVE}", r"\1 (`\2`)", without_images)
    base = repository.rstrip("/")
    with_images = re.sub(rf"!\[([^\]]*)\]{RELATIVE}", rf"![\1]({base}/raw/HEAD/\2)", readme)
    return re.sub(rf"(?<!!)\[([^\]]+)\]{RELATIVE}", rf"[\1]({base}/blob/HEAD/\2)", with_images)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = long_description((ROOT / "README.md").read_text(encoding="utf-8"), project.get("urls", {}).get("Repository"))
    setup(long_description=text, long_description_content_type="text/markdown")
