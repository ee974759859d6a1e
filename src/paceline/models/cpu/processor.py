"""The processor that numba compiles for: this one, unless its settings name another (NUMBA_CPU_NAME with
NUMBA_CPU_FEATURES, NUMBA_ENABLE_AVX).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from llvmlite import binding
from numba import config
from numba.core.codegen import get_host_cpu_features

SETTINGS: Mapping[str, Any] = vars(config)


def name() -> str:
    """LLVM's name of it."""
    cpu: str = SETTINGS["CPU_NAME"] or binding.get_host_cpu_name()
    return cpu


@functools.cache
def features() -> Mapping[str, bool]:
    """LLVM's names of features, and whether the processor has them; those that are not named it lacks."""
    named = SETTINGS["CPU_FEATURES"]
    told: str = get_host_cpu_features() if named is None else named
    return {name[1:]: name.startswith("+") for name in told.split(",")}


def has_bfloat() -> bool:
    """Whether it rounds to bfloat16 and multiplies pairs of it in one instruction (avx512bf16)."""
    return features().get("avx512bf16", False)


def has_fast_bfloat() -> bool:
    """Whether that brings more products a cycle than float32's instruction. AMD's does; Intel's brings half as many (84
    against 151 GFLOP/s of a thread, on Emerald Rapids without its matrix unit).
    """
    return has_bfloat() and name().startswith("znver")


def has_dot_bytes() -> bool:
    """Whether it multiplies four pairs of bytes in one instruction."""
    return features().get("avx512vnni", False)
