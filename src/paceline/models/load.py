"""From a folder or hub id to a running model: resolve, check, choose the native runner or the fallback."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from paceline.checkpoints import (
    BLOCKS,
    MATRICES,
    NATIVE_ONLY,
    AdaptedCheckpoint,
    BlockRows,
    Checkpoint,
    Form,
    Forms,
    GgufCheckpoint,
    MarianCheckpoint,
    PackedFile,
    QuantizedCheckpoint,
    Replacement,
    RoundingError,
    block_rows,
    declared_dtype,
    file_keys,
    find_format,
    has_source,
    is_gguf,
    layout,
    load_weights,
    marian_path,
    open_checkpoint,
    quantized,
    quantized_rows,
    read_config,
    resolve,
    sources,
    spec_from_config,
    untie_if_different,
)
from paceline.config import DTYPES, NOT_QUANTIZED, QUANTIZATIONS
from paceline.errors import CheckpointError, ConfigError, UnsupportedModelError
from paceline.models.base import Runner
from paceline.models.layers.own_weights import Weights
from paceline.models.memory import check_files, fit_context
from paceline.models.passes.eligibility import fits
from paceline.models.passes.packed_weights import PackedWeights
from paceline.models.passes.padding import padded, padded_spec
from paceline.models.passes.strict import (
    NOT_STRICT_IN_TRANSFORMERS,
    strict_unavailable,
    why_not_strict,
)
from paceline.models.runners.remapped_tokens import HeadRows, MappedRunner
from paceline.models.spec import ModelSpec

if TYPE_CHECKING:
    from paceline.models.runners.longrope import LongRopeRunner
    from paceline.models.runners.native import NativeRunner
    from paceline.models.runners.recurrent import RecurrentRunner

log = logging.getLogger("paceline")

ROUNDED: Mapping[frozenset[Form], str] = {
    frozenset({"int8"}): "int8, which changes little",
    frozenset({"int4"}): "int4",
    frozenset({"int8", "int4"}): "int4, and to int8 where that would lose much",
}
"""What the weights of a quantised file become (benchmarks/gguf_files.py)."""

MOST_OF_INT4 = 6
"""Bits of a weight in blocks that are counted as int4."""


def load_runner(
    model: str | Path,
    *,
    name: str | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    max_context: int | None = None,
    trust_remote_code: bool = False,
    native: bool = True,
    exactness: str = "auto",
    quantization: str | None = None,
    activation_bits: int | None = None,
    head_rows: Sequence[int] | None = None,
    group_size: int | None = None,
    lora: str | Path | None = None,
    tokens: int | None = None,
) -> Runner:
    """Load a model.

    Args:
        model: a checkpoint folder or a hub id.
        name: for messages, where `model` is the folder that a name was resolved to.
        revision: branch, tag or commit on the hub.
        dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".
        max_context: most tokens of a sequence; None takes the checkpoint's, or what fits into memory.
        trust_remote_code: let the fallback run Python code that comes with the checkpoint.
        native: False takes the transformers fallback for every architecture.
        quantization: None, or a key of `config.QUANTIZATIONS`: round the weights as they are read
            (checkpoints.quantization).
        activation_bits: 8 or 16, of the activations that a quantised file's blocks are multiplied with; None: 8.
        exactness: "strict" takes passes that are built to keep a row's bits, also where others are faster.
        head_rows: tokens that the head keeps (models.runners.remapped_tokens); all others have logits of -inf. None:
            all.
        group_size: layers of a group that fuzzy passes feed the same state (models.runners.grouped); None: no such
            passes.
        lora: folder of a LoRA adapter, merged into the weights before they are rounded (checkpoints.lora).
        tokens: ids that are tokens lie below; rows of embedding and head beyond, by which many checkpoints are padded,
            are left out. None: all rows stay.
    Raises:
        CheckpointError: missing, incomplete or inconsistent files.
        UnsupportedModelError: what is not supported.
        OutOfMemoryError: it would not fit.
        ConfigError: a wrong argument.
    """
    target = resolve_device(device)
    name, strict = name or str(model), exactness == "strict"
    adapter = None if lora is None else Path(lora).expanduser()
    wanted = _LoadRequest(
        name, dtype, target, max_context, strict, quantization, activation_bits, head_rows, group_size, adapter, tokens
    )
    return _load(
        resolve(model, revision=revision, code=trust_remote_code), wanted, native=native, code=trust_remote_code
    )


@dataclass(frozen=True, slots=True)
class _LoadRequest:
    """What `load_runner` was asked for; ConfigError where a name in it is not known."""

    name: str
    dtype: str
    device: torch.device
    max_context: int | None
    strict: bool
    quantization: str | None
    activation_bits: int | None
    head_rows: Sequence[int] | None
    group_size: int | None = None
    lora: Path | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.quantization not in {None, NOT_QUANTIZED, *QUANTIZATIONS}:
            raise ConfigError(
                f"quantization must be None or one of {', '.join(QUANTIZATIONS)}, got {self.quantization!r}"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")


def _load(folder: Path, wanted: _LoadRequest, *, native: bool, code: bool) -> Runner:
    """The native runner of a checkpoint folder, or where that is not to be had or not wanted, the fallback."""
    config = read_config(folder)
    if is_gguf(folder):
        return _native(folder, config, _gguf_spec(config, wanted.name, native=native), wanted)
    spec = _native_spec(config, wanted.name) if native else None
    if spec is not None:
        return _native(folder, config, spec, wanted)
    _refuse_fallback(folder, config, wanted)
    return _fallback(folder, config, wanted, code=code)


def _gguf_spec(config: Mapping[str, Any], name: str, *, native: bool) -> ModelSpec:
    """The spec of a GGUF file's model, for which there is no fallback; errors speak of the file."""
    if not native:
        raise ConfigError(f"{name}: transformers is not used for GGUF files; take the safetensors checkpoint")
    try:
        return spec_from_config(config)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{name} is a GGUF file of a model that is not supported ({error}); use the safetensors checkpoint it was "
            f"made from"
        ) from error
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {str(error).replace('config.json', 'its metadata')}") from error


def _native_spec(config: Mapping[str, Any], name: str) -> ModelSpec | None:
    """The spec of a native family, or None with a warning."""
    try:
        return spec_from_config(config)
    except UnsupportedModelError as reason:
        log.warning("%s: %s; using transformers, which allows chains of drafts only and is slower", name, reason)
        return None


def _refuse_fallback(folder: Path, config: Mapping[str, Any], wanted: _LoadRequest) -> None:
    name = wanted.name
    if (form := find_format(folder, config)) is not None:
        raise UnsupportedModelError(
            f"{name} is quantised ({form.label}), which the native runner alone reads; use the checkpoint that it was "
            f"made from, or a model of a supported family"
        )
    if wanted.head_rows is not None:
        raise UnsupportedModelError(
            f"{name}: a head of fewer rows needs the native runner; use a model of a supported family"
        )
    if wanted.group_size is not None:
        raise UnsupportedModelError(
            f"{name}: layers that run in groups need the native runner; use a model of a supported family"
        )
    if wanted.lora is not None:
        raise UnsupportedModelError(
            f"{name}: LoRA adapters are merged for models of the native runner only; merge it with peft "
            f"(merge_and_unload) and load the result"
        )
    if wanted.strict:
        raise strict_unavailable(name, NOT_STRICT_IN_TRANSFORMERS)
    if wanted.quantization not in {None, NOT_QUANTIZED}:
        raise UnsupportedModelError(f"{name}: quantization={wanted.quantization!r} {NATIVE_ONLY}")
    _check_activation_bits(wanted, None)


@dataclass(frozen=True, slots=True)
class _Plan:
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


def _native(folder: Path, config: Mapping[str, Any], spec: ModelSpec, wanted: _LoadRequest) -> Runner:
    _check_native(spec, wanted)
    plan = _planned(folder, config, spec, wanted)
    context = fit_context(
        plan.wide if plan.rows is None else replace(plan.wide, tied=False),
        name=wanted.name, dtype=plan.dtype, device=wanted.device, max_context=wanted.max_context,
        quantization=plan.counted,
    )  # fmt: skip
    packed, error = _packed(plan, wanted), RoundingError()
    weights = load_weights(
        plan.checkpoint, plan.spec, device=wanted.device, dtype=plan.dtype,
        instead=_instead(plan, error, shape_only=packed.found), elsewhere=(plan.blocks or {}).keys(),
        shape_only=MATRICES if packed.found else None,
    )  # fmt: skip
    _tell(plan, wanted, error)
    runner = _started(plan, weights, packed, wanted, context)
    return runner if plan.rows is None else MappedRunner.of_head(runner, plan.rows)


def _check_native(spec: ModelSpec, wanted: _LoadRequest) -> None:
    if wanted.strict and (why := why_not_strict(spec, wanted.device)) is not None:
        raise strict_unavailable(wanted.name, why)
    if spec.encoder is not None:
        _refuse_with_encoder(wanted)
    context = wanted.max_context
    if context is not None and not 2 <= context <= spec.max_context:
        raise ConfigError(
            f"max_model_len must lie in 2..{spec.max_context}, the context of {wanted.name}, got {context}"
        )


def _refuse_with_encoder(wanted: _LoadRequest) -> None:
    given = {"draft_vocab_size": wanted.head_rows, "layers in groups": wanted.group_size, "lora": wanted.lora}
    for name, value in given.items():
        if value is not None:
            raise UnsupportedModelError(f"{wanted.name} has an encoder, for which {name} is not there; leave it out")


def _planned(folder: Path, config: Mapping[str, Any], spec: ModelSpec, wanted: _LoadRequest) -> _Plan:
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
        _check_activation_bits(wanted, form)
    if wanted.lora is not None:
        checkpoint = AdaptedCheckpoint(checkpoint, wanted.lora, tied=spec.tied)
        spec = untie_if_different(checkpoint, spec)
    wide = padded_spec(spec)
    if wide is not spec and not all(fits(wide, dtype, wanted.device, quantization=kind) for kind in _kinds(form)):
        wide = spec
    return _Plan(checkpoint, spec, wide, dtype, tokens, rows, blocks, form)


def _usual_dtype(spec: ModelSpec, checkpoint: Checkpoint, device: torch.device) -> str:
    """The checkpoint's dtype; of a quantised one in float16, which compiled passes do not take, bfloat16 on CPUs."""
    return (
        "bfloat16" if checkpoint.kind is not None and device.type == "cpu" and spec.dtype == "float16" else spec.dtype
    )


def _opened(folder: Path, config: Mapping[str, Any]) -> Checkpoint:
    if is_gguf(folder):
        return GgufCheckpoint(folder)
    marian = marian_path(folder)
    return open_checkpoint(folder, config) if marian is None else MarianCheckpoint(marian)


def _started(plan: _Plan, weights: Weights, packed: PackedWeights, wanted: _LoadRequest, context: int) -> Runner:
    """The runner of packed weights; it takes only handles of its own kind, which the protocol cannot say."""
    options: dict[str, Any] = {
        "name": wanted.name, "device": wanted.device, "dtype": plan.dtype, "max_context": context,
    }  # fmt: skip
    if wanted.group_size is not None:
        from paceline.models.runners.grouped import GroupedRunner

        return cast(Runner, GroupedRunner(plan.result, weights, wanted.group_size, **options))
    if plan.result.encoder is not None:
        from paceline.models.runners.encoder_decoder import EncoderDecoderRunner

        options |= {"packed": packed, "strict": wanted.strict}
        return cast(Runner, EncoderDecoderRunner(plan.result, plan.result.encoder, weights, **options))
    runner = _runner_of(plan.result)(
        plan.result, weights, strict=wanted.strict, blocks=plan.blocks, packed=packed,
        activation_bits=wanted.activation_bits or 8, **options,
    )  # fmt: skip
    return cast(Runner, runner)


def _blocks(
    checkpoint: Checkpoint, spec: ModelSpec, wanted: _LoadRequest, dtype: torch.dtype, head: HeadRows
) -> dict[str, BlockRows] | None:
    """The matrices of a quantised file that compiled passes multiply as they are; None where there are none.

    Args:
        head: rows of the head, among those that are tokens.
    """
    whole = wanted.quantization is None and wanted.lora is None and wanted.group_size is None and spec.encoder is None
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


def _form(checkpoint: Checkpoint, spec: ModelSpec, wanted: _LoadRequest, *, kept: bool) -> Forms | None:
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


def _tell(plan: _Plan, wanted: _LoadRequest, error: RoundingError) -> None:
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


def _check_activation_bits(wanted: _LoadRequest, form: Forms | None) -> None:
    """Of matrices that are no blocks: activations have 16 bits where weights are rounded, else the model's dtype.

    Raises:
        UnsupportedModelError: others are asked for.
    """
    if wanted.activation_bits not in {None, 16 if form else None}:
        kept = "rounded weights are multiplied with 16 bits" if form else "its weights are not rounded"
        raise UnsupportedModelError(
            f"{wanted.name}: activation_bits={wanted.activation_bits} is for the blocks of quantised files in compiled "
            f"passes, here {kept}; leave it out"
        )


def _packed(plan: _Plan, wanted: _LoadRequest) -> PackedWeights:
    """The packed matrices of an earlier process, or what keeps those of this one, where compiled passes may serve."""
    device = wanted.device
    if wanted.group_size is not None or not all(
        fits(plan.wide, plan.dtype, device, quantization=kind) for kind in plan.kinds
    ):
        return PackedWeights()
    from paceline.models.cpu.processor import features, name

    processor = [name(), *sorted(feature for feature, there in features().items() if there)]
    rows = None if plan.rows is None else hashlib.sha256(plan.rows.kept.tobytes()).hexdigest()
    key = {
        "files": file_keys(plan.checkpoint, wanted.lora), "spec": repr(plan.wide), "dtype": str(plan.dtype),
        "kinds": sorted(map(str, plan.kinds)), "more": [repr(plan.form), plan.tokens, rows], "layout": layout(),
        "processor": processor,
    }  # fmt: skip
    return PackedWeights(PackedFile(wanted.name, key))


def _instead(plan: _Plan, error: RoundingError, *, shape_only: bool) -> Replacement:
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


def _runner_of(spec: ModelSpec) -> type[NativeRunner | LongRopeRunner | RecurrentRunner]:
    """The runner class for a model's mixers and rotary embeddings."""
    from paceline.models.runners.longrope import LongRopeRunner
    from paceline.models.runners.native import NativeRunner
    from paceline.models.runners.recurrent import RecurrentRunner

    if spec.states:
        return RecurrentRunner
    return LongRopeRunner if any(rope.kind == "longrope" for rope in spec.ropes.values()) else NativeRunner


def _fallback(folder: Path, config: Mapping[str, Any], wanted: _LoadRequest, *, code: bool) -> Runner:
    from paceline.models.runners.fallback.encoder_decoder import TransformersEncoderDecoder
    from paceline.models.runners.fallback.runner import TransformersRunner

    dtype: torch.dtype | None = None if wanted.dtype == "auto" else getattr(torch, wanted.dtype)
    check_files(Checkpoint(folder), name=wanted.name, dtype=dtype, device=wanted.device)
    kind = TransformersEncoderDecoder if has_source(config) else TransformersRunner
    runner = kind.load(
        folder,
        name=wanted.name,
        device=wanted.device,
        dtype="auto" if dtype is None else dtype,
        trust_remote_code=code,
        max_context=wanted.max_context,
        tokens=wanted.tokens,
    )
    return cast(Runner, runner)  # see _native


def resolve_device(device: str, *, name: str = "device") -> torch.device:
    """The device that is meant; "auto" is CUDA where there is one.

    Args:
        name: of the argument, for messages.
    Raises:
        ConfigError: not a device of this machine.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = device.partition(":")
    if kind not in {"cpu", "cuda"} or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise ConfigError(f"{name} must be auto, cpu, cuda or cuda:N, got {device!r}")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise ConfigError(
            f"{name}={device!r}, but PyTorch sees {count} CUDA devices; use {name}='cpu' or install a CUDA build"
        )
    return torch.device(device)


def resolve_dtype(dtype: str, declared: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in; "auto" is the checkpoint's. Warns of one that the device or its fastest passes do not
    have; which one is faster is for a measurement to say (paceline.doctor).

    Args:
        declared: the checkpoint's dtype by name; anything but the three known ones counts as float32.
    """
    name = dtype if dtype != "auto" else declared if declared in DTYPES else "float32"
    if device.type == "cpu" and name == "float16":
        log.warning(
            "float16 on a CPU is computed by PyTorch's operators; compiled passes take dtype='bfloat16' or 'float32'"
        )
    if device.type == "cuda" and name == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        log.warning("bfloat16 is emulated on this GPU; use dtype='float16' or 'float32'")
    resolved: torch.dtype = getattr(torch, name)
    return resolved
