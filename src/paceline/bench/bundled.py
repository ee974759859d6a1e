"""What ships with the package for trying things: models of a few million parameters, and prompts that they were not
trained on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from paceline.llm import BUNDLED
from paceline.utils import user_cache

BUNDLED_TARGET, BUNDLED_DRAFT = BUNDLED / "target", BUNDLED / "draft"

SMOLLM2 = "SmolLM2-135M-Instruct"
"""The real model of the benchmarks and of the demo; `benchmarks/real_models.py` makes its folder from packages."""


def smollm2_folder() -> Path:
    """Where the real model of the benchmarks lies, if it was made."""
    return user_cache("models") / SMOLLM2


@dataclass(frozen=True, slots=True)
class BundledPrompt:
    """A user message of the bundled set.

    Attributes:
        repetitive: the answer will repeat much of the prompt or of itself.
    """

    id: str
    task: str
    prompt: str
    repetitive: bool


def bundled_prompts() -> list[BundledPrompt]:
    """The prompts that ship with the package; the bundled models were not trained on them."""
    text = (files("paceline") / "bundled" / "prompts.jsonl").read_text(encoding="utf-8")
    return [BundledPrompt(**json.loads(line)) for line in text.split("\n") if line.strip()]
