"""A decoder layer with attention to a source that can be trained, of the form that a ModelSpec describes: what
`models.layers.decoder` runs, written for gradients, with canonical names of weights (`checkpoints.targets`).

Axes: b = rows, t = tokens, n = tokens of a document, s = rows of its source, h = heads, g = key-value heads, e =
dimensions of a head, d = hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import CapabilityError
from paceline.models import ModelSpec
from paceline.models.layers import ACTIVATIONS, Rotation


class Affine(nn.Module):
    """Multiplies by a matrix, and adds a bias where there is one."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.bias = None if bias is None else nn.Parameter(bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Norm(Affine):
    """Norms states as a spec's norms do."""

    def __init__(self, weight: Tensor, bias: Tensor | None, spec: ModelSpec) -> None:
        super().__init__(weight, bias)
        self._eps, self._layer = spec.norm_eps, spec.norm == "layer"

    def forward(self, x: Tensor) -> Tensor:
        x, size = x.float(), (x.shape[-1],)
        if self._layer:
            return F.layer_norm(x, size, self.weight, self.bias, self._eps)
        return F.rms_norm(x, size, self.weight, self._eps)


def modules_of(weights: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, nn.Module]:
    """A norm for each vector, and a linear map for each matrix, by the names of their weights."""
    modules: dict[str, nn.Module] = {}
    for name in (key.removesuffix(".weight") for key in weights if key.endswith(".weight")):
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        modules[name] = Norm(weight, bias, spec) if weight.dim() == 1 else Affine(weight, bias)
    return modules


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Says what the tokens of a batch see in one layer.

    Attributes:
        mask: (b, 1 or h, t, t) added to the scores of self attention.
        rotation: of queries and keys, (b * t, 1, dims); None where nothing is rotated.
        sizes: tokens of each document, by row.
        memories: its source's keys and values (s, 2 * g, e), by row and document.
    """

    mask: Tensor
    rotation: Rotation | None
    sizes: Sequence[Sequence[int]]
    memories: Sequence[Sequence[Tensor]]


class SourceLayer(nn.ModuleDict):
    """Reads what is before a token and all of its source.

    Args:
        weights: canonical ones of the layer, without its number; those of keys and values of the source are not used.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor]) -> None:
        super().__init__(modules_of(weights, spec))
        self._spec = spec

    def forward(self, x: Tensor, seen: Surroundings) -> Tensor:
        """(b, t, d) of states (b, t, d)."""
        x = self._added(x, self._self_attended(self._normed("attn_norm", x), seen), "attn")
        if "cross_norm" in self or "residual_cross_norm" in self:
            x = self._normed("residual_cross_norm", x + self._cross_attended(self._normed("cross_norm", x), seen))
        return self._added(x, self._transformed(self._normed("mlp_norm", x)), "mlp")

    def _added(self, x: Tensor, out: Tensor, part: str) -> Tensor:
        x = x + self._normed(f"post_{part}_norm", out) * self._spec.residual_multiplier
        return self._normed(f"residual_{part}_norm", x)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        normed: Tensor = self[name](x) if name in self else x
        return normed

    def _self_attended(self, x: Tensor, seen: Surroundings) -> Tensor:
        spec, (b, t, _) = self._spec, x.shape
        qkv = self["qkv"](x).view(b * t, -1, spec.head_dim)
        turned, values = qkv.split((spec.num_heads + spec.num_kv_heads, spec.num_kv_heads), 1)
        if seen.rotation is not None:
            turned = rotated(turned, seen.rotation)
        queries, keys = turned.split((spec.num_heads, spec.num_kv_heads), 1)
        q, k, v = (part.reshape(b, t, -1, spec.head_dim).transpose(1, 2) for part in (queries, keys, values))
        attended: Tensor = self["o"](self._attention(q, k, v, seen.mask).transpose(1, 2).flatten(2))
        return attended

    def _cross_attended(self, x: Tensor, seen: Surroundings) -> Tensor:
        spec, (b, t, _) = self._spec, x.shape
        queries = self["cross_q"](x).view(b, t, spec.num_heads, spec.head_dim)
        rows = []
        for row, sizes, memories in zip(queries, seen.sizes, seen.memories, strict=True):
            parts = row.split([*sizes, t - sum(sizes)])
            mixed = [self._over(part, memory) for part, memory in zip(parts, memories, strict=False)]
            rows.append(torch.cat([*mixed, torch.zeros_like(parts[-1])]))
        attended: Tensor = self["cross_o"](torch.stack(rows).flatten(2))
        return attended

    def _over(self, queries: Tensor, memory: Tensor) -> Tensor:
        """(n, h, e) of queries (n, h, e)."""
        keys, values = memory.transpose(0, 1)[None].split(self._spec.num_kv_heads, 1)
        return self._attention(queries.transpose(0, 1)[None], keys, values)[0].transpose(0, 1)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        k, v, mask = k.to(q.dtype), v.to(q.dtype), None if mask is None else mask.to(q.dtype)
        grouped = self._spec.num_heads != self._spec.num_kv_heads
        return F.scaled_dot_product_attention(q, k, v, mask, scale=self._spec.scale, enable_gqa=grouped)

    def _transformed(self, x: Tensor) -> Tensor:
        inner, act = self["gate_up"](x), ACTIVATIONS[self._spec.activation]
        if self._spec.gated:
            gate, up = inner.chunk(2, -1)
            inner = act(gate) * up
        else:
            inner = act(inner)
        transformed: Tensor = self["down"](inner)
        return transformed


def rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    """(r, heads, e) with rotary embedding: `models.layers.decoder.rotate_`, not in place."""
    cos, signed_sin, _ = rotation
    dims = cos.shape[-1]
    turned, rest = heads.split((dims, heads.shape[-1] - dims), -1)
    return torch.cat((turned * cos + turned.roll(dims // 2, -1) * signed_sin, rest), -1)


def check_trainable(spec: ModelSpec, name: str) -> None:
    """Reject layers of a form that is not written here.

    Raises:
        CapabilityError: naming it.
    """
    forms = {
        "mixtures of experts": spec.moe, "latent attention": spec.latent, "norms of queries and keys": spec.qk_norm,
        "attention sinks": spec.attention_sinks, "soft caps": spec.attention_softcap or spec.logit_softcap,
        "attention beside the MLP": spec.parallel, "norms stored as w - 1": spec.norm_offset,
        "sliding windows": any(layer.window for layer in spec.layers),
        "recurrent states": spec.states,
        f"activation {spec.activation}": spec.activation not in ACTIVATIONS,
    }  # fmt: skip
    for form, there in forms.items():
        if there:
            raise CapabilityError(f"{name} has {form}, with which layers are not trained here; choose another method")
