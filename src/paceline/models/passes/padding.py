"""Sizes that do not fill vectors, filled up with zeros: the same model in a spec and weights that compiled passes take.

Heads grow to whole vectors, and so do the halves of what is rotated: first into the dimensions of the head that pass
unrotated, which the wider table leaves as they are, then into zeros. Norms over heads divide by the number of
dimensions, zeros included; their epsilon and weights make up for that. The inner width of MLPs and experts grows to a
multiple of 8. The hidden size stays: each of a model's norms and everything that reads its states would have to know.
Models with latent attention or mixers stay as they are, and so do encoders, whose attention takes heads of any size.

Weights are padded one by one as they are read, before they are rounded: groups of int4 must not cross heads.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.checkpoints import empty
from paceline.models.spec import ModelSpec

HEAD, INNER = 32, 8
"""What compiled passes want sizes to be multiples of."""

MOST = 1.8
"""Heads that would grow by more than this factor stay as they are: zeros are multiplied and cached like numbers. Those
of Moonshine tiny grow from 36 dimensions to 64.
"""

ZERO = -1
"""In lists of rows: one of zeros."""


def padded_spec(spec: ModelSpec) -> ModelSpec:
    """The spec of the padded model; the same object where nothing is to be padded."""
    head = _up(spec.head_dim, HEAD)
    if head > MOST * spec.head_dim or spec.latent is not None or spec.states:
        return spec
    share = spec.head_dim / head
    wide = replace(
        spec,
        head_dim=head,
        attention_scale=spec.attention_scale if head == spec.head_dim else spec.scale,
        qk_norm_eps=spec.qk_norm_eps if head == spec.head_dim else (spec.qk_norm_eps or spec.norm_eps) * share,
        ropes={key: replace(rope, width=_up(rope.width or rope.dims, HEAD)) for key, rope in spec.ropes.items()},
        intermediate_size=_up(spec.intermediate_size, INNER),
        moe=spec.moe
        and replace(spec.moe, intermediate=_up(spec.moe.intermediate, INNER), shared=_up(spec.moe.shared, INNER)),
    )
    unchanged = {key: replace(rope, width=rope.width or rope.dims) for key, rope in spec.ropes.items()}
    return spec if wide == replace(spec, ropes=unchanged) else wide


def padded(name: str, weight: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """A canonical weight of `spec` (checkpoints.weights) as `padded_spec(spec)` has it."""
    if not name.startswith("layers."):
        return weight
    _, index, kind = name.split(".", 2)
    if kind.startswith(("qkv.", "o.weight", "q_norm.", "k_norm.", "cross_q.", "cross_kv.", "cross_o.weight")):
        return _padded_heads(kind, weight, spec, _turned(spec, int(index)))
    if kind.startswith(("gate_up.", "shared.gate_up.", "experts.gate_up")):
        return _padded_inner(weight, 1 if kind.startswith("experts.") else 0, parts=2 if spec.gated else 1)
    if kind in {"down.weight", "shared.down.weight", "experts.down"}:
        return _padded_inner(weight, weight.dim() - 1)
    return weight


def _padded_heads(kind: str, weight: torch.Tensor, spec: ModelSpec, turned: list[int]) -> torch.Tensor:
    """What has heads as rows, or as columns; queries and keys in the order `turned`, all else in its own."""
    size, plain = spec.head_dim, _filled(list(range(spec.head_dim)), spec)
    if kind in {"o.weight", "cross_o.weight"}:
        return _taken(weight, _rows([plain] * spec.num_heads, size), dim=1)
    if kind.startswith("cross_"):
        return _taken(weight, _rows([plain] * (len(weight) // size), size))
    if kind.startswith("qkv."):
        heads = [turned] * (spec.num_heads + spec.num_kv_heads) + [plain] * spec.num_kv_heads
        return _taken(weight, _rows(heads, size))
    return _padded_norm(weight, turned, spec)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _filled(places: list[int], spec: ModelSpec) -> list[int]:
    """The dimensions of a padded head, given its first ones."""
    return places + [ZERO] * (_up(spec.head_dim, HEAD) - len(places))


def _turned(spec: ModelSpec, index: int) -> list[int]:
    """The dimensions of a padded head whose halves are rotated against each other."""
    key = spec.layers[index].rope
    dims = 0 if key is None else spec.ropes[key].dims
    half, missing = dims // 2, (_up(dims, HEAD) - dims) // 2
    rest = list(range(dims, spec.head_dim)) + [ZERO] * (2 * missing)
    halves = [*range(half), *rest[:missing], *range(half, dims), *rest[missing : 2 * missing]]
    return _filled(halves + [place for place in rest[2 * missing :] if place != ZERO], spec)


def _padded_inner(weight: torch.Tensor, dim: int, parts: int = 1) -> torch.Tensor:
    size = weight.shape[dim] // parts
    return _taken(weight, _rows([[*range(size), *[ZERO] * (-size % INNER)]] * parts, size), dim)


def _rows(heads: list[list[int]], size: int) -> torch.Tensor:
    """Rows of heads one after the other, from lists of rows within heads of `size`."""
    places = torch.tensor(heads)
    return torch.where(places == ZERO, ZERO, places + size * torch.arange(len(heads))[:, None]).flatten()


def _taken(weight: torch.Tensor, rows: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Rows along an axis, zeros where there is none; the weight itself where that are all in order."""
    if torch.equal(rows, torch.arange(weight.shape[dim])):
        return weight
    shape = (*weight.shape[:dim], len(rows), *weight.shape[dim + 1 :])
    out, places = empty(shape, weight.dtype, weight.device).zero_(), (rows != ZERO).nonzero().flatten()
    return out.index_copy_(dim, places, weight.index_select(dim, rows[places]))


def _padded_norm(weight: torch.Tensor, turned: list[int], spec: ModelSpec) -> torch.Tensor:
    """Weights, in float32, of a norm over heads, smaller as the mean over more dimensions is."""
    factor = (spec.head_dim / len(turned)) ** 0.5
    offset = 1.0 if spec.norm_offset else 0.0
    heads = [turned] * (len(weight) // spec.head_dim)
    return _taken((weight.float() + offset) * factor - offset, _rows(heads, spec.head_dim))
