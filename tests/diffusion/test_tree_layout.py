"""Drafts along one call: what is laid out how. That it decodes the same canvases is tested with FreeDave."""

import numpy as np

from paceline.diffusion import Canvas, ConfiguredMethod, Layout
from tests.diffusion.decoding import Watched, fill
from tests.diffusion.toys_t4 import t4


def test_the_tree_lays_copies_along_one_call_and_shares_what_is_read() -> None:
    toy = Watched(t4())
    fill(toy, {"method": "freedave", "drafts": 3, "block_length": 6, "cache": "dual", "layout": "tree"})
    [call] = toy.passes[1][0]
    assert call.slots.tolist() == list(range(3, 9)) * 3
    assert call.read.tolist() == [0, 1, 2, *range(9, 15)]
    assert call.mask[:, :9].all()
    assert (call.mask[:, 9:] == np.kron(np.eye(3), np.ones((6, 6))).astype(bool)).all()


def test_a_layout_without_drafts_to_share_is_the_plain_one() -> None:
    toy = t4()
    canvas = Canvas.of((3,), 4, mask_token_id=23)
    parts = ConfiguredMethod({"method": "freedave", "layout": "tree"}).parts(toy, canvas)
    [plan] = parts.cache.plans(canvas, range(1, 5))
    [tree], [plain] = parts.layout.calls([canvas], [plan], None), Layout().calls([canvas], [plan], None)
    assert tree.mask is None
    assert np.array_equal(tree.slots, plain.slots)
