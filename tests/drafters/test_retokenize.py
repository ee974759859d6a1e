"""One text in the tokens of another vocabulary: the same whatever way it came in, a bounded look-back, no broken
characters.
"""

from __future__ import annotations

import random

import pytest
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoints import Tokenizer, encoder_of, whole_characters
from paceline.drafters.vocab.retokenize import LONGEST_PIECE, Retokenizer, TextReading, cut_of
from paceline.drafters.vocab.vocabularies import shared_tokens
from paceline.llm import BUNDLED

SOURCE = Tokenizer.load(BUNDLED / "target")
TEXT = (
    (
        "The quick brown fox, größer than a 東京タワー 🙂🚀, jumps:\n\n"
        "    def add(a, b):\n        return a + b  # русский\n\n"
    )
    * 6
    + "x" * 700
    + " and so on and on, it doesn't end. " * 20
)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("kinds")
    return {kind: Tokenizer.load(tiny_tokenizers.write(folder / kind, kind)) for kind in tiny_tokenizers.KINDS}


def between(other: Tokenizer) -> Retokenizer:
    return Retokenizer(SOURCE, other, shared_tokens(SOURCE, other).specials)


def tokens(reading: TextReading) -> list[int]:
    return [*reading.done, *reading.open]


@pytest.mark.parametrize("kind", tiny_tokenizers.KINDS)
def test_the_steps_in_which_a_text_comes_do_not_matter(others: dict[str, Tokenizer], kind: str) -> None:
    ids = SOURCE.encode(TEXT, add_special_tokens=False)
    ids = [*ids[:50], 3, *ids[50:], 3, 1, *ids[:9]]
    by = between(others[kind])
    rng = random.Random(0)
    for _ in range(3):
        reading, at = by.open(), 0
        while at < len(ids):
            at += rng.randint(1, 60)
            reading.follow(ids[:at])
            fresh = by.open()
            fresh.follow(ids[:at])
            assert (tokens(reading), reading.pending) == (tokens(fresh), fresh.pending)
            assert len(reading.tail) <= LONGEST_PIECE, "a bounded look-back"


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_the_text_is_the_same_and_nearly_the_tokens(others: dict[str, Tokenizer], kind: str) -> None:
    other, text = others[kind], TEXT.replace("x" * 700, "")
    reading = between(other).open()
    reading.follow(SOURCE.encode(text, add_special_tokens=False))
    found, whole = tokens(reading), other.encode(text)
    assert other.decode(found).replace(" ", "") == text.replace(" ", "")
    same = sum(a == b for a, b in zip(found, whole, strict=False))
    assert found[: len(whole) // 20] == whole[: len(whole) // 20]
    assert abs(len(found) - len(whole)) < 0.02 * len(whole)
    assert kind == "metaspace" or (found == whole and same == len(whole))


def test_a_reading_forks(others: dict[str, Tokenizer]) -> None:
    by = between(others["byte_level"])
    ids, one = SOURCE.encode("The quick brown fox jumps over", add_special_tokens=False), by.open()
    one.follow(ids[:6])
    two = one.copy()
    one.follow([*ids[:6], *ids[2:4]])
    two.follow(ids)
    fresh = by.open()
    fresh.follow(ids)
    assert tokens(two) == tokens(fresh) != tokens(one)


def test_bytes_of_a_character_wait_for_its_end(others: dict[str, Tokenizer]) -> None:
    by, ids = between(others["byte_level"]), SOURCE.encode("a🙂b", add_special_tokens=False)
    assert len(ids) > 4, "the character is spread over several tokens"
    reading, seen = by.open(), []
    for stop in range(1, len(ids) + 1):
        reading.follow(ids[:stop])
        seen.append((others["byte_level"].decode(tokens(reading)), bool(reading.pending)))
    assert seen[0] == ("a", False)
    assert seen[-1] == ("a🙂b", False)
    assert {text for text, waits in seen if waits} == {"a"}
    reading = by.open()
    reading.follow([*ids[:2], 3])
    assert others["byte_level"].decode(tokens(reading)) == "a\ufffd", (
        "what a special token interrupts never gets its end"
    )


def test_special_tokens_become_the_others_own(others: dict[str, Tokenizer]) -> None:
    by = between(others["metaspace"])
    assert (SOURCE.eos_id, by.specials[3], by.prefix) == (3, 2, [1])
    hello = others["metaspace"].encode("hello", add_special_tokens=False)
    reading = by.open()
    reading.follow([*SOURCE.encode("hello", add_special_tokens=False), 3])
    assert tokens(reading) == [1, *hello, 2]
    started = by.open()
    started.follow([SOURCE.bos_id or 0, *SOURCE.encode("hello", add_special_tokens=False)])
    assert tokens(started) == ([1, *hello]), "one start token"


def test_a_continued_text_gets_no_second_space(others: dict[str, Tokenizer]) -> None:
    for other in others.values():
        encode = encoder_of(other)
        assert encode("hello") + encode(" world") == other.encode("hello world", add_special_tokens=False)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40).filter(lambda text: "\x00" not in text), st.integers(0, 160))
def test_whole_characters(text: str, cut: int) -> None:
    data = text.encode("utf-8", "ignore")[:cut]
    size = whole_characters(data)
    assert data[:size].decode("utf-8") == data.decode("utf-8", "ignore")


def test_cuts_depend_on_what_is_before_them() -> None:
    text = "a" * 70 + " b" + "c" * 300
    assert cut_of(text) == 70 == cut_of(text[:72])
    assert cut_of(text[:71]) is None
    assert cut_of("a" * LONGEST_PIECE) is None
    assert cut_of("a" * (LONGEST_PIECE + 1)) == LONGEST_PIECE


def test_the_history_check_catches_cuts_where_the_text_happened_to_end(others: dict[str, Tokenizer]) -> None:
    """Negative control: encoding each step's text by itself gives other tokens."""
    other = others["byte_level"]
    ids = [token for letter in "the quick fox" for token in SOURCE.encode(letter, add_special_tokens=False)]
    pieces = [token for one in ids for token in other.encode(SOURCE.decode([one]), add_special_tokens=False)]
    reading = between(other).open()
    reading.follow(ids)
    assert pieces != tokens(reading)
