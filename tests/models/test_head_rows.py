"""A head of fewer rows: the kept rows keep their bits, the others are -inf, and drafts are chosen among the kept
ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
import torch

from paceline.errors import ConfigError, UnsupportedModelError
from paceline.llm import BUNDLED
from paceline.models import HeadRows, load_runner
from paceline.tree import TokenTree

IDS = [(31 * i) % 6000 + 4 for i in range(24)]
KEPT = sorted(np.random.default_rng(0).choice(6144, 701, replace=False).tolist())
OUT = sorted(set(range(6144)) - set(KEPT))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("rows"), tie_word_embeddings=True)


def logits(runner: Any, ids: list[int] = IDS) -> torch.Tensor:
    found: torch.Tensor = runner.extend([runner.open()], [ids], all_logits=True).logits
    return found


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"dtype": "float32"}], ids=str)
def test_kept_rows_keep_their_bits(folder: Path, options: dict[str, Any]) -> None:
    whole, small = logits(load_runner(folder, **options)), logits(load_runner(folder, head_rows=KEPT, **options))
    assert torch.equal(whole[:, KEPT], small[:, KEPT])
    assert bool((small[:, OUT] == -torch.inf).all())
    other = logits(load_runner(folder, head_rows=[token + 1 for token in KEPT[:-1]], **options))
    assert not torch.equal(whole[:, KEPT[:-1]], other[:, KEPT[:-1]]), "the comparison sees another choice"


def test_all_rows_are_the_model_itself(folder: Path) -> None:
    assert torch.equal(logits(load_runner(folder)), logits(load_runner(folder, head_rows=range(6144))))


def test_a_trimmed_model_scores_trees_by_its_own_ids(folder: Path) -> None:
    whole, small = load_runner(folder), load_runner(folder, head_rows=KEPT)
    tree = TokenTree.build([5, 9, 7], [-1, -1, 1])
    rows = []
    for runner in (whole, small):
        cache = runner.open()
        runner.extend([cache], [IDS])
        rows.append(runner.score([cache], [11], [tree]).logits)
        runner.commit([cache], [[1, 2]])
        assert cache.length == len(IDS) + 3
        rows[-1] = torch.cat((rows[-1], runner.score([cache], [12], [TokenTree.build([], [])]).logits))
    assert torch.equal(rows[0][:, KEPT], rows[1][:, KEPT])


def test_the_bundled_draft_chooses_among_the_kept() -> None:
    whole, small = load_runner(BUNDLED / "draft"), load_runner(BUNDLED / "draft", head_rows=KEPT)
    assert int(logits(small)[-1].argmax()) == KEPT[int(logits(whole)[-1, KEPT].argmax())]
    assert small.info.weight_bytes < whole.info.weight_bytes


def test_a_head_without_rows_and_a_model_without_head_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="at least one of the 6144 tokens"):
        load_runner(folder, head_rows=[6144, -1])
    with pytest.raises(UnsupportedModelError, match="head of fewer rows"):
        load_runner(folder, head_rows=KEPT, native=False)


def test_rows_that_the_model_lacks_are_left_out() -> None:
    rows = HeadRows.of([4, 1, 4, 9], 6)
    assert (rows.kept.tolist(), rows.vocab_size) == ([1, 4], 6)
