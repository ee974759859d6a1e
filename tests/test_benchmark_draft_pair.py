"""The pair's script times nothing that differs, and its figures are those of arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import benchmark_scripts
import pytest


@pytest.fixture(scope="module")
def pair() -> Iterator[Any]:
    with benchmark_scripts.imported("draft_pair") as (found,):
        yield found


def pieces(pair: Any) -> list[Any]:
    return [pair.Piece("set", str(i), [1, 2], [5, 6, 7 + i]) for i in range(3)]


def answering(pair: Any, passes: int, accepted: int, wrong: Sequence[str] = ()) -> Callable[[Any, int], Any]:
    """A setting that writes what plain decoding does, but for some conversations."""

    def run(piece: Any, repeat: int) -> Any:
        tokens = [5, 9, 9] if piece.conversation in wrong else list(piece.answer)
        return pair.Answer(tokens, passes, 4, accepted, 0.25, 0.5 / passes)

    return run


def test_a_setting_of_ours_that_differs_ends_the_run(pair: Any) -> None:
    plain, some = answering(pair, 3, 0), pieces(pair)
    with pytest.raises(
        SystemExit, match=r"'auto' differs from plain decoding at token 1 of set 2.*\[9, 9\] instead of"
    ):
        pair.measure({pair.PLAIN: plain, "auto": answering(pair, 2, 1, wrong=["2"])}, some, 1)
    short = {pair.PLAIN: plain, "auto": lambda piece, repeat: pair.Answer(piece.answer[:2], 2, 1, 1, 0.1, 0.1)}
    with pytest.raises(SystemExit, match="at token 2"):
        pair.measure(short, some, 1)


def test_another_engine_is_compared_with_itself(pair: Any) -> None:
    plain, llama, drafted = pair.PLAIN, pair.LLAMA, pair.LLAMA_DRAFT
    runs = {
        plain: answering(pair, 3, 0), "auto": answering(pair, 2, 1), llama: answering(pair, 3, 0, wrong=["0"]),
        drafted: answering(pair, 1, 2, wrong=["0", "1"]),
    }  # fmt: skip
    found = pair.measure(runs, pieces(pair), 2)
    made = pair.summary(found)
    same = [made[name][f"identical to {plain}"] for name in (plain, "auto", llama)]
    assert same == pytest.approx([1.0, 1.0, 2 / 3])
    assert made[drafted][f"identical to {llama}"] == pytest.approx(2 / 3)
    assert made["auto"]["tokens per pass"] == pytest.approx(3 / 2)
    assert made["auto"]["accepted"] == pytest.approx(1 / 4)
    assert made["auto"]["tokens per second (CPU)"] == pytest.approx(3 / 0.25)
    assert made["auto"][f"over {plain} (CPU)"]["value"] == pytest.approx(1.0)
    assert made["auto"][f"over {plain} (decoding)"]["value"] == pytest.approx(2 / 3)
    slow = [[(2 * seconds, one) for seconds, one in rows] for rows in found["auto"]]
    twice = pair.summary({plain: slow, "auto": found["auto"]})
    assert twice["auto"][f"over {plain} (wall)"]["value"] == pytest.approx(2.0)
