"""Outputs end exactly where one token a step with a naive search would end them, however the tokens are chunked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from paceline.checkpoints import Tokenizer
from paceline.config import SamplingParams
from paceline.engine import StopChecker
from paceline.engine.transcript import Transcript, find_stop, open_length

PIECES = ["a", "b", "ab", "ba", "aab", "", "c", "abc", "<eos>", "<eot>"]
EOS, EOT = 8, 9


class Pieces:
    """A tokenizer whose decode joins fixed pieces."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(PIECES[i] for i in ids if not (skip_special_tokens and i >= EOS))

    def has_text(self, index: int, skip_special_tokens: bool = True) -> bool:
        return not (skip_special_tokens and index >= EOS)


@dataclass
class Outcome:
    kept: int
    text: str
    finish_reason: str | None
    stop_reason: int | str | None


def checker(params: SamplingParams, limit: int | None = None, eos: Sequence[int] = (EOS,)) -> StopChecker:
    tokenizer: Any = Pieces()
    return StopChecker(params, eos, tokenizer, [], max_new_tokens=limit)


def chunked(params: SamplingParams, tokens: list[int], sizes: list[int], limit: int | None) -> Outcome:
    """Push in chunks, and check on the way that what was safe to show stays."""
    checked, at, shown, kept = checker(params, limit), 0, "", 0
    for size in [*sizes, *[1] * len(tokens)]:
        kept += checked.push(tokens[at : at + size])
        at += size
        assert checked.text.startswith(shown)
        shown = checked.text[: checked.safe_text_length]
        if checked.finished or at >= len(tokens):
            break
    assert checked.num_tokens == kept
    return Outcome(kept, checked.text, checked.finish_reason, checked.stop_reason)


Search = Callable[[str, str, Sequence[str]], tuple[int, str] | None]


def naive_search(text: str, before: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The first stop string in reading order that the text has and the text before the last token had not."""
    for start in range(len(text)):
        for stop in stops:
            if text.startswith(stop, start) and start + len(stop) > len(before):
                return start, stop
    return None


def naive(params: SamplingParams, tokens: list[int], limit: int | None, search: Search = naive_search) -> Outcome:
    """Plain decoding, one token a step, everything decoded again at each."""
    join, stops, include = Pieces().decode, params.stop, params.include_stop_str_in_output
    most = min(n for n in (params.max_tokens, limit, 10**9) if n is not None)
    skip = params.skip_special_tokens
    for n in range(1, len(tokens) + 1):
        reason: str | None = None
        stop_reason: int | str | None = None
        token, text, before = tokens[n - 1], join(tokens[:n], skip), join(tokens[: n - 1], skip)
        if n >= params.min_tokens and token == EOS and not params.ignore_eos:
            reason = "stop"
        elif n >= params.min_tokens and token in params.stop_token_ids:
            reason, stop_reason = "stop", token
        elif n >= most:
            reason = "length"
        if reason == "stop" and not include:
            text = before
        if params.min_tokens == 0 or n > params.min_tokens:
            found = search(text, before, stops) if text != before else None
            if found is not None:
                start, stop = found
                return Outcome(n, text[: start + len(stop) if include else start], "stop", stop)
        if reason is not None:
            return Outcome(n, text, reason, stop_reason)
    return Outcome(len(tokens), join(tokens, skip), None, None)


def params_strategy() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        lambda stop, ids, include, ignore, low, extra, skip: SamplingParams(
            stop=stop,
            stop_token_ids=ids,
            include_stop_str_in_output=include,
            ignore_eos=ignore,
            min_tokens=low,
            max_tokens=None if extra is None else low + extra,
            skip_special_tokens=skip,
        ),
        st.lists(st.text(alphabet="abc<>", min_size=1, max_size=4), max_size=3),
        st.lists(st.sampled_from([EOS, EOT, 6]), max_size=2, unique=True),
        st.booleans(),
        st.booleans(),
        st.integers(0, 6),
        st.none() | st.integers(1, 20),
        st.booleans(),
    )


TOKENS = st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 4, 5, 6, 7, EOS, EOT]), max_size=30)


@settings(max_examples=400, deadline=None)
@given(params_strategy(), TOKENS, st.lists(st.integers(1, 7), max_size=12), st.none() | st.integers(1, 25))
def test_chunks_end_where_one_token_a_step_ends(
    params: SamplingParams, tokens: list[int], sizes: list[int], limit: int | None
) -> None:
    assert chunked(params, tokens, sizes, limit) == naive(params, tokens, limit)


def test_the_check_catches_a_search_in_the_new_characters_only() -> None:
    def new_only(text: str, before: str, stops: Sequence[str]) -> tuple[int, str] | None:
        return naive_search(text[len(before) :], "", stops)

    params, tokens = SamplingParams(stop=["ab"]), [0, 1, 0, 1]
    assert chunked(params, tokens, [4], None) == naive(params, tokens, None) != naive(params, tokens, None, new_only)


def test_the_check_catches_a_search_over_a_whole_chunk() -> None:
    tokens, stops = [0, 1, 6, 0, 1], ["c", "ab"]
    whole = find_stop(Pieces().decode(tokens), stops, len(tokens))
    assert whole == (0, "ab")
    params = SamplingParams(stop=["c", "aba"], max_tokens=None)
    late = [2, 0, 6]
    assert chunked(params, late, [3], None) == Outcome(2, "", "stop", "aba")
    assert chunked(SamplingParams(stop=stops), tokens, [5], None) == Outcome(2, "", "stop", "ab")


@pytest.mark.parametrize("include", [False, True])
def test_end_and_stop_tokens_stay_in_the_ids_but_not_in_the_text(include: bool) -> None:
    for token, reason in ((EOS, None), (6, 6)):
        params = SamplingParams(stop_token_ids=[6], include_stop_str_in_output=include, skip_special_tokens=False)
        found = chunked(params, [0, 1, token, 0], [4], None)
        assert found == Outcome(3, "ab" + PIECES[token] * include, "stop", reason)


def test_ignore_eos_goes_on_and_an_explicit_stop_token_still_stops() -> None:
    assert chunked(SamplingParams(ignore_eos=True), [EOS, 0], [2], None).finish_reason is None
    params = SamplingParams(ignore_eos=True, stop_token_ids=[EOS])
    assert chunked(params, [EOS, 0], [2], None) == Outcome(1, "", "stop", EOS)


def test_min_tokens_defers_every_stop_condition() -> None:
    params = SamplingParams(min_tokens=3, stop=["b"], stop_token_ids=[6], max_tokens=9)
    assert chunked(params, [1, 6, 1, 0, 1, 0], [6], None) == Outcome(5, "bcba", "stop", "b")
    assert chunked(params, [EOS, 6, EOS], [3], None) == Outcome(3, "c", "stop", None)


def test_limits_of_the_parameters_and_of_the_context() -> None:
    assert chunked(SamplingParams(max_tokens=2), [0, 0, 0], [3], None) == Outcome(2, "aa", "length", None)
    assert chunked(SamplingParams(max_tokens=None), [0, 0, 0], [3], 1) == Outcome(1, "a", "length", None)
    assert chunked(SamplingParams(max_tokens=2, stop=["aa"]), [0, 0], [2], None) == Outcome(2, "", "stop", "aa")


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    checked = checker(SamplingParams(stop=["abc", "bb"]))
    checked.push([0, 1])
    assert (checked.text, checked.safe_text_length) == ("ab", 0)
    checked.push([0])
    assert (checked.text, checked.safe_text_length) == ("aba", 2)
    assert open_length("xxab", ["abc", "bb"]) == 2
    assert open_length("xxabc", ["abc"]) == 0
    included = checker(SamplingParams(stop=["abc"], include_stop_str_in_output=True))
    included.push([0, 1])
    assert included.safe_text_length == 2


def test_the_open_length_is_that_of_trying_every_beginning() -> None:
    draws = random.Random(0)

    def word(most: int) -> str:
        return "".join(draws.choice("ab") for _ in range(draws.randint(1, most)))

    lengths = set()
    for _ in range(2000):
        stops, text = sorted(word(6) for _ in range(draws.randint(1, 5))), word(12)
        expected = max(
            size for size in range(7) if any(text.endswith(one[:size]) for one in stops if len(one) > size) or not size
        )
        assert open_length(text, stops) == expected, (text, stops)
        lengths.add(expected)
    assert lengths == set(range(6)), "all lengths occur"
    assert open_length("text", []) == 0


def test_the_stop_string_is_that_of_looking_for_each_alone() -> None:
    draws = random.Random(1)
    found = 0
    for _ in range(2000):
        stops = ["".join(draws.choices("ab", k=draws.randint(1, 6))) for _ in range(3)]
        text, new = "".join(draws.choices("ab", k=draws.randint(1, 12))), draws.randint(1, 4)
        starts = [
            (start, place)
            for place, stop in enumerate(stops)
            for start in range(len(text))
            if text[start:].startswith(stop) and start + len(stop) > len(text) - new
        ]
        expected = (min(starts)[0], stops[min(starts)[1]]) if starts else None
        assert find_stop(text, stops, new) == expected, (text, stops, new)
        found += expected is not None
    assert 0 < found < 2000


def test_nothing_may_follow_the_end() -> None:
    checked = checker(SamplingParams())
    assert checked.push([EOS, 0]) == 1
    with pytest.raises(RuntimeError, match="has ended"):
        checked.push_one(0)


def test_without_a_tokenizer_ids_and_limits_still_work() -> None:
    checked = StopChecker(SamplingParams(stop_token_ids=[5]), [EOS], None, [])
    assert checked.push([1, 2, 5, 3]) == 3
    assert (checked.text, checked.finish_reason, checked.stop_reason) == ("", "stop", 5)


def test_bytes_of_a_character_that_never_completes_come_out_at_the_end() -> None:
    tokenizer = Tokenizer.load(Path(paceline.__file__).parent / "bundled" / "target")
    ids = tokenizer.encode("a🙂")[:-1]
    checked = StopChecker(SamplingParams(max_tokens=len(ids)), [], tokenizer, [])
    assert checked.push(ids[:-1]) == len(ids) - 1
    assert checked.text == "a"
    checked.push(ids[-1:])
    assert checked.text == tokenizer.decode(ids)
    assert checked.text.startswith("a\ufffd")


CUT_SHORT = [
    ("\ufffd", "a", "a\ufffd"),
    ("a\ufffd", "", "a\ufffd"),
    ("\ufffd\ufffd", None, None),
    ("\ufffdb", None, None),
]


@pytest.mark.parametrize("end", ["limit", "end token"])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("stop", "before", "behind"), CUT_SHORT)
def test_a_stop_string_in_what_was_held_back_until_the_end_cuts(
    stop: str, before: str | None, behind: str | None, include: bool, end: str
) -> None:
    """The bytes of one character that never completes become one U+FFFD."""
    tokenizer = Tokenizer.load(Path(paceline.__file__).parent / "bundled" / "target")
    ids = tokenizer.encode("a🙂")[:-1]
    plain = tokenizer.decode(ids)
    assert plain == "a\ufffd"
    pushed, most = ([*ids, 0], None) if end == "end token" else (ids, len(ids))
    params = SamplingParams(max_tokens=most, stop=[stop], include_stop_str_in_output=include)
    found = StopChecker(params, [0], tokenizer, [])
    assert found.push(pushed) == len(pushed)
    if before is None:
        assert (found.text, found.finish_reason, found.stop_reason) == (
            plain,
            "stop" if end == "end token" else "length",
            None,
        )
    else:
        assert (found.text, found.finish_reason, found.stop_reason) == (behind if include else before, "stop", stop)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("stop", "before", "behind"), CUT_SHORT)
def test_a_stop_string_in_what_was_held_back_until_an_abort_cuts(
    stop: str, before: str | None, behind: str | None, include: bool, streamed: bool
) -> None:
    tokenizer = Tokenizer.load(Path(paceline.__file__).parent / "bundled" / "target")
    ids = tokenizer.encode("a🙂")[:-1]
    params = SamplingParams(max_tokens=None, stop=[stop], include_stop_str_in_output=include)
    found = Transcript(params, [], tokenizer, [], 100, at_once=not streamed)
    shown, kept = found.push(ids, [None] * len(ids))
    assert (kept, found.finish_reason) == (len(ids), None)
    text = "".join(piece for piece, _ in (*shown, *found.flush()))
    assert text == found.text == ("a\ufffd" if before is None else behind if include else before)
    assert found.flush() == ()
