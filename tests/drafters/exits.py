"""What tests of DEL share: prompts, costs under which drafting pays, an engine with the drafter at hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline import LLM, SamplingParams
from paceline.drafters.dynamic_exit import DynamicExitDrafter
from paceline.drafters.exit_choice import ExitCosts

PROMPTS = ["What is 2 + 3?", "def area(width, height):", "Name the first three months of the year, please."]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
LAYERS = 6
FREE = ExitCosts(np.zeros(5), np.zeros(5), np.ones(3))
"""Costs under which drafting always pays."""


def fast(plain: LLM, **options: Any) -> tuple[LLM, DynamicExitDrafter]:
    llm = plain.with_speculative_config({"method": "del", **options})
    (drafter,) = llm.engine.parts.crew.drafters
    assert isinstance(drafter, DynamicExitDrafter)
    return llm, drafter
