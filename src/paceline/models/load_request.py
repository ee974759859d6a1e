"""What a model is to be loaded with, and which of it the runner that takes the model cannot give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoints import NATIVE_ONLY, Forms, find_format
from paceline.config import DTYPES, NOT_QUANTIZED, QUANTIZATIONS
from paceline.errors import ConfigError, UnsupportedModelError
from paceline.models.attention.kv_selection import KVSelection
from paceline.models.passes.strict import NOT_STRICT_IN_TRANSFORMERS, strict_unavailable, why_not_strict
from paceline.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LoadRequest:
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
    selection: KVSelection | None = None

    @property
    def compiles(self) -> bool:
        """Whether nothing that is asked for is left out of compiled passes."""
        return self.group_size is None and (self.selection is None or self.selection.compiles)

    def __post_init__(self) -> None:
        if self.quantization not in {None, NOT_QUANTIZED, *QUANTIZATIONS}:
            raise ConfigError(
                f"quantization must be None or one of {', '.join(QUANTIZATIONS)}, got {self.quantization!r}"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")


def refuse_native(spec: ModelSpec, wanted: LoadRequest) -> None:
    """Refuse what native runners of such a model do not give.

    Raises:
        ConfigError: strict passes, or a context, that there are none of.
        UnsupportedModelError: what models with an encoder lack.
    """
    if wanted.strict and (why := why_not_strict(spec, wanted.device)) is not None:
        raise strict_unavailable(wanted.name, why)
    if spec.encoder is not None:
        _refuse_with_encoder(wanted)
    context = wanted.max_context
    if context is not None and not 2 <= context <= spec.max_context:
        raise ConfigError(
            f"max_model_len must lie in 2..{spec.max_context}, the context of {wanted.name}, got {context}"
        )


def _refuse_with_encoder(wanted: LoadRequest) -> None:
    given = {
        "kv_selection": wanted.selection,
        "draft_vocab_size": wanted.head_rows,
        "layers in groups": wanted.group_size,
        "lora": wanted.lora,
    }
    for name, value in given.items():
        if value is not None:
            raise UnsupportedModelError(f"{wanted.name} has an encoder, for which {name} is not there; leave it out")


def refuse_fallback(folder: Path, config: Mapping[str, Any], wanted: LoadRequest) -> None:
    """Refuse what transformers does not give.

    Raises:
        UnsupportedModelError: naming what, and what to do instead.
        ConfigError: strict passes.
    """
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
    if wanted.selection is not None:
        raise UnsupportedModelError(
            f"{name}: kv_selection needs the native runner; use a model of a supported family, or leave it out"
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
    check_activation_bits(wanted, None)


def check_activation_bits(wanted: LoadRequest, form: Forms | None) -> None:
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
