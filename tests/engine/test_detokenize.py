"""Text that comes piece by piece equals the decode of the whole, for every kind of tokenizer."""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CORPUS, KINDS, write

import paceline
from paceline.checkpoints import Tokenizer
from paceline.engine import IncrementalDetokenizer, detokenize
from paceline.engine.detokenize import BROKEN

BUNDLED = Path(paceline.__file__).parent / "bundled" / "target"
LONG = " ".join(CORPUS[:4]) + " 🙂東🚀京 €uro äöü ß"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    made = {kind: Tokenizer.load(write(tmp_path_factory.mktemp(kind), kind)) for kind in KINDS}
    return made | {"bundled": Tokenizer.load(BUNDLED)}


def stream(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], *, skip: bool | Collection[int] = True
) -> tuple[str, list[str]]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    pieces = [detokenizer.push([token]) for token in ids]
    pieces.append(detokenizer.finish())
    assert detokenizer.text == "".join(pieces)
    return detokenizer.text, pieces


@pytest.mark.parametrize("kind", [*KINDS, "bundled"])
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_add_up_to_the_decode_of_the_whole(tokenizers: dict[str, Tokenizer], kind: str, skip: bool) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(LONG, add_special_tokens=False)
    text, pieces = stream(tokenizer, [], ids, skip=skip)
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert not any(BROKEN in piece for piece in pieces)
    assert len(ids) > 3 * detokenize.WINDOW


@pytest.mark.parametrize("kind", [*KINDS, "bundled"])
def test_text_continues_the_prompt(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("hello world, hello there", add_special_tokens=False)
    whole = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        start = tokenizer.decode(ids[:cut])
        if whole.startswith(start):
            assert stream(tokenizer, ids[:cut], ids[cut:])[0] == whole[len(start) :]


@pytest.mark.parametrize("kind", [*KINDS, "bundled"])
def test_special_tokens_of_a_list_are_left_out(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    first, *others = sorted(tokenizer.special_ids)
    words = tokenizer.encode("hello world", add_special_tokens=False)
    ids = [first, *words, others[0], *words, first]
    for skipped in ([first], [first, *others], tokenizer.special_ids, []):
        found = stream(tokenizer, [], ids, skip=skipped)[0]
        assert found == tokenizer.decode(ids, skipped)
        assert tokenizer.token_text(first) not in found or first not in skipped
        assert (tokenizer.token_text(others[0]) in found) is (others[0] not in skipped)
    assert stream(tokenizer, [], ids, skip=tokenizer.special_ids) == stream(tokenizer, [], ids)
    assert stream(tokenizer, [], ids, skip=[]) == stream(tokenizer, [], ids, skip=False)
    params = paceline.SamplingParams(skip_special_tokens=[first, first])
    assert params.skip_special_tokens == {first}
    for wrong in (None, "yes", [-1], ["a"]):
        with pytest.raises(paceline.ConfigError, match="skip_special_tokens"):
            paceline.SamplingParams(skip_special_tokens=wrong)


def test_a_leading_space_survives_a_prompt_that_ends_in_special_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["metaspace"]
    world = tokenizer.encode("hello world", add_special_tokens=False)[-1]
    assert tokenizer.token_text(world).startswith(" ")
    prompt = [*tokenizer.encode("hello"), *[2] * 9]
    assert stream(tokenizer, prompt, [world])[0] == tokenizer.token_text(world)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@settings(max_examples=60, deadline=None)
@given(text=st.text(min_size=0, max_size=60))
def test_any_text_is_restored_without_broken_characters(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    streamed, pieces = stream(tokenizer, [], ids, skip=False)
    assert streamed == tokenizer.decode(ids, skip_special_tokens=False)
    if BROKEN not in text:
        assert not any(BROKEN in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["byte_level", "wordpiece", "unigram"])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), length=st.integers(0, 120), skip=st.booleans())
def test_random_token_ids_give_the_decode_of_the_whole(
    tokenizers: dict[str, Tokenizer], kind: str, seed: int, length: int, skip: bool
) -> None:
    tokenizer, rng = tokenizers[kind], random.Random(seed)
    ids = [rng.randrange(tokenizer.vocab_size + 5) for _ in range(length)]
    assert stream(tokenizer, [], ids, skip=skip)[0] == tokenizer.decode(ids, skip_special_tokens=skip)


def test_incomplete_characters_wait_and_broken_ones_come_out(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["metaspace"]
    euro = [3 + byte for byte in "€".encode()]
    assert stream(tokenizer, [], euro)[1] == ["", "", "€", ""]
    assert stream(tokenizer, [], euro[:2])[1] == ["", "", BROKEN * 2]
    broken = [3 + 0xFF] * 40
    text, pieces = stream(tokenizer, [], broken)
    assert text == BROKEN * 40
    assert max(len(piece) for piece in pieces) <= detokenize.PATIENCE


def test_the_window_stays_short(tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, longest = tokenizers["byte_level"], 0
    decode = tokenizer.decode

    def spy(ids: list[int], skip: bool = True) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids, skip)

    monkeypatch.setattr(tokenizer, "decode", spy)
    stream(tokenizer, [], [*tokenizer.encode(LONG), *[2] * 50, *[3 + 200] * 50])
    assert longest <= 2 * detokenize.WINDOW + detokenize.PATIENCE


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_the_check_catches_decoding_tokens_one_by_one(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(LONG, add_special_tokens=False)
    assert "".join(tokenizer.decode([token]) for token in ids) != tokenizer.decode(ids)


@pytest.mark.parametrize("kind", [*KINDS, "bundled"])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9), length=st.integers(0, 60), cut=st.integers(0, 60), skip=st.booleans())
def test_a_rest_at_once_is_what_pieces_give(
    tokenizers: dict[str, Tokenizer], kind: str, seed: int, length: int, cut: int, skip: bool
) -> None:
    tokenizer, rng = tokenizers[kind], random.Random(seed)
    ids = [rng.randrange(tokenizer.vocab_size + 5) for _ in range(length)]
    at_once = IncrementalDetokenizer(tokenizer, ids[:cut], skip_special_tokens=skip)
    pieces = stream(tokenizer, ids[:cut], ids[cut:], skip=skip)[0]
    assert at_once.rest(ids[cut:]) == pieces == at_once.text
    assert at_once.finish() == ""
