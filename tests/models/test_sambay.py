"""SambaY: known tokens go through the layers that keep something of them, and what reads one layer's memory, keys and
values, for the rows that are asked for alone; so do the last layers of other models that keep nothing. That logits are
right is for test_parity to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine.harness import engine, run, tokens
from engine.test_hybrid_drafts import drafting
from engine.test_state_prefixes import apart, decode
from models import checkpoints
from models.checkpoints import CASES, Tensors, reference
from models.test_parity import PATH, TEXT, TREE, distance
from tiny_llama import tokens as drawn
from torch.nn import functional as F

from paceline.checkpoints import Checkpoint, load_weights, read_config, spec_from_config
from paceline.config import SamplingParams
from paceline.doctor.passes import random_weights
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models import GatedMemorySpec, ModelSpec, has_ability
from paceline.models.attention.segments import Segment, parts_with
from paceline.models.layers.decoder import PackedLayer
from paceline.models.layers.mixers.gated_memory import GatedMemory
from paceline.models.layers.mixers.step import RecurrentStep
from paceline.models.layers.own_weights import OwnWeights
from paceline.models.memory import estimate
from paceline.models.passes import eager
from paceline.models.runners import RecurrentRunner

NAME, LAYERS, SELF_DECODER = "phi4flash", 8, 5
"""The case, its layers, and how many of them every token goes through; the next one keeps its keys and values."""

CPU, TOLERANCE = torch.device("cpu"), CASES[NAME].tolerance
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)


@cache
def _parts(dtype: torch.dtype = torch.float32) -> tuple[ModelSpec, Tensors]:
    with TemporaryDirectory() as folder:
        path = checkpoints.write(NAME, "new", Path(folder))
        spec = spec_from_config(read_config(path))
        return spec, load_weights(Checkpoint(path), spec, device=CPU, dtype=dtype)


def sambay(noise: float = 0.0, **changes: Any) -> RecurrentRunner:
    """The case with a longer context and other `changes` of its spec; `noise` as of `tiny_hybrid.hybrid`."""
    spec, found = _parts()
    generator, weights = torch.Generator().manual_seed(1), dict(found)
    for name, weight in found.items():
        if noise and weight.dim() > 1:
            weights[name] = weight + noise * weight.std() * torch.randn(weight.shape, generator=generator)
    spec = replace(spec, max_context=256, **changes)
    return RecurrentRunner(spec, weights, name="tiny", device=CPU, dtype=torch.float32)


class Rows:
    """Counts the rows that go through the MLP of each layer of a runner."""

    def __init__(self, runner: RecurrentRunner) -> None:
        self.counts = [0] * LAYERS
        passes: Any = runner.native.passes
        for index, layer in enumerate(passes.decoder.layers):
            layer.feed_forward = self._counting(index, layer.feed_forward)

    def _counting(self, index: int, mlp: Any) -> Any:
        def counted(x: torch.Tensor) -> torch.Tensor:
            self.counts[index] += len(x)
            return mlp(x)

        return counted

    def since(self) -> list[int]:
        counts, self.counts = self.counts, [0] * LAYERS
        return counts


def some(all_rows: int, wanted: int) -> list[int]:
    """Rows of each layer where so many go through the self-decoder, and so many through the rest."""
    return [all_rows] * SELF_DECODER + [wanted] * (LAYERS - SELF_DECODER)


def test_known_tokens_leave_out_the_cross_decoder() -> None:
    runner = sambay()
    rows, one, two = Rows(runner), runner.open(), runner.open()
    last = runner.extend([one, two], [TEXT[:40], TEXT[5:12]]).logits
    assert rows.since() == some(47, 2)
    assert distance(last[:1], reference(NAME, TEXT[:40])[-1:]) < TOLERANCE
    assert distance(last[1:], reference(NAME, TEXT[5:12])[-1:]) < TOLERANCE
    tree = runner.score([one], [TEXT[40]], [TREE]).logits
    assert rows.since() == some(1 + len(TREE), 1 + len(TREE))
    wanted = reference(NAME, [*TEXT[:41], *TREE.tokens[list(PATH)].tolist()])[40:]
    assert distance(tree[[0, *(node + 1 for node in PATH)]], wanted) < TOLERANCE
    whole = runner.extend([runner.open()], [TEXT[:40]], all_logits=True, taps=[1]).logits
    assert rows.since() == some(40, 40)
    assert distance(whole, reference(NAME, TEXT[:40])) < TOLERANCE


@pytest.mark.parametrize(("tap", "wanted"), [(SELF_DECODER - 1, 1), (SELF_DECODER, 40), (LAYERS, 40)])
def test_taps_are_of_all_rows(tap: int, wanted: int) -> None:
    runner = sambay()
    rows = Rows(runner)
    found = runner.extend([runner.open()], [TEXT[:40]], taps=[tap])
    assert rows.since() == some(40, wanted)
    whole = runner.extend([runner.open()], [TEXT[:40]], taps=[tap], all_logits=True)
    assert distance(found.taps[tap], whole.taps[tap]) < TOLERANCE


@pytest.mark.parametrize(("pattern", "whole"), [("M-*M-", 4), ("M-*-", 2), ("M-M*-E", 3)])
def test_last_layers_of_other_models_are_left_out_too(pattern: str, whole: int) -> None:
    """The last one that keeps something, where it is attention alone, runs for its keys."""
    config = checkpoints.old_config("nemotron_h-moe") | {"hybrid_override_pattern": pattern}
    spec = spec_from_config(config | {"num_hidden_layers": len(pattern)})
    weights = dict(random_weights(spec, torch.float32, None))
    runner = RecurrentRunner(spec, weights, name="tiny", device=CPU, dtype=torch.float32)
    passes: Any = runner.native.passes
    assert passes.decoder.optional == whole
    last = runner.extend([runner.open(), runner.open()], [TEXT[:30], TEXT[:7]]).logits
    wanted = runner.extend([runner.open()], [TEXT[:30]], all_logits=True).logits
    assert distance(last, wanted[[29, 6]]) < 1e-4
    assert distance(last, wanted[[28, 5]]) > 0.1


def test_parts_of_segments_hold_the_rows_that_are_wanted() -> None:
    cache: Any = None
    segments = [Segment(cache, 4), Segment(cache, 5, done=2), Segment(cache, 5)]
    parts, rows, picked = parts_with(segments, [1, 3, 8])
    assert [(part.done, part.slots) for part in parts] == [(1, 4), (1, 2)]
    assert (rows, picked) == ([1, 2, 3, 8], [0, 2, 3])


def test_a_row_that_is_left_out_though_it_is_asked_for_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(segments: Any, wanted: Sequence[int]) -> tuple[list[Any], list[int], list[int]]:
        return [], list(wanted), list(range(len(wanted)))

    monkeypatch.setattr(eager, "parts_with", without)
    runner = sambay()
    last = runner.extend([runner.open()], [TEXT[:40]]).logits
    assert distance(last, reference(NAME, TEXT[:40])[-1:]) > 10 * TOLERANCE


def test_logprobs_of_a_prompt_are_those_of_its_tokens() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (request,) = run(engine(sambay()), [TEXT[:40]], params)  # type: ignore[arg-type]
    wanted = reference(NAME, TEXT[:40]).log_softmax(-1)
    found = [one[token].logprob for one, token in zip((request.prompt_logprobs or [])[1:], TEXT[1:40], strict=True)]
    assert distance(torch.tensor(found), wanted[range(39), TEXT[1:40]]) < TOLERANCE


def test_trees_change_no_token() -> None:
    prompts = [drawn(size, seed=size) for size in (3, 20, 37)]
    plain = run(engine(sambay()), prompts, GREEDY)  # type: ignore[arg-type]
    found = run(drafting(sambay(), "trees", sambay(noise=0.1)), prompts, GREEDY)
    assert apart(found, plain) < 1e-3
    accepted = [request.metrics.num_accepted_tokens for request in found]
    assert 0 < sum(accepted) < 20 * len(prompts)
    assert len({tuple(ids) for (ids,) in tokens(plain)}) == len(prompts)


def test_the_memory_of_another_node_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run_unit = GatedMemory.run

    def of_another(self: GatedMemory, normed: torch.Tensor, step: RecurrentStep, layer: int) -> torch.Tensor:
        return run_unit(self, normed, SimpleNamespace(published=step.published.roll(1, 0)), layer)  # type: ignore[arg-type]  # all it reads

    monkeypatch.setattr(GatedMemory, "run", of_another)
    runner = sambay()
    sequence = runner.open()
    runner.extend([sequence], [TEXT[:40]])
    tree = runner.score([sequence], [TEXT[40]], [TREE]).logits
    wanted = reference(NAME, [*TEXT[:41], *TREE.tokens[list(PATH)].tolist()])[40:]
    assert distance(tree[[0, *(node + 1 for node in PATH)]], wanted) > 10 * TOLERANCE


def test_a_text_goes_on_from_a_kept_state() -> None:
    prompt, live = drawn(100, seed=1), engine(sambay())  # type: ignore[arg-type]
    (first,) = decode(live, [prompt])
    longer = [*prompt, *first.outputs[0].token_ids, 9, 8]
    (found,) = decode(live, [longer])
    assert found.num_cached_tokens >= 96
    cold = decode(engine(sambay(), enable_prefix_caching=False), [longer])  # type: ignore[arg-type]
    assert apart([found], cold) < 1e-3


def test_a_memory_of_ones_makes_a_gated_mlp() -> None:
    spec, generator = _parts()[0], torch.Generator().manual_seed(0)
    into, out = torch.randn(12, 6, generator=generator), torch.randn(6, 12, generator=generator)
    weights = OwnWeights({"mixer.in.weight": into, "mixer.out.weight": out}, "", spec, True, torch.float32)
    unit, x = GatedMemory(GatedMemorySpec(channels=12), weights), torch.randn(5, 6, generator=generator)
    mlp = F.silu(x @ into.t()) @ out.t()
    ones: Any = SimpleNamespace(published=torch.ones(5, 12))
    assert distance(unit.run(x, ones, 0), mlp) < 1e-5
    twice: Any = SimpleNamespace(published=torch.full((5, 12), 2.0))
    assert distance(unit.run(x, twice, 0), mlp) > 0.1


def test_states_windows_and_the_keys_of_one_layer_are_kept() -> None:
    runner = sambay()
    spec, arena = runner.spec, runner.native.arena
    assert arena.windowed is not None
    assert (arena.kv.shape[0], arena.windowed.kv.shape[0]) == (1, 2)
    channels, numbers, taps = 128, 8, 4
    assert runner.memory.state_bytes == 3 * channels * (numbers + taps - 1) * 4
    keys = 2 * 4 * 8 * 4  # of four heads of 8 dimensions, and as many values
    assert arena.block_bytes == 16 * keys
    need = estimate(spec, torch.float32, CPU)
    assert need.cache(10**6) - need.cache(10**5) == 9 * 10**5 * keys
    own = replace(spec, layers=tuple(replace(layer, kv_of=None) for layer in spec.layers))
    twice = estimate(own, torch.float32, CPU)
    assert twice.cache(10**6) - twice.cache(10**5) == 2 * 9 * 10**5 * keys


def test_no_layer_runs_without_the_others() -> None:
    names = ("early_exit", "layer_subsets")
    assert not any(has_ability(sambay(), name) for name in names)
    alone = sambay(layers=_parts()[0].layers[:SELF_DECODER])
    assert all(has_ability(alone, name) for name in names)


@pytest.mark.parametrize("wide", [True, False])
def test_states_between_layers_are_wide(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, weights = _parts(torch.bfloat16)
    seen, run_layer = set[torch.dtype](), PackedLayer.run

    def noting(self: PackedLayer, x: torch.Tensor, *given: Any, **options: Any) -> None:
        seen.add(x.dtype)
        run_layer(self, x, *given, **options)

    monkeypatch.setattr(PackedLayer, "run", noting)
    spec = spec if wide else replace(spec, wide_sums=False)
    runner = RecurrentRunner(spec, dict(weights), name="tiny", device=CPU, dtype=torch.bfloat16)
    found = runner.extend([runner.open()], [TEXT], taps=[-1, 3, LAYERS])
    assert seen == {torch.float32 if wide else torch.bfloat16}
    assert {found.logits.dtype, *(tap.dtype for tap in found.taps.values())} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"num_hidden_layers": 6}, CheckpointError, "'num_hidden_layers' must be a multiple of 4, got 6"),
        ({"mb_per_layer": 4}, UnsupportedModelError, "mb_per_layer=4"),
        ({"num_key_value_heads": 1}, CheckpointError, "8 heads and 1 key-value heads are no pairs"),
    ],
)
def test_other_layouts_are_refused(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        spec_from_config(checkpoints.old_config(NAME) | change)
