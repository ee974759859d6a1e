"""Arbitrage: each model alone at the ends of the threshold, steps found by hand, the oracle above chance routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError, PacelineError
from paceline.models.heads import StateJudge
from tests.search.letters import searched
from tests.search.two_models import params, tokens

PROMPTS = ["Once upon a time", "def f(x):\n    return", "SELECT name FROM"]
STEP = 5
HERE = "tests.search.test_arbitrage"


def found(llm: LLM, prompt: str, how: SamplingParams, **options: Any) -> Any:
    return searched(llm, how, prompt, method="arbitrage", model="bundled/draft", step_tokens=STEP, **options)


def half(texts: Sequence[str]) -> list[float]:
    return [0.5] * len(texts)


@pytest.mark.parametrize("how", [params(), params(temperature=0.9)], ids=["greedy", "drawn"])
def test_each_model_writes_alone_at_its_end_of_the_threshold(llm: LLM, small: LLM, how: SamplingParams) -> None:
    for prompt in PROMPTS:
        for threshold, wanted, written in ((0.0, tokens(llm, prompt, how), 0), (1.0, tokens(small, prompt, how), 40)):
            one = found(llm, prompt, how, router=f"{HERE}:half", threshold=threshold)
            assert (one.outputs[0].token_ids, one.metrics.num_departures) == (wanted, written)


def even(texts: Sequence[str]) -> list[float]:
    """A router without sense or chance: by the number of letters."""
    return [float(len(text) % 2) for text in texts]


def by_hand(llm: LLM, small: LLM, prompt: str, router: Callable[[Sequence[str]], list[float]]) -> tuple[list[int], int]:
    """Tokens, and how many of them are the small model's: steps from whole prompts, without caches of searches."""
    text, written, little = llm.tokenizer.encode(prompt), list[int](), 0
    while len(written) < 40:
        little_step, large_step = (written_by(model, [*text, *written]) for model in (small, llm))
        stands = router([llm.tokenizer.decode([*written, *little_step])])[0] <= 0.5
        written += little_step if stands else large_step
        little += STEP if stands else 0
    return written, little


def written_by(model: LLM, text: list[int]) -> list[int]:
    (result,) = model.generate({"prompt_token_ids": text}, params(max_tokens=STEP))
    return list(result.outputs[0].token_ids)


def test_it_is_steps_of_two_models_by_hand(llm: LLM, small: LLM) -> None:
    """So a step that was taken back leaves nothing in the small model's cache, and the large one reads what stands."""
    how, mixed = params(), 0
    for prompt in PROMPTS:
        wanted, little = by_hand(llm, small, prompt, even)
        one = found(llm, prompt, how, router=even, delimiter="never")
        assert (one.outputs[0].token_ids, one.metrics.num_departures) == (wanted, little)
        mixed += 0 < little < 40
    assert mixed > 0
    assert any(
        by_hand(llm, small, prompt, lambda texts: [1.0 - even(texts)[0]]) != by_hand(llm, small, prompt, even)
        for prompt in PROMPTS
    )


def test_steps_end_with_their_delimiter(llm: LLM) -> None:
    seen, shorter = list[str](), 0

    def router(texts: Sequence[str]) -> list[float]:
        seen.extend(texts)
        return [0.0] * len(texts)

    one = found(llm, PROMPTS[0], params(), router=router, delimiter="e")
    expected, step, written = list[str](), list[int](), one.outputs[0].token_ids
    for place, token in enumerate(written, 1):
        step.append(token)
        if "e" in llm.tokenizer.decode(step).lstrip() or len(step) == STEP:
            expected.append(llm.tokenizer.decode(written[:place]))
            short, step = len(step) < STEP, []
            shorter += short
    assert seen[: len(expected)] == expected
    assert shorter > 3


def letters(texts: Sequence[str]) -> list[float]:
    """A reward: the share of e among the letters."""
    return [text.count("e") / max(1, len(text)) for text in texts]


def test_the_oracle_bounds_a_random_router_of_as_many_large_steps(llm: LLM) -> None:
    """By the reward that it knows; a router that is given the oracle's own advantage comes as high."""
    how, random = params(), Random(0)
    oracle, chance = 0.0, 0.0

    def reached(prompt: str, **options: Any) -> tuple[float, float]:
        """The reward, and the share of the small model."""
        one = found(llm, prompt, how, **options)
        return letters([one.outputs[0].text])[0], one.metrics.num_departures / 40

    def drawn(share: float) -> Callable[[Sequence[str]], list[float]]:
        return lambda _: [float(random.random() > share)]

    for prompt in PROMPTS:
        reward, share = reached(prompt, reward=letters, threshold=0.0)
        oracle += reward
        chance += sum(reached(prompt, router=drawn(share))[0] for _ in range(4)) / 4
    assert oracle > chance
    for end in (0.0, 1.0):
        assert oracle > sum(reached(prompt, router=half, threshold=end)[0] for prompt in PROMPTS)


def test_a_head_routes_by_the_small_models_state_behind_the_step(llm: LLM, small: LLM, tmp_path: Path) -> None:
    hidden = small.runner.info.hidden_size
    weight = torch.randn(hidden, generator=torch.Generator().manual_seed(1))
    text = llm.tokenizer.encode(PROMPTS[0])
    (result,) = small.generate(PROMPTS[0], params(max_tokens=STEP))
    whole, last = [*text, *result.outputs[0].token_ids], small.runner.info.num_layers - 1
    cache = small.runner.open()
    state = small.runner.extend([cache], [whole], taps=(last,)).taps[last][-1:]
    small.runner.release(cache)
    own = float(StateJudge(weight, 0.0).logits(state))
    for shift, small_writes in ((0.5, True), (-0.5, False)):
        head = StateJudge(weight, shift - own, {"tokenizer": llm.tokenizer.fingerprint()})
        folder = head.write(tmp_path / str(shift))
        one = found(llm, PROMPTS[0], params(max_tokens=STEP), router=str(folder), delimiter="never")
        assert one.metrics.num_departures == (STEP if small_writes else 0)
    wrong = StateJudge(torch.zeros(hidden + 1), 0.0).write(tmp_path / "wrong")
    with pytest.raises(PacelineError, match="hidden_size"):
        llm.generate("x", params(), search={"method": "arbitrage", "model": "bundled/draft", "router": str(wrong)})


def test_memory_is_given_back(llm: LLM) -> None:
    found(llm, PROMPTS[0], params(), router=even)
    found(llm, PROMPTS[0], params(), reward=letters)
    other: Any = llm.models.open("bundled/draft")
    assert other.memory.used == 0
    llm.reset_prefix_cache()
    own: Any = llm.runner
    assert own.memory.used == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": half}, "model must be a folder or hub id"),
        ({"model": "bundled/draft"}, "router must be given, or else reward"),
        ({"model": "bundled/draft", "router": half, "reward": letters}, "router must be left out beside reward"),
        ({"model": "bundled/draft", "router": half, "threshold": 2.0}, "threshold must be in 0..1"),
        ({"model": "bundled/draft", "router": half, "delimiter": ""}, "delimiter must be a string"),
        ({"model": "bundled/draft", "router": "no:such"}, "router: cannot import"),
    ],
)
def test_bad_options_get_one_line(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        llm.generate("x", params(), search={"method": "arbitrage", **options})


def test_a_router_must_say_numbers_in_0_to_1(llm: LLM) -> None:
    (one,) = llm.generate(
        "x", params(), search={"method": "arbitrage", "model": "bundled/draft", "router": lambda _: [2.0]}
    )
    assert "router must give a number in 0..1" in str(one.outputs[0].error)


def test_strict_mode_rejects_it() -> None:
    strict = LLM(dtype="float32", speculative_config=None, exactness="strict")
    with pytest.raises(ConfigError, match="search must be a method in which the model alone writes"):
        strict.generate("x", params(), search={"method": "arbitrage", "model": "bundled/draft", "router": half})
