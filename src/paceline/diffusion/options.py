"""What a user may ask of diffusion decoding, as far as it does not depend on the canvas or the model's shape: keys and
values of a `diffusion_config`, and what the loop cannot honour. That is rejected with an error that names it, never
dropped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.checkpoints import GenerationDefaults
from paceline.config import OF_DIFFUSION, EngineConfig, SamplingParams, SpeculativeConfig
from paceline.errors import ConfigError
from paceline.utils import json_object, need, shortened

logger = logging.getLogger("paceline")

HINT = 'configure its decoding with diffusion_config, as {"method": "threshold"}'

SAMPLING: Mapping[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "allowed_token_ids": None,
    "bad_words": (),
    "logits_processors": (),
    "structured_outputs": None,
    "steering": None,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
}
"""Sampling parameters that have no meaning where slots are written in any order, with the values that ask for
nothing.
"""

INSTEAD = {"structured_outputs": "give regex, grammar or json_schema in diffusion_config"}
"""What to do without some of them."""

SAMPLED = ("temperature", "seed", "max_tokens", *OF_DIFFUSION)
"""Sampling parameters that are honoured, and are no options of a method."""

ENGINE: Mapping[str, Any] = {
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": None,
    "speculative_memory_bytes": None,
    "exactness": "auto",
    "quantization": None,
    "activation_bits": None,
    "kv_selection": None,
    "skipping": None,
}
"""The same of engine arguments."""


def check_kind(name: str, denoiser: bool, speculative: SpeculativeConfig | None, diffusion_config: object) -> None:
    """Reject a configuration of the other kind of model.

    Args:
        name: of the model.
        denoiser: it is a diffusion language model.
        speculative: what the user chose, None where nothing.
    Raises:
        ConfigError: with the one that fits.
    """
    if denoiser and speculative is not None:
        raise ConfigError(
            f"speculative_config cannot be used with {name}, a diffusion language model; leave it out, and {HINT}"
        )
    if not denoiser and diffusion_config is not None:
        raise ConfigError(
            f"diffusion_config needs a diffusion language model, and {name} is an autoregressive one; use "
            f"speculative_config"
        )


def check_sampling(params: SamplingParams) -> None:
    """Reject sampling parameters that cannot be honoured.

    Raises:
        ConfigError: the first of them.
    """
    for key, neutral in SAMPLING.items():
        value = getattr(params, key)
        if value != neutral and not (key == "top_k" and value == -1):
            do = INSTEAD.get(key, "leave it out")
            raise ConfigError(f"{key}={shortened(value)} cannot be used with a diffusion language model; {do}")


def check_engine(config: EngineConfig) -> None:
    """Reject engine arguments that cannot be honoured.

    Raises:
        ConfigError: the first of them.
    """
    for key, neutral in ENGINE.items():
        if (value := getattr(config, key)) != neutral:
            raise ConfigError(f"{key}={shortened(value)} cannot be used with a diffusion language model; leave it out")


def honoured(defaults: GenerationDefaults) -> GenerationDefaults:
    """A checkpoint's recommendations without those that cannot be honoured; a log line names these."""
    left_out = [key for key in defaults.sampling if key in SAMPLING and defaults.sampling[key] != SAMPLING[key]]
    if left_out:
        logger.warning("generation_config.json: %s cannot be honoured in diffusion decoding", ", ".join(left_out))
    return replace(defaults, sampling={key: value for key, value in defaults.sampling.items() if key not in SAMPLING})


def parse_config(config: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """A `diffusion_config`: a dict, its JSON text, the name of a method, or None for the default.

    Raises:
        ConfigError: something else, or a key that belongs to SamplingParams.
    """
    if isinstance(config, str):
        whole = config.lstrip().startswith("{") or config.strip() == "null"
        config = json_object("diffusion_config", config) if whole else {"method": config}
    rule = "be a dict, JSON or the name of a method"
    need(config is None or isinstance(config, Mapping), "diffusion_config", rule, config)
    config = dict(config or {})
    for key, value in config.items():
        name = canonical(str(key))
        need(name not in SAMPLED, f"{name} in diffusion_config", "be a sampling parameter (SamplingParams)", value)
    return config


ABOVE_ONE = 2.0
"""Most of a threshold of confidence: above 1 it asks for one slot a round; far above it, it is a typing mistake."""

RANGES: Mapping[str, tuple[float, float]] = {
    "confidence_threshold": (0.0, ABOVE_ONE),
    "confidence_low": (0.0, ABOVE_ONE),
    "confidence_high": (0.0, ABOVE_ONE),
    "relaxed_threshold": (0.0, ABOVE_ONE),
    "entropy_threshold": (-1.0, 1e9),
    "edit_threshold": (0.0, 1.0),
    "filter_threshold": (0.0, 1.0),
    "gap_progress": (0.0, 1.0),
    "factor": (0.0, 1e9),
    "list_growth": (0.0, 1e9),
    "min_information": (0.0, 1e9),
    "penalty_lambda": (0.0, 1e9),
    "alg_temp": (0.0, 1e9),
    "eos_factor_min": (0.0, 1e9),
    "eos_factor_max": (0.0, 1e9),
    "gap_thresholds": (-math.inf, math.inf),
    "min_exploit": (0, 1e9),
    "max_post_edit_steps": (0, 1024),
    "answer_start": (0, 1e9),
    "answer_template": (0, 1e9),
    "end_token_ids": (0, 1e9),
}
"""Options whose part does not look at their range itself -> least and most value, each entry's where it is a list."""


ALIASES = {"unmasking_strategy": "method", "dllm_unmasking_strategy": "method"}


def canonical(key: str) -> str:
    """The name of an option, as other engines may call it -> ours."""
    return ALIASES.get(key, key).removeprefix("dllm_")
