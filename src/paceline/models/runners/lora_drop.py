"""LoRA-Drop: on most tokens some layers are replaced by what they gave last, and a low-rank correction.

Behind the prompt one token in k + 1 runs all layers: it writes keys and values everywhere, and what each droppable
layer gives becomes that layer's *anchor*. On the k tokens that follow, a droppable layer gives its anchor plus
alpha / r * B A x, where x is what enters the layer at this token, and neither attends nor writes keys. The other
layers, among them the first and the last, run for every token.

Droppable layers thus have keys of the prompt and of the refreshing tokens alone, at their true positions. What was
dropped leaves gaps there, which no later token sees; their slots stay unused, so that the cache is as large as without.
Prompts, trees and batches: phases count from each text's own prompt, and a draft is verified row by row in the phase
of its position. Of the layers that may be dropped the paper names the share, and that the first ones and the last run
always; here they are the ones right before the last (own reading): untrained, SmolLM2 departs less so than where
dropped layers lie between kept ones, since each break replaces the whole residual stream.

Sources: LoRA-Drop: Temporal LoRA Decoding for Efficient LLM Inference (arXiv:2601.02569); that the correction reads the
layer's current input is as in its authors' code, where a summary of the paper names the state of the token before.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.errors import CheckpointError
from paceline.models.attention.gaps import Gaps
from paceline.models.base import LayerPlan, PassResult, Runner
from paceline.models.passes.base import Passes
from paceline.models.passes.skipping import ReducedRows, RowSkipping
from paceline.models.runners.skipping import Opens, PassSkipping, SkippingRunner, native_with_layers
from paceline.models.spec import ModelSpec
from paceline.utils import integer, need, number, replacing

FILE: Final = "lora_drop.safetensors"
FORMAT: Final = "paceline lora_drop 1"


@dataclass(frozen=True, slots=True)
class Corrections:
    """What takes the place of layers.

    Attributes:
        reuse: tokens that follow each one that runs all layers.
        factors: layer -> A (rank, hidden) and B (hidden, rank), B with alpha / rank times its values, ascending.
    """

    reuse: int
    factors: Mapping[int, tuple[torch.Tensor, torch.Tensor]]


def droppable(layers: int, share: float) -> tuple[int, ...]:
    """So large a share of all layers, rounded, those right before the last one; the first one always stays."""
    count = max(0, min(layers - 2, round(layers * share)))
    return tuple(range(layers - 1 - count, layers - 1))


def write_corrections(
    folder: Path,
    factors: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    *,
    alpha: float,
    reuse: int,
    facts: Mapping[str, Any],
) -> None:
    """Write what was trained into a folder, as float32.

    Args:
        factors: layer -> A (rank, hidden) and B (hidden, rank), as learned.
        facts: where they come from.
    """
    tensors = {
        f"layers.{layer}.{side}": one.detach().float().contiguous().cpu()
        for layer, pair in factors.items()
        for side, one in zip("ab", pair, strict=True)
    }
    about = {"format": FORMAT, "alpha": repr(alpha), "reuse": str(reuse), "facts": json.dumps(dict(facts))}
    with replacing(folder / FILE) as fresh:
        save_file(tensors, fresh, about)


def read_corrections(folder: Path, spec: ModelSpec, *, name: str) -> Corrections:
    """Read what `write_corrections` wrote, for a model.

    Args:
        name: of the model, for messages.
    Raises:
        CheckpointError: nothing there, something else, or the corrections of another model.
    """
    file = folder / FILE
    if not file.is_file():
        raise CheckpointError(f"no {FILE} in {folder}; `paceline train lora_drop` makes one")
    try:
        with safe_open(file, "pt") as opened:
            about = opened.metadata() or {}
            found = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  it is no dict
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} holds no corrections ({error})") from error
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{file} holds no corrections; `paceline train lora_drop` writes them")
    alpha, reuse = float(about["alpha"]), int(about["reuse"])
    layers = sorted({int(key.split(".")[1]) for key in found})
    factors = {layer: (found[f"layers.{layer}.a"], found[f"layers.{layer}.b"]) for layer in layers}
    fits = all(
        0 < layer < spec.num_layers - 1 and a.shape == (a.shape[0], spec.hidden_size) and b.shape == a.T.shape
        for layer, (a, b) in factors.items()
    )
    if not fits:
        raise CheckpointError(f"{file} holds the corrections of another model than {name}")
    return Corrections(reuse, {layer: (a, b * (alpha / len(a))) for layer, (a, b) in factors.items()})


class AnchoredLayers(RowSkipping):
    """One row in reuse + 1 runs all layers; the others take anchors and corrections in the place of some.

    Args:
        layers: how many there are. left_out: those that are dropped, neither the first nor the last.
        corrections: see `Corrections`; layers without factors are taken as they were.

    Attributes:
        every: one row in so many runs all layers.
    """

    keeps_anchors = True

    def __init__(self, layers: int, left_out: Sequence[int], corrections: Corrections) -> None:
        self.left_out = tuple(left_out) if corrections.reuse else ()
        self.every, self._factors = corrections.reuse + 1, corrections.factors
        kept = [layer for layer in range(layers) if layer not in self.left_out]
        starts = [layer for layer in kept if layer - 1 not in kept]
        self._spans = [(first, next(at for at in range(first, layers + 1) if at not in kept)) for first in starts]
        self._plans = [LayerPlan(first=first, stop=stop) for first, stop in self._spans]

    def runs_all(self, behind: int) -> bool:
        """See `RowSkipping`."""
        return behind % self.every == 0

    def last_whole(self, behind: int) -> int:
        """See `RowSkipping`."""
        return behind - behind % self.every

    def run(self, passes: Passes, rows: ReducedRows, taps: Collection[int], logits: Sequence[int] | None) -> PassResult:
        """See `RowSkipping`: layers that are kept run in the spans between dropped ones."""
        kept: dict[int, torch.Tensor] = {}
        fed, last = rows.fed, len(self._spans) - 1
        for number_of, ((first, stop), plan) in enumerate(zip(self._spans, self._plans, strict=True)):
            ends = number_of == last
            wanted = [tap for tap in taps if first <= tap < stop or (tap < 0 and not first) or (ends and tap >= stop)]
            result = passes.run(rows.segments, fed, (), plan, wanted, logits=logits if ends else (), states=not ends)
            kept |= result.taps
            if ends:
                return PassResult(result.logits, result.states, kept, result.best)
            fed = self._dropped(stop, result.states, rows.anchors, taps, kept)
        raise AssertionError("the last layer always runs")

    def _dropped(
        self, first: int, x: torch.Tensor, anchors: torch.Tensor, taps: Collection[int], kept: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """(rows, hidden) behind the dropped layers from `first` on, of what enters them."""
        layer = first
        while layer in self.left_out:
            anchor = anchors[:, self.left_out.index(layer)]
            if (pair := self._factors.get(layer)) is not None:
                a, b = pair
                anchor = anchor + (x @ a.T) @ b.T
            x = anchor.contiguous()
            if layer in taps:
                kept[layer] = x
            layer += 1
        return x


class LoraDrop(PassSkipping):
    """Has most tokens reuse what some layers gave last, with a low-rank correction.

    Args:
        adapter: the folder that `paceline train lora_drop` has written for this model: which layers are dropped, and
            their corrections. None drops without a correction.
        drop: share of the layers that is dropped, where there is no adapter; 0 drops none.
        reuse: tokens that follow each one that runs all layers; 0 drops none. None is what the adapter was trained for,
            or 3.
    Raises:
        ConfigError: a value outside its range, or both an adapter and a share.
        CheckpointError: no adapter there, or one of another model.
    """

    name = "lora_drop"

    def __init__(self, *, adapter: str | None = None, drop: float | None = None, reuse: int | None = None) -> None:
        need(adapter is None or drop is None, "drop", "be left out beside an adapter, which says it", drop)
        if drop is not None:
            number("drop", drop, 0.0, 1.0, "lie in 0..1")
        if reuse is not None:
            integer("reuse", reuse, 0, 1024)
        self._adapter, self._drop, self._reuse = adapter, 0.5 if drop is None else drop, reuse

    def open(self, load: Opens, *, name: str) -> Runner:
        """See `PassSkipping`."""
        gaps = Gaps()
        native = native_with_layers(load(selection=gaps), self.name, name=name)
        rows = self._rows(native.spec, native.info.dtype, native.info.device, name=name)
        windowed = [layer for layer in rows.left_out if native.spec.layers[layer].window is not None]
        need(not windowed, "skipping", "drop no layers with a sliding window", windowed)
        gaps.follow(rows.left_out, rows.every)
        key = f"{len(rows.left_out)}-{rows.every}"
        return SkippingRunner(native, rows, method=self.name, key=key)  # type: ignore[return-value]  # it takes only handles of its own kind

    def _rows(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, *, name: str) -> AnchoredLayers:
        if self._adapter is None:
            corrections = Corrections(3 if self._reuse is None else self._reuse, {})
            return AnchoredLayers(spec.num_layers, droppable(spec.num_layers, self._drop), corrections)
        read = read_corrections(Path(self._adapter).expanduser(), spec, name=name)
        factors = {layer: (a.to(device, dtype), b.to(device, dtype)) for layer, (a, b) in read.factors.items()}
        reuse = read.reuse if self._reuse is None else self._reuse
        return AnchoredLayers(spec.num_layers, tuple(factors), Corrections(reuse, factors))
