"""The literal tables of diffusion decoding: parts by name, and methods as compositions of parts.

In: nothing. Out: names with where a class lives, or with which parts and options make a method. Not here: making any (`methods`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PARTS: Mapping[str, Mapping[str, str]] = {
    "schedule": {"blocks": "blocks:Blocks"},
    "score": {
        "confidence": "scores:Confidence",
        "margin": "scores:Margin",
        "entropy": "scores:Entropy",
        "random": "scores:Random",
        "leftmost": "scores:Leftmost",
    },
    "modifier": {},
    "commit": {"quota": "quota:Quota", "threshold": "threshold:Threshold", "factor": "threshold:Factor"},
    "edit": {},
    "check": {},
    "stop": {},
    "cache": {"none": "whole:Whole"},
    "verification": {"none": "plain:Plain"},
}
"""Kind of part -> name -> "module:Class" within `paceline.diffusion`."""


@dataclass(frozen=True, slots=True)
class Method:
    """A published method: which parts, with which options.

    Attributes:
        paper: title and arXiv id.
        modifiers: in order.
        options: defaults of the method where they differ from those of its parts.
        lossless: reproduces the static baseline's canvas in exact arithmetic.
        needs: of the model, in words; empty for any denoiser.
    """

    paper: str
    schedule: str = "blocks"
    score: str = "confidence"
    modifiers: tuple[str, ...] = ()
    commit: str = "quota"
    edit: str | None = None
    check: str | None = None
    stop: str | None = None
    cache: str = "none"
    verification: str = "none"
    options: Mapping[str, Any] = field(default_factory=dict)
    lossless: bool = False
    needs: str = ""


LLADA = "Large Language Diffusion Models (arXiv:2502.09992)"
DREAM = "Dream 7B: Diffusion Large Language Models (arXiv:2508.15487)"
FAST = "Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel Decoding (arXiv:2505.22618)"

METHODS: Mapping[str, Method] = {
    "static": Method(LLADA, lossless=True),
    "random": Method(LLADA, score="random"),
    "margin": Method(DREAM, score="margin"),
    "entropy": Method(DREAM, score="entropy"),
    "leftmost": Method(LLADA, score="leftmost"),
    "threshold": Method(FAST, commit="threshold"),
    "factor": Method(FAST, commit="factor"),
}
