"""The rounded copy of the target as a draft: it agrees nearly always, changes nothing, and is refused where it cannot
be.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from toys import ToyRunner

from paceline import LLM, SamplingParams
from paceline.bench import bundled_prompts
from paceline.drafters import DrafterArgs
from paceline.drafters.self.quantized_copy import QuantizedCopyDrafter
from paceline.errors import ConfigError, OutOfMemoryError, UnsupportedModelError
from paceline.models import memory

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=24)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(speculative_config=None, dtype="float32", seed=1)


@pytest.fixture(scope="module")
def prompts(plain: LLM) -> list[dict[str, Any]]:
    """Four, ragged."""
    return [
        {"prompt_token_ids": plain.chat_ids([{"role": "user", "content": p.prompt}])}
        for p in bundled_prompts()[::6][:4]
    ]


def texts(llm: LLM, prompts: list[dict[str, Any]], params: SamplingParams) -> tuple[list[list[int]], float]:
    """Tokens, and the share of drafts that stood."""
    found = llm.generate(prompts, params)
    assert not any(out.metrics.dropped_drafters for out in found)
    drafted = sum(out.metrics.num_draft_tokens for out in found)
    return [out.outputs[0].token_ids for out in found], sum(o.metrics.num_accepted_tokens for o in found) / max(
        1, drafted
    )


@pytest.mark.parametrize(("form", "least"), [("int8", 0.85), ("int4", 0.6)])
def test_a_copy_says_what_its_target_says(plain: LLM, prompts: list[dict[str, Any]], form: str, least: float) -> None:
    fast = plain.with_speculative_config(
        {"method": "quantized_copy", "quantization": form, "num_speculative_tokens": 4}
    )
    for batch in (prompts[:1], prompts):
        tokens, share = texts(fast, batch, GREEDY)
        assert tokens == texts(plain, batch, GREEDY)[0]
        assert share > least
    assert texts(fast, prompts, SEEDED)[0] == texts(plain, prompts, SEEDED)[0]


def test_drawn_drafts_stand_as_often_as_the_distributions_are_close(plain: LLM, prompts: list[dict[str, Any]]) -> None:
    """1 - total variation of int8's distribution and the target's is near 1; that of a trimmed head's is not."""
    shares = []
    for options in ({}, {"draft_vocab_size": 261}):
        fast = plain.with_speculative_config({"method": "quantized_copy", "num_speculative_tokens": 3, **options})
        shares.append(texts(fast, prompts, SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True))[1])
    assert shares[0] > 0.95
    assert shares[1] < 0.8, "the share sees a draft of another distribution"


def test_a_copy_drafts_trees_whose_width_is_given_by_level(plain: LLM, prompts: list[dict[str, Any]]) -> None:
    tree = {"tree_policy": "rsd_c", "tree_width": [2, 1, 1], "num_speculative_tokens": 6}
    fast = plain.with_speculative_config({"method": "quantized_copy", **tree})
    tokens, share = texts(fast, prompts, SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True))
    assert [len(one) for one in tokens] == [24] * len(prompts)
    assert share > 0.3


def test_a_copy_is_made_once_for_all_engines(plain: LLM) -> None:
    first, second = (
        plain.with_speculative_config({"method": "quantized_copy", "quantization": name}) for name in ("int8", "int8wo")
    )
    one, other = (llm.engine.parts.drafter_set.drafters[0].runner for llm in (first, second))  # type: ignore[attr-defined]
    assert one is other
    assert one.info.quantization == "int8"
    assert one.info.weight_bytes < plain.runner.info.weight_bytes / 3


def test_no_room_for_both(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda device: 1000)
    with pytest.raises(OutOfMemoryError, match=r"the int4 copy of .*target needs .* can be used"):
        plain.with_speculative_config({"method": "quantized_copy", "quantization": "int4", "draft_vocab_size": 900})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"quantization": "fp8"}, "must be one of int8, int8_weight_only"),
        ({"tree_width": 0}, "tree_width"),
        ({"model": "x"}, "does not know 'model'"),
    ],
)
def test_bad_options_are_rejected(plain: LLM, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        plain.with_speculative_config({"method": "quantized_copy", **options})


def test_targets_without_a_copy_are_rejected() -> None:
    small = LLM(speculative_config=None, quantization="int8")
    with pytest.raises(ConfigError, match="must differ from the target's, which is int8 itself"):
        small.with_speculative_config({"method": "quantized_copy"})
    toy: Any = ToyRunner(11)
    with pytest.raises(ConfigError, match="loaded from files"):
        QuantizedCopyDrafter(DrafterArgs(vocab_size=11, index=0, max_context=99, target=toy))


def test_a_target_without_native_runner_is_rejected(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.models import load

    monkeypatch.setattr(load, "spec_from_config", Mock(side_effect=UnsupportedModelError("of no family")))
    with pytest.raises(UnsupportedModelError, match="the int4 copy of"):
        plain.with_speculative_config({"method": "quantized_copy", "quantization": "int4", "draft_vocab_size": 901})
