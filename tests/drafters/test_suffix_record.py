"""Records of arrays: compiled code finds the arrays that they were made of."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.drafters.suffix import SuffixTree, arrays_of, record_of


def test_compiled_code_sees_the_arrays_of_a_record() -> None:
    tree = SuffixTree(6)
    tree.grow(np.array([1, 2, 1, 2, 3], np.int32))
    found = arrays_of(tree.record)
    for name, array in tree.arrays._asdict().items():
        read = getattr(found, name)
        assert read.shape == array.shape
        assert read.dtype == array.dtype
        assert read.ctypes.data == array.ctypes.data
    assert found.text.ctypes.data != tree.copy().arrays.text.ctypes.data


def test_a_tree_that_moves_has_another_record() -> None:
    tree = SuffixTree(6, 8)
    before = tree.record
    tree.grow(np.arange(100, dtype=np.int32))
    assert not np.array_equal(tree.record, before)
    assert np.array_equal(tree.record, record_of(tree.arrays))


def test_arrays_with_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        record_of([np.zeros((4, 4), np.int32)[:, 0]])
