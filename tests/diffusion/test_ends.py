"""Rules about the end of a text: EOSER's factor, the bar of CAD, cutting."""

import pytest

from paceline.diffusion import Canvas, ConfiguredMethod, EndRamp
from paceline.errors import ConfigError
from tests.diffusion.decoding import fill, same
from tests.diffusion.toys import Independent
from tests.diffusion.toys_scripted import with_ends

END = 6


def factors(length: int, **options: object) -> list[float]:
    toy = Independent([0.5] * length)
    canvas = Canvas.of((), length, mask_token_id=toy.mask_token_id)
    parts = ConfiguredMethod({"method": "eoser", **options}).parts(toy, canvas)
    [modifier] = parts.transition.modifiers
    assert isinstance(modifier, EndRamp)
    return [modifier.factor(s) for s in range(modifier.rounds)]


def test_the_ramp_ends_at_its_last_value() -> None:
    assert factors(4) == pytest.approx([0.4, 0.6, 0.8, 1.0])
    assert factors(8, block_length=4, denoising_steps=2) == pytest.approx([0.4, 0.6, 0.8, 1.0])
    expected = [0.01 + 0.99 * (2 ** (s + 1) - 1) / 8 for s in range(3)]
    assert factors(8, eos_ramp="exponential", eos_factor_min=0.01) == pytest.approx(expected)


def test_the_factor_moves_ends_back() -> None:
    toy = with_ends([0.6, 0.95, 0.5, 0.7], [0, END, 0, 0], END)
    assert fill(toy, "static", 4, ()).trajectory.order.tolist() == [1, 3, 0, 2]
    assert fill(toy, "eoser", 4, ()).trajectory.order.tolist() == [3, 0, 1, 2]


def test_scores_below_zero_are_lowered_too() -> None:
    toy = with_ends([0.9, 0.85, 0.5, 0.7], [END, 0, 0, 0], END)
    assert fill(toy, {"method": "entropy"}, 4, ()).trajectory.order[0] == 0
    assert fill(toy, {"method": "entropy", "modifiers": ("eoser",)}, 4, ()).trajectory.order[0] == 1


def test_no_end_before_its_time() -> None:
    toy = with_ends([0.99, 0.6, 0.98, 0.96, 0.5], [END, 0, END, 0, 0], END)
    config = {"method": "cad", "eos_bar": 0.6, "max_tokens_per_round": 32}
    order = fill(toy, config, 5, ()).trajectory.order.tolist()
    assert order == [3, 1, 4, 0, 2]
    assert fill(toy, {**config, "eos_bar": 0.0}, 5, ()).trajectory.order.tolist()[:2] == [0, 2]


def test_the_bar_does_not_write_more_than_the_quota_asks_and_allows() -> None:
    """A quota of two with one slot free of the bar writes that one."""
    toy = with_ends([0.99, 0.6, 0.98, 0.97], [END, 0, END, END], END)
    rounds = fill(toy, {"method": "static", "modifiers": ("eos_bar",), "denoising_steps": 2}, 4, ()).trajectory.rounds
    assert rounds[0].slots.tolist() == [1]


def test_where_everything_ends_decoding_goes_on_a_slot_a_round() -> None:
    toy = with_ends([0.99, 0.98, 0.97, 0.96], [END] * 4, END)
    outcome = fill(toy, {"method": "cad", "eos_bar": 1.0}, 4, ())
    assert outcome.trajectory.calls == 4
    assert (outcome.canvas.tokens == END).all()


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_no_round_writes_more_than_the_cap(cap: int) -> None:
    outcome = fill(Independent([0.99] * 7), {"method": "cad", "max_tokens_per_round": cap}, 7, ())
    assert [r.slots.size for r in outcome.trajectory.rounds] == [cap] * (7 // cap) + [7 % cap] * (7 % cap > 0)


def test_a_block_never_takes_more_rounds_than_slots() -> None:
    toy = with_ends([0.3, 0.2, 0.4, 0.1, 0.3, 0.2], [END, 0, END, 0, END, END], END)
    assert fill(toy, {"method": "cad", "block_length": 3, "eos_bar": 0.9}, 6, ()).trajectory.calls <= 6


def test_the_text_is_cut_after_its_first_end() -> None:
    toy = with_ends([0.5, 0.4, 0.9, 0.3, 0.2], [0, 1, END, 1, END], END)
    outcome = fill(toy, "eotp", 5, ())
    assert outcome.canvas.output == [0, 1, END]
    assert outcome.trajectory.calls == 3
    assert outcome.trajectory.slots_computed == 5 + 3 + 3


def test_an_earlier_end_cuts_again() -> None:
    toy = with_ends([0.5, 0.4, 0.9, 0.3], [0, END, END, 1], END)
    outcome = fill(toy, "eotp", 4, ())
    assert outcome.canvas.output == [0, END]


def test_the_eager_rule_cuts_on_a_guess() -> None:
    toy = with_ends([0.9, 0.4, 0.35, 0.3], [0, 0, END, END], END)
    assert fill(toy, "eotp", 4, ()).canvas.output == [0, 0, END]
    eager = fill(toy, {"method": "eotp", "eager_end": True}, 4, ())
    assert eager.canvas.output == [0, 0, END]
    assert eager.trajectory.slots_computed < fill(toy, "eotp", 4, ()).trajectory.slots_computed


def test_the_eager_rule_cuts_at_the_surest_guess() -> None:
    """Of the ends guessed at slots 1 and 3 the second is surer: passes over 5, 4, 4 and 4 slots."""
    toy = with_ends([0.9, 0.3, 0.4, 0.35, 0.2], [0, END, 0, END, 0], END)
    eager = fill(toy, {"method": "eotp", "eager_end": True}, 5, ())
    assert eager.trajectory.slots_computed == 5 + 4 + 4 + 4
    assert eager.canvas.output == [0, END]


def test_texts_without_an_end_keep_their_length() -> None:
    toy = with_ends([0.5, 0.4, 0.9], [0, 1, 2], END)
    assert same(fill(toy, "eotp", 3, ()), fill(toy, "static", 3, ()))


def test_wrong_options_are_one_line() -> None:
    toy = Independent([0.5] * 4)
    with pytest.raises(ConfigError, match="eos_factor_min must be positive"):
        fill(toy, {"method": "eoser", "eos_factor_min": 0.0}, 4, ())
    with pytest.raises(ConfigError, match=r"eos_bar must lie in 0\.\.1"):
        fill(toy, {"method": "cad", "eos_bar": 2.0}, 4, ())
