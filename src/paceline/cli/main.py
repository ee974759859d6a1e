"""The entry of the `paceline` command: imports its commands and runs one.

It imports next to nothing by itself, so that Ctrl-C finds it in charge soon after the interpreter starts.
"""

from __future__ import annotations

import sys

try:
    from paceline.cli.interrupts import INTERRUPTED, AtOnce
except KeyboardInterrupt:
    print("paceline: interrupted", file=sys.stderr)
    raise SystemExit(130) from None


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code; whatever goes wrong becomes one line on standard error.

    Args:
        argv: arguments without the program's name; None takes the process's own, which then ends with this call.
    """
    try:
        with AtOnce():
            from paceline.cli.app import run

            return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # between two lines of ours
        print("paceline: interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        if argv is None:
            AtOnce(silent=True).__enter__()  # until the interpreter is gone
