"""Runners of other token ids, and heads of fewer rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
import torch
from tiny_llama import tokens
from toy_parts import EncoderRunner
from toys import ToyRunner

from paceline.errors import ConfigError, PromptError, UnsupportedModelError
from paceline.llm import BUNDLED
from paceline.models import Inputs, MappedRunner, context_of, load_runner
from paceline.models.abilities import input_kinds_of
from paceline.models.runners.remapped_tokens import HeadRows
from paceline.tree import TokenTree

INNER = 6
INTO = np.array([3, -1, 0, 5, 1])
COLUMNS, TOKENS = np.array([0, 3, 5]), np.array([2, 0, 3])


def mapped(inner: Any) -> MappedRunner:
    """Outer ids 0, 2, 3, 4 are inner 3, 0, 5, 1; the last has no column."""
    return MappedRunner(inner, INTO, COLUMNS, TOKENS, 4)


def test_ids_go_in_and_columns_come_out() -> None:
    inner = ToyRunner(INNER, order=None)
    runner = mapped(inner)
    cache = runner.open()
    row = runner.extend([cache], [[0, 2, 4]]).logits[0]
    plain = inner.logits([3, 0, 1])
    assert row.tolist() == [plain[3], -torch.inf, plain[0], plain[5]]
    rows = runner.score([cache], [3], [TokenTree.build([0, 2], [-1, -1])]).logits
    assert [float(r[2]) for r in rows] == [float(inner.logits([3, 0, 1, 5, *path])[0]) for path in ([], [3], [0])]
    runner.commit([cache], [[1]])
    other = runner.fork(cache)
    runner.truncate(other, 2)
    assert (cache.length, other.length) == (5, 2)
    assert cache.tokens == [3, 0, 1, 5, 0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("tokens", [[1], [9], [-1], [0, 1]])
def test_what_the_model_does_not_have_is_rejected(tokens: list[int]) -> None:
    with pytest.raises(ConfigError, match="was fed a token that it does not have"):
        mapped(ToyRunner(INNER)).inside(tokens)


def test_maps_over_maps() -> None:
    """Newer ids 0, 1, 2 are 3, 2, 1 of the map above; of these the last is nobody."""
    inner = ToyRunner(INNER, order=None)
    runner = mapped(inner).renamed(np.array([3, 2, -1]), np.array([-1, -1, 1, 0]), 3)
    row = runner.extend([runner.open()], [[0, 1]]).logits[0]
    plain = inner.logits([5, 0])
    assert row.tolist() == [plain[5], plain[0], -torch.inf]
    whole = MappedRunner(inner, np.arange(INNER), None, np.arange(INNER), INNER)  # type: ignore[arg-type]
    same = whole.renamed(np.arange(INNER), np.arange(INNER)[::-1].copy(), INNER)
    assert same.extend([same.open()], [[1, 2]]).logits[0].tolist() == inner.logits([1, 2]).flip(0).tolist()


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


def test_a_head_without_rows_and_a_model_without_head_are_rejected(folder: Path) -> None:
    with pytest.raises(ConfigError, match="at least one of the 6144 tokens"):
        load_runner(folder, head_rows=[6144, -1])
    with pytest.raises(UnsupportedModelError, match="head of fewer rows"):
        load_runner(folder, head_rows=KEPT, native=False)


def test_rows_that_the_model_lacks_are_left_out() -> None:
    rows = HeadRows.of([4, 1, 4, 9], 6)
    assert (rows.kept.tolist(), rows.vocab_size) == ([1, 4], 6)


def test_inputs_go_to_the_model_behind_other_ids() -> None:
    """Encoder tokens are translated, all else is passed on. Control: a model without inputs takes none here either."""
    inner, ids = EncoderRunner(), np.arange(63, -1, -1)
    runner = MappedRunner(inner, ids, ids, np.arange(64), 64)
    outer, within = Inputs(encoder_tokens=[1, 2]), Inputs(encoder_tokens=[62, 61])
    assert input_kinds_of(runner) == inner.input_kinds
    assert context_of(runner, outer) == context_of(inner, within) == inner.info.max_context - 2
    states = runner.open(5, outer), inner.open(5, within), inner.open(5)
    text = tokens(9, seed=4)
    mapped = runner.extend([states[0]], [text]).logits
    (own,), (without,) = (inner.extend([state], [ids[text].tolist()]).logits for state in states[1:])
    assert torch.equal(mapped[0], own[torch.from_numpy(ids.copy())])
    assert not torch.equal(own, without)
    with pytest.raises(PromptError, match="was fed a token that it does not have"):
        context_of(runner, Inputs(encoder_tokens=[64]))
    plain = MappedRunner(inner.native, ids, None, ids, 64)  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="tiny takes tokens as inputs"):
        plain.open(5, outer)
