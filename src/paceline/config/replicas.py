"""How many engines answer, and where."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from paceline.utils import integer, need

MOST_REPLICAS: Final = 1024


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """Of `paceline serve --replicas`.

    Attributes:
        replicas: engines, each in a process of its own; the least number with `max_replicas`.
        max_replicas: as many are started while requests queue; None: `replicas`.
        ray_address: of a Ray cluster that runs already; None starts one on this machine.
        prefix_routing: prompts that begin alike go to the same replica; otherwise Ray takes the shorter queue of two
            that are drawn at random.
    Raises:
        ConfigError: a value outside its range.
    """

    replicas: int = 1
    max_replicas: int | None = None
    ray_address: str | None = None
    prefix_routing: bool = True

    def __post_init__(self) -> None:
        integer("replicas", self.replicas, 1, MOST_REPLICAS)
        if self.max_replicas is not None:
            integer("max_replicas", self.max_replicas, self.replicas, MOST_REPLICAS)
        need(self.ray_address != "", "ray_address", "be a host with a port, or auto", self.ray_address)

    @property
    def most(self) -> int:
        """Replicas there may be at once."""
        return self.max_replicas or self.replicas

    def threads(self, given: int | None) -> int:
        """Of each replica: `given`, or its share of this machine's cores."""
        return given or max(1, cores() // self.most)
