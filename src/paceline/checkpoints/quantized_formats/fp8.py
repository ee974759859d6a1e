"""FP8 checkpoints in the layouts of DeepSeek and transformers (scales of blocks, `weight_scale_inv`), and of vLLM,
FBGEMM and ModelOpt (`weight_scale`), and ModelOpt's NVFP4; see `scaled_floats`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline.checkpoints.quantized_formats.integer_matrix import Reader, StoredMatrix
from paceline.checkpoints.quantized_formats.scaled_floats import Fp4Matrix, Fp8Matrix
from paceline.checkpoints.quantized_formats.stored_parts import OfLinearMaps, StoredParts, refuse
from paceline.errors import CheckpointError
from paceline.utils import shortened

OF_ACTIVATIONS: Final = frozenset({"input_scale", "input_scale_ub", "activation_scale", "k_scale", "v_scale"})


class Fp8(OfLinearMaps):
    """The format; see `stored_parts.Format`.

    Args:
        settings: `weight_block_size`, where scales are of blocks.
    Raises:
        CheckpointError: a setting that is wrong. UnsupportedModelError: another layout.
    """

    label: Final = "FP8"
    marks: Final = frozenset({"weight_scale_inv", "weight_scale"})
    parts: Final = frozenset({"weight", "weight_scale_inv", "weight_scale"})
    others: Final = OF_ACTIVATIONS
    ignores: Final = "activations are not rounded"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        if (kind := str(settings.get("fmt", "e4m3"))) not in {"e4m3", "float8_e4m3fn"}:
            raise refuse(self.label, f"fmt={kind!r}")
        block = settings.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)
        ):
            raise CheckpointError(
                f"the configuration of FP8 weights: 'weight_block_size' must be two whole numbers, got "
                f"{shortened(block)}; download config.json again"
            )
        self._block = None if block is None else (block[0], block[1])

    def matrix(self, stored: StoredParts, read: Reader) -> StoredMatrix:
        scale = "weight_scale_inv" if "weight_scale_inv" in stored.entries else "weight_scale"
        return Fp8Matrix.of(stored, scale, self._block)


class ModelOpt(OfLinearMaps):
    """FP8 and NVFP4 as NVIDIA's ModelOpt writes them; see `stored_parts.Format`.

    Args:
        settings: `quant_algo`.
    Raises:
        UnsupportedModelError: another one.
    """

    label: Final = "ModelOpt"
    marks: Final = frozenset({"weight_scale"})
    parts: Final = frozenset({"weight", "weight_scale", "weight_scale_2"})
    others: Final = OF_ACTIVATIONS
    ignores: Final = "activations are not rounded"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        inner = settings.get("quantization")
        algorithm = str((inner if isinstance(inner, Mapping) else settings).get("quant_algo"))
        if algorithm.upper() not in {"FP8", "NVFP4"}:
            raise refuse(self.label, f"quant_algo={algorithm!r}")

    def matrix(self, stored: StoredParts, read: Reader) -> StoredMatrix:
        if "weight_scale_2" in stored.entries:
            return Fp4Matrix.of(stored, "weight", "weight_scale", "weight_scale_2")
        return Fp8Matrix.of(stored, "weight_scale", None)
