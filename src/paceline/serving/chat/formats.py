"""The table of formats in which families of models write function calls; the module of each holds what is known of it.

Which one a model has is read off its chat template. A template that takes tools and speaks of none of these has a
format that is not known; then the server needs to be told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from paceline.serving.chat.apertus import APERTUS
from paceline.serving.chat.base import ToolFormat
from paceline.serving.chat.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from paceline.serving.chat.gemma import GEMMA4
from paceline.serving.chat.glm import GLM45
from paceline.serving.chat.harmony import HARMONY
from paceline.serving.chat.hermes import HERMES
from paceline.serving.chat.hunyuan import HUNYUAN
from paceline.serving.chat.kimi import KIMI_K2
from paceline.serving.chat.llama import LLAMA3_JSON
from paceline.serving.chat.minimax import MINIMAX_M2
from paceline.serving.chat.mistral import MISTRAL, MISTRAL_ARGS
from paceline.serving.chat.olmo import OLMO3
from paceline.serving.chat.phi import PHI4_MINI
from paceline.serving.chat.pythonic import PYTHONIC
from paceline.serving.chat.qwen_coder import QWEN3_CODER, SEED_OSS

FORMATS: Final[Mapping[str, ToolFormat]] = {
    "openai": HARMONY,
    "kimi_k2": KIMI_K2,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "glm45": GLM45,
    "seed_oss": SEED_OSS,
    "minimax_m2": MINIMAX_M2,
    "hunyuan_a13b": HUNYUAN,
    "olmo3": OLMO3,
    "apertus": APERTUS,
    "gemma4": GEMMA4,
    "phi4_mini_json": PHI4_MINI,
    "qwen3_coder": QWEN3_CODER,
    "mistral_args": MISTRAL_ARGS,
    "mistral": MISTRAL,
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "pythonic": PYTHONIC,
}
"""The formats by name; of those that a template speaks of, the first is meant."""


def format_of(template: str | None) -> str | None:
    """Return the name of the format that a chat template speaks of; None where it speaks of none that is known."""
    spoken_of = (name for name, form in FORMATS.items() if all(re.search(sign, template or "") for sign in form.signs))
    return next(spoken_of, None)
