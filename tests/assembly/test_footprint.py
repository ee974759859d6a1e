"""The memory of speculation: what is predicted is what is held, and no step of a limited engine holds more than its
limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adversaries import Adversary
from tiny_checkpoint import write
from toys import ToyRunner

from paceline import LLM, SamplingParams
from paceline.assembly import limited
from paceline.assembly.controller_setup import footprint_of, runners_of
from paceline.bench import BUNDLED_DRAFT
from paceline.controllers import LimitedController, Signal
from paceline.controllers.policies import FixedController
from paceline.drafters import DrafterArgs
from paceline.errors import ConfigError
from paceline.llm import BUNDLED
from paceline.models import Runner, cache_bytes, slot_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return LLM(str(folder), speculative_config=None, dtype="float32", threads=1, enable_prefix_caching=False)


def prompts(batch: int, length: int) -> list[Any]:
    return [{"prompt_token_ids": [(7 * i + 3 * j) % 500 + 10 for j in range(length)]} for i in range(batch)]


def texts(llm: LLM, batch: int, length: int, tokens: int = 12) -> list[list[int]]:
    found = llm.generate(prompts(batch, length), SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    assert not any(out.metrics.dropped_drafters for out in found)
    return [out.outputs[0].token_ids for out in found]


def cache_held(cache: Any) -> int:
    """Bytes of a cache's blocks."""
    return len(cache.blocks) * int(cache.arena.kv.nbytes // (cache.arena.slots // 16))


class Meter:
    """Bytes that speculation holds in each step, beside what was predicted for it."""

    def __init__(self, llm: LLM) -> None:
        drafter_set = llm.engine.parts.drafter_set
        self.footprint = footprint_of(llm.runner, drafter_set.drafters)
        self.slot = slot_bytes(llm.runner) or 0
        self.steps: list[tuple[int, int, int]] = []
        self.drafts = list(drafter_set.drafters)
        self._opened: list[Any] = []
        llm.engine.watchers.append(self)
        for drafter in self.drafts:
            for runner in runners_of(drafter):
                self._spy(runner)

    def _spy(self, runner: Any) -> None:
        opened = runner.open

        def spying() -> Any:
            self._opened.append(cache := opened())
            return cache

        runner.open = spying

    def __call__(self, record: Any) -> None:
        row = record.scores.logits[0].nbytes
        nodes = sum(map(len, record.trees))
        held = nodes * (self.slot + row) + sum(cache_held(cache) for cache in self._opened)
        signals = [Signal(i, length, 9, 0.0) for i, length in enumerate(record.lengths)]
        self.steps.append((held, self.footprint.batch(signals, max(map(len, record.trees))), nodes))


def engine_of(folder: Path, config: dict[str, Any] | None, **more: Any) -> LLM:
    return LLM(str(folder), speculative_config=config, dtype="float32", threads=1, enable_prefix_caching=False, **more)


@pytest.fixture(params=["native", "bundled", "layers in groups"])
def draft(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """What drafts, as keys of speculative_config."""
    if request.param == "bundled":
        return {"method": "draft_model", "model": str(BUNDLED_DRAFT)}
    if request.param == "native":
        return {"method": "draft_model", "model": str(write(tmp_path / "draft", seed=1, max_position_embeddings=512))}
    model = write(tmp_path / "draft", seed=1, max_position_embeddings=512, num_hidden_layers=5)
    return {"method": "easyspec", "model": str(model)}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [20, 150])
def test_what_is_predicted_is_held(folder: Path, draft: dict[str, Any], batch: int, length: int) -> None:
    """Over nodes, batch and length. Negative control: a prediction that forgets the rows of logits is far off."""
    for nodes in (2, 7):
        llm = engine_of(folder, {**draft, "num_speculative_tokens": nodes}, speculative_memory_bytes=10**9)
        meter = Meter(llm)
        texts(llm, batch, length, nodes + 8)
        steps = [(held, predicted) for held, predicted, _ in meter.steps[1:-3]]
        assert steps
        assert all(0.97 < held / predicted < 1.03 for held, predicted in steps), steps
        forgotten = replace(meter.footprint, row=0).batch([Signal(i, length, 9, 0.0) for i in range(batch)], nodes)
        assert not 0.97 < steps[0][0] / forgotten < 1.03


def test_no_step_holds_more_than_the_limit(folder: Path, plain: LLM, draft: dict[str, Any]) -> None:
    """With a limit for one sequence of three, for a few nodes, and for all that is asked: the same tokens, more and
    more drafts.
    """
    config = {**draft, "num_speculative_tokens": 8}
    free = Meter(engine_of(folder, config))
    signals, drafted, want = [Signal(i, 40, 9, 0.0) for i in range(3)], [], texts(plain, 3, 30, 40)
    for batch, nodes in ((1, 2), (3, 3), (3, 12)):
        limit = free.footprint.batch(signals[:batch], nodes)
        llm = engine_of(folder, config, speculative_memory_bytes=limit)
        meter = Meter(llm)
        assert texts(llm, 3, 30, 40) == want
        assert max(held for held, _, _ in meter.steps) <= limit
        drafted.append(sum(count for *_, count in meter.steps))
    assert 0 < drafted[0] < drafted[1] < drafted[2]


def test_auto_plans_within_the_limit(folder: Path, plain: LLM) -> None:
    config = {"method": ["ngram", "draft_model"], "model": str(BUNDLED_DRAFT), "controller": "auto"}
    footprint = footprint_of(plain.runner, Meter(engine_of(folder, config)).drafts)
    limit = footprint.sequence(100, 3, 0.0)
    llm = engine_of(folder, config, speculative_memory_bytes=limit)
    meter = Meter(llm)
    assert texts(llm, 1, 30, 60) == texts(plain, 1, 30, 60)
    assert max(held for held, _, _ in meter.steps) <= limit
    assert "nodes within" in llm.engine.parts.controller.explain(0)


@pytest.mark.parametrize(("kind", "stores"), [("diffusion", False), ("block_diffusion", True)])
def test_drafts_of_a_diffusion_model_are_counted(kind: str, stores: bool) -> None:
    """Logits of all drafted slots at once, and what a block-causal model stores of the text."""
    config = {"method": "deer", "model": str(BUNDLED / kind), "num_speculative_tokens": 5}
    llm = LLM(speculative_config=config, threads=1, enable_prefix_caching=False, speculative_memory_bytes=10**9)
    (drafter,), vocab = llm.engine.parts.drafter_set.drafters, llm.runner.info.vocab_size
    found = footprint_of(llm.runner, [drafter])
    assert found.row == vocab * 2 + drafter.denoiser.vocab_size * 4  # type: ignore[attr-defined]
    held: list[tuple[int, int]] = []

    def look(record: Any) -> None:
        (state,) = record.sequences[0].states
        cache = None if state is None else state.cache
        if state is not None:  # it is gone after the last step
            held.append(
                (0 if cache is None else cache.keys.nbytes + cache.values.nbytes, found.drafts(record.lengths[0], 5))
            )

    llm.engine.watchers.append(look)
    texts(llm, 1, 100, 60)
    assert all((made > 0) == stores and made <= predicted for made, predicted in held)
    assert max(made for made, _ in held) >= 0.9 * max(predicted for _, predicted in held)
    least = found.sequence(16, 1, 0.0)
    with pytest.raises(ConfigError, match=f"speculative_memory_bytes must be at least {least}"):
        LLM(speculative_config=config, threads=1, speculative_memory_bytes=least - 1)


def test_what_fits_nothing_is_rejected(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"speculative_memory_bytes must be at least \d+, .* with ngram, got 100; raise it"
    ) as refused:
        engine_of(folder, {"method": "ngram"}, speculative_memory_bytes=100)
    least = int(str(refused.value).split("at least ")[1].split(",")[0])
    assert engine_of(folder, {"method": "ngram"}, speculative_memory_bytes=least)
    with pytest.raises(ConfigError, match=f"at least {least}"):
        engine_of(folder, {"method": "ngram"}, speculative_memory_bytes=least - 1)
    with pytest.raises(ConfigError, match="speculative_memory_bytes must be"):
        engine_of(folder, None, speculative_memory_bytes=0)


class Toy(Adversary):
    """With a model whose caches are not counted."""

    runner = ToyRunner(16)

    def __init__(self) -> None:
        super().__init__(DrafterArgs(vocab_size=16, index=0, max_context=64))

    def runners(self) -> Sequence[Runner]:
        return (self.runner,)


def test_without_drafts_or_a_limit_nothing_changes(folder: Path) -> None:
    runner, controller = ToyRunner(16), FixedController(3)
    assert limited(controller, runner, [], 5) is controller
    assert limited(controller, runner, [Toy()], None) is controller
    assert engine_of(folder, None, speculative_memory_bytes=1).engine.parts.controller.name == "fixed"


def test_caches_that_are_not_counted_are_rejected(plain: LLM) -> None:
    for runner in (Toy.runner, plain.runner):
        with pytest.raises(ConfigError, match="not available with toy"):
            limited(FixedController(3), runner, [Toy()], 10**9)
    assert cache_bytes(Toy.runner, 5) is None


def test_the_controller_keeps_its_name(folder: Path) -> None:
    llm = engine_of(folder, {"method": "ngram", "num_speculative_tokens": 2}, speculative_memory_bytes=10**7)
    assert isinstance(llm.engine.parts.controller, LimitedController)
    assert llm.engine.parts.controller.name == "fixed"
