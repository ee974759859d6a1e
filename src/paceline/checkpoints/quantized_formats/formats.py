"""Which format a checkpoint's weights are quantised in, by `config.json` or a file that older tools write beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from paceline.checkpoints.quantized_formats.awq import Awq
from paceline.checkpoints.quantized_formats.compressed_tensors import CompressedTensors
from paceline.checkpoints.quantized_formats.fp8 import Fp8, ModelOpt
from paceline.checkpoints.quantized_formats.gptq import Gptq
from paceline.checkpoints.quantized_formats.mxfp4_experts import Mxfp4Experts
from paceline.checkpoints.quantized_formats.stored_parts import INSTEAD, Format
from paceline.checkpoints.tokenizer import read_json
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.utils import shortened

FORMATS: Final[Mapping[str, Callable[[Mapping[str, Any]], Format]]] = {
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "fbgemm_fp8": Fp8,
    "modelopt": ModelOpt,
    "modelopt_fp4": ModelOpt,
}
"""`quant_method` -> what reads it."""

QUANTIZATION_KEYS: Final = ("quantization_config", "compression_config")
FILES: Final = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files that say it where config.json does not, and the method that writes them."""


def find_format(folder: Path, config: Mapping[str, Any]) -> Format | None:
    """The format of a checkpoint, or None for weights that are floats.

    Raises:
        CheckpointError: a setting that is missing or wrong.
        UnsupportedModelError: a format, or a variant of one, that is not read.
    """
    text = config.get("text_config")
    for owner in (config, text if isinstance(text, Mapping) else {}):
        for key in QUANTIZATION_KEYS:
            if (settings := owner.get(key)) is None:
                continue
            if not isinstance(settings, Mapping):
                raise CheckpointError(
                    f"{folder}/config.json: {key!r} must be an object, got {shortened(settings)}; use the bfloat16 or "
                    "float16 checkpoint, or remove the key if the weights are not quantised"
                )
            method = str(settings.get("quant_method") or _unnamed(settings)).lower()
            if method == "mxfp4" and owner.get("model_type") == "gpt_oss":
                return Mxfp4Experts()
            return _format(folder, method, settings)
    for name, method in FILES.items():
        if (folder / name).is_file():
            return _format(folder, method, read_json(folder / name))
    return None


def _format(folder: Path, method: str, settings: Mapping[str, Any]) -> Format:
    if method not in FORMATS:
        raise UnsupportedModelError(f"{folder} is quantised ({method.upper()}), which is not supported; {INSTEAD}")
    try:
        return FORMATS[method](settings)
    except (CheckpointError, UnsupportedModelError) as error:
        raise type(error)(f"{folder}: {error}") from error


def _unnamed(settings: Mapping[str, Any]) -> str:
    """The method of settings that do not name it."""
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    return "compressed-tensors" if "config_groups" in settings else "?"
