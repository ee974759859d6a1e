"""Passes whose later rows leave out layers: at the ends the full model to the bit; what each method computes, against
transformers' layers; drafts, batches and what is taken back as tokens one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from tiny_llama import close, runner_of, tiny_llama, tokens
from transformers import LlamaForCausalLM

from paceline.errors import CapabilityError, CheckpointError, ConfigError, UnsupportedModelError
from paceline.models.attention.gaps import Gaps
from paceline.models.runners import SkippingRunner, droppable, layer_drafts_of, write_corrections
from paceline.models.runners.layer_skipping import UnifiedLayerSkipping
from paceline.models.runners.lora_drop import LoraDrop
from paceline.tree import EMPTY_TREE, TokenTree

TEXT, PROMPT = tokens(40, seed=5), 20
LAYERS = 6


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=64, head_dim=32)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corrections of layers 1, 2 and 4 that are not nothing."""
    folder, generator = tmp_path_factory.mktemp("adapter"), torch.Generator().manual_seed(0)
    factors = {
        layer: (torch.randn(2, 64, generator=generator) / 8, torch.randn(64, 2, generator=generator))
        for layer in (1, 2, 4)
    }
    write_corrections(folder, factors, alpha=1.0, reuse=3, facts={})
    return folder


def made(model: LlamaForCausalLM, method: Any, compiled: bool = False, **changes: Any) -> SkippingRunner:
    def load(**options: Any) -> Any:
        assert options.pop("lora", None) is None
        return runner_of(model, compiled=compiled, **changes, **options)

    return cast(SkippingRunner, method.open(load, name="tiny"))


def of(model: LlamaForCausalLM, adapter: Path, name: str, compiled: bool = False) -> SkippingRunner:
    methods = {
        "unified": lambda: UnifiedLayerSkipping(speedup=2),
        "dropped": lambda: LoraDrop(adapter=str(adapter)),
        "reused": lambda: LoraDrop(drop=0.5, reuse=2),
    }
    return made(model, methods[name](), compiled)


ALL = pytest.mark.parametrize("name", ["unified", "dropped", "reused"])
FORMS = pytest.mark.parametrize("compiled", [False, True], ids=["operators", "compiled"])


def opened(runner: Any, announced: bool = True, count: int = PROMPT - 1) -> Any:
    cache = runner.open(PROMPT if announced else 0)
    runner.extend([cache], [TEXT[:count]])
    return cache


def decoded(runner: Any, cache: Any = None, width: int = 1) -> torch.Tensor:
    """(21, v) logits from the prompt's last token on, in chains of `width`."""
    cache, rows = cache or opened(runner), []
    for at in range(cache.length, len(TEXT), width):
        part = TEXT[at : at + width]
        rows.append(runner.score([cache], part[:1], [TokenTree.chain(part[1:]) if width > 1 else EMPTY_TREE]).logits)
        runner.commit([cache], [range(len(part) - 1)])
    return torch.cat(rows)


# ------------------------------------------------------------------------------------------------------ at the ends


@FORMS
def test_at_a_speedup_of_one_it_is_the_full_model_to_the_bit(model: LlamaForCausalLM, compiled: bool) -> None:
    plain = runner_of(model, compiled=compiled)
    whole = decoded(plain)
    assert torch.equal(decoded(made(model, UnifiedLayerSkipping(speedup=1), compiled)), whole)
    assert not close(decoded(made(model, UnifiedLayerSkipping(speedup=1.5), compiled)), whole, 0.1), "the control"


@FORMS
@pytest.mark.parametrize("options", [{"reuse": 0}, {"drop": 0.0}], ids=["k = 0", "p = 0"])
def test_where_nothing_is_dropped_it_is_the_full_model_to_the_bit(
    model: LlamaForCausalLM, options: dict[str, Any], compiled: bool
) -> None:
    plain = runner_of(model, compiled=compiled)
    for width in (1, 5):
        whole = decoded(plain, width=width)
        assert torch.equal(decoded(made(model, LoraDrop(**options), compiled), width=width), whole)
        some = made(model, LoraDrop(reuse=1, drop=0.2), compiled)
        assert not close(decoded(some, width=width), whole, 0.1), "the control"


@ALL
def test_prompts_and_their_last_token_run_all_layers(model: LlamaForCausalLM, adapter: Path, name: str) -> None:
    runner, plain = of(model, adapter, name), runner_of(model, compiled=False)
    whole, found = decoded(plain), decoded(runner)
    assert torch.equal(found[0], whole[0])
    assert not close(found[2:3], whole[2:3], 0.01), "the control"
    assert torch.equal(
        runner.extend([runner.open(PROMPT)], [TEXT[:PROMPT]], all_logits=True).logits,
        plain.extend([plain.open()], [TEXT[:PROMPT]], all_logits=True).logits,
    )


# -------------------------------------------------------------------------------------------- what the methods compute


@torch.inference_mode()
def by_transformers(model: LlamaForCausalLM, run: Callable[[int, int], str], correct: dict[int, Any]) -> torch.Tensor:
    """(40, v) logits of the text, token by token, by transformers' layers.

    Args:
        run: of a position and a layer: "all", "pass" (as it came) or "reuse".
        correct: layer -> what is added to what was reused, of the layer's input.
    """
    inner, rows = model.model, list[torch.Tensor]()
    seen: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(LAYERS)}  # normed inputs, the keys' source
    places: dict[int, list[int]] = {layer: [] for layer in range(LAYERS)}
    anchors: dict[int, torch.Tensor] = {}
    for position, token in enumerate(TEXT):
        x = inner.embed_tokens(torch.tensor([[token]]))
        for index, layer in enumerate(inner.layers):
            how = run(position, index)
            if how == "pass":
                continue
            if how == "reuse":
                x = anchors[index] + correct.get(index, torch.zeros_like)(x)
                continue
            seen[index].append(x)
            places[index].append(position)
            states, at = torch.cat(seen[index], 1), torch.tensor([places[index]])
            mask = torch.zeros(1, 1, len(at[0]), len(at[0])).masked_fill(at[0] > at[0][:, None], -torch.inf)
            out = layer(states, attention_mask=mask, position_ids=at, position_embeddings=inner.rotary_emb(states, at))
            x = anchors[index] = (out if isinstance(out, torch.Tensor) else out[0])[:, -1:]
        rows.append(model.lm_head(inner.norm(x))[0])
    return torch.cat(rows)


@FORMS
def test_later_tokens_run_the_kept_layers_alone(model: LlamaForCausalLM, compiled: bool) -> None:
    runner = made(model, UnifiedLayerSkipping(speedup=2), compiled)
    assert runner.native.info.passes == ("compiled" if compiled else "operators")

    def expected(kept: Sequence[int]) -> torch.Tensor:
        return by_transformers(model, lambda at, layer: "all" if at < PROMPT or layer in kept else "pass", {})

    found = decoded(runner)
    assert close(found, expected([0, 3, 5])[PROMPT - 1 :], 2e-3)
    assert not close(found, expected([0, 2, 5])[PROMPT - 1 :], 0.1), "the control"


@FORMS
def test_dropped_layers_give_anchor_and_correction(model: LlamaForCausalLM, adapter: Path, compiled: bool) -> None:
    stored = load_file(adapter / "lora_drop.safetensors")
    correct = {
        layer: lambda x, at=layer: 0.5 * x @ stored[f"layers.{at}.a"].T @ stored[f"layers.{at}.b"].T
        for layer in (1, 2, 4)
    }

    def expected(every: int, correct: dict[int, Any]) -> torch.Tensor:
        def run(at: int, layer: int) -> str:
            whole = at < PROMPT or (at - PROMPT) % every == 0 or layer not in (1, 2, 4)
            return "all" if whole else "reuse"

        return by_transformers(model, run, correct)[PROMPT - 1 :]

    found = decoded(of(model, adapter, "dropped", compiled))
    assert close(found, expected(4, correct), 2e-3)
    assert not close(found, expected(4, {}), 0.01), "the control: no correction"
    assert not close(found, expected(3, correct), 0.1), "the control: another phase"


def test_of_one_token_again_and_again_dropped_layers_give_the_same(model: LlamaForCausalLM) -> None:
    """With no correction and k = 1 every other output is the one before it."""
    runner = made(model, LoraDrop(drop=0.5, reuse=1))
    left_out = droppable(LAYERS, 0.5)
    cache, taps = opened(runner), list[torch.Tensor]()
    for _ in range(7):
        scores = runner.score([cache], [9], [EMPTY_TREE], taps=left_out)
        runner.commit([cache], [()])
        taps.append(torch.stack([scores.taps[layer] for layer in left_out]))
    for at in (1, 3, 5):
        assert torch.equal(taps[at], taps[at + 1]), at
        assert not torch.equal(taps[at], taps[at - 1]), "the control: it was refreshed"


def test_dropped_layers_have_keys_of_prompt_and_refreshes(model: LlamaForCausalLM, monkeypatch: Any) -> None:
    runner = made(model, LoraDrop(drop=0.5, reuse=3))
    counted = list[int]()
    seen = Gaps.seen

    def counting(self: Gaps, segment: Any) -> Any:
        found = seen(self, segment)
        counted.append(int(found.sum()))
        return found

    monkeypatch.setattr(Gaps, "seen", counting)
    cache = opened(runner)
    counted.clear()
    decoded(runner, cache)
    whole = [at for at in range(PROMPT - 1, len(TEXT)) if at < PROMPT or (at - PROMPT) % 4 == 0]
    assert sorted(set(counted)) == [PROMPT + one for one in range(len(whole))]


# ------------------------------------------------------------------------------------------ drafts, batches, rollback


@ALL
@pytest.mark.parametrize("announced", [True, False])
def test_chains_are_tokens_one_by_one(model: LlamaForCausalLM, adapter: Path, name: str, announced: bool) -> None:
    runner = of(model, adapter, name)
    one_by_one = decoded(runner, opened(runner, announced))
    assert close(decoded(runner, opened(runner, announced), width=7), one_by_one, 1e-3)
    other = decoded(runner, opened(runner, not announced), width=7)
    assert not close(other, one_by_one, 0.01), "the control: a border one token off"


@FORMS
@ALL
def test_trees_batches_and_what_is_taken_back(
    model: LlamaForCausalLM, adapter: Path, name: str, compiled: bool
) -> None:
    runner = of(model, adapter, name, compiled)
    one_by_one = decoded(runner)
    cache, other = opened(runner), runner.open(3)
    tree = TokenTree.build([1, TEXT[20], 2, TEXT[21], TEXT[22], 3, TEXT[23]], [-1, -1, 0, 1, 3, 3, 4])
    runner.extend([other], [TEXT[:2]])
    both = runner.score([cache, other], [TEXT[19], TEXT[2]], [tree, TokenTree.chain(TEXT[3:9])]).logits
    assert close(both[[0, 2, 4, 5, 7]], one_by_one[:5], 1e-3)
    alone = runner.open(3)
    runner.extend([alone], [TEXT[:2]])
    for row, token in enumerate(TEXT[2:9], 8):
        assert close(both[row : row + 1], runner.score([alone], [token], [EMPTY_TREE]).logits, 1e-3)
        runner.commit([alone], [()])
    runner.commit([cache], [[1, 3, 4, 6]])
    fork = runner.fork(cache)
    runner.score([cache], [1], [TokenTree.chain([2, 3, 4, 5, 6])])
    runner.commit([cache], [range(5)])
    runner.truncate(cache, 24)
    assert close(decoded(runner, cache), one_by_one[5:], 1e-3)
    assert close(decoded(runner, fork), one_by_one[5:], 1e-3)
    if name != "unified":
        fork = runner.fork(opened(runner))
        runner.extend([fork], [TEXT[19:22]])
        fork.anchors = {place: torch.zeros_like(anchor) for place, anchor in fork.anchors.items()}
        assert not close(decoded(runner, fork), one_by_one[3:], 0.01), "the control: other anchors"


@ALL
def test_a_text_that_is_read_again_is_read_as_it_was_written(model: LlamaForCausalLM, adapter: Path, name: str) -> None:
    """As when a request gave its blocks away and goes on; negative control: read as a prompt."""
    runner = of(model, adapter, name)
    one_by_one = decoded(runner)
    cache = opened(runner, count=30)
    assert close(decoded(runner, cache), one_by_one[11:], 1e-3)
    cache = runner.open(31)
    runner.extend([cache], [TEXT[:30]])
    assert not close(decoded(runner, cache), one_by_one[11:], 0.01), "the control"


@ALL
def test_what_reduced_rows_left_is_not_shared(model: LlamaForCausalLM, adapter: Path, name: str) -> None:
    runner = of(model, adapter, name)
    text = tokens(100, seed=1)
    cache = runner.open(40)
    runner.extend([cache], [text[:39]])
    for token in text[39:99]:
        runner.score([cache], [token], [EMPTY_TREE])
        runner.commit([cache], [()])
    memory = runner.memory
    pieces = memory.pieces(text)
    assert memory.blocks_present(cache, 3) == 40 // memory.block_size < 3
    memory.retain(cache, "", pieces)
    assert memory.known("", pieces) == 40 // memory.block_size


@torch.inference_mode()
def test_skipped_layers_are_never_touched(model: LlamaForCausalLM) -> None:
    """Their keys may hold anything behind the prompt."""
    runner = made(model, UnifiedLayerSkipping(speedup=2))
    one_by_one, cache = decoded(runner), opened(runner)
    runner.score([cache], [TEXT[19]], [EMPTY_TREE])
    runner.commit([cache], [()])
    for layer in (0, 1):
        cache.reserve(20)
        slots = torch.from_numpy(cache.slot_index(PROMPT, len(cache.blocks) * runner.memory.block_size))
        runner.native.arena.layers[layer][slots] = torch.nan
        clean = bool(decoded(runner, runner.fork(cache)).isfinite().all())
        assert clean is (layer == 1), "layer 0 runs, and its masked keys are the control"
        runner.native.arena.layers[layer][slots] = 0
    assert close(decoded(runner, cache), one_by_one[1:], 1e-3)


# ------------------------------------------------------------------------------------------------------------ refused


def test_what_cannot_skip_is_refused(model: LlamaForCausalLM, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"speedup must be in 1\.\.3 for 6 layers, got 4"):
        made(model, UnifiedLayerSkipping(speedup=4))
    with pytest.raises(ConfigError, match=r"speedup must be a number of 1 or more, got 0\.5"):
        UnifiedLayerSkipping(speedup=0.5)
    with pytest.raises(ConfigError, match="drop must be left out beside an adapter"):
        LoraDrop(adapter=str(adapter), drop=0.5)
    with pytest.raises(ConfigError, match=r"drop must lie in 0\.\.1, got 2"):
        LoraDrop(drop=2)
    with pytest.raises(ConfigError, match="drop no layers with a sliding window"):
        made(model, LoraDrop(), windows=(8,))
    with pytest.raises(CheckpointError, match=r"no lora_drop\.safetensors in"):
        made(model, LoraDrop(adapter=str(tmp_path)))
    (tmp_path / "lora_drop.safetensors").write_text("text")
    with pytest.raises(CheckpointError, match="holds no corrections"):
        made(model, LoraDrop(adapter=str(tmp_path)))
    with pytest.raises(CheckpointError, match="holds the corrections of another model than tiny"):
        made(tiny_llama(num_hidden_layers=LAYERS), LoraDrop(adapter=str(adapter)))
    with pytest.raises(UnsupportedModelError, match="for which skipping='unified_layer_skipping' is not there"):
        UnifiedLayerSkipping().open(cast(Any, lambda **options: object()), name="tiny")


def test_layers_that_are_dropped_lie_between_the_first_and_the_last() -> None:
    assert droppable(30, 0.5) == tuple(range(14, 29))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        found = droppable(30, share)
        assert len(found) == len(set(found)) == min(28, round(30 * share))
        assert not found or (min(found) > 0 and max(found) < 29)
    assert droppable(2, 1.0) == ()


def test_a_drafter_that_runs_some_layers_is_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(CapabilityError, match="cannot run alone"):
        layer_drafts_of(cast(Any, made(model, UnifiedLayerSkipping())), "layer_skip")
    layer_drafts_of(cast(Any, runner_of(model, compiled=False)), "layer_skip")  # the control
