"""Makes the pictures of docs/images from pages that `paceline explain` writes, with a headless Chromium.

usage: python docs/pictures.py            needs `chromium` on the path; looks at no network
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
FLAGS = "--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run --hide-scrollbars"
TREE_ONLY = """<style>
header, .figures, .bar, main > :not(:first-child), footer, #detail, details { display: none !important; }
main, body { display: block; margin: 0 !important; padding: 0 !important; max-width: none; }
body { background: white !important; }
.panel { border: 0 !important; }
.tree { min-height: 0 !important; max-height: none !important; }
</style>"""
SUMS = "total = total + price\ntotal = total + tax\ntotal ="


@dataclass(frozen=True, slots=True)
class Picture:
    """A step of a replay; `step` 0 shows the whole page."""

    prompt: str
    config: dict[str, object]
    step: int
    size: tuple[int, int]


PICTURES = {
    "chain": Picture(SUMS, {"method": "ngram", "num_speculative_tokens": 6}, 7, (620, 240)),
    "tree": Picture(
        "def add_numbers(a, b):",
        {"method": "draft_model", "tree_policy": "eagle2", "tree_width": 3, "num_speculative_tokens": 10},
        1,
        (620, 400),
    ),
    "replay": Picture("def add_numbers(a, b):", {"method": "draft_model", "num_speculative_tokens": 4}, 0, (900, 1000)),
}


def draw(name: str, picture: Picture, folder: Path) -> None:
    """Replay the generation and photograph it."""
    page, config = folder / f"{name}.html", json.dumps(picture.config)
    explain = [sys.executable, "-m", "paceline", "explain", picture.prompt, "--max-tokens", "24", "-s", config]
    subprocess.run([*explain, "--output", str(page), "--force"], check=True)
    if picture.step:
        page.write_text(page.read_text(encoding="utf-8").replace("</head>", TREE_ONLY + "</head>"), encoding="utf-8")
    width, height = picture.size
    address = f"{page.as_uri()}?theme=light#{picture.step or 1}"
    size = [f"--window-size={width},{height}", f"--screenshot={IMAGES / name}.png", "--force-device-scale-factor=1.5"]
    browser = ["chromium", *FLAGS.split(), f"--user-data-dir={folder / name}", *size, address]
    subprocess.run(browser, check=True, timeout=120)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, picture in PICTURES.items():
            draw(name, picture, Path(folder))


if __name__ == "__main__":
    main()
