"""A page seen by a headless Chromium: its document after the scripts ran, its complaints, its picture.

PACELINE_ARTIFACTS names a folder in which pictures are kept; without it they go to pytest's own temporary folder
(`--basetemp`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

FOUND = next((path for name in ("chromium", "google-chrome", "chromium-browser") if (path := shutil.which(name))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=3000",
)
WATCH = """<script>
window.faults = [];
addEventListener("error", (event) => faults.push(String(event.message || event.target.tagName)), true);
addEventListener("securitypolicyviolation", (event) => faults.push("blocked " + event.blockedURI));
const complain = console.error;
console.error = (...all) => { faults.push(all.join(" ")); complain(...all); };
</script>"""
REPORT = """<script>
addEventListener("load", () => {
  const told = (typeof report === "function") ? report() : null;
  const loaded = performance.getEntriesByType("resource").map((entry) => entry.name);
  document.documentElement.dataset.told = JSON.stringify({ faults, loaded, told, broken: window.broken === true });
});
</script>"""


@dataclass(frozen=True)
class Seen:
    """What the browser made of a page.

    Attributes:
        faults: script errors, blocked requests, console errors. loaded: outside parts that were asked for.
        told: what the page's function `report` returned.
        broken: whether a text of the page ran as a script.
        console: lines that the browser logged for the console.
    """

    dom: str
    faults: list[str]
    loaded: list[str]
    told: Any
    broken: bool
    console: list[str]


def look(page: str, folder: Path, script: str = "", address: str = "") -> Seen:
    """Load a page, run `script` after its own (it may define `report`), and dump the document."""
    watched = page.replace("<head>", "<head>" + WATCH, 1)
    watched = watched.replace("</body>", f"<script>{script}</script>{REPORT}</body>", 1)
    assert watched.count("window.faults = []") == 1
    path = folder / "watched.html"
    path.write_text(watched, encoding="utf-8")
    done = _run(folder, path, address, "--dump-dom")
    told = re.search(r'data-told="([^"]*)"', done.stdout)
    assert told is not None, done.stderr[-2000:]
    return Seen(dom=done.stdout, console=re.findall(r".*CONSOLE.*", done.stderr), **json.loads(unescape(told[1])))


def picture(page: str, folder: Path, name: str, address: str = "", size: tuple[int, int] = (1280, 900)) -> Path:
    """Draw a page; returns the PNG."""
    kept = Path(os.environ.get("PACELINE_ARTIFACTS") or folder)
    kept.mkdir(parents=True, exist_ok=True)
    path, shot = folder / f"{name}.html", kept / f"{name}.png"
    path.write_text(page, encoding="utf-8")
    _run(folder, path, address, f"--screenshot={shot}", f"--window-size={size[0]},{size[1]}")
    return shot


def _run(folder: Path, path: Path, address: str, *flags: str) -> subprocess.CompletedProcess[str]:
    assert FOUND is not None
    profile = folder / "profile"
    shutil.rmtree(profile, ignore_errors=True)
    command = [FOUND, *FLAGS, f"--user-data-dir={profile}", *flags, path.resolve().as_uri() + address]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120, check=True)
