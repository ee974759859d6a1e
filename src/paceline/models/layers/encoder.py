"""The encoder of an encoder-decoder model: what a source becomes before the decoder attends to it.

Sources: Attention Is All You Need (arXiv:1706.03762), Whisper (arXiv:2212.04356), Moonshine (arXiv:2410.15608).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from paceline.models.attention.source_attention import Attention, EncoderStep
from paceline.models.layers.decoder import PackedLayer, placement_of
from paceline.models.layers.linear import Map, RowInvariance, make_linear, multiplied_out
from paceline.models.layers.own_weights import OwnWeights, Weights, norm_of
from paceline.models.layers.positions import relative_biases
from paceline.models.layers.rope import Rotary
from paceline.models.spec import ConvolutionSpec, EncoderSpec, ModelSpec, attention_shape
from paceline.models.state.arena import Arena
from paceline.models.state.cross_memory import CrossMemory

PREFIX = "encoder."


@dataclass(frozen=True, slots=True)
class CompiledParts:
    """What of an encoder is compiled.

    Attributes:
        product: makes the linear map of a weight (out, in), its scales (out,) where it is int8, and its bias, if there
            is one; None: PyTorch's takes its place.
        attention: of one source, as of `EncoderStep`.
        dtype: that the encoder computes in, if not the model's own.
    """

    product: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], Map | None] = lambda *_: None
    attention: Attention | None = None
    dtype: torch.dtype | None = None


class Encoder:
    """Sources in, what the decoder attends to out; many are read side by side, and none depends on its neighbours.

    Args:
        spec: of the whole model.
        weights: canonical ones; those of the encoder, and of what turns its states into the decoder's keys and values,
            are taken out.
        compiled: what takes the place of PyTorch's operators.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        row_invariant: RowInvariance = True,
        compiled: CompiledParts = CompiledParts(),
    ) -> None:
        self._memory_shape, embedding = (-1, 2 * spec.num_kv_heads, spec.head_dim), weights["embed.weight"]
        dtype, own = compiled.dtype or embedding.dtype, dict[str, torch.Tensor]()
        for name in [name for name in weights if name.startswith(PREFIX) or ".cross_kv." in name]:
            weight = weights.pop(name)
            own[name.removeprefix(PREFIX)] = weight.to(dtype) if weight.dtype is embedding.dtype else weight

        def maps(weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None) -> Map:
            made = compiled.product(weight, scale, bias)
            return _by_operators(weight, scale, bias, row_invariant) if made is None else made

        shared = row_invariant, dtype
        makers = {name: own.pop(name) for name in list(own) if ".cross_kv." in name}
        self._memory_maps = [
            OwnWeights(makers, f"layers.{i}.", spec, *shared, maps=maps).linear("cross_kv")
            for i in range(spec.num_layers)
        ]
        self.spec = _encoder_of(spec)
        model, device = self.spec.model, embedding.device
        self.shape, self.dtype, self._attention = attention_shape(model), dtype, compiled.attention
        self._convolutions = [_Convolution(conv, own, number) for number, conv in enumerate(self.spec.convolutions, 1)]
        self._embedding = own.pop("embed.weight", embedding)
        self._scale = torch.tensor(model.embedding_multiplier, dtype=dtype).item()
        self._placement, self._norm = placement_of(model, own, dtype, device), norm_of(model, own, "final_norm")
        self._biases, self._rotary = relative_biases(model, own), Rotary(model.ropes, device, dtype)
        self._layers = [
            PackedLayer(model, self.shape, i, OwnWeights(own, f"layers.{i}.", model, *shared, maps=maps))
            for i in range(model.num_layers)
        ]

    def read(self, sources: Sequence[torch.Tensor], arena: Arena) -> list[CrossMemory]:
        """What the decoder attends to, of each source, as for `run`; in slots of the decoder's arena."""
        memories = []
        for states in self.run(sources):
            memory = CrossMemory(arena, len(states))
            for layer, make in enumerate(self._memory_maps):
                memory.write(layer, make(states).view(self._memory_shape))
            memories.append(memory)
        return memories

    def run(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """States (rows, hidden) of each source: ids (tokens,) int64, or features (channels, steps) or (steps,)."""
        embedded = [self._embedded(source) for source in sources]
        rows = [len(states) for states in embedded]
        x, at = torch.cat(embedded), [position for count in rows for position in range(count)]
        x = self._placement.apply(x, at)
        step, rotations = EncoderStep(self.shape, rows, self._biases, self._attention), self._rotary.at(at, ())
        for layer in self._layers:
            layer.run(x, step, rotations)
        return list((x if self._norm is None else self._norm(x)).split(rows))

    def _embedded(self, source: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) in a tensor of its own."""
        if not self._convolutions:
            return self._embedding[source].to(self.dtype) * self._scale
        x = source.to(self.dtype).view(-1, source.shape[-1])
        for convolution in self._convolutions:
            x = convolution.run(x)
        return x.t().contiguous()


def _by_operators(
    weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, row_invariant: RowInvariance
) -> Map:
    """PyTorch's product; int8 weights are multiplied out each time, which is little beside many rows."""
    if scale is None:
        return make_linear(weight, bias, row_invariant=row_invariant)
    return multiplied_out(weight, scale, bias)


def _encoder_of(spec: ModelSpec) -> EncoderSpec:
    assert spec.encoder is not None, "a decoder-only model has no encoder"
    return spec.encoder


class _Convolution:
    def __init__(self, spec: ConvolutionSpec, weights: Weights, number: int) -> None:
        name = f"convolutions.{number}"
        self._spec, self._act = spec, torch.tanh if spec.activation == "tanh" else F.gelu
        self._weight, self._bias = weights.pop(f"{name}.weight"), weights.pop(f"{name}.bias", None)
        self._norm = (weights.pop(f"{name}.norm.weight"), weights.pop(f"{name}.norm.bias")) if spec.norm else None

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """(inputs, steps) -> (outputs, fewer steps)."""
        spec = self._spec
        out = self._act(F.conv1d(x.unsqueeze(0), self._weight, self._bias, spec.stride, spec.padding))
        if self._norm is not None:
            out = F.group_norm(out, 1, *self._norm)
        return out[0]
