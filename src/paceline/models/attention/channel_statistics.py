"""Which channels of keys carry most of their products with queries: found on texts, kept in a file beside the model.

Of each head and channel c the mean of |q_c k_c| over the tokens of the texts is taken, after rotation, q and k being of
the same token; query heads that share keys are averaged. The file ranks all channels, so that any number of them can be
taken.

Source: Post-Training Sparse Attention with Double Sparsity (arXiv:2408.07092), offline calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.errors import CheckpointError
from paceline.models.attention.kv_selection import KVSelection
from paceline.models.attention.segments import Segment
from paceline.models.attention.tree_attention import Masks, SequenceStep
from paceline.models.spec import AttentionShape, ModelSpec

FORMAT: Final = "paceline channels 1"
"""Of a file's metadata."""


class ChannelStatistics(KVSelection):
    """Attends to everything, and adds up what channels contribute.

    Attributes:
        sums: layer -> (kv heads, head dim) float64 sums of |q_c k_c| over tokens and the query heads of a key.
        tokens: that were read.
    """

    name = "channel_statistics"

    def __init__(self) -> None:
        self.sums: dict[int, torch.Tensor] = {}
        self.tokens = 0

    def prepare(self, spec: ModelSpec, device: torch.device, *, name: str) -> None:
        """See `KVSelection`."""
        super().prepare(spec, device, name=name)
        shape = (spec.num_kv_heads, spec.head_dim)
        self.sums = {
            index: torch.zeros(shape, dtype=torch.float64) for index, layer in enumerate(spec.layers) if layer.attention
        }

    def step(self, shape: AttentionShape, masks: Masks, segment: Segment) -> StatisticsStep:
        """See `KVSelection`."""
        self.tokens += segment.rows
        return StatisticsStep(self, shape, masks, segment)

    def ranked(self) -> dict[int, torch.Tensor]:
        """Layer -> (kv heads, head dim) int64 channels, that with the largest mean first."""
        return {layer: torch.argsort(sums, -1, descending=True) for layer, sums in self.sums.items()}

    def share(self, part: int) -> float:
        """How much of all products the first 1 / part of the channels carries, a mean over layers and heads."""
        shares = []
        for sums in self.sums.values():
            rising = sums.sort(-1, descending=True).values
            shares.append(rising[:, : max(1, sums.shape[-1] // part)].sum(-1) / sums.sum(-1))
        return float(torch.cat(shares).mean())

    def save(self, path: Path, *, name: str) -> None:
        """Write the ranked channels as safetensors.

        Args:
            name: of the model, for those who look into the file.
        """
        tensors = {f"layers.{layer}.channels": one.to(torch.int16) for layer, one in self.ranked().items()}
        save_file(tensors, path, {"format": FORMAT, "model": name, "tokens": str(self.tokens)})


class StatisticsStep(SequenceStep):
    """The rows of one sequence."""

    __slots__ = ("_statistics",)

    def __init__(self, statistics: ChannelStatistics, shape: AttentionShape, masks: Masks, segment: Segment) -> None:
        super().__init__(shape, masks, segment)
        self._statistics = statistics

    def attend(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See `AttentionStep`."""
        kv_heads, groups, size = self._shape.kv_heads, self._shape.groups, self._shape.head_dim
        queries = qkv.narrow(1, 0, groups * kv_heads).view(-1, groups, kv_heads, size).float()
        keys = qkv.narrow(1, groups * kv_heads, kv_heads).unsqueeze(1).float()
        products = (queries * keys).abs().sum((0, 1), dtype=torch.float64)
        self._statistics.sums[layer] += products.cpu()
        return super().attend(layer, qkv, sinks)


def read_channels(path: Path, spec: ModelSpec, *, name: str) -> Mapping[int, torch.Tensor]:
    """Layer -> (kv heads, head dim) int64 ranked channels.

    Args:
        name: of the model that they are for.
    Raises:
        CheckpointError: no such file, no channels in it, or those of a model of another shape.
    """
    made_by = "`paceline analyze channels` makes one"
    if not path.is_file():
        raise CheckpointError(f"no channels at {str(path)!r}; {made_by}")
    try:
        with safe_open(path, "pt") as opened:
            if (opened.metadata() or {}).get("format") != FORMAT:
                raise CheckpointError(f"{str(path)!r} holds no channels; {made_by}")
            found = {key: opened.get_tensor(key).long() for key in list(opened.keys())}
    except SafetensorError as error:
        raise CheckpointError(f"{str(path)!r} holds no channels ({error}); {made_by}") from None
    layers = [index for index, layer in enumerate(spec.layers) if layer.attention]
    whole = torch.arange(spec.head_dim).expand(spec.num_kv_heads, -1)
    wanted = {f"layers.{layer}.channels" for layer in layers}
    if found.keys() != wanted or not all(torch.equal(one.sort(-1).values, whole) for one in found.values()):
        raise CheckpointError(f"{str(path)!r} holds the channels of another model than {name}; {made_by} for it")
    return {layer: found[f"layers.{layer}.channels"] for layer in layers}
