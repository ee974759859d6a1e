"""Rules with a memory keep one of their own for every canvas."""

from typing import Any

import pytest

from paceline.diffusion import Canvas, ConfiguredMethod, decode
from paceline.errors import ConfigError
from tests.diffusion.decoding import complete, same
from tests.diffusion.toys_t4 import t4

CONFIGS: list[dict[str, Any]] = [
    {"method": "ccd", "history_length": 3},
    {"method": "ccd_ds", "history_length": 2},
    {"method": "ccd_agreement", "warmup_rounds": 2},
    {"method": "llada2.1_s", "block_length": 4},
    {"method": "bacd", "confidence_low": 0.3, "confidence_high": 0.5, "block_length": 4},
    {"method": "remdm", "remask_eta": 0.5, "temperature": 1.0},
]


def canvases(mask_token_id: int) -> list[Canvas]:
    prompts = [((3, 4, 5), 12), ((9, 1), 8), ((7, 7, 2, 8), 12)]
    return [Canvas.of(prompt, length, mask_token_id=mask_token_id) for prompt, length in prompts]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["method"])
def test_texts_decoded_together_are_those_decoded_alone(config: dict[str, Any]) -> None:
    toy, method = t4(), ConfiguredMethod(config)
    texts = canvases(toy.mask_token_id)
    together = decode(texts, toy, [method.parts(toy, canvas, seed=i) for i, canvas in enumerate(texts)])
    for i, (canvas, outcome) in enumerate(zip(texts, together, strict=True)):
        assert same(outcome, complete(toy, canvas, config, seed=i))


@pytest.mark.parametrize("config", CONFIGS[:3], ids=lambda config: config["method"])
def test_a_shared_memory_would_show(config: dict[str, Any]) -> None:
    toy, method = t4(), ConfiguredMethod(config)
    texts = [canvas for canvas in canvases(toy.mask_token_id) if canvas.length != 10]
    parts = [method.parts(toy, canvas, seed=i) for i, canvas in enumerate(texts)]
    parts[1].transition.commit = parts[0].transition.commit
    together = decode(texts, toy, parts)
    alone = [complete(toy, canvas, config, seed=i) for i, canvas in enumerate(texts)]
    assert not all(same(ours, theirs) for ours, theirs in zip(together, alone, strict=True))


def test_rules_with_a_memory_cannot_be_verified_by_drafts() -> None:
    toy = t4()
    [canvas] = canvases(toy.mask_token_id)[:1]
    with pytest.raises(ConfigError):
        ConfiguredMethod({"method": "ccd", "verification": "freedave"}).parts(toy, canvas)
