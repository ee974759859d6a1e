"""Exits of a sorted draft model (S2D), as the key `paceline_exits` of its config.json has them:

    {"layers": [6, 9], "thresholds": [{"target": {"name": ..., "fingerprint": ...}, "thresholds": [0.8, 0.9]}]}

One draft model serves several targets, each with thresholds of its own.

Source: S2D: sorted speculative decoding for more efficient deployment of nested large language models
(arXiv:2407.01955).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from paceline.errors import CheckpointError
from paceline.models.heads.head_files import shape_of

KEY: Final = "paceline_exits"


@dataclass(frozen=True, slots=True)
class DraftExits:
    """Says after which layers a token may leave, and how sure it must be for which target.

    Attributes:
        layers: ascending, without the last one, where all leave.
        chosen: of each target, its facts (`name`, `fingerprint`) and a threshold for each of these layers.
    """

    layers: tuple[int, ...]
    chosen: tuple[tuple[Mapping[str, str], tuple[float, ...]], ...] = ()

    def thresholds_for(self, fingerprint: str) -> tuple[float, ...] | None:
        """Those of a target of this shape, whatever its dtype; None where none were chosen."""
        known = {shape_of(target.get("fingerprint", "")): thresholds for target, thresholds in self.chosen}
        return known.get(shape_of(fingerprint))

    def chosen_for(self, target: Mapping[str, str], thresholds: Sequence[float]) -> DraftExits:
        """The same with these thresholds for a target, in place of those for another one of its shape."""
        shape = shape_of(target["fingerprint"])
        others = tuple(each for each in self.chosen if shape_of(each[0].get("fingerprint", "")) != shape)
        return replace(self, chosen=(*others, (target, tuple(thresholds))))

    def as_json(self) -> dict[str, Any]:
        """Its entry of config.json."""
        chosen = [{"target": dict(target), "thresholds": list(each)} for target, each in self.chosen]
        return {KEY: {"layers": list(self.layers), "thresholds": chosen}}

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str) -> DraftExits | None:
        """What a config.json says; None where it says nothing.

        Args:
            name: of the checkpoint, for the message.
        Raises:
            CheckpointError: it says something else.
        """
        if KEY not in config:
            return None
        stored, problem = config[KEY], f"{name}: {KEY} in config.json must hold layers and a threshold for each; train"
        try:
            layers = tuple(int(layer) for layer in stored["layers"])
            chosen = tuple(
                (dict(each["target"]), tuple(float(one) for one in each["thresholds"])) for each in stored["thresholds"]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{problem} it again") from error
        if any(len(thresholds) != len(layers) for _, thresholds in chosen):
            raise CheckpointError(f"{problem} it again")
        return cls(layers, chosen)


def usual_exits(layers: int) -> tuple[int, ...]:
    """A half and three quarters of so many layers, as in the paper."""
    return tuple(sorted({max(1, layers // 2), max(1, 3 * layers // 4)} - {layers}))
