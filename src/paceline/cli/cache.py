"""`paceline cache list | clear`: what is kept on this machine between runs, how large it is, and where."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Annotated, Any

import typer

from paceline.cli.options import with_log_level
from paceline.cli.terminal import counted, listed, say
from paceline.errors import ConfigError

app = typer.Typer(name="cache", help="What is kept on disk between runs: list, clear.", add_completion=False)

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME...]", help="Names of `paceline cache list`; default: all that is made again by itself."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Says what is kept under one name, and where.

    Attributes:
        what: it is. paths: files, or folders that belong to it wholly. remade: by itself, where it is missed.
    """

    name: str
    what: str
    paths: list[Path]
    remade: bool = True

    @property
    def files(self) -> list[Path]:
        """List all files."""
        inside = [
            [path] if path.is_file() else [path for path in path.rglob("*") if path.is_file()] for path in self.paths
        ]
        return [path for some in inside for path in some]


MEASURED = {
    "exactness": "self-tests of models",
    "costs": "what passes and drafts cost",
    "acceptance": "how often drafts are accepted",
}
OTHERS = {
    "profiles": "choices of `paceline tune`",
    "random": "models of random weights, of benchmarks",
    "models": "real models, of benchmarks",
}
"""Folders of what is stored: what is made again by itself, and what is not."""


def entries() -> list[CacheEntry]:
    """All that is there, packed weights model by model, the largest first."""
    from paceline.checkpoints import packed_folder
    from paceline.utils import kernel_files, user_cache

    packed = packed_folder()
    kept = [
        CacheEntry(f"packed/{path.stem}", "packed weights", [path])
        for path in (packed.iterdir() if packed.is_dir() else ())
        if path.is_file()
    ]
    kept.append(CacheEntry("kernels", "compiled code", kernel_files(PACKAGE)))
    kept += [CacheEntry(name, what, _inside(user_cache(name))) for name, what in MEASURED.items()]
    kept += [CacheEntry(name, what, _inside(user_cache(name)), remade=False) for name, what in OTHERS.items()]
    peers = _inside(user_cache("peers", "PACELINE_HOME"))
    kept.append(CacheEntry("peers", "environments of other engines", peers, remade=False))
    return sorted((entry for entry in kept if entry.paths), key=lambda entry: -size_of(entry.files))


def _inside(folder: Path) -> list[Path]:
    return [folder] if folder.is_dir() and any(folder.iterdir()) else []


def size_of(files: Iterable[Path]) -> int:
    """Bytes of files, of those that are still there."""
    return sum(_state(path, lambda state: state.st_size) for path in files)


def _state(path: Path, field: Callable[[Any], float]) -> int:
    try:
        return int(field(path.stat()))
    except OSError:
        return 0


def _age(files: Iterable[Path]) -> int:
    """Seconds since the newest of files was written or, if it is packed weights, used."""
    return max(0, int(time()) - max((_state(path, lambda state: state.st_mtime) for path in files), default=0))


@app.command("list")
@with_log_level
def show(as_json: Json = False) -> None:
    """What is kept: name, size, age, and the folder."""
    from paceline.checkpoints import packed_folder
    from paceline.utils import limit, user_cache

    kept, folder = entries(), user_cache("")
    sizes = [size_of(entry.files) for entry in kept]
    most = limit(packed_folder())
    if as_json:
        rows = [
            {
                "name": entry.name,
                "what": entry.what,
                "bytes": size,
                "age_seconds": _age(entry.files),
                "remade": entry.remade,
                "folder": str(_folder(entry)),
            }
            for entry, size in zip(kept, sizes, strict=True)
        ]
        print(json.dumps({"folder": str(folder), "bytes": sum(sizes), "most_packed_bytes": most, "entries": rows}))
        return
    width = max((len(entry.name) for entry in kept), default=0)
    for entry, size in zip(kept, sizes, strict=True):
        say(
            f"{entry.name:<{width}}  {_bytes(size):>8}  {_ago(_age(entry.files)):>10}  {entry.what}",
            indent=" " * (width + 2),
        )
    kernels = [str(_folder(entry)) for entry in kept if entry.name == "kernels"]
    say(
        f"{_bytes(sum(sizes))} in {folder}" + (f", kernels in {PACKAGE}" if kernels else "")
        + f"; packed weights may take {_bytes(most)} (PACELINE_CACHE_GB)"
    )  # fmt: skip


def _folder(entry: CacheEntry) -> Path:
    first = entry.paths[0]
    return first if first.is_dir() else first.parent


@app.command("clear")
@with_log_level
def clear(names: Names = None) -> None:
    """Delete what is kept: what is made again by itself, or what is named; profiles and models only by name."""
    there = entries()
    wanted = [entry for entry in there if entry.remade] if not names else _named(names, there)
    size, count = size_of(path for entry in wanted for path in entry.files), 0
    for entry in wanted:
        for path in entry.paths:
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            except OSError as error:
                raise ConfigError(f"{str(path)!r} cannot be removed ({error.strerror or error})") from None
            count += 1
    what = listed(entry.name for entry in wanted) if wanted else "nothing"
    say(f"removed {what}" + (f": {_bytes(size)}" if wanted else ""))


def _named(names: Iterable[str], there: list[CacheEntry]) -> list[CacheEntry]:
    """The entries of these names; "packed" is all packed weights.

    Raises:
        ConfigError: an unknown one.
    """
    named: list[CacheEntry] = []
    for name in names:
        fitting = [
            entry for entry in there if name in (entry.name, entry.name.partition("/")[0], entry.name.partition("/")[2])
        ]
        if not fitting:
            known = listed(dict.fromkeys(entry.name for entry in there)) or "nothing"
            raise ConfigError(f"nothing called {name!r} is kept; there is {known}")
        named += [entry for entry in fitting if entry not in named]
    return named


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _ago(seconds: int) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return counted(seconds // length, unit)
    return counted(seconds, "second")
