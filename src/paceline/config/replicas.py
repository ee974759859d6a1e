"""How many engines answer, and where."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from paceline.config.declared import check_options, documented, option
from paceline.utils import integer, need

MOST_REPLICAS: Final = 1024


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@documented
@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """Says how many replicas `paceline serve` runs, and where.

    Raises:
        ConfigError: a value outside its range.
    """

    replicas: int = option(1, "Engines, each a process of its own.", low=1, high=MOST_REPLICAS)
    max_replicas: int | None = option(None, "Start up to so many while requests queue.")
    ray_address: str | None = option(
        None, "Ray cluster that runs them; default: Ray on this machine alone.", metavar="HOST:PORT",
        check=lambda name, value: need(value != "", name, "be a host with a port, or auto", value),
    )  # fmt: skip
    prefix_routing: bool = option(
        True, "Prompts that begin alike go to the same replica.",
        doc="Prompts that begin alike go to the same replica; otherwise Ray takes the shorter queue of two drawn ones.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_replicas is not None:
            integer("max_replicas", self.max_replicas, self.replicas, MOST_REPLICAS)

    @property
    def most(self) -> int:
        """Replicas there may be at once."""
        return self.max_replicas or self.replicas

    def threads(self, wanted: int | None) -> int:
        """Of each replica: `wanted`, or its share of this machine's cores."""
        return wanted or max(1, cores() // self.most)
