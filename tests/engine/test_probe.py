"""What a pass costs is measured within the context, and a root alone as plain decoding scores it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from tiny_llama import runner_of, tiny_llama

from paceline.engine import Probe


@pytest.mark.parametrize(("most", "measured"), [(512, 3), (20, 2), (8, 1)])
def test_rows_that_the_context_cannot_hold_are_not_measured(most: int, measured: int) -> None:
    runner, found = runner_of(tiny_llama(), max_context=most), list[float]()
    refused = pytest.raises(RuntimeError, match=f"context of {most} tokens") if measured < 3 else nullcontext()
    with refused:
        for seconds in Probe(runner)([1, 8, 32], 100):
            found.append(seconds)
    assert len(found) == measured
    assert min(found) > 0
