"""What two vocabularies share: by bytes and by office, one to one, and a runner of both."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_tokenizers
import torch
from toy_models import LETTERS, OTHER, ToyModels, letters, others, strangers
from toys import ToyRunner

from paceline.checkpoints import Tokenizer, token_bytes
from paceline.drafters.vocab.vocabularies import Numbering, check_shared, open_shared, shared_tokens
from paceline.errors import DrafterError, UnsupportedModelError
from paceline.llm import BUNDLED

TARGET = Tokenizer.load(BUNDLED / "target")


@pytest.mark.parametrize("kind", tiny_tokenizers.KINDS)
def test_shared_tokens_write_the_same_bytes(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = Tokenizer.load(tiny_tokenizers.write(tmp_path_factory.mktemp(kind), kind))
    shared = shared_tokens(TARGET, other)
    mine, theirs = token_bytes(TARGET), token_bytes(other)
    texts = {a: b for a, b in shared.target_of.items() if b not in shared.specials}
    assert len(texts) == shared.texts > 50
    assert all(theirs[a] == mine[b] for a, b in texts.items())
    assert len(set(shared.target_of.values())) == len(shared.target_of)
    assert shared.specials[TARGET.eos_id or 0] == other.eos_id
    assert set(mine) & set(theirs) - {None, b""} == {mine[b] for b in texts.values()}, "nothing is left out"


def test_special_tokens_are_no_texts() -> None:
    shared = shared_tokens(letters(), others())
    assert shared.specials == {0: 0}
    assert shared.texts == len(LETTERS)
    assert {OTHER[a]: LETTERS[b - 1] for a, b in shared.target_of.items() if a} == dict(
        zip(LETTERS, LETTERS, strict=True)
    )


def test_nothing_in_common_is_rejected() -> None:
    shared = shared_tokens(letters(), strangers())
    with pytest.raises(
        DrafterError, match="'x' shares no token with the target: none of its 3 writes what one of 11 does"
    ):
        check_shared(shared, "x", letters(), strangers())
    check_shared(shared_tokens(letters(), others()), "x", letters(), others())


def test_the_runner_speaks_both_and_renormalises() -> None:
    models = ToyModels(ToyRunner(11), ToyRunner(11, order=None))
    runner, numbering = open_shared(models, "other", shared_tokens(letters(), others()), 11)
    assert numbering.numbers([0, 10, 11, 12]) == [0, 1, 11 + 11, 11 + 12], "unshared tokens have numbers of their own"
    row = runner.extend([runner.open()], [numbering.numbers([10, 12, 9])]).logits[0]
    own = models.other.logits([10, 12, 9])
    shared = [0, *range(1, 11)]
    assert row.shape == (11,)
    want = own[shared].softmax(0)
    assert torch.allclose(row.softmax(0)[numbering.names[shared]], want)
    assert models.opened[-1][1] == shared, "the head keeps shared rows alone"


def test_a_model_whose_head_cannot_be_cut_is_masked() -> None:
    class Whole(ToyModels):
        def open(self, model: str, *, head_rows: Any = None, other_tokens: bool = False, **more: Any) -> Any:
            if head_rows is not None:
                raise UnsupportedModelError("no")
            return super().open(model, other_tokens=other_tokens)

    shared = shared_tokens(letters(), others())
    rows = []
    for kind in (ToyModels, Whole):
        runner, numbering = open_shared(kind(ToyRunner(11), ToyRunner(11, order=None)), "other", shared, 11)
        rows.append(runner.extend([runner.open()], [numbering.numbers([10, 13])]).logits)
    assert torch.equal(*rows)


def test_heads_smaller_than_their_vocabularies() -> None:
    numbering = Numbering(shared_tokens(letters(), others()), 5, 9)
    assert numbering.names.tolist() == [0, -1, -1, -1, -1, -1, -1, 4, 3]
    assert numbering.numbers([0, 7, 8, 12]) == [0, 4, 3]
