"""bfloat16 as LLVM knows it, which llvmlite does not name.

In: nothing. Out: the type, and whether this CPU has instructions for it. Not here: what is computed with it
(models.cpu.vectors, models.cpu.tiles).
"""

from __future__ import annotations

from llvmlite import binding, ir


class Bfloat(ir.Type):
    """One bfloat16."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bfloat)

    def __hash__(self) -> int:
        return hash(Bfloat)


def has_bfloat() -> bool:
    """Whether this CPU rounds sixteen float32 to bfloat16, and multiplies pairs of bfloat16, in one instruction
    (avx512bf16).
    """
    return bool(binding.get_host_cpu_features().get("avx512bf16"))
