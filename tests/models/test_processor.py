"""Products for processors with AVX2 alone: compiled in a process that numba is told such a processor in. Whole passes:
`benchmarks/avx2.py`.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.models.cpu import features, processor
from paceline.models.cpu.tiles import DOT, FULL, HALF
from paceline.models.passes import compiled_decoder

HASWELL = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt"}

pytestmark = pytest.mark.skipif(
    platform.machine() not in {"x86_64", "AMD64"} or not features().get("avx2"), reason="needs a processor with AVX2"
)

PRODUCTS = """
import re
from models.translated_once import translated_once
from paceline.models.cpu.integer_products import to_bytes
from paceline.models.cpu.matrix import strip_sums
from paceline.models.cpu.vectors import load, store_half

@translated_once
def products(kind, weights, x, sums):
    to_bytes(x, 64, sums, 640, False)
    store_half(x, load(x))
    strip_sums(kind, weights, 4, x, 640, 8, sums)  # products

products.compile("void(int64, int64, int64, int64)")
assembly = "".join(products.inspect_asm().values())
print(len(re.findall("%zmm", assembly)), len(re.findall("%ymm", assembly)), "tdp" in assembly)
"""


def printed(program: str, **environment: str) -> list[str]:
    paths = filter(None, (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")))
    found = os.environ | environment | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", program], env=found, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.split()


def test_products_for_avx2_have_no_wider_registers() -> None:
    wide, narrow, tiles = printed(PRODUCTS, **HASWELL)
    assert int(wide) == 0
    assert int(narrow) > 100
    assert tiles == "False"


@pytest.mark.skipif(not features().get("avx512f"), reason="needs a processor with AVX-512")
def test_code_for_this_processor_has() -> None:
    """A part of it says so, in a quarter of the time."""
    part = "".join(line for line in PRODUCTS.splitlines(keepends=True) if "# products" not in line)
    wide, _, _ = printed(part)
    assert int(wide) > 100


@pytest.mark.parametrize(
    ("name", "has_bfloat", "has_unit", "kind"),
    [
        ("znver4", True, False, DOT), ("znver3", False, False, HALF), ("emeraldrapids", True, False, HALF),
        ("emeraldrapids", True, True, DOT), ("haswell", False, False, HALF),
    ],
)  # fmt: skip
def test_bfloat16_is_multiplied_as_is_fastest(
    monkeypatch: pytest.MonkeyPatch, name: str, has_bfloat: bool, has_unit: bool, kind: int
) -> None:
    monkeypatch.setattr(processor, "name", lambda: name)
    monkeypatch.setattr(processor, "has_bfloat", lambda: has_bfloat)
    monkeypatch.setattr(compiled_decoder, "has_matrix_unit", lambda: has_unit)
    assert compiled_decoder.best_kind(torch.bfloat16) == kind
    assert compiled_decoder.best_kind(torch.float32) == FULL
