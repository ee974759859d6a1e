"""Keeps a program to AVX2 alone, on any processor; without one, proves the compiled passes so, in a minute.

usage: avx2.py [COMMAND...]     such as: avx2.py pytest -n 2 tests/models

Asks numba, PyTorch and oneDNN first whether the settings took hold. Without a command, it runs the self-test of
the compiled passes for float32 and bfloat16 with plain, int8 and int4 weights and GGUF blocks, and exits with 1 where
one is wrong, or the control (another token in the reference) is right; otherwise with the code of the command.
"""

from __future__ import annotations

import os
import subprocess
import sys

from common import AVX2, beyond_avx2

SELF_TEST = """
import torch
from paceline.models.passes import self_test
from paceline.models.cpu.processor import has_bfloat, has_dot_bytes
from paceline.models.cpu.matrix_unit import has_matrix_unit

torch.set_num_threads(1)
assert not (has_bfloat() or has_dot_bytes() or has_matrix_unit())
for dtype in (torch.float32, torch.bfloat16):
    print(*(self_test.agrees(dtype, quantization=form) for form in (None, "int8", "int4", "blocks")))
right = self_test.expected
self_test.expected = lambda weights, ids: right(weights, [*ids[:4], ids[4] ^ 1, *ids[5:]])
print(self_test.agrees(torch.bfloat16))
"""


def main() -> None:
    command = sys.argv[1:]
    if wrong := beyond_avx2():
        sys.exit(f"the settings for AVX2 did not take hold: {wrong}")
    if command:
        sys.exit(subprocess.run(command, env=os.environ | AVX2, check=False).returncode)
    done = subprocess.run(
        [sys.executable, "-c", SELF_TEST], env=os.environ | AVX2, capture_output=True, text=True, check=False
    )
    print(done.stdout or done.stderr)
    sys.exit(int(done.stdout.split() != ["True"] * 8 + ["False"]))


if __name__ == "__main__":
    main()
