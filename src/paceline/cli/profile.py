"""`paceline profile list | show | remove`: what `paceline tune` chose for models on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import with_log_level
from paceline.cli.terminal import counted, say
from paceline.cli.tune import gain_words
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.profiles import Profile

app = typer.Typer(name="profile", help="Profiles that `paceline tune` made: list, show, remove.", add_completion=False)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A profile of `paceline profile list`, or its file.")]
NameOrAll = Annotated[str, typer.Argument(metavar="NAME|all", help="A profile, or all of them.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("list")
@with_log_level
def show_all(as_json: Json = False) -> None:
    """All profiles, the newest last: name, day, choice, where it applies."""
    from paceline.profiles import profile_dir, saved

    profiles, broken = saved()
    if as_json:
        print(json.dumps({"profiles": [_facts(path, profile) for path, profile in profiles.items()]}))
        return
    for profile in profiles.values():
        where = profile.conditions
        say(
            f"{profile.name}: {profile.choice} (tuned {profile.tuned}; {where.dtype} on {where.device}, "
            f"{counted(where.threads, 'thread')})",
            indent="  ",
        )
    for path, why in broken.items():
        say(f"{path.stem}: cannot be read ({why})", indent="  ")
    if not profiles and not broken:
        say(f"no profiles in {profile_dir()}; `paceline tune` makes one")


@app.command("show")
@with_log_level
def show(name: Name, as_json: Json = False) -> None:
    """One profile: what it chose, on what evidence, and where it applies."""
    path, profile = _named(name)
    if as_json:
        print(json.dumps(_facts(path, profile)))
        return
    where, measured = profile.conditions, profile.measured
    lines = {
        "profile": profile.name,
        "tuned": profile.tuned,
        "model": str(measured.get("model", "unknown")),
        "choice": profile.choice,
        "config": json.dumps(profile.speculative_config),
        "gain": _gain(measured.get("gain"), measured.get("batch_size", 1)),
        "threads": str(profile.threads),
        "applies to": f"{where.dtype} on {where.device}, {counted(where.threads, 'thread')}, {where.machine}",
        "versions": ", ".join(f"{key} {value}" for key, value in where.versions.items()),
        "file": str(path),
    }
    say(*(f"{key:<11}{value}" for key, value in lines.items()), indent=" " * 11)


@app.command("remove")
@with_log_level
def remove(name: NameOrAll) -> None:
    """Delete a profile, or all of them; `auto` decides again for that model."""
    from paceline.profiles import saved

    if name == "all":
        profiles, broken = saved()
        paths = [*profiles, *broken]
    else:
        paths = [_named(name)[0]]
    for path in paths:
        try:
            path.unlink()
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be removed ({error.strerror or error})") from None
    say(f"{counted(len(paths), 'profile')} removed" if name == "all" else f"profile {name} removed")


def _named(name: str) -> tuple[Path, Profile]:
    """The profile of this name, file name or path.

    Raises:
        ConfigError: there is none, or more than one.
    """
    from paceline.profiles import saved

    profiles, broken = saved()
    for path, why in broken.items():
        if name in (path.stem, path.name, str(path)):
            raise ConfigError(f"the profile {name!r} cannot be read ({why}); run `paceline tune` again, or remove all")
    fitting = [(p, profile) for p, profile in profiles.items() if name in (profile.name, p.stem, p.name, str(p))]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ConfigError(f"{name!r} names {len(fitting)} profiles; give one as {fitting[0][0].stem!r}")
    known = ", ".join(profile.name for profile in profiles.values())
    raise ConfigError(
        f"there is no profile {name!r}; " + (f"known are {known}" if known else "`paceline tune` makes one")
    )


def _facts(path: Path, profile: Profile) -> dict[str, Any]:
    from dataclasses import asdict

    return {"name": profile.name, "file": str(path), "choice": profile.choice, **asdict(profile)}


def _gain(gain: Any, batch_size: Any) -> str:
    if not isinstance(gain, dict):
        return "not measured"
    try:
        return gain_words(gain, batch_size)
    except (KeyError, TypeError, ValueError):
        return "not readable"
