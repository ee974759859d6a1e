"""What a mixer is, and which there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from paceline.models.layers.mixers.gated_delta import GatedDelta
from paceline.models.layers.mixers.gated_memory import GatedMemory
from paceline.models.layers.mixers.kimi_delta import KimiDelta
from paceline.models.layers.mixers.light_net import LightNet
from paceline.models.layers.mixers.mamba import Mamba
from paceline.models.layers.mixers.mamba2 import Mamba2
from paceline.models.layers.mixers.short_conv import ShortConv
from paceline.models.layers.mixers.simple_unit import SimpleUnit
from paceline.models.layers.mixers.step import RecurrentStep
from paceline.models.layers.own_weights import OwnWeights
from paceline.models.mixer_spec import (
    DeltaSpec,
    GatedMemorySpec,
    KimiDeltaSpec,
    LightNetSpec,
    Mamba2Spec,
    MambaSpec,
    MixerSpec,
    ShortConvSpec,
    SimpleUnitSpec,
)


class Mixer(Protocol):
    """Takes the place of attention in a layer, or stands beside it."""

    def run(self, normed: torch.Tensor, step: RecurrentStep, layer: int) -> torch.Tensor:
        """What it makes of normed states (rows, hidden), as a new tensor; states of layer `layer` are read and left."""


KINDS: Mapping[type[Any], Callable[[Any, OwnWeights], Mixer]] = {
    ShortConvSpec: ShortConv,
    DeltaSpec: GatedDelta,
    KimiDeltaSpec: KimiDelta,
    Mamba2Spec: Mamba2,
    MambaSpec: Mamba,
    GatedMemorySpec: GatedMemory,
    LightNetSpec: LightNet,
    SimpleUnitSpec: SimpleUnit,
}


def make_mixer(spec: MixerSpec, weights: OwnWeights) -> Mixer:
    """The mixer of a layer; takes its weights."""
    return KINDS[type(spec)](spec, weights)
