"""Guesses while nothing is drafted are held against the text that came, per sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paceline.engine.listening import Listening
from paceline.tree.token_tree import EMPTY_TREE, TokenTree


class Heard:
    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def hear(self, drafter: int, matched: int) -> None:
        self.calls.append((drafter, matched))


def sequence(key: int, tokens: list[int]) -> Any:
    return SimpleNamespace(key=key, context=SimpleNamespace(tokens=tokens))


def says(tokens: list[int]) -> Any:
    return lambda index: TokenTree.chain(tokens) if tokens and index == 1 else EMPTY_TREE


def after(guess: list[int], came: list[int]) -> list[tuple[int, int]]:
    listening, heard, one = Listening(), Heard(), sequence(3, [5, 6])
    listening.step(one, [0, 1], heard, says(guess))  # type: ignore[arg-type]
    one.context.tokens += came
    listening.step(one, [0, 1], heard, says([]))  # type: ignore[arg-type]
    listening.step(one, [0, 1], heard, says([]))  # type: ignore[arg-type]
    return heard.calls


def test_tokens_that_came_true_are_counted_up_to_the_first_that_did_not() -> None:
    assert after([7, 8, 9], [7, 8, 9, 1]) == [(1, 3)]
    assert after([7, 8, 9], [7, 1, 9]) == [(1, 1)]
    assert after([7, 8, 9], [1, 8, 9]) == [(1, 0)]
    assert after([7, 8, 9], [7]) == [(1, 1)]
    assert after([], [7, 8]) == []


def test_another_sequence_is_not_held_against_the_guess() -> None:
    listening, heard = Listening(), Heard()
    listening.step(sequence(1, [5]), [1], heard, says([7]))  # type: ignore[arg-type]
    listening.step(sequence(2, [5, 7]), [1], heard, says([7]))  # type: ignore[arg-type]
    assert heard.calls == []
