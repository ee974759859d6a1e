"""What `benchmarks/bergamot.py` makes of a model and its short list, and `bergamot_rounding.py` of a product."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import benchmark_scripts
import numpy as np
import pytest
import tiny_marian as tiny
import torch
from marian_reference import MarianReference

from paceline.checkpoints import read_marian

SOURCE, TEXT = [5, 17, 30, 0], [10, 20, 30]
LISTS = ([], [40], [], [60, 61], [62], [7], [], [])
"""Of each source token, what it is often translated to."""


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with benchmark_scripts.imported("bergamot") as found:
        yield found[0]


def test_the_same_weights_are_written_in_float32(script: ModuleType, tmp_path: Path) -> None:
    """With the gates negated it is the model whose gates have their roles swapped, which writes other logits."""
    path = tiny.make(tmp_path)
    logits = {}
    for swapped in (False, True):
        script.write_float32(path, tmp_path / "float32.bin", swapped=swapped)
        file = read_marian(tmp_path / "float32.bin")
        assert {item.kind for item in file.items.values()} == {tiny.FLOAT32, tiny.INT8}
        assert file.settings() == tiny.SIZES
        logits[swapped] = MarianReference(file).text_logits(SOURCE, TEXT)
        wanted = MarianReference(read_marian(path), swapped=swapped).text_logits(SOURCE, TEXT)
        torch.testing.assert_close(logits[swapped], wanted, rtol=1e-5, atol=1e-5)
    assert (logits[True] - logits[False]).abs().max() > 0.1


def test_a_short_list_holds_what_may_be_written(script: ModuleType, tmp_path: Path) -> None:
    """The 4 most frequent tokens but the unknown one, the source's own, their translations, and frequent ones until
    there are 8.
    """
    ids = np.array([token for each in LISTS for token in each], "<u4")
    offsets = np.cumsum([0, *map(len, LISTS)]).astype("<u8")
    head = struct.pack("<6Q", script.SHORT_LIST, 0, 4, 2, len(offsets), len(ids))
    (tmp_path / "lex.bin").write_bytes(head + offsets.tobytes() + ids.tobytes())
    shortlist = script.ShortList(tmp_path / "lex.bin")
    assert shortlist.allowed([3, 0]) == [0, 2, 3, 4, 5, 60, 61]
    assert shortlist.allowed([5, 6, 0]) == [0, 2, 3, 4, 5, 6, 7]
    (tmp_path / "lex.bin").write_bytes(bytes(48))
    with pytest.raises(SystemExit, match="must be a binary short list"):
        script.ShortList(tmp_path / "lex.bin")


def test_the_engines_roundings_of_a_product() -> None:
    """Both forms are the product of whole numbers; sums of two products that leave 16 bits are cut off in one alone."""
    with benchmark_scripts.imported("bergamot_rounding") as (script,):
        draw = torch.Generator().manual_seed(0)
        x, bias = torch.randn(5, 32, generator=draw), torch.randn(8, generator=draw)
        small = torch.randint(-40, 41, (8, 32), generator=draw).float()
        for whole, cut in ((small, False), (small.sign() * 127, True)):
            rows = script.Rows(torch.arange(8), whole, 30.0, 50.0)
            found = {name: rows.product(x, bias, how, script.Counted()) for name, how in script.ROUNDINGS.items()}
            wanted = (x * 30).round().clamp(-127, 127).double() @ whole.double().T / 1500 + bias
            for name in ("as shipped", "unshifted"):
                torch.testing.assert_close(found[name].double(), wanted, rtol=1e-4, atol=1e-4)
            assert ((found["sums of 16 bits"] - wanted).abs().max() > 0.1) == cut
            assert 1e-3 < (found["by rows"] - wanted).abs().max() < 1.5
        counted = script.Counted()
        rows.product(torch.full((1, 32), 9.0), bias, script.Rounding(), counted)
        assert (counted.inputs, counted.beyond) == (32, 32)
