"""Every near tie is counted and nothing hides behind the first one, with a model whose logits are written down here."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.models import NO_INPUTS, Inputs
from paceline.sampling import KeyedDraws, draw_seed
from paceline.verify import Agreement, Difference, differences, first_difference
from paceline.verify.tokens import Sampling

SIZE = 8
PROMPT = [1, 2]


class Written:
    """A runner whose row after a text is a function of the text; tokens 5 and 6 nearly tie where their position is
    even.
    """

    info = SimpleNamespace(dtype=torch.float32)

    def open(self, prompt_length: int = 0, inputs: Inputs = NO_INPUTS) -> list[int]:
        return []

    def release(self, cache: list[int]) -> None:
        cache.clear()

    def extend(self, caches: list[list[int]], tokens: list[list[int]], *, all_logits: bool) -> Any:
        rows = []
        for token in tokens[0]:
            caches[0].append(token)
            rows.append(self.row(caches[0]))
        return SimpleNamespace(logits=torch.stack(rows))

    def row(self, text: Sequence[int]) -> torch.Tensor:
        noise = torch.Generator().manual_seed(sum(text) * 1000 + len(text))
        row_v = torch.rand(SIZE, generator=noise)
        if len(text) % 2 == 0:
            row_v[5], row_v[6] = 3.0, 3.0 + 1e-5
        return row_v

    def plain(self, text: Sequence[int], count: int, sampling: Sampling | None = None) -> list[int]:
        """Plain decoding of `count` tokens."""
        made = list(text)
        for _ in range(count):
            row_v = self.row(made)
            if sampling is None:
                made.append(int(row_v.argmax()))
            else:
                keys = KeyedDraws(draw_seed(sampling.seed, 0), len(made))
                made.append(keys.gumbel(0, row_v / sampling.temperature))
        return made[len(text) :]


@pytest.fixture
def model() -> Written:
    return Written()


def other_at_ties(model: Written, places: set[int], count: int = 8) -> list[int]:
    """An accelerated output that takes the other token of the near ties at these positions."""
    made: list[int] = []
    while len(made) < count:
        (token,) = model.plain([*PROMPT, *made], 1)
        made.append(5 if len(made) in places else token)
    return made


def compare(model: Written, fast: list[int], count: int = 8, sampling: Sampling | None = None) -> list[Difference]:
    def go_on(kept: list[int]) -> list[int]:
        return model.plain([*PROMPT, *kept], count - len(kept), sampling)

    return differences(model, PROMPT, model.plain(PROMPT, count, sampling), fast, go_on, sampling=sampling)  # type: ignore[arg-type]


def test_every_near_tie_is_counted(model: Written) -> None:
    assert compare(model, model.plain(PROMPT, 8)) == []
    found = compare(model, other_at_ties(model, {2, 4, 6}))
    assert [d.position for d in found] == [2, 4, 6]
    assert all(d.near_tie for d in found)


def test_a_wrong_token_after_a_near_tie_is_found(model: Written) -> None:
    fast = other_at_ties(model, {2})
    fast[5] = (fast[5] + 1) % SIZE
    found = compare(model, fast)
    assert [(d.position, d.near_tie) for d in found] == [(2, True), (5, False)]


def test_an_output_that_ends_at_or_after_a_near_tie_is_found(model: Written) -> None:
    fast = other_at_ties(model, {2})
    for length in (3, 5):
        last = compare(model, fast[:length])[-1]
        assert (last.position, last.fast, last.near_tie) == (length, None, False)


def test_the_first_difference_alone_would_pass_it(model: Written) -> None:
    fast = other_at_ties(model, {2})
    fast[5] = (fast[5] + 1) % SIZE
    first = first_difference(model, PROMPT, model.plain(PROMPT, 8), fast)  # type: ignore[arg-type]
    assert first is not None
    assert first.near_tie


def test_above_temperature_0_the_noise_of_the_seed_decides_what_is_a_near_tie(model: Written) -> None:
    sampling = Sampling(temperature=0.5, seed=7)
    fast = model.plain(PROMPT, 8, sampling)
    assert compare(model, fast, sampling=sampling) == []
    fast[3] = (fast[3] + 1) % SIZE
    (found,) = compare(model, fast, sampling=sampling)
    assert (found.position, found.near_tie) == (3, False)


def test_a_near_tie_of_perturbed_scores(model: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(temperature=1.0, seed=3)
    position = len(PROMPT) + 4
    noise_v = KeyedDraws(draw_seed(3, 0), position).noise(0, torch.zeros(SIZE))
    tied_v = -noise_v - 5.0
    tied_v[2:4] = 3.0 - noise_v[2:4]
    tied_v[2] += 1e-4
    row = model.row
    monkeypatch.setattr(model, "row", lambda text: tied_v if len(text) == position else row(text))
    fast = model.plain(PROMPT, 8, sampling)
    assert fast[4] == 2
    assert abs(float(tied_v[2] - tied_v[3])) > 0.01  # no near tie of the logits themselves
    other = [*fast[:4], 3]
    other += model.plain([*PROMPT, *other], 3, sampling)
    (found,) = compare(model, other, sampling=sampling)
    assert (found.position, found.near_tie) == (4, True)
    (unseeded,) = [first_difference(model, PROMPT, fast, other)]  # type: ignore[arg-type]
    assert unseeded is not None
    assert not unseeded.near_tie


def test_the_noise_is_what_draws_add() -> None:
    weights_v = torch.randn(500)
    for depth in range(5):
        draws = KeyedDraws(99, 17)
        assert int((weights_v + draws.noise(depth, weights_v)).argmax()) == draws.gumbel(depth, weights_v)


def test_an_agreement_adds_up() -> None:
    tie, wrong = Difference(1, 5, 6, 1e-5, 1e-3, True), Difference(3, 5, 7, 1.0, 1e-3, False)
    found = Agreement()
    for differing in ([], [tie, tie], [tie, wrong]):
        found.add([1, 2, 3], differing)
    assert (found.outputs, found.tokens, found.identical, found.near_ties, found.wrong) == (3, 9, 1, 3, 1)
    assert [row["output"] for row in found.to_dict()["differences"]] == [1, 1, 2, 2]
