"""Lets a trainer learn from the records of ended requests, and lets what it made draft; on a thread of its own."""

from __future__ import annotations

import logging
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Condition, Thread
from typing import Any, Final

import torch
from torch import Tensor

from paceline.config import LearnConfig
from paceline.drafters.base import Drafter
from paceline.drafters.learning.records import TrafficBuffer, TrafficRecord
from paceline.drafters.learning.trainer_process import TrainerProcess
from paceline.drafters.learning.versions import Outcomes, TenantVersions, Version

logger = logging.getLogger("paceline.drafters")

PREFIX: Final = "paceline-learn-"
BEST: Final = ("base", "current", "candidate")
"""What a round's replay may find best."""

Embed = Callable[[Sequence[int]], Tensor]


class Learner:
    """Keeps records and versions of all tenants, and the trainer.

    Args:
        name: of the drafter. base: what was served at first, and the folder of its weights.
        rebuild: makes a drafter of the weights in a folder; called on a thread of the learner's own, beside steps.
        embed: the target's embeddings, where the trainer needs them.
        process: the trainer, which has opened the same folder.
    Attributes:
        running: the trainer has not ended.
    """

    def __init__(
        self,
        name: str,
        base: tuple[Drafter, Path],
        rebuild: Callable[[Path], Drafter],
        *,
        embed: Embed | None,
        config: LearnConfig,
        process: TrainerProcess,
    ) -> None:
        self.name, self.config, self.running = name, config, True
        self._base = base
        self.buffer = TrafficBuffer(config.buffer_bytes)
        self._tenants: OrderedDict[str, TenantVersions] = OrderedDict()
        self._rebuild, self._embed, self._process = rebuild, embed, process
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._made, self._changed, self._closed, self._training = 0, Condition(), False, False
        self._finalizer = weakref.finalize(self, _end, process, self._folder)
        Thread(target=_work, args=(weakref.ref(self), self._changed), name=f"paceline-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """The trainer's."""
        return self._process.pid

    def of(self, tenant: str) -> TenantVersions:
        """The versions of a tenant; at first there is the base alone."""
        with self._changed:
            versions = self._tenants.get(tenant)
            if versions is None:
                base, folder = self._base
                versions = self._tenants[tenant] = TenantVersions(
                    Version(0, folder, base, Outcomes()), rollback=self.config.rollback
                )
                while len(self._tenants) > self.config.max_tenants:
                    gone, _ = self._tenants.popitem(last=False)
                    self.buffer.forget(gone)
                    logger.info("drafter %s forgets what it has learned of a tenant: more than %d", self.name,
                                self.config.max_tenants)  # fmt: skip
            self._tenants.move_to_end(tenant)
            return versions

    def tenants(self) -> Mapping[str, TenantVersions]:
        """All that there are now."""
        with self._changed:
            return dict(self._tenants)

    def add(self, tenant: str, record: TrafficRecord) -> None:
        """A request has ended; where there are enough of them, a round begins on the learner's thread."""
        with self._changed:
            versions = self._tenants.get(tenant)
            if versions is None or not self.running:
                return
            self.buffer.add(tenant, record)
            versions.new += 1
            if versions.new >= self.config.interval:
                self._changed.notify()

    def choose(self, versions: TenantVersions) -> Version:
        """The version for a request that begins."""
        with self._changed:
            return versions.choose()

    def count(self, versions: TenantVersions, version: Version, tried: int, accepted: int) -> None:
        """Count trials of a version, and take it back where fewer are accepted than before it."""
        with self._changed:
            current, before = versions.current, versions.before
            back = versions.count(version, tried, accepted)
        if back and before is not None:
            logger.warning(
                "drafter %s: version %d is taken back: %.0f %% of its drafts were accepted, %.0f %% of version %d's",
                self.name, current.number, 100 * current.outcomes.share, 100 * before.outcomes.share, before.number,
            )  # fmt: skip

    def pause(self, paused: bool) -> None:
        """Let the trainer wait, or go on."""
        if self.running:
            self._process.pause(paused)

    def adopt(self, tenant: str, folder: Path) -> Version:
        """Let what was written into a folder draft for requests of a tenant that begin from now on.

        Raises:
            PacelineError: it is no such drafter.
        """
        versions = self.of(tenant)
        drafter = self._rebuild(folder)
        with self._changed:
            version = Version(versions.newest + 1, folder, drafter, Outcomes())
            versions.adopt(version)
        return version

    def close(self) -> None:
        """End the trainer; drafts go on."""
        with self._changed:
            self._closed, self.running = True, False
            self._changed.notify()
        self._finalizer()

    def due(self) -> str | None:
        """The tenant whose drafter is to be trained next; called with the lock."""
        waiting = {tenant: one.new for tenant, one in self._tenants.items() if one.new >= self.config.interval}
        return max(waiting, key=waiting.__getitem__) if waiting else None

    @property
    def busy(self) -> bool:
        """A round runs, or is due."""
        with self._changed:
            return not self.ended and (self._training or self.due() is not None)

    @property
    def ended(self) -> bool:
        """Nothing will be learned any more."""
        return self._closed or not self.running

    def round(self, tenant: str) -> None:
        """Train, replay, and let the best draft."""
        try:
            self._round(tenant)
        finally:
            with self._changed:
                self._training = False

    def _round(self, tenant: str) -> None:
        with self._changed:
            versions = self._tenants.get(tenant)
            if versions is None:  # others took its place since it was due
                return
            versions.new, current, self._training = 0, versions.current, True
            chosen, held = self.buffer.parts(tenant, self.config.steps, self.config.held_out)
            for record in chosen:
                record.learned = True
            self._made += 1
        if not (chosen and held):
            return
        output = self._folder / str(self._made)
        answer = self._asked(current, output, chosen, held)
        if answer is None:
            return
        best, shares = answer["best"], answer["tokens_a_pass"]
        logger.info("drafter %s: of the newest %d requests %s; %s drafts", self.name, len(held),
                    ", ".join(f"{name} makes {shares[name]:.2f} tokens a pass" for name in shares), best)  # fmt: skip
        made = self._rebuild(output) if best == "candidate" else None
        with self._changed:
            versions.rounds += 1
            if versions.current is current and made is not None:
                versions.adopt(Version(versions.newest + 1, output, made, Outcomes()))
            elif versions.current is current and best == "base" and current is not versions.base:
                versions.adopt(versions.base)
        self._clear()

    def _asked(
        self, current: Version, output: Path, chosen: Sequence[TrafficRecord], held: Sequence[TrafficRecord]
    ) -> dict[str, Any] | None:
        """The trainer's answer; None where it has ended, which is said once."""
        job = {
            "base": str(self._base[1]), "current": str(current.folder), "output": str(output),
            "learning_rate": self.config.learning_rate, "learned": len(chosen), "replayed": len(held),
            "seed": self._made, "first": [record.first for record in (*chosen, *held)],
        }  # fmt: skip
        try:
            answer = self._process.ask(job, self._tensors([*chosen, *held]))
            why = answer.get("error", "")
        except (OSError, EOFError, ValueError):
            answer, why = {}, f"it has ended ({self._process.ending()})"
        if not why:
            return answer
        with self._changed:
            was, self.running = self.running, False
        if was and not self._closed:
            logger.warning(
                "the trainer of drafter %s learns no more: %s; the server goes on with version %d (said once)",
                self.name, why, current.number,
            )  # fmt: skip
        return None

    @torch.inference_mode()
    def _tensors(self, records: Sequence[TrafficRecord]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for number, record in enumerate(records):
            tensors = record.tensors()
            if self._embed is not None:
                tensors["embedded"] = self._embed(record.tokens).cpu().contiguous()
            found |= {f"{number}.{name}": tensor for name, tensor in tensors.items()}
        return found

    def _clear(self) -> None:
        """Delete the files of versions that will not draft again."""
        with self._changed:
            kept = {version.folder for one in self._tenants.values() for version in one.kept}
        for folder in self._folder.iterdir():
            if folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)


def _end(process: TrainerProcess, folder: Path) -> None:
    process.close()
    shutil.rmtree(folder, ignore_errors=True)


def _work(found: weakref.ref[Learner], changed: Condition) -> None:
    """Rounds, until the learner ends or nobody has it any more."""
    while (learner := found()) is not None and not learner.ended:
        with changed:
            tenant = learner.due()
            if tenant is None:
                del learner
                changed.wait(1.0)
                continue
        try:
            learner.round(tenant)
        except Exception as error:  # of the learning alone, not of requests
            logger.warning("drafter %s learns no more (%s: %s); the server goes on (said once)", learner.name,
                           type(error).__name__, error)  # fmt: skip
            learner.running = False
        del learner
