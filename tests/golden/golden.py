"""Golden files: what the project did before a change, and whether it still does it.

usage: golden.py make|compare [--part PART ...]

    tokens    token ids and numbers of steps of every drafter, verifier and mode on the tests' toy model   (default)
    options   arguments of the public classes, options of every drafter, verifier, controller              (default)
    real      tokens and tokens a pass of every method with SmolLM2 (benchmarks/real_models.py), bfloat16, on one CPU
              model
    coverage  branch coverage of the suite, in percent by package (runs the suite; needs coverage)

`make` writes PART.json beside this script, `compare` prints each difference and exits with 1. The default parts take
about a minute once the kernels are compiled, and are to match after every commit; a commit that changes one of them
on purpose makes the file again and says why. `real` holds bfloat16 tokens, which differ by CPU: on another one than the
file names it is skipped. Everything runs on one thread; nothing that a measured time decides is in the files, but that
`auto` gives plain tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CACHE = os.environ.get("PACELINE_CACHE_DIR")
"""The user's own, before `settle`."""
PARTS: dict[str, str] = {
    "tokens": "golden.toy_tokens",
    "options": "golden.options",
    "real": "golden.real",
    "coverage": "golden.branches",
}
"""Name -> module, whose `found(golden)` gives the part anew as a JSON object, from the golden one or None."""
DEFAULT = ("tokens", "options")


class Skipped(Exception):
    """A part cannot be compared here; the text says why."""


def differences(golden: Any, found: Any, at: str = "") -> Iterator[str]:
    """A line or a few for each place where two JSON values differ."""
    if isinstance(golden, Mapping) and isinstance(found, Mapping):
        for key in golden | found:
            here = f"{at} / {key}" if at else key
            if key not in found:
                yield f"{here}: gone, was {_short(golden[key])}"
            elif key not in golden:
                yield f"{here}: new, is {_short(found[key])}"
            else:
                yield from differences(golden[key], found[key], here)
    elif isinstance(golden, list) and isinstance(found, list) and all(isinstance(line, str) for line in golden + found):
        gone, new = [line for line in golden if line not in found], [line for line in found if line not in golden]
        if gone or new or golden != found:
            yield "\n".join(
                [
                    f"{at}:" + ("" if gone or new else " other order"),
                    *(f"    - {x}" for x in gone),
                    *(f"    + {x}" for x in new),
                ]
            )
    elif golden != found:
        yield f"{at}:\n    - {_short(golden)}\n    + {_short(found)}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 400 else f"{text[:400]}..."


def path_of(part: str, folder: Path = HERE) -> Path:
    return folder / f"{part}.json"


def read(part: str, folder: Path = HERE) -> Any:
    path = path_of(part, folder)
    return json.loads(path.read_text()) if path.exists() else None


def write(part: str, found: Any, folder: Path = HERE) -> None:
    text = json.dumps(found, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\s+([\d.,\s]+?)\s+\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)
    path_of(part, folder).write_text(text + "\n")


def compare(part: str, compute: Callable[[Any], Any], folder: Path = HERE) -> bool:
    """Whether a part is as its file says; prints what is not."""
    golden = read(part, folder)
    if golden is None:
        print(f"{part}: no {path_of(part, folder)}; make it first")
        return False
    lines = list(differences(golden, compute(golden)))
    for line in lines:
        print(f"{part}: {line}")
    print(f"{part}: {f'{len(lines)} differences' if lines else 'as before'}")
    return not lines


def settle() -> None:
    """The conditions of every part: one thread, no network, no terminal, caches of their own."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "100", "TERMINAL_WIDTH": "100",
        "NO_COLOR": "1",
        "TERM": "dumb", "PACELINE_CACHE_DIR": tempfile.mkdtemp(prefix="paceline-golden-"),
    }  # fmt: skip
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["make", "compare"])
    parser.add_argument("--part", action="append", choices=list(PARTS), help="may be given more than once")
    given = parser.parse_args(arguments)
    settle()
    fine = True
    for part in given.part or DEFAULT:
        compute = __import__(PARTS[part], fromlist=["found"]).found
        try:
            if given.action == "compare":
                fine &= compare(part, compute)
            else:
                write(part, compute(read(part)))
                print(f"{part}: wrote {path_of(part)}")
        except Skipped as why:
            print(f"{part}: skipped, {why}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.path[:1] = [str(HERE.parent), str(HERE.parent.parent)]  # `golden` is the folder, tests and benchmarks are found
    from golden.golden import main as entry  # the same module under the name that the parts import

    sys.exit(entry())
