"""The entry of `python -m lab`."""

from __future__ import annotations

import sys

from paceline.cli import AtOnce


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code; whatever goes wrong becomes one line on standard error.

    Args:
        argv: arguments without the program's name; None takes the process's own.
    """
    with AtOnce():
        from lab.commands.app import app
        from paceline.cli import run

        return run(sys.argv[1:] if argv is None else argv, app, "python -m lab")


if __name__ == "__main__":
    sys.exit(main())
