"""From a folder or hub id to a running model: resolve, check, choose the native runner or the fallback."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from paceline.checkpoints import (
    MATRICES,
    Checkpoint,
    PackedFile,
    RoundingError,
    file_keys,
    has_source,
    is_gguf,
    layout,
    load_weights,
    read_config,
    resolve,
    spec_from_config,
)
from paceline.errors import CheckpointError, ConfigError, UnsupportedModelError
from paceline.models.attention.kv_selection import KVSelection
from paceline.models.base import Runner
from paceline.models.devices import resolve_device
from paceline.models.layers.own_weights import Weights
from paceline.models.load_request import LoadRequest, refuse_fallback, refuse_native
from paceline.models.memory import check_files, fit_context
from paceline.models.passes.eligibility import fits
from paceline.models.passes.packed_weights import PackedWeights
from paceline.models.runners.remapped_tokens import MappedRunner
from paceline.models.runners.skipping import PassSkipping
from paceline.models.spec import ModelSpec
from paceline.models.weight_plan import WeightPlan, plan_weights, replacement, tell_of_rounding
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.models.runners.longrope import LongRopeRunner
    from paceline.models.runners.native import NativeRunner
    from paceline.models.runners.recurrent import RecurrentRunner

log = logging.getLogger("paceline")


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
    kv_selection: KVSelection | None = None,
    skipping: PassSkipping | None = None,
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
        kv_selection: attends to a part of the text.
        skipping: leaves out a part of the passes; beside no `kv_selection`, on the native runner alone.
    Raises:
        CheckpointError: missing, incomplete or inconsistent files.
        UnsupportedModelError: what is not supported.
        OutOfMemoryError: it would not fit.
        ConfigError: a wrong argument.
    """
    target = resolve_device(device)
    name, strict = name or str(model), exactness == "strict"
    adapter = None if lora is None else Path(lora).expanduser()
    wanted = LoadRequest(
        name, dtype, target, max_context, strict, quantization, activation_bits, head_rows, group_size, adapter, tokens,
        kv_selection,
    )  # fmt: skip
    folder = resolve(model, revision=revision, code=trust_remote_code)
    if skipping is None:
        return _load(folder, wanted, native=native, code=trust_remote_code)
    need(kv_selection is None, "kv_selection", "be left out beside skipping", kv_selection)

    def load(*, lora: Path | None = None, selection: KVSelection | None = None) -> Runner:
        need(lora is None or adapter is None, "lora", f"be left out beside skipping {skipping.name!r}", lora)
        request = replace(wanted, lora=lora or adapter, selection=selection)
        return _load(folder, request, native=native, code=trust_remote_code)

    return skipping.open(load, name=name)


def _load(folder: Path, wanted: LoadRequest, *, native: bool, code: bool) -> Runner:
    """The native runner of a checkpoint folder, or where that is not to be had or not wanted, the fallback."""
    config = read_config(folder)
    if is_gguf(folder):
        return _native(folder, config, _gguf_spec(config, wanted.name, native=native), wanted)
    spec = _native_spec(config, wanted.name) if native else None
    if spec is not None:
        return _native(folder, config, spec, wanted)
    refuse_fallback(folder, config, wanted)
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


def _native(folder: Path, config: Mapping[str, Any], spec: ModelSpec, wanted: LoadRequest) -> Runner:
    refuse_native(spec, wanted)
    plan = plan_weights(folder, config, spec, wanted)
    context = fit_context(
        plan.wide if plan.rows is None else replace(plan.wide, tied=False),
        name=wanted.name, dtype=plan.dtype, device=wanted.device, max_context=wanted.max_context,
        quantization=plan.counted,
    )  # fmt: skip
    packed, error = _packed(plan, wanted), RoundingError()
    weights = load_weights(
        plan.checkpoint, plan.spec, device=wanted.device, dtype=plan.dtype,
        instead=replacement(plan, error, shape_only=packed.found), elsewhere=(plan.blocks or {}).keys(),
        shape_only=MATRICES if packed.found else None,
    )  # fmt: skip
    tell_of_rounding(plan, wanted, error)
    runner = _started(plan, weights, packed, wanted, context)
    return runner if plan.rows is None else MappedRunner.of_head(runner, plan.rows)


def _packed(plan: WeightPlan, wanted: LoadRequest) -> PackedWeights:
    """The packed matrices of an earlier process, or what keeps those of this one, where compiled passes may serve."""
    device = wanted.device
    if not wanted.compiles or not all(fits(plan.wide, plan.dtype, device, quantization=kind) for kind in plan.kinds):
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


def _started(plan: WeightPlan, weights: Weights, packed: PackedWeights, wanted: LoadRequest, context: int) -> Runner:
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
    if wanted.selection is not None:
        options["selection"] = wanted.selection
    runner = _runner_of(plan.result)(
        plan.result, weights, strict=wanted.strict, blocks=plan.blocks, packed=packed,
        activation_bits=wanted.activation_bits or 8, **options,
    )  # fmt: skip
    return cast(Runner, runner)


def _runner_of(spec: ModelSpec) -> type[NativeRunner | LongRopeRunner | RecurrentRunner]:
    """The runner class for a model's mixers and rotary embeddings."""
    from paceline.models.runners.longrope import LongRopeRunner
    from paceline.models.runners.native import NativeRunner
    from paceline.models.runners.recurrent import RecurrentRunner

    if spec.states:
        return RecurrentRunner
    return LongRopeRunner if any(rope.kind == "longrope" for rope in spec.ropes.values()) else NativeRunner


def _fallback(folder: Path, config: Mapping[str, Any], wanted: LoadRequest, *, code: bool) -> Runner:
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
    return cast(Runner, runner)  # see _started
