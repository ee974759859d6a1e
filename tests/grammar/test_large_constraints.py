"""Lists of many texts, and constraints that stand for more than they say."""

from __future__ import annotations

from typing import Any

import llguidance
import pytest
import torch

from paceline.checkpoints import Tokenizer
from paceline.config import StructuredOutputsParams
from paceline.grammar import Constraint, constraint
from paceline.llm import BUNDLED

WORDS = Tokenizer.load(BUNDLED / "target")
SIZE, END = 6144, WORDS.eos_id or 0
MANY = [f"entry {number} of the list" for number in range(5000)]


def made(**given: Any) -> Constraint:
    return constraint(StructuredOutputsParams(**given), WORDS, SIZE, [END])


def row(rule: Constraint) -> torch.Tensor:
    logits = torch.zeros(1, SIZE)
    rule.apply(logits, ((),), ())
    return logits[0]


def follows(rule: Constraint, text: str) -> bool:
    for token in [*WORDS.encode(text, add_special_tokens=False), END]:
        if row(rule)[token].isneginf():
            return False
        rule.advance([token])
    return True


@pytest.mark.parametrize("choices", [MANY, ["a|b", "(a)+", ".*", "é\\d", "a\nb", "a", "[", "/"]], ids=["many", "signs"])
def test_a_choice_is_one_of_its_texts_however_many(choices: list[str]) -> None:
    for text in (*choices[:8], choices[-1]):
        assert follows(made(choice=choices), text), text
    for text in ("entry 5000 of the list", "entry 1 of", "aa", "b", "x", "é1", "ab"):
        assert not follows(made(choice=choices), text), text


def test_short_texts_that_stand_for_much_end_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are too large is found in a step, so that others wait for it; long ones may take their time."""
    given: list[int] = []

    class Noted:
        def __new__(cls, *positional: Any, limits: llguidance.LLParserLimits, **more: Any) -> Any:
            given.append(limits.initial_lexer_fuel)
            return real(*positional, limits=limits, **more)

        grammar_from_regex = staticmethod(llguidance.LLMatcher.grammar_from_regex)

    real = llguidance.LLMatcher
    monkeypatch.setattr(llguidance, "LLMatcher", Noted)
    rule = made(regex="(a{1000}){1000}")
    row(rule)
    rule.advance(WORDS.encode("a", add_special_tokens=False))
    with pytest.raises(RuntimeError, match="too many expressions"):
        row(rule)
    row(made(choice=[f"{text}, and more" for text in MANY]))
    assert given[0] < 250_000
    assert given[1] == 1_000_000
