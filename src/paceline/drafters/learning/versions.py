"""The versions of one tenant's drafter: which one drafts, and whether its drafts are accepted as often as before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Final

from paceline.drafters.base import Drafter
from paceline.tree import PROBE, ROOT, TokenTree, Verdict

LEAST: Final = 64
"""Trials of both versions before they are compared."""

ENOUGH: Final = 256
"""Trials of a new version after which it needs no comparison any more."""

SIGMAS: Final = 3.0
"""A new version's share of accepted drafts may be lower by so many standard errors."""


@dataclass(slots=True)
class Outcomes:
    """Counts trials of drafts: positions for which a drafter had a token, and where it was accepted."""

    tried: int = 0
    accepted: int = 0

    @property
    def share(self) -> float:
        return self.accepted / max(1, self.tried)

    def add(self, tried: int, accepted: int) -> None:
        """Count."""
        self.tried += tried
        self.accepted += accepted

    def below(self, other: Outcomes) -> bool:
        """Whether the share is lower than another by more than chance. Source: two-proportion z-test."""
        if min(self.tried, other.tried) < LEAST:
            return False
        pooled = (self.accepted + other.accepted) / (self.tried + other.tried)
        error = sqrt(pooled * (1 - pooled) * (1 / self.tried + 1 / other.tried))
        return other.share - self.share > SIGMAS * error


def outcome(tree: TokenTree, verdict: Verdict, source: int) -> tuple[int, int, bool]:
    """How many positions of an accepted path, and of the one behind it, a drafter had tokens for; at how many its token
    was accepted; and whether those behind the path, of which there were some, were rejected.
    """
    sources = tree.sources.tolist()
    columns = zip(tree.parents.tolist(), sources, tree.kinds.tolist(), strict=True)
    parents = {parent for parent, by, kind in columns if by == source and kind != PROBE}
    tried = accepted = 0
    at = ROOT
    for node in verdict.path:
        if at in parents:
            tried += 1
            accepted += sources[node] == source
        at = node
    rejected = at in parents
    return tried + rejected, accepted, rejected


@dataclass(slots=True, eq=False)
class Version:
    """One state of a drafter's weights.

    Attributes:
        number: 0 is what was served at first. folder: of its weights.
        withdrawn: its drafts were accepted less often than those before it.
    """

    number: int
    folder: Path
    drafter: Drafter
    outcomes: Outcomes
    withdrawn: bool = False


class TenantVersions:
    """What one tenant's requests have taught, and which version drafts for them.

    Args:
        base: what was served at first. rollback: a new version is compared with the one before it.
    Attributes:
        current: the newest that was not taken back.
        before: what it is compared with; None once it is not any more.
        new: requests since the last round. rounds, promoted, rolled_back: how often there was one.
        newest: the highest number so far.
    """

    def __init__(self, base: Version, *, rollback: bool) -> None:
        self.base = self.current = base
        self.before: Version | None = None
        self.new = self.rounds = self.promoted = self.rolled_back = self.newest = 0
        self._rollback, self._turn = rollback, False

    def choose(self) -> Version:
        """The version for a request that begins. While two are compared, each in turn, so that both get requests of the
        same kinds: otherwise what follows when requests change would look like a worse version.
        """
        self._turn = self.before is None or not self._turn
        return self.current if self._turn or self.before is None else self.before

    def adopt(self, version: Version) -> None:
        """Let another version draft for requests that begin."""
        self.before, self.current = self.current if self._rollback else None, version
        self.newest, self._turn = max(self.newest, version.number), False
        self.promoted += version is not self.base
        self.rolled_back += version is self.base
        for one in self.kept[1:]:
            one.outcomes = Outcomes()

    def count(self, version: Version, tried: int, accepted: int) -> bool:
        """Count trials of a version; whether the current one was taken back for them."""
        version.outcomes.add(tried, accepted)
        current, before = self.current, self.before
        if before is None:
            return False
        if current.outcomes.below(before.outcomes):
            current.withdrawn, self.current, self.before = True, before, None
            self.rolled_back += 1
            return True
        if current.outcomes.tried >= ENOUGH and before.outcomes.tried >= LEAST:
            self.before = None
        return False

    @property
    def kept(self) -> Sequence[Version]:
        """Versions that may draft again: the base, the current one, the one before."""
        return [one for one in (self.base, self.current, self.before) if one is not None]
