"""Unified Layer Skipping: prompts run all layers, every later token the same evenly spread few of them.

Of L layers floor(L / s) run, for a target speed-up of s: the first, the last, and those whose number is a multiple of
an interval. A prompt is read whole, so that its keys and values are there in all layers; later tokens see them, and
each other in the layers that run. As no layer is entered for one token and left out for another, batches stay whole,
and nothing is decided while it runs. Without fine-tuning what is written falls apart at a speed-up of 2 or more;
`paceline train unified_layer_skipping` makes an adapter that is taught by these very passes.

Source: Accelerating Inference in Large Language Models with a Unified Layer Skipping Strategy (arXiv:2404.06954).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from paceline.errors import ConfigError
from paceline.models.base import LayerPlan, PassResult, Runner
from paceline.models.passes.base import Passes
from paceline.models.passes.skipping import ReducedRows, RowSkipping
from paceline.models.runners.skipping import Opens, PassSkipping, SkippingRunner, native_with_layers
from paceline.utils import number

ROUNDING = 1e-9
"""Quotients such as 3 / 0.3 lie just below the number that is meant."""


def unified_layers(layers: int, speedup: float, *, name: str = "target_speedup") -> list[int]:
    """The layers that Unified Layer Skipping keeps for a target speed-up.

    The first, the last, and evenly spaced ones between.

    Args:
        name: of the speed-up, for the error.
    Raises:
        ConfigError: a speed-up below 1, or one at which fewer than two layers would stay.
    """
    count = math.floor(layers / speedup + ROUNDING) if speedup >= 1 else 0
    if count < 2:
        raise ConfigError(f"{name} must be in 1..{layers / 2:g} for {layers} layers, got {speedup:g}")
    interval = layers // (count - 1)
    between = [layer for layer in range(1, layers - 1) if layer % interval == 0]
    return [0, *between[: count - 2], layers - 1]


class StaticLayers(RowSkipping):
    """All rows behind the border leave out the same layers.

    Args:
        layers: how many there are. kept: those that run.
    """

    def __init__(self, layers: int, kept: Collection[int]) -> None:
        self.left_out = tuple(layer for layer in range(layers) if layer not in kept)
        skipped = frozenset(self.left_out)
        self._plan = LayerPlan(skip_attention=skipped, skip_mlp=skipped)

    def runs_all(self, behind: int) -> bool:
        """See `RowSkipping`."""
        return not self.left_out

    def run(self, passes: Passes, rows: ReducedRows, taps: Collection[int], logits: Sequence[int] | None) -> PassResult:
        """See `RowSkipping`."""
        return passes.run(rows.segments, rows.fed, (), self._plan, taps, logits=logits)


class UnifiedLayerSkipping(PassSkipping):
    """Runs prompts through all layers, and later tokens through evenly spread ones.

    Args:
        speedup: target: that share of the layers is left out, but for 1 / speedup. 1 runs all of them.
    Raises:
        ConfigError: a speed-up below 1, or at which fewer than two of the model's layers would run.
    """

    name = "unified_layer_skipping"

    def __init__(self, *, speedup: float = 2.0) -> None:
        number("speedup", speedup, 1.0, math.inf, "be a number of 1 or more")
        self.speedup = speedup

    def open(self, load: Opens, *, name: str) -> Runner:
        """See `PassSkipping`."""
        native = native_with_layers(load(), self.name, name=name)
        layers = native.spec.num_layers
        kept = unified_layers(layers, self.speedup, name="speedup")
        return SkippingRunner(native, StaticLayers(layers, kept), method=self.name, key=str(len(kept)))  # type: ignore[return-value]  # it takes only handles of its own kind
