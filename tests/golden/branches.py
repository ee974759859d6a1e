"""Branch coverage of the suite, in percent by package; what numba compiles is not seen.

A package within half a point of its golden figure counts as before: some branches hang on times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "paceline"
SAME = 0.5


def measured(*tests: str) -> dict[str, float]:
    """Package (a folder of the source) -> percent of its branches that the tests take both ways."""
    with tempfile.TemporaryDirectory() as work:
        config, report = Path(work) / "coveragerc", Path(work) / "report.json"
        lines = [
            "[run]",
            "branch = True",
            f"source = {PACKAGE}",
            "parallel = True",
            f"data_file = {work}/data",
            "patch = subprocess, _exit",
            "disable_warnings = no-data-collected",  # the process that only waits for its workers has none
        ]
        config.write_text("\n".join(lines))
        coverage = [sys.executable, "-m", "coverage"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        }

        def run(*arguments: str, fine: tuple[int, ...] = (0,)) -> None:
            code = subprocess.run([*coverage, *arguments], cwd=ROOT, env=environment, check=False).returncode
            if code not in fine:
                sys.exit(f"coverage {arguments[0]} ended with {code}")

        run(
            "run", f"--rcfile={config}", "-m", "pytest", "-n", "2", *tests, fine=(0, 1)
        )  # 1: some tests failed, which they say
        run("combine", f"--rcfile={config}", "--quiet")
        run("json", f"--rcfile={config}", "--quiet", "-o", str(report))
        return by_package(json.loads(report.read_text())["files"])


def by_package(files: dict[str, Any]) -> dict[str, float]:
    taken, known = defaultdict[str, int](int), defaultdict[str, int](int)
    for name, file in files.items():
        parts = (ROOT / name).relative_to(PACKAGE).parts
        package = parts[0] if len(parts) > 1 else "paceline"
        for key in (package, "all"):
            taken[key] += file["summary"]["covered_branches"]
            known[key] += file["summary"]["num_branches"]
    return {key: round(100 * taken[key] / known[key], 1) for key in sorted(known) if known[key]}


def found(golden: Any) -> dict[str, Any]:
    now = measured()
    return {
        key: golden[key] if golden and abs(golden.get(key, -9) - value) <= SAME else value for key, value in now.items()
    }
