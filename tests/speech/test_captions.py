"""Live captions: words on which transcripts agree are final, and audio that is done with is cut off."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.speech.captions import LiveCaptions, LocalAgreement
from paceline.speech.transcript import Word


def spoken(text: str, begin: float = 0.0, step: float = 0.5) -> list[Word]:
    """Words of `step` seconds each."""
    return [Word(f" {one}", begin + place * step, begin + (place + 1) * step) for place, one in enumerate(text.split())]


def texts(words: Sequence[Word]) -> str:
    return "".join(word.text for word in words).strip()


def added(agreement: LocalAgreement, *hypotheses: str) -> list[str]:
    return [texts(agreement.add(spoken(one))) for one in hypotheses]


def test_times_do_not_go_back_where_a_later_transcript_has_moved_them() -> None:
    agreement = LocalAgreement()
    added(agreement, "a b", "a b")
    for _ in range(2):
        agreement.add([Word(" c", 0.95, 0.98), *spoken("d", begin=1.2)])
    ends = [(word.start, word.end) for word in agreement.stable]
    assert texts(agreement.stable) == "a b c d"
    assert ends == [(0.0, 0.5), (0.5, 1.0), (1.0, 1.0), (1.2, 1.7)]


def test_two_transcripts_must_agree() -> None:
    agreement = LocalAgreement()
    assert added(agreement, "a b c", "a b d e", "a b d e f") == ["", "a b", "d e"]
    assert texts(agreement.rest) == "f"
    assert texts(agreement.finish()) == "f"
    assert texts(agreement.stable) == "a b d e f"
    assert not agreement.finish()


def test_the_check_catches_that_one_transcript_is_enough() -> None:
    assert added(LocalAgreement(agree=1), "a b c", "a b d e") == ["a b c", "e"]


def test_three_transcripts_must_agree() -> None:
    agreement = LocalAgreement(agree=3)
    assert added(agreement, "a b c", "a b c d", "a b x d", "a b c d", "a b c d e") == ["", "", "a b", "", ""]
    assert added(agreement, "a b c d e f") == ["c d"]


def test_the_same_transcript_twice_is_final() -> None:
    assert added(LocalAgreement(), "a b c", "a b c") == ["", "a b c"]


def test_final_words_that_are_said_again_at_the_beginning_are_left_out() -> None:
    agreement = LocalAgreement()
    added(agreement, "a b c", "a b c")
    late = spoken("b c d e", begin=1.45)  # the model's times have moved: all of them begin behind the final words
    assert texts(agreement.add(late)) == ""
    assert texts(agreement.rest) == "d e"
    assert texts(agreement.add(spoken("d e f", begin=1.45))) == "d e"


def test_words_said_twice_are_kept_where_they_are_apart() -> None:
    agreement = LocalAgreement()
    added(agreement, "no", "no")
    again = spoken("no yes", begin=2.0)
    agreement.add(again)
    assert texts(agreement.add(again)) == "no yes"


def test_final_words_never_change() -> None:
    draw = random.Random(3)
    for agree in (1, 2, 3):
        agreement, shown = LocalAgreement(agree), []
        for length in range(1, 40):
            heard = [draw.choice("ab") if draw.random() < 0.2 else "a" for _ in range(length)]
            shown += agreement.add(spoken(" ".join(heard)))
            assert agreement.stable == shown
            assert all(one.end <= two.end for one, two in pairwise(shown))


# ------------------------------------------------------------------------------------------------ the buffer

RATE = 100


def live(**options: object) -> LiveCaptions:
    return LiveCaptions(sample_rate=RATE, **options)  # type: ignore[arg-type]


def seconds(count: float) -> np.ndarray:
    return np.ones(round(count * RATE), np.float32)


def test_audio_is_cut_at_the_last_whole_segment_that_is_final() -> None:
    captions = live(longest=4.0)
    captions.feed(seconds(3))
    text = "a b c d e f"
    assert captions.update(spoken(text), [2.0, 3.0]) == []
    captions.feed(seconds(2))
    assert texts(captions.update(spoken(f"{text} g h"), [2.0, 3.0, 4.0])) == text
    assert (captions.offset, captions.seconds) == (3.0, 2.0), "the segment that ends at 4 s is not final"
    assert texts(captions.rest) == "g h"
    assert captions.prompt == " a b c d e f"
    found = captions.update(spoken("g h i"), [1.5])
    assert [(word.text, word.start, word.end) for word in found] == [(" g", 3.0, 3.5), (" h", 3.5, 4.0)]


def test_short_audio_is_kept_whole() -> None:
    captions = live(longest=4.0)
    captions.feed(seconds(4))
    for _ in range(2):
        captions.update(spoken("a b c d"), [1.0, 2.0])
    assert (captions.offset, captions.prompt) == (0.0, "")


def test_the_prompt_is_what_came_last_before_the_audio() -> None:
    captions = live(longest=1.0, prompt_characters=4)
    captions.feed(seconds(4))
    for _ in range(2):
        captions.update(spoken("aa bb cc dd"), [1.5, 2.0])
    assert captions.offset == 1.5
    assert captions.prompt == " bb cc"


@pytest.mark.parametrize("hears", ["nothing", "another word each time", "the same words"])
def test_audio_never_grows_beyond_a_window(hears: str) -> None:
    captions, shown = live(), []
    for turn in range(200):
        captions.feed(seconds(1))
        words = {
            "nothing": [],
            "another word each time": spoken(f"w{turn}"),
            "the same words": spoken(" ".join(["a"] * int(captions.seconds)), step=1.0),
        }[hears]
        shown += captions.update(words, [captions.seconds])
        assert captions.seconds <= 30.0
        assert captions.offset + captions.seconds == pytest.approx(turn + 1)
    shown += captions.finish()
    assert list(captions.stable) == shown
    assert bool(shown) == (hears != "nothing")


def test_numbers_out_of_range_are_named() -> None:
    with pytest.raises(ConfigError, match=r"longest must be a number of seconds in 1\.\.30, got 40"):
        LiveCaptions(longest=40)
    with pytest.raises(ConfigError, match="agree must be an integer in"):
        LocalAgreement(0)
