"""The formats by name, and how a folder's is found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline.errors import CheckpointError, ConfigError
from paceline.models.heads.formats.base import HeadFormat, Shapes
from paceline.models.heads.formats.dflash import DeepSpecFormat, DFlashFormat
from paceline.models.heads.formats.eagle import EagleFormat
from paceline.models.heads.formats.falcon import FalconFormat
from paceline.models.heads.formats.hydra import HydraFormat
from paceline.models.heads.formats.longspec import LongSpecFormat
from paceline.models.heads.formats.medusa import MedusaFormat, VllmMedusaFormat
from paceline.models.heads.formats.mlp_speculator import MLPSpeculatorFormat
from paceline.models.heads.formats.speculators import SpeculatorsFormat
from paceline.models.heads.head_config import HeadConfig

FORMATS: Final[tuple[HeadFormat, ...]] = (
    SpeculatorsFormat(),
    DFlashFormat(),
    DeepSpecFormat(),
    LongSpecFormat(),
    FalconFormat(),
    MLPSpeculatorFormat(),
    HydraFormat(),
    VllmMedusaFormat(),
    MedusaFormat(),
    EagleFormat(),
)

WRITTEN: Final = tuple(known_format.name for known_format in FORMATS)
"""Formats that a head can be written in."""


def format_of(config: Mapping[str, Any], shapes: Shapes, where: object) -> HeadFormat:
    """The format of a folder, by its config.json and the shapes of its tensors.

    Raises:
        CheckpointError: none that is known.
    """
    for known_format in FORMATS:
        if known_format.matches(config, shapes):
            return known_format
    raise CheckpointError(
        f"{where} is no head: its config.json has neither 'paceline_head' nor what speculators, DFlash, DSpark, EAGLE, "
        "Falcon, LongSpec, Medusa, Hydra or IBM's accelerators write; give the folder of a head"
    )


def foreign_config(
    format: HeadFormat, config: Mapping[str, Any], shapes: Shapes, num_layers: int, where: object
) -> HeadConfig:
    """The config of a head of another engine.

    Args:
        config: its config.json. num_layers: of the target. where: folder, for messages.
    Raises:
        CheckpointError: it does not describe a head, or one of its options is not supported.
    """
    try:
        return format.config_of(config, shapes, num_layers)
    except (KeyError, TypeError, AttributeError, ValueError, ConfigError) as error:
        why = f"no key {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(
            f"{where}: config.json does not describe a head of {format.name} that can be read ({why}); write it again"
        ) from None


def writer(name: str, method: str) -> HeadFormat:
    """The format of that name, for heads of that method.

    Raises:
        ConfigError: it does not hold such heads.
    """
    head_format = next(known_format for known_format in FORMATS if known_format.name == name)
    if method not in head_format.methods:
        others = [known_format.name for known_format in FORMATS if method in known_format.methods]
        raise ConfigError(
            f"a head of method {method!r} has no form in the format {name!r}, which holds "
            f"{' and '.join(head_format.methods)}; write {' or '.join([*others, 'paceline'])}"
        )
    return head_format
