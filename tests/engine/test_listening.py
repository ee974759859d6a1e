"""Guesses while nothing is drafted are held against the text that came, per sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paceline.controllers.fixed import FixedController
from paceline.engine.listening import Listening
from paceline.tree.token_tree import EMPTY_TREE, TokenTree


class Heard(FixedController):
    def __init__(self) -> None:
        super().__init__(0)
        self.listens = [0, 1]
        self.calls: list[tuple[int, int]] = []

    def hear(self, drafter: int, matched: int) -> None:
        self.calls.append((drafter, matched))


def sequence(key: int, tokens: list[int]) -> Any:
    return SimpleNamespace(key=key, context=SimpleNamespace(tokens=tokens))


def says(tokens: list[int]) -> Any:
    return lambda index: TokenTree.chain(tokens) if tokens and index == 1 else EMPTY_TREE


def after(guess: list[int], came: list[int]) -> list[tuple[int, int]]:
    listening, heard, one = Listening(), Heard(), sequence(3, [5, 6])
    listening.step(one, heard, says(guess))
    one.context.tokens += came
    listening.step(one, heard, says([]))
    listening.step(one, heard, says([]))
    return heard.calls


def test_tokens_that_came_true_are_counted_up_to_the_first_that_did_not() -> None:
    assert after([7, 8, 9], [7, 8, 9, 1]) == [(1, 3)]
    assert after([7, 8, 9], [7, 1, 9]) == [(1, 1)]
    assert after([7, 8, 9], [1, 8, 9]) == [(1, 0)]
    assert after([7, 8, 9], [7]) == [(1, 1)]
    assert after([], [7, 8]) == []


def test_another_sequence_is_not_held_against_the_guess() -> None:
    listening, heard = Listening(), Heard()
    listening.step(sequence(1, [5]), heard, says([7]))
    listening.step(sequence(2, [5, 7]), heard, says([7]))
    assert heard.calls == []
