"""What a format of another engine is, and what several share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from paceline.errors import ConfigError
from paceline.models.heads.head_config import LAYER_KEYS, HeadConfig

Shapes = Mapping[str, Sequence[int]]
Found = Mapping[str, Any]


class Target(NamedTuple):
    """The model that a head is written for.

    Attributes:
        name: or path. kind: the architecture in its config.json.
    """

    name: str
    kind: str


class HeadFormat(ABC):
    """The files of one engine, as config.json and tensors.

    Attributes:
        name: for users, and in messages.
        methods: whose heads can be written.
        whole: tensors that other engines do not take from the target, and which are filled in before a head is written.
    """

    name: ClassVar[str]
    methods: ClassVar[tuple[str, ...]]
    whole: ClassVar[tuple[str, ...]] = ("head.weight",)

    @abstractmethod
    def matches(self, found: Found, shapes: Shapes) -> bool:
        """Whether a folder has this format, by its config.json and the shapes of its tensors."""

    @abstractmethod
    def config_of(self, found: Found, shapes: Shapes, num_layers: int) -> HeadConfig:
        """What a folder holds; `num_layers` are the target's.

        Raises:
            ConfigError, KeyError, TypeError: config.json does not describe a head, or one that is not supported.
        """

    @abstractmethod
    def canonical(self, name: str, config: HeadConfig) -> str | None:
        """The name of `tensors_of` for a tensor; None for one that says nothing that others do not say."""

    def finish(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors, by their canonical names, with our meaning of numbers where the format has another."""
        return weights

    @abstractmethod
    def written(
        self, config: HeadConfig, weights: Mapping[str, Tensor], target: Target
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json and tensors of a head that has all that `whole` names.

        Raises:
            ConfigError: something that the format has no place for.
        """

    def lacks(self, what: str) -> ConfigError:
        """The error for what cannot be written."""
        return ConfigError(f"the format {self.name!r} has no place for {what}; write 'paceline', or another format")


def layer_of(found: Found) -> dict[str, Any]:
    """The keys of a decoder layer; newer transformers keep the rotary base in an object."""
    rope = found.get("rope_parameters") or {}
    given = {"rope_theta": rope.get("rope_theta"), **found}
    if rope.get("rope_type", "default") != "default":
        given["rope_scaling"] = dict(rope)
    return {key: given[key] for key in LAYER_KEYS if given.get(key) is not None}


def dtype_of(weights: Mapping[str, Tensor]) -> str:
    """The name of the weights' dtype, for a config.json."""
    return str(next(one for one in weights.values() if one.is_floating_point()).dtype).removeprefix("torch.")


def heads_rows(config: HeadConfig, weights: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor]]:
    """The rows of every head: its own, or those of all.

    Raises:
        KeyError: there are neither.
    """
    for head in range(config.num_heads):
        own = f"heads.{head}.head.weight"
        yield head, weights[own if own in weights else "head.weight"]
