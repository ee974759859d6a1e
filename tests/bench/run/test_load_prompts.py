"""Request traces: columns, units of time, lengths that fit."""

from __future__ import annotations

import pytest

from paceline.bench.run.load import fit_arrivals, trace_prompts
from paceline.errors import PromptError
from paceline.utils import Arrival
from paceline.utils.traces import parse_trace

MOONCAKE = (
    '{"timestamp": 5000, "input_length": 100, "output_length": 10}\n{"timestamp": 2000, "input_length": 50, '
    '"output_length": 20}\n'
)


def test_milliseconds_are_sorted_and_begin_at_0() -> None:
    assert parse_trace(MOONCAKE, "t") == [Arrival(0.0, 50, 20), Arrival(3.0, 100, 10)]


@pytest.mark.parametrize(
    ("text", "gap"),
    [
        ("arrival_time,prompt_tokens,output_tokens\n1.5,8,4\n3.5,8,4\n", 2.0),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:01:51.5,8,4\n2023-11-16 18:01:53.5,8,4\n", 2.0),
        ("timestamp,input_length,output_length\n0.5,8,4\n1.0,8,4\n", 0.5),
    ],
)
def test_csv_columns_of_others(text: str, gap: float) -> None:
    assert parse_trace(text, "t", csv=True) == [Arrival(0.0, 8, 4), Arrival(gap, 8, 4)]


def test_lengths_are_scaled_to_the_context_by_one_factor() -> None:
    arrivals = [Arrival(0.0, 900, 100), Arrival(1.0, 90, 10)]
    fitted, scale = fit_arrivals(arrivals, 502)
    assert scale == 0.5
    assert fitted == [Arrival(0.0, 450, 50), Arrival(1.0, 45, 5)]
    assert fit_arrivals(arrivals, 4096) == (arrivals, 1.0)


def test_prompts_have_the_lengths() -> None:
    made = trace_prompts([Arrival(0.0, 7, 1), Arrival(0.0, 25, 1)], list(range(10)), 8)
    assert [len(one) for one in made] == [7, 25]
    assert max(map(max, made)) < 8


@pytest.mark.parametrize(
    "text", ["", "3", '{"timestamp": 0}', "{", '{"timestamp": 0, "input_length": 0, "output_length": 1}']
)
def test_what_is_no_trace_gets_one_line(text: str) -> None:
    with pytest.raises(PromptError):
        parse_trace(text, "t")
