"""Start of a driver: `PEERS_PYTHON PATH/drivers NAME`, where NAME is a module of this folder.

The peer's interpreter has no Paceline, and must not pick up one by chance: the drivers are put under their full names
into otherwise empty packages, so that they import each other as everywhere else and nothing else of Paceline can be
imported.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent
PACKAGE = ("lab", "peers", "drivers")


def main() -> None:
    """Run the driver that the first argument names."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER]
    for depth in range(len(PACKAGE)):
        package = ModuleType(".".join(PACKAGE[: depth + 1]))
        package.__path__ = [str(FOLDER)] if depth == len(PACKAGE) - 1 else []
        sys.modules[package.__name__] = package
    here = ".".join(PACKAGE)
    import_module(f"{here}.wire").serve(f"{here}.{sys.argv[1]}")


if __name__ == "__main__":
    main()
