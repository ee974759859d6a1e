"""The matrices of a quantised checkpoint under the decoder's names, as rows of blocks that are made when they are
packed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import torch

from paceline.checkpoints.block_types import NAMES, BlockRows, Ints, Source, row_bytes
from paceline.checkpoints.canonical_tensors import CanonicalTensor, StoredTensor
from paceline.checkpoints.quantization import MATRICES
from paceline.checkpoints.quantized_formats.matrix_blocks import BlockForm, block_form
from paceline.checkpoints.quantized_formats.quantized_checkpoint import QuantizedCheckpoint
from paceline.checkpoints.weights import StoredNames, chosen_pieces, targets
from paceline.models import ModelSpec

ORDERED: Final = re.compile(r"layers\.\d+\.(qkv|attn_gate|o|gate_up|down)\.weight")
"""Matrices whose inputs compiled passes bring into another order."""


def quantized_rows(checkpoint: QuantizedCheckpoint, spec: ModelSpec) -> dict[str, BlockRows]:
    """The matrices that blocks keep, by canonical name; of a mixture the rows of all experts, one after the other.

    Raises:
        CheckpointError: see `weights.load_weights`, or parts of a matrix that contradict each other.
    """
    names, found = StoredNames(checkpoint, spec), {}
    for target in targets(spec):
        if MATRICES.match(target.name) and not target.factors:
            rows = _rows(checkpoint, names, target, ordered=spec.latent is None)
            if rows is not None:
                found[target.name] = rows
    return {name: rows for name, rows in found.items() if _with_gates(name, found, spec)}


def _with_gates(name: str, found: dict[str, BlockRows], spec: ModelSpec) -> bool:
    """Whether what is packed together is in blocks of the same order: gates of attention stand below queries."""
    layer, _, part = name.removesuffix(".weight").rpartition(".")
    if not spec.attention_gate or part not in {"qkv", "attn_gate"}:
        return True
    pair = [found[one] for one in (f"{layer}.qkv.weight", f"{layer}.attn_gate.weight") if one in found]
    return len(pair) == 2 and _same([rows.columns for rows in pair])


def _rows(
    checkpoint: QuantizedCheckpoint, names: StoredNames, target: CanonicalTensor, *, ordered: bool
) -> BlockRows | None:
    """A matrix whose pieces one type of blocks keeps, or None.

    Args:
        ordered: inputs of a group need not stand side by side.
    """
    pieces, forms = list[StoredTensor](), list[BlockForm]()
    for piece, name in chosen_pieces(names, target):
        form = block_form(checkpoint.matrices.get(names.checked(name, piece)), checkpoint.stored_tensor)
        if form is None or not form.kinds:
            return None
        pieces.append(piece)
        forms.append(form)
    kind = next((one for one in forms[0].kinds if all(one in form.kinds for form in forms)), None)
    order = forms[0].order
    if kind is None or not _same([form.order for form in forms]):
        return None
    if order is not None and not (ordered and ORDERED.fullmatch(target.name)):
        return None
    size = row_bytes(kind, target.shape[-1])
    places = np.zeros((*target.shape[:-1], 3), np.int64)
    sources = list[Source]()
    for piece, form in zip(pieces, forms, strict=True):
        for expert in [piece.expert] if len(piece.shape) == 2 else range(piece.shape[0]):
            own, rows = places if expert is None else places[expert], _places(piece, len(sources), size)
            own[piece.at : piece.at + len(rows)] = rows
            sources.append(partial(form.make, kind, expert or 0))
    places[..., 2] = NAMES.index(kind)
    return BlockRows(tuple(sources), places.reshape(-1, 3), target.shape[-1], order)


def _places(piece: StoredTensor, source: int, size: int) -> Ints:
    """(rows, 3) places of a stored matrix, or of one in a stack, in the order that the model wants; their type is 0."""
    rows = torch.arange(piece.shape[-2])[:, None]
    if piece.arrange is not None:
        rows = piece.arrange(rows) if len(piece.shape) == 2 else piece.arrange(rows[None])[0]
    at = rows[:, 0].numpy() * size
    return np.stack((np.full_like(at, source), at, np.zeros_like(at)), 1)


def _same(orders: Sequence[Ints | None]) -> bool:
    first = orders[0]
    if first is None:
        return all(order is None for order in orders)
    return all(order is not None and np.array_equal(order, first) for order in orders)
