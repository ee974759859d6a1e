"""GPTQ's tensors, as AutoGPTQ and GPTQModel write them.

A map of `in` inputs and `out` outputs, b bits: `qweight` int32 (in * b / 32, out), each column a stream of numbers down
the inputs, lowest bits first; `qzeros` int32 (groups, out * b / 32), the same along the outputs; `scales` (groups,
out); `g_idx` int32 (in,), the group of each input, which follows no order where columns were rounded by the size of
their activations (desc_act). Zeros of format "gptq" are stored less 1, those of "gptq_v2" as they are.

Source: GPTQ: Accurate post-training quantization for generative pre-trained transformers (arXiv:2210.17323).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from paceline.checkpoints.quantized_formats.bit_streams import unpacked_numbers, words_of
from paceline.checkpoints.quantized_formats.integer_matrix import Grid, IntegerMatrix, Reader, even_groups
from paceline.checkpoints.quantized_formats.stored_parts import FLOATS, OfLinearMaps, StoredParts, refuse, whole_number
from paceline.errors import CheckpointError

LEAST_BITS, MOST_BITS = 2, 8


@dataclass(frozen=True, slots=True)
class GptqMatrix(IntegerMatrix):
    """See the module.

    Attributes:
        size: inputs of a group. less: what stored zeros lack. symmetric: zeros are half of the range.
    """

    stored: StoredParts
    shape: tuple[int, int]
    bits: int
    size: int
    less: int
    symmetric: bool

    def grid(self, read: Reader) -> Grid:
        zeros = unpacked_numbers(read(self.stored.name("qzeros")), self.bits, self.shape[0]).to(torch.int16)
        half = 1 << (self.bits - 1)
        # Some writers give zeros as they are and still call that format "gptq".
        as_they_are = self.symmetric and bool((zeros == half).all())
        scales = read(self.stored.name("scales"))
        return Grid(scales.T, (zeros if as_they_are else zeros + self.less).T, self._groups(read, len(scales)))

    def _groups(self, read: Reader, count: int) -> torch.Tensor:
        inputs = self.shape[1]
        if "g_idx" not in self.stored.entries:
            return even_groups(inputs, count, self.size)
        groups = read(self.stored.name("g_idx")).long()
        if int(groups.min()) < 0 or int(groups.max()) >= count:
            raise CheckpointError(
                f"{self.stored.entries['g_idx'].file}: {self.stored.name('g_idx')} names group {int(groups.max())} "
                f"of {count}; download the checkpoint again"
            )
        return groups

    def numbers(self, read: Reader) -> torch.Tensor:
        words = read(self.stored.name("qweight")).T.contiguous()
        return unpacked_numbers(words, self.bits, self.shape[1])


class Gptq(OfLinearMaps):
    """The format; see `stored_parts.Format`.

    Args:
        settings: `bits`, `group_size` (-1: one group), `sym`, `checkpoint_format` and, where modules have bits of their
            own, `dynamic`.
    Raises:
        CheckpointError: a setting that is missing or wrong. UnsupportedModelError: another layout.
    """

    label: Final = "GPTQ"
    marks: Final = frozenset({"qweight"})
    parts: Final = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    others: Final = frozenset[str]()
    ignores: Final = ""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        layout = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
        if layout not in {"gptq", "gptq_v2"}:
            raise refuse(self.label, f"checkpoint_format={layout!r}")
        self._bits = whole_number(settings, "bits", self.label)
        if not LEAST_BITS <= self._bits <= MOST_BITS:
            raise refuse(self.label, f"{self._bits} bits")
        self._size = whole_number(settings, "group_size", self.label, -1)
        self._own, self._less = bool(settings.get("dynamic")), 1 if layout == "gptq" else 0
        self._symmetric = bool(settings.get("sym", True))

    def matrix(self, stored: StoredParts, read: Reader) -> GptqMatrix:
        words, outputs = stored.need("qweight", ("I32",), 2)
        groups, _ = stored.need("scales", FLOATS, 2)
        stored.need_shape("scales", (groups, outputs))
        bits = self._bits_of(stored, outputs)
        inputs = words * 32 // bits
        stored.need_shape("qzeros", (groups, words_of(outputs, bits)))
        if "g_idx" in stored.entries:
            stored.need("g_idx", ("I32", "I64"), 1)
            stored.need_shape("g_idx", (inputs,))
        size = self._size if self._size > 0 and not self._own else -(-inputs // groups)
        if -(-inputs // size) != groups:
            raise CheckpointError(
                f"{stored.entries['scales'].file}: {stored.name('scales')} has {groups} groups, but {inputs} inputs in "
                f"groups of {size} make {-(-inputs // size)}; its configuration and weights do not belong together"
            )
        return GptqMatrix(stored, (outputs, inputs), bits, size, self._less, self._symmetric)

    def _bits_of(self, stored: StoredParts, outputs: int) -> int:
        """Those of the configuration, or the map's own where maps may differ."""
        _, words = stored.need("qzeros", ("I32",), 2)
        fitting = [bits for bits in range(LEAST_BITS, MOST_BITS + 1) if words_of(outputs, bits) == words]
        if self._bits in fitting:
            return self._bits
        if not fitting or not self._own:
            raise CheckpointError(
                f"{stored.entries['qzeros'].file}: {stored.name('qzeros')} has {words} words for {outputs} outputs, "
                f"which {self._bits} bits do not make; its configuration and weights do not belong together"
            )
        return fitting[0]
