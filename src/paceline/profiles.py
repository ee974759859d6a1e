"""Profiles: what `paceline tune` chose for one model on one machine, and when a loaded model may use it.

A profile fits where it was measured: same checkpoint (shape, configuration, a sample of the weights' bytes), device,
dtype, threads, machine and versions. It replaces a default only; what a user writes as `speculative_config` always
wins.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from paceline import registry, utils
from paceline.checkpoints import digest_of, resolve
from paceline.config import SpeculativeConfig
from paceline.controllers.auto import CostKey
from paceline.errors import ConfigError, PacelineError
from paceline.utils import keys_once, user_cache

if TYPE_CHECKING:
    from paceline.models import ModelInfo

logger = logging.getLogger("paceline")

SCHEMA: Final = 3
SWITCH: Final = "PACELINE_PROFILE"
"""Environment variable: 0, off, no or false leaves profiles unread."""

DEFAULT: Final[Mapping[str, Any]] = MappingProxyType({"method": "auto"})
"""The default speculative_config. It is told from an explicit {"method": "auto"} by identity, so pass it on, never a
copy.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a measurement belongs to.

    Attributes:
        model: digest of the checkpoint (`digest_of`).
        device, dtype, passes: where, in what and by what it computes (`ModelInfo.passes`).
        threads: of PyTorch on the CPU, before a profile changes them.
        machine: processor and the number of its CPUs that this process may use.
        versions: of torch and paceline.
    """

    model: str
    device: str
    dtype: str
    passes: str
    threads: int
    machine: str
    versions: Mapping[str, str]

    @classmethod
    def of(cls, info: ModelInfo, folder: Path) -> Conditions:
        """Those of a loaded model in this process, now."""
        key = CostKey.of(info)
        versions = {"torch": key.torch, "paceline": key.paceline}
        model = digest_of(folder, info.fingerprint)
        return cls(
            model=model, device=key.device, dtype=key.dtype, passes=key.passes, threads=key.threads, machine=machine(),
            versions=versions,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One choice.

    Attributes:
        conditions: where it was measured.
        speculative_config: in vLLM's dialect; None is plain decoding.
        threads: of PyTorch, part of the choice.
        drafts: folder or hub id of each draft model -> its digest.
        measured: gain, interval, prompts and the like, for people.
    """

    conditions: Conditions
    speculative_config: Mapping[str, Any] | None
    threads: int
    drafts: Mapping[str, str] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """The choice, parsed."""
        return SpeculativeConfig.parse(self.speculative_config)

    @property
    def name(self) -> str:
        """For people: the model's own name and the end of the file's."""
        return f"{Path(str(self.measured.get('model', 'model'))).name}-{self.path.stem[-12:-6]}"

    @property
    def tuned(self) -> str:
        """The day it was made on."""
        return str(self.measured.get("created", "at an unknown time"))[:10]

    @property
    def choice(self) -> str:
        """What it chose, in words."""
        config = self.speculative
        if config is None:
            return "plain decoding"
        parts = config.method if isinstance(config.method, tuple) else (config,)
        names = " + ".join(str(one.method) for one in parts)
        most = config.num_speculative_tokens
        return f"method {names}" + ("" if most is None else f", {most} token{'s' if most != 1 else ''} a draft")

    def __str__(self) -> str:
        return f"profile {self.name} (tuned {self.tuned}): {self.choice}, from `paceline tune`"

    @property
    def path(self) -> Path:
        """Its file."""
        where = {key: value for key, value in asdict(self.conditions).items() if key != "versions"}
        digest = hashlib.sha256(json.dumps(where, sort_keys=True).encode()).hexdigest()
        return profile_dir() / f"{self.conditions.model}-{digest[:12]}.json"

    def save(self) -> Path:
        """Write the file in one piece, over an earlier one of the same model, device, dtype, threads and machine.

        Raises:
            ConfigError: the folder cannot be written.
        """
        path, temporary = self.path, None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
            ) as file:
                temporary = Path(file.name)
                file.write(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n")
            temporary.replace(path)
        except OSError as error:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            raise ConfigError(
                f"the profile cannot be written to {path} ({error}); set PACELINE_CACHE_DIR to another folder"
            ) from None
        return path

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a file.

        Raises:
            OSError, ValueError: unreadable, another schema, or values of the wrong kind.
        """
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=keys_once("it"))
        if not isinstance(found, dict) or found.pop("schema", None) != SCHEMA:
            raise ValueError(f"not schema version {SCHEMA}")
        try:
            profile = cls(**{**found, "conditions": Conditions(**found["conditions"])})
            _ = profile.speculative
        except (KeyError, TypeError, PacelineError) as error:
            raise ValueError(str(error)) from error
        threads = (profile.threads, profile.conditions.threads)
        if not all(isinstance(number, int) and 0 < number <= 1024 for number in threads) or not isinstance(
            profile.drafts, dict
        ):
            raise ValueError("threads or drafts of the wrong kind")
        return profile

    def stale(self, here: Conditions) -> str | None:
        """Why it no longer holds although it was measured in this very place, or None."""
        for name, version in here.versions.items():
            if (before := self.conditions.versions.get(name)) != version:
                return f"measured with {name} {before}, now {version}"
        for name in _methods(self.speculative):
            try:
                registry.lookup("drafters", name)
            except PacelineError as error:
                return str(error)
        for name, digest in self.drafts.items():
            try:
                now = digest_of(resolve(name))
            except PacelineError as error:
                return f"its draft model cannot be opened ({error})"
            if now != digest:
                return f"its draft model {name} has changed"
        return None

    def foreign(self, here: Conditions) -> str | None:
        """Why it belongs to another place, or None. A process that already runs with the chosen threads fits, too."""
        for name in ("device", "dtype", "passes", "machine"):
            before, now = getattr(self.conditions, name), getattr(here, name)
            if before != now:
                return f"measured for {name} {before!r}, here {now!r}"
        if here.threads not in (self.conditions.threads, self.threads):
            return f"measured for {self.conditions.threads} threads, here {here.threads}"
        return None


def _methods(config: SpeculativeConfig | None) -> list[str]:
    """The methods that a configuration names."""
    if config is None:
        return []
    names = [config.method] if isinstance(config.method, str) else [str(entry.method) for entry in config.method]
    return [name for name in names if name != "auto"]


def profile_dir() -> Path:
    """Folder of the profiles, beside that of the measured costs."""
    return user_cache("profiles")


def saved() -> tuple[dict[Path, Profile], dict[Path, str]]:
    """All profiles by file, the newest last; and the files that cannot be read, with the reason."""
    found, broken = {}, {}
    for path in sorted(profile_dir().glob("*.json")):
        try:
            found[path] = Profile.load(path)
        except (OSError, ValueError) as error:
            broken[path] = str(error)
    newest_last = sorted(found.items(), key=lambda pair: str(pair[1].measured.get("created", "")))
    return dict(newest_last), broken


def switched_on() -> bool:
    """Whether the environment leaves profiles on.

    Raises:
        ConfigError: it says neither.
    """
    return utils.switched_on(SWITCH, "profiles")


def adopt(info: ModelInfo, folder: Path, *, threads: int | None = None) -> Profile | None:
    """The profile that fits a loaded model, its number of threads set in PyTorch; None where there is none.

    Args:
        folder: of the checkpoint.
        threads: what the user set; a profile that wants another number is not used then.
    """
    if not switched_on():
        return None
    profile = find(Conditions.of(info, folder), threads=threads)
    if profile is not None:
        if info.device.type == "cpu":
            import torch

            if torch.get_num_threads() != profile.threads:
                torch.set_num_threads(profile.threads)
        logger.info(
            "%s, with %d threads; %s (%s=0 switches profiles off)", profile, profile.threads, profile.path, SWITCH
        )
    return profile


def find(here: Conditions, *, threads: int | None = None) -> Profile | None:
    """The profile for these conditions; if there are only others of the same model, one log line says why not."""
    stale, foreign = [], []
    for path in sorted(profile_dir().glob(f"{here.model}-*.json")):
        try:
            profile = Profile.load(path)
        except (OSError, ValueError) as error:
            stale.append(f"{path} cannot be read ({error})")
            continue
        if (why := profile.foreign(here)) is not None:
            foreign.append(f"{path}: {why}")
        elif threads is not None and threads != profile.threads:
            foreign.append(f"{path}: it was made for {profile.threads} threads, {threads} are set")
        elif (why := profile.stale(here)) is not None:
            stale.append(f"{path}: {why}")
        else:
            return profile
    if stale:
        logger.warning("profile not used: %s; run `paceline tune` again", stale[0])
    elif foreign:
        logger.info("profile not used: %s; `paceline tune` makes one for this setup", foreign[0])
    return None


def machine() -> str:
    """Processor and the number of CPUs that this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{names[0] if names else platform.processor() or platform.machine()}, {allowed} CPUs"
