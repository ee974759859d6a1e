"""top_logprobs: values of log_softmax, ranks, ties by id, the chosen token always there."""

import math

import pytest
import torch

from paceline.sampling import Logprob, top_logprobs


def test_the_top_tokens_come_in_order_and_the_chosen_one_with_its_rank() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 0.0, 6.0]])
    expected = torch.log_softmax(logits, -1)
    first, second = top_logprobs(logits, [0, 3], 2)
    assert list(first) == [1, 3, 0]
    assert [first[t].rank for t in first] == [1, 2, 4]
    assert list(second) == [3, 0]
    for row, entry in zip(expected, (first, second), strict=True):
        for token, one in entry.items():
            assert one.logprob == float(row[token])
            assert one.decoded_token is None


def test_k_of_zero_gives_the_chosen_token_alone() -> None:
    assert top_logprobs(torch.zeros(1, 4), [2], 0) == [{2: Logprob(pytest.approx(-math.log(4)), 3)}]


def test_ties_go_to_the_smaller_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 2.0, 1.0]])
    (entry,) = top_logprobs(logits, [5], 4)
    assert [(token, one.rank) for token, one in entry.items()] == [(1, 1), (4, 2), (0, 3), (2, 4), (5, 6)]


def test_more_than_the_vocabulary_means_all() -> None:
    (entry,) = top_logprobs(torch.tensor([[0.0, 1.0]]), [0], 20)
    assert list(entry) == [1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_row_is_what_it_is_alone_and_ranks_agree_with_sorting(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 997, generator=torch.Generator().manual_seed(0)).to(dtype)
    chosen = [3, 100, 996, 0, 500]
    entries = top_logprobs(logits, chosen, 6)
    for row, token, entry in zip(logits, chosen, entries, strict=True):
        assert top_logprobs(row[None], [token], 6) == [entry]
        order = sorted(range(997), key=lambda t: (-float(row[t]), t))
        assert [t for t in entry if entry[t].rank <= 6] == order[:6]
        assert entry[token].rank == order.index(token) + 1
        total = float(torch.logsumexp(row.double(), 0))
        assert entry[token].logprob == pytest.approx(float(row[token]) - total, abs=1e-5)


def test_no_rows_and_wrong_shapes() -> None:
    assert top_logprobs(torch.zeros(0, 4), [], 3) == []
    with pytest.raises(ValueError, match="one row per chosen token"):
        top_logprobs(torch.zeros(2, 4), [1], 3)
