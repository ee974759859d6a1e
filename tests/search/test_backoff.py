"""What is denied never comes out: what leads to it is taken back to where its line, or it, begins."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError

PROMPT = "def fib(n):"


def text_of(llm: LLM, how: SamplingParams, **search: Any) -> str:
    (found,) = llm.generate(PROMPT, how, search={"method": "backoff", **search} if search else None)
    found.raise_for_error()
    return found.outputs[0].text


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("search", [{"denied": []}, {"denied": "no such text", "deny": lambda _: False}])
def test_denying_nothing_is_plain_decoding(llm: LLM, temperature: float, search: dict[str, Any]) -> None:
    how = SamplingParams(temperature=temperature, max_tokens=40, seed=5)
    assert text_of(llm, how, **search) == text_of(llm, how)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_denying_a_character_where_it_begins_is_banning_its_tokens(llm: LLM, temperature: float) -> None:
    how = {"temperature": temperature, "max_tokens": 16, "seed": 5}
    with_e = [one for one in range(llm.runner.info.vocab_size) if "e" in llm.tokenizer.decode([one])]
    banned = text_of(llm, SamplingParams(**how, logit_bias=dict.fromkeys(with_e, -100.0)))  # type: ignore[arg-type]
    found = text_of(llm, SamplingParams(**how), denied="e", back_to="match", attempts=1000, rewinds=9999)  # type: ignore[arg-type]
    assert found == banned
    assert "e" not in found
    assert "e" in text_of(llm, SamplingParams(**how))  # type: ignore[arg-type]


def scripted(llm: LLM, script: Mapping[str, Sequence[str]], begin: str = "\n") -> Callable[..., torch.Tensor]:
    """A logits processor under which the tokens behind a token are those of the script, the first likeliest."""

    def number(text: str) -> int:
        (found,) = llm.tokenizer.encode(text, add_special_tokens=False)
        return found

    numbers = {number(text): [number(one) for one in following] for text, following in script.items()}

    def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        scores = torch.full_like(logits, float("-inf"))
        for place, token in enumerate(numbers[output[-1] if output else number(begin)]):
            scores[token] = -2.0 * place
        return scores

    return process


def script_text(llm: LLM, script: Mapping[str, Sequence[str]], size: int = 6, **search: Any) -> str:
    how = SamplingParams(temperature=0.0, max_tokens=size, logits_processors=[scripted(llm, script)])
    return text_of(llm, how, **search)


FIRST = {"\n": "Lx", "L": "b", "b": "\n", "x": "\n"}  # a label, then what it warns of
LAST = {"\n": "bx", "b": "L", "L": "\n", "x": "\n"}  # the label behind


def test_a_label_before_the_line_and_one_behind_it(llm: LLM) -> None:
    assert script_text(llm, FIRST) == "Lb\nLb\n"
    assert script_text(llm, FIRST, denied="L", back_to="match") == "x\nx\nx\n"
    assert script_text(llm, LAST) == "bL\nbL\n"
    assert script_text(llm, LAST, denied="L") == "x\nx\nx\n"
    assert script_text(llm, LAST, denied="L", back_to="match") == "x\nx\nx\n"  # nothing else follows b
    assert script_text(llm, LAST, deny=lambda text: text.endswith("L")) == "x\nx\nx\n"


def test_indentation_stays_and_a_line_without_a_way_out_takes_back_the_one_before(llm: LLM) -> None:
    indented = {"\n": [" "], " ": "bx", "b": "L", "L": "\n", "x": "\n"}
    assert script_text(llm, indented, denied="L") == " x\n x\n"
    either = {"\n": "px", "p": "\n", "x": "\n"}
    assert script_text(llm, either, deny=lambda text: re.search(r"p\n[px]$", text)) == "x\nx\np\n"
    dead = {"\n": "b", "b": "L", "L": "\n"}
    (found,) = llm.generate(
        PROMPT, SamplingParams(temperature=0.0, max_tokens=6, logits_processors=[scripted(llm, dead)]), use_tqdm=False,
        search={"method": "backoff", "denied": "L"},
    )  # fmt: skip
    assert found.outputs[0].error == "the search has found nothing"


def test_a_line_is_begun_so_often_at_most(llm: LLM) -> None:
    """Two of its beginnings lead to the label, the third does not."""
    three = {"\n": "abx", "a": "L", "b": "L", "L": "\n", "x": "\n"}
    assert script_text(llm, three, denied="L", attempts=3) == "x\nx\nx\n"
    how = SamplingParams(temperature=0.0, max_tokens=6, logits_processors=[scripted(llm, three)])
    (found,) = llm.generate(PROMPT, how, search={"method": "backoff", "denied": "L", "attempts": 2})
    assert found.outputs[0].error == "the search has found nothing"


def test_the_number_of_rewinds_is_bounded_and_what_is_left_is_clean(llm: LLM) -> None:
    late = {"\n": "bx", "b": "L", "L": "\n", "x": "\n"}
    assert script_text(llm, late, size=8, denied="L", rewinds=2) == "x\nx\n"
    with pytest.raises(ConfigError, match="denied must hold regular expressions, got '\\('"):
        text_of(llm, SamplingParams(), denied="(")
    with pytest.raises(ConfigError, match="back_to must be one of line, match"):
        text_of(llm, SamplingParams(), denied="x", back_to="start")


def test_a_pattern_of_several_lines_above_temperature_0(llm: LLM) -> None:
    how = SamplingParams(temperature=1.0, max_tokens=60, seed=2, ignore_eos=True)
    pattern = r"return\b.*\n.*\w"
    plain = [text_of(llm, SamplingParams(temperature=1.0, max_tokens=60, seed=s, ignore_eos=True)) for s in range(8)]
    assert any(re.search(pattern, one) for one in plain)
    for seed in range(8):
        how.seed = seed
        assert not re.search(pattern, text_of(llm, how, denied=pattern))
