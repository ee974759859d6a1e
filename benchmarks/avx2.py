"""Compiled passes for processors with AVX2 alone, on one with AVX-512: right results, with a control, in a minute.

usage: avx2.py

Runs the self-test of models.cpu for float32 and bfloat16 with plain, int8 and int4 weights and GGUF blocks, in a
process that is told a Haswell processor. Exits with 1 where one is wrong, or the control (another token in the
reference) is right.
"""

from __future__ import annotations

import os
import subprocess
import sys

from common import AVX2

SELF_TEST = """
import torch
from paceline.models.cpu import self_test
from paceline.models.cpu.processor import features, has_bfloat, has_dot_bytes
from paceline.models.cpu.matrix_unit import has_matrix_unit

torch.set_num_threads(1)
assert not (has_bfloat() or has_dot_bytes() or has_matrix_unit())
for dtype in (torch.float32, torch.bfloat16):
    print(*(self_test.agrees(dtype, quantization=form) for form in (None, "int8", "int4", "blocks")))
right = self_test.expected
self_test.expected = lambda weights, ids: right(weights, [*ids[:4], ids[4] ^ 1, *ids[5:]])
print(self_test.agrees(torch.bfloat16), features().get("avx2"))
"""


def main() -> None:
    command = [sys.executable, "-c", SELF_TEST]
    done = subprocess.run(command, env=os.environ | AVX2, capture_output=True, text=True, check=False)
    print(done.stdout or done.stderr)
    sys.exit(int(done.stdout.split() != ["True"] * 8 + ["False", "True"]))


if __name__ == "__main__":
    main()
