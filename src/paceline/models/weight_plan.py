"""What becomes of a checkpoint's tensors: dtype, padding, rows of the head, blocks that stay as they are, rounding."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from paceline.checkpoints import (
    BLOCKS,
    MATRICES,
    AdaptedCheckpoint,
    BlockRows,
    Checkpoint,
    Form,
    Forms,
    GgufCheckpoint,
    MarianCheckpoint,
    QuantizedCheckpoint,
    Replacement,
    RoundingError,
    block_rows,
    declared_dtype,
    is_gguf,
    marian_path,
    open_checkpoint,
    quantized,
    quantized_rows,
    sources,
    untie_if_different,
)
from paceline.config import QUANTIZATIONS
from paceline.models.devices import resolve_dtype
from paceline.models.load_request import LoadRequest, check_activation_bits
from paceline.models.passes.eligibility import fits
from paceline.models.passes.padding import padded, padded_spec
from paceline.models.runners.remapped_tokens import HeadRows
from paceline.models.spec import ModelSpec

log = logging.getLogger("paceline")

ROUNDED: Mapping[frozenset[Form], str] = {
    frozenset({"int8"}): "int8, which changes little",
    frozenset({"int4"}): "int4",
    frozenset({"int8", "int4"}): "int4, and to int8 where that would lose much",
}
"""What the weights of a quantised file become (benchmarks/gguf_files.py)."""

MOST_OF_INT4 = 6
"""Bits of a weight in blocks that are counted as int4."""


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """What becomes of a checkpoint's tensors.

    Attributes:
        checkpoint: with the adapter, where there is one.
        spec: the stored model. wide: the same padded for compiled passes, or `spec` itself.
        tokens: rows of embedding and head that are tokens. rows: those that the head keeps; None for all.
        blocks: matrices that keep the numbers of a file; None where none do.
        form: what the others are rounded to.
    """

    checkpoint: Checkpoint
    spec: ModelSpec
    wide: ModelSpec
    dtype: torch.dtype
    tokens: int
    rows: HeadRows | None
    blocks: dict[str, BlockRows] | None
    form: Forms | None

    @property
    def kinds(self) -> set[Form | None]:
        """Forms of the matrices."""
        if not self.blocks:
            return _kinds(self.form)
        return {BLOCKS, *self.left.values()}

    @property
    def left(self) -> dict[str, Form]:
        """Matrices that are rounded beside blocks, and to what; nothing where there are no blocks."""
        if not self.blocks or not isinstance(self.form, Mapping):
            return {}
        forms: dict[str, Form] = {**self.form, "head.weight": "int8"}
        return {name: form for name, form in forms.items() if name not in self.blocks}

    @property
    def counted(self) -> Forms | None:
        """The forms by which memory is counted: of blocks one with as many bits."""
        if not self.blocks or not isinstance(self.form, Mapping):
            return self.form
        forms: dict[str, Form] = {
            name: "int4" if 8 * rows.nbytes < MOST_OF_INT4 * len(rows) * rows.inputs else "int8"
            for name, rows in self.blocks.items()
        }
        return {**self.form, **forms}

    @property
    def result(self) -> ModelSpec:
        """The shape of the model that runs."""
        stored = self.spec.vocab_size
        wide = self.wide if self.tokens == stored else replace(self.wide, vocab_size=self.tokens, stored_rows=stored)
        return wide if self.rows is None else self.rows.spec(wide)


def _kinds(form: Forms | None) -> set[Form | None]:
    return set(form.values()) if isinstance(form, Mapping) else {form}


def plan_weights(folder: Path, config: Mapping[str, Any], spec: ModelSpec, wanted: LoadRequest) -> WeightPlan:
    """The plan for the model of a folder whose `config.json` says `spec`.

    Raises:
        CheckpointError: missing or damaged files.
        UnsupportedModelError: bits of activations that its weights do not take.
    """
    checkpoint = _opened(folder, config)
    if declared_dtype(config) is None:
        spec = replace(spec, dtype=str(checkpoint.dtype()).removeprefix("torch."))
    dtype = resolve_dtype(wanted.dtype, _usual_dtype(spec, checkpoint, wanted.device), wanted.device)
    spec = untie_if_different(checkpoint, spec)
    tokens = spec.vocab_size if wanted.tokens is None else min(wanted.tokens, spec.vocab_size)
    rows = None if wanted.head_rows is None else HeadRows.of(wanted.head_rows, tokens)
    blocks = _blocks(checkpoint, spec, wanted, dtype, HeadRows(np.arange(tokens), tokens) if rows is None else rows)
    form = _form(checkpoint, spec, wanted, kept=blocks is not None)
    if blocks is None:
        check_activation_bits(wanted, form)
    if wanted.lora is not None:
        checkpoint = AdaptedCheckpoint(checkpoint, wanted.lora, tied=spec.tied)
        spec = untie_if_different(checkpoint, spec)
    wide = padded_spec(spec)
    fit = wide is spec or all(fits(wide, dtype, wanted.device, quantization=kind) for kind in _kinds(form))
    if wanted.selection is not None or not fit:  # channels are those of the stored model
        wide = spec
    return WeightPlan(checkpoint, spec, wide, dtype, tokens, rows, blocks, form)


def _opened(folder: Path, config: Mapping[str, Any]) -> Checkpoint:
    if is_gguf(folder):
        return GgufCheckpoint(folder)
    marian = marian_path(folder)
    return open_checkpoint(folder, config) if marian is None else MarianCheckpoint(marian)


def _usual_dtype(spec: ModelSpec, checkpoint: Checkpoint, device: torch.device) -> str:
    """The checkpoint's dtype; of a quantised one in float16, which compiled passes do not take, bfloat16 on CPUs."""
    return (
        "bfloat16" if checkpoint.kind is not None and device.type == "cpu" and spec.dtype == "float16" else spec.dtype
    )


def _blocks(
    checkpoint: Checkpoint, spec: ModelSpec, wanted: LoadRequest, dtype: torch.dtype, head: HeadRows
) -> dict[str, BlockRows] | None:
    """The matrices of a quantised file that compiled passes multiply as they are; None where there are none.

    Args:
        head: rows of the head, among those that are tokens.
    """
    whole = wanted.quantization is None and wanted.lora is None and wanted.compiles and spec.encoder is None
    if not whole or checkpoint.kind is None or padded_spec(spec) is not spec:
        return None
    if not fits(spec, dtype, wanted.device, quantization=BLOCKS):
        return None
    if isinstance(checkpoint, GgufCheckpoint):
        return _gguf_blocks(checkpoint, spec, head)
    assert isinstance(checkpoint, QuantizedCheckpoint)
    rows = quantized_rows(checkpoint, spec)
    if "head.weight" in rows:
        rows["head.weight"] = rows["head.weight"].take(head.kept)
    beside = all(fits(spec, dtype, wanted.device, quantization=form) for form in ("int8", "int4"))
    return rows if rows and beside else None


def _gguf_blocks(checkpoint: GgufCheckpoint, spec: ModelSpec, head: HeadRows) -> dict[str, BlockRows] | None:
    """All matrices of a file; None where blocks do not keep one."""
    from paceline.models.cpu.block_packing import can_pack

    if (rows := block_rows(checkpoint, spec)) is None or not can_pack(rows, gated=spec.gated):
        return None
    return rows | {
        "embed.weight": rows["embed.weight"].take(np.arange(head.vocab_size)),
        "head.weight": rows["embed.weight" if spec.tied else "head.weight"].take(head.kept),
    }


def _form(checkpoint: Checkpoint, spec: ModelSpec, wanted: LoadRequest, *, kept: bool) -> Forms | None:
    """What the weights are rounded to.

    Matrices of a quantised file are by default: to int4 where it keeps all parts of one, else to int8.

    Args:
        kept: blocks keep some.
    """
    if wanted.quantization is not None:
        return QUANTIZATIONS.get(wanted.quantization)
    if checkpoint.kind is None or not (kept or checkpoint.is_rounded):
        return None
    stored = {
        name: names
        for name, names in sources(checkpoint, spec).items()
        if MATRICES.match(name) and name != "head.weight"
    }
    for gate in [name for name in stored if name.endswith("attn_gate.weight")]:  # a part of the same matrix
        queries = gate.replace("attn_gate", "qkv")
        stored[gate] = stored[queries] = [*stored[gate], *stored[queries]]
    return {name: "int4" if all(map(checkpoint.is_narrow, names)) else "int8" for name, names in stored.items()}


def replacement(plan: WeightPlan, error: RoundingError, *, shape_only: bool) -> Replacement:
    """What takes the place of each canonical weight: the tensors of a smaller head, padded, all rounded.

    Args:
        error: is told what is rounded. shape_only: of matrices.
    """
    spec, rows, form = plan.spec, plan.rows, plan.form
    smaller = spec if rows is None else rows.spec(spec)

    def instead(name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        weight = weight[: plan.tokens] if name in {"embed.weight", "head.weight"} else weight
        parts: Iterable[tuple[str, torch.Tensor]] = [(name, weight)]
        for key, whole in parts if rows is None else rows.weights(name, weight, spec):
            part = whole.to("meta") if shape_only and MATRICES.match(key) else whole
            fitting = part if plan.wide is spec else padded(key, part, spec)
            if form is None:
                yield key, fitting
            else:
                made = dict(quantized(key, fitting, smaller, form, shape_only=shape_only))
                error.note(fitting, made)
                yield from made.items()

    return instead


def tell_of_rounding(plan: WeightPlan, wanted: LoadRequest, error: RoundingError) -> None:
    """Say what becomes of the numbers of a quantised file."""
    kind = plan.checkpoint.kind
    if kind is None or plan.form is None or wanted.quantization is not None:
        return
    loss = "" if error.share is None else f" (an error of {100 * error.share:.2g} %)"
    if plan.blocks is None:
        log.warning(
            "%s: its weights (%s) are rounded to %s%s; quantization='none' keeps them as they are, in bfloat16",
            wanted.name, kind, ROUNDED[frozenset(cast("set[Form]", _kinds(plan.form)))], loss,
        )  # fmt: skip
        return
    left = {name: form for name, form in plan.left.items() if name != "head.weight"}
    rounded = ["the head"] if len(left) < len(plan.left) else []
    rounded += [f"{len(left)} matrices of the layers"] if left else []
    if rounded:
        log.warning(
            "%s: its weights (%s) keep their numbers, but for %s, rounded to %s%s; quantization='none' keeps all as "
            "they are, in bfloat16",
            wanted.name, kind, " and ".join(rounded), ROUNDED[frozenset(plan.left.values())], loss,
        )  # fmt: skip
